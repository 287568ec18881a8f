import json
import sys

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from weft.accelerate import Accelerator


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(44, 8, generator=generator), torch.randint(4, (44,), generator=generator))
    loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    evaluation = DataLoader(dataset, batch_size=4)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    losses = []
    for _ in range(2):
        model.train()
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()).mean().item())
        model.eval()
        correct = total = 0
        for inputs, targets in evaluation:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, targets = accelerator.gather_for_metrics((predictions, targets))
            correct += (predictions == targets).sum().item()
            total += len(targets)
        accelerator.print(f"accuracy {correct / total:.3f} of {total}")
    accelerator.save_state(sys.argv[1])
    accelerator.load_state(sys.argv[1])
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses, "total": total, "lr": optimizer.param_groups[0]["lr"]}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
