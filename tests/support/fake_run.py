"""Notebook cell that starts a run on 16 fake ranks."""

from __future__ import annotations

TRAIN = """
import torch, dtkit
from torch import nn
from dtkit.testing.fake_transport import FakeTransport

@dtkit.panel("Rows so far")
def rows(ax, history):
    ax.plot([0, 1], [0, len(history)])

cluster = dtkit.Cluster.from_transport(FakeTransport(16), device="cpu")
data = torch.zeros(6400, 2), torch.zeros(6400, dtype=torch.int64)
run = cluster.train(nn.Linear(2, 2), data, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD,
                    batch_size=1600, steps=400, start=False)
run.step(50)
run.note("<script>alert(1)</script>")
"""
