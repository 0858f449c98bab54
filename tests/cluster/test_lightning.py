"""Lightning modules with their datamodule, as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dtkit
from tests.support import small
from tests.support.gan import Gan, judge, make_optimizers, make_points, train_gan

if TYPE_CHECKING:
    from pathlib import Path

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


class Validated(Module):
    """Module whose validation differs from its training, and logs numbers of its own."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.layers(x)
        self.log("val_loss", F.cross_entropy(logits, y, label_smoothing=0.5))
        self.log_dict({"val_accuracy": (logits.argmax(1) == y).float().mean(), "val_index": float(batch_idx)})


class Small(Data):
    """With one sample for validation in the second batch of one rank, and none for the other rank."""

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*(part[:33] for part in small.data())), batch_size=32)


def test_validation_runs_the_validation_step(cluster2: dtkit.Cluster):
    run = cluster2.train(Validated(), Small(), epochs=1)
    run.wait(60)
    (evaluation,) = run.history.evaluations
    x, y = (part[:33] for part in small.data())
    logits = run.model.layers(x)
    expected = F.cross_entropy(logits, y, label_smoothing=0.5).item()
    assert evaluation["loss"] == evaluation["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert evaluation["val_accuracy"] == pytest.approx((logits.argmax(1) == y).float().mean().item())
    assert evaluation["val_index"] < 1


def test_early_stopping_may_monitor_what_a_validation_step_logs(cluster2: dtkit.Cluster):
    with pytest.raises(ValueError, match=r"evaluated is loss, val_loss, val_accuracy, val_index, .*'val_loss'$"):
        cluster2.train(Validated(), Small(), epochs=2, callbacks=[dtkit.EarlyStopping(monitor="valid_loss")])
    run = cluster2.train(
        Validated(), Small(), epochs=2, callbacks=[stopping := dtkit.EarlyStopping(monitor="val_loss")]
    )
    run.wait(60)
    assert stopping.best == min(evaluation["val_loss"] for evaluation in run.history.evaluations)


class Silent(Module):
    def validation_step(self, _batch: Any, _batch_idx: int) -> None:
        self.log("val_accuracy", 1.0)


def test_validation_step_without_a_loss_is_refused(cluster2: dtkit.Cluster):
    run = cluster2.train(Silent(), Data(), epochs=1)
    with pytest.raises(
        dtkit.errors.DtkitError, match=r"Silent\.validation_step returns no loss, and logs val_accuracy"
    ):
        run.wait(60)
    run.stop()


def test_given_arguments_take_the_place_of_methods(cluster2: dtkit.Cluster):
    run = cluster2.train(Module(), small.data(), optimizer=small.sgd, batch_size=8, steps=2)
    run.wait(60)
    assert run.history.column("lr").tolist() == [0.1] * 4
    assert run.spec.batch_size == 8


class ManualGan(lightning.LightningModule):
    """GAN that updates by itself, in the words of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.networks = Gan()

    def training_step(self, batch: Any, _batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        real, noise = batch
        self.toggle_optimizer(discriminator)
        fake = self.networks.generator(noise)
        for _ in range(2):
            discriminator.zero_grad()
            self.manual_backward(judge(self.networks.discriminator(real), 1.0))
            self.manual_backward(judge(self.networks.discriminator(fake.detach()), 0.0))
            discriminator.step()
        self.untoggle_optimizer(discriminator)
        self.toggle_optimizer(generator)
        loss = judge(self.networks.discriminator(self.networks.generator(noise)), 1.0)
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.untoggle_optimizer(generator)
        self.log("g_loss", loss)

    def configure_optimizers(self) -> Any:
        return make_optimizers(self.networks), []


@pytest.mark.slow
def test_module_with_manual_optimization_trains_as_the_same_function(cluster2: dtkit.Cluster):
    run = cluster2.train(ManualGan(), make_points(), batch_size=16, steps=6)
    run.wait(60)
    expected = cluster2.train(
        Gan(), make_points(), batch_size=16, steps=6, training_step=train_gan, optimizer=make_optimizers
    )
    expected.wait(60)
    for p, q in zip(run.model.parameters(), expected.model.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-12
    assert run.history.loss()[1].tolist() == pytest.approx(expected.history.loss()[1].tolist())
    assert run.history.scalar("g_loss")[1] == pytest.approx(run.history.loss()[1])
    assert all(p.requires_grad for p in run.model.parameters())


class Two(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.2)]


class ManualWithSchedule(ManualGan):
    def configure_optimizers(self) -> Any:
        optimizers = make_optimizers(self.networks)
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1)]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Two, "returns 2 optimizers and 0 schedulers"),
        (ManualWithSchedule, "returns 1 schedulers, and the module updates by itself"),
    ],
)
def test_optimizers_that_nothing_would_step_are_refused(cluster2: dtkit.Cluster, model: Any, message: str):
    with pytest.raises(ValueError, match=message):
        cluster2.train(model(), Data(), epochs=1)


class Annealed(Module):
    """Module whose loss depends on epoch, step and batch index, also in a module within it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Module().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log_dict({"at_epoch": float(self.inner.current_epoch), "at_step": float(self.global_step)})
        self.log("at_batch", float(batch_idx))
        x, y = batch
        return F.cross_entropy(self.layers(x), y) * (1 + self.current_epoch)


def test_step_knows_its_epoch_step_and_batch(cluster2: dtkit.Cluster, tmp_path: Path):
    """Without a trainer, Lightning says 0 for epoch and step."""
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 6}
    cluster2.train(Annealed(), Data(), steps=6, **options).wait(60)
    run = cluster2.train(Annealed(), Data(), steps=8, resume_from=tmp_path)
    run.wait(60)
    columns = [run.history.scalar(name)[1].tolist() for name in ("at_epoch", "at_step", "at_batch")]
    assert columns == [[0] * 4 + [1] * 4, list(range(8)), [0, 1, 2, 3] * 2]
    assert run.verify(6).verdict == "PASS"


