"""Lightning modules with their datamodule, as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.support import small

if TYPE_CHECKING:
    import dtkit

lightning = pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.cluster


class Module(lightning.LightningModule):
    """Small classifier with a schedule that steps after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.log("train/spread", x.mean())
        self.log_dict({"loss": loss, "batch": float(batch_idx)}, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


class Data(lightning.LightningDataModule):
    def setup(self, stage: str) -> None:
        assert stage == "fit"
        self.rows = TensorDataset(*small.data())

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=16)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=32)


def test_module_trains_with_its_own_methods(cluster2: dtkit.Cluster, capsys: pytest.CaptureFixture[str]):
    run = cluster2.train(Module(), Data(), epochs=2)
    run.wait(60)
    assert "DataLoader: TensorDataset, batch_size=16 over all ranks, rows in order" in capsys.readouterr().out
    assert run.history.column("lr").tolist() == [0.1] * 8 + [0.05] * 8
    assert run.history.scalar_names == ["train/spread", "batch"]
    assert len(run.history.evaluations) == 2
    assert run.verify(4).verdict == "PASS"
    assert isinstance(run.model, Module)


def test_given_arguments_take_the_place_of_methods(cluster2: dtkit.Cluster):
    run = cluster2.train(Module(), small.data(), optimizer=small.sgd, batch_size=8, steps=2)
    run.wait(60)
    assert run.history.column("lr").tolist() == [0.1] * 4
    assert run.spec.batch_size == 8


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Two(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.2)]


@pytest.mark.parametrize(
    ("model", "message"),
    [(Manual, "automatic_optimization=False.* cluster.torchrun"), (Two, "returns 2 optimizers and 0 schedulers")],
)
def test_what_one_update_a_step_cannot_do_is_refused(cluster2: dtkit.Cluster, model: Any, message: str):
    with pytest.raises(ValueError, match=message):
        cluster2.train(model(), Data(), epochs=1)
