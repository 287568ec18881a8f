import json

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import weft.hvd as hvd

hvd.init()
torch.manual_seed(hvd.rank())  # broadcast_parameters makes the weights equal
generator = torch.Generator().manual_seed(0)
dataset = TensorDataset(torch.randn(32, 8, generator=generator), torch.randint(4, (32,), generator=generator))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> list[float]:
    losses = []
    while state.epoch < 2:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(hvd.allreduce(loss, name="loss").item())
        state.epoch += 1
        state.commit()
    return losses


state = hvd.elastic.TorchState(model, optimizer, epoch=0)
found = train(state)
if hvd.rank() == 0:
    print(json.dumps({"losses": found, "size": hvd.size()}))
hvd.shutdown()
