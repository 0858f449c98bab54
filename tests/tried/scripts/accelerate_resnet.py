"""torchvision's ResNet-18 in a loop of one's own under Accelerate."""

import torch
import torchvision
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torchvision.models.resnet18(num_classes=10)
images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(1))
rows = TensorDataset(images, torch.arange(64) % 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_function = nn.CrossEntropyLoss()
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=16))
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(loss_function(model(x), y))
    optimizer.step()
print("checksum", sum(p.double().sum().item() for p in accelerator.unwrap_model(model).parameters()))
