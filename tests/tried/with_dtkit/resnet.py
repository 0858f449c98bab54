"""torchvision's ResNet-18."""

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torchvision.models.resnet18(num_classes=10)
images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(1))
rows = TensorDataset(images, torch.arange(64) % 10)
run = cluster.train(
    model, DataLoader(rows, batch_size=32), loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01), epochs=1,
)  # fmt: skip
run.wait()
checksum = sum(p.double().sum().item() for p in run.model.parameters())