class Asking(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) / self.trainer.num_training_batches


def test_question_that_only_a_trainer_can_answer_raises(cluster2: dtkit.Cluster):
    with pytest.raises(dtkit.errors.DtkitError, match="asks its trainer for num_training_batches"):
        cluster2.train(Asking(), Data(), epochs=1).wait(60)


class Clipping(Module):
    def configure_gradient_clipping(self, *_args: Any, **_options: Any) -> None:
        """Clip in a way of its own."""


class Averaging(Module):
    def on_train_batch_end(self, *_args: Any) -> None:
        """Do something after each batch."""


class Prepared(Module):
    """Module that makes its layers when the training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Identity()

    def configure_model(self) -> None:
        self.layers = nn.Linear(4, 3)


class Augmented(Data):
    def on_after_batch_transfer(self, batch: Any, _dataloader_idx: int) -> Any:
        return batch


class EverySecond(Module):
    def configure_optimizers(self) -> dict[str, Any]:
        configured = super().configure_optimizers()
        configured["lr_scheduler"]["frequency"] = 2
        return configured


class OnPlateau(Module):
    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_accuracy"}}


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (Clipping, Data, "Clipping has configure_gradient_clipping, which only Lightning's Trainer calls"),
        (Module, Augmented, "Module has on_after_batch_transfer"),
        (EverySecond, Data, "frequency=2; it must be 1"),
        (OnPlateau, Data, "monitor='val_accuracy'; here it would get each epoch's validation loss"),
    ],
)
def test_what_only_a_trainer_would_do_is_refused(cluster2: dtkit.Cluster, model: Any, data: Any, message: str):
    with pytest.raises(ValueError, match=message):
        cluster2.train(model(), data(), epochs=1)


def test_hook_that_is_not_called_gives_a_warning(cluster2: dtkit.Cluster):
    with pytest.warns(UserWarning, match="dtkit doesn't call on_train_batch_end of Averaging"):
        cluster2.train(Averaging(), Data(), epochs=1).wait(60)


def test_layers_are_made_when_the_training_begins(cluster2: dtkit.Cluster):
    run = cluster2.train(Prepared(), Data(), epochs=1)
    run.wait(60)
    assert isinstance(run.model.layers, nn.Linear)
