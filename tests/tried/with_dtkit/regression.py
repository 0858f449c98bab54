"""The regression of the scripts for DistributedDataParallel, Accelerate and Lightning."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
generator = torch.Generator().manual_seed(1)
rows = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))
loader = DataLoader(rows, batch_size=8)
run = cluster.train(model, loader, loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), epochs=1)
run.wait()
checksum = sum(p.double().sum().item() for p in run.model.parameters())
