"""A custom loop with DistributedDataParallel and DistributedSampler."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
generator = torch.Generator().manual_seed(1)
rows = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, shuffle=False)):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
print("checksum", sum(p.double().sum().item() for p in model.parameters()))
dist.destroy_process_group()
