"""A custom loop under Accelerate."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
generator = torch.Generator().manual_seed(1)
rows = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
print("checksum", sum(p.double().sum().item() for p in accelerator.unwrap_model(model).parameters()))
