"""A small convolutional net in a loop of one's own under Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(32, 10),
)  # fmt: skip
images = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(1))
rows = TensorDataset(images, torch.arange(64) % 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loss_function = nn.CrossEntropyLoss()
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=8))
for _epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_function(model(x), y))
        optimizer.step()
print("checksum", sum(p.double().sum().item() for p in accelerator.unwrap_model(model).parameters()))
