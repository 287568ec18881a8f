import argparse
import json

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import weft.deepspeed as deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage", type=int, default=1)
parser.add_argument("--save", default="")
parser = deepspeed.add_config_arguments(parser)


def main() -> None:
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(48, 8, generator=generator), torch.randint(4, (48,), generator=generator))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.999], "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3,
                                                     "warmup_type": "linear"}},
        "zero_optimization": {"stage": args.stage},
    }  # fmt: skip
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=dataset, config=config
    )
    losses, rates = [], []
    for _ in range(2):
        for inputs, targets in loader:
            loss = functional.cross_entropy(engine(inputs.to(engine.device)), targets.to(engine.device))
            engine.backward(loss)
            rates.append(engine.get_lr()[0])
            engine.step()
            losses.append(loss.item())
    engine.save_checkpoint(args.save, client_state={"epoch": 2})
    path, client = engine.load_checkpoint(args.save)
    found = {"losses": losses, "rates": rates, "steps": engine.global_steps, "client": client, "path": path}
    if engine.global_rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
