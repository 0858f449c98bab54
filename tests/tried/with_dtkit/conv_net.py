"""A small convolutional net."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(32, 10),
)  # fmt: skip
images = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(1))
rows = TensorDataset(images, torch.arange(64) % 10)
run = cluster.train(
    model, DataLoader(rows, batch_size=16), loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), epochs=2,
)  # fmt: skip
run.wait()
checksum = sum(p.double().sum().item() for p in run.model.parameters())
