"""Models for other software: Hugging Face's folder, PEFT's adapter, torch's distributed checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import dtkit
from dtkit.checkpoint import export
from tests.support import small
from tests.support.marks import slow

pytest.importorskip("transformers")
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from tests.support.hugging_face import make_bert, make_llama, make_samples

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster


def train(cluster: dtkit.Cluster, model: Any, samples: Any, **options: Any) -> dtkit.Run:
    run = cluster.train(model, samples, optimizer=small.sgd, batch_size=8, steps=2, **options)
    run.wait(90)
    return run


def check_equal(loaded: torch.nn.Module, trained: torch.nn.Module) -> None:
    expected = trained.state_dict()
    state = loaded.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


@pytest.mark.parametrize("max_bytes", [2**31, 50_000], ids=["one file", "several files"])
def test_folder_is_what_from_pretrained_reads(
    cluster2: dtkit.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int
):
    monkeypatch.setattr(export, "_MAX_FILE_BYTES", max_bytes)
    run = train(cluster2, make_llama(), make_samples(16, "llama"), strategy=dtkit.Sharded())
    result = run.save(tmp_path / "model", format="hf")
    assert (result.path, result.step) == (tmp_path / "model", 2)
    assert len(list(result.path.glob("*.safetensors"))) == (1 if max_bytes > 10**9 else 8)
    check_equal(AutoModelForCausalLM.from_pretrained(result.path, dtype=torch.float64), run.model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tied_weights_are_written_once(cluster2: dtkit.Cluster, tmp_path: Path):
    run = train(cluster2, make_bert(), make_samples(16, "bert"), strategy=dtkit.Pipeline(2, 2))
    run.save(tmp_path / "model", format="hf")
    check_equal(AutoModelForMaskedLM.from_pretrained(tmp_path / "model", dtype=torch.float64), run.model)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapter_is_written_alone(cluster2: dtkit.Cluster, tmp_path: Path):
    adapted = get_peft_model(make_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).double()
    run = train(cluster2, adapted, make_samples(16, "llama"))
    run.save(tmp_path / "adapter", format="peft")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    assert weights.stat().st_size < 30_000
    check_equal(PeftModel.from_pretrained(make_llama(), tmp_path / "adapter", autocast_adapter_dtype=False), run.model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_distributed_checkpoint_of_torch_has_the_model(cluster2: dtkit.Cluster, tmp_path: Path):
    run = small.train(cluster2, strategy=dtkit.Sharded(), steps=2)
    run.wait(60)
    run.save(tmp_path / "dcp", format="dcp")
    state = {"model": {name: torch.zeros_like(value) for name, value in small.net().state_dict().items()}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    model = small.net()
    model.load_state_dict(state["model"])
    check_equal(model, run.model)


@pytest.mark.parametrize("format", ["hf", slow("dcp")])
def test_training_begins_with_the_weights_of_a_folder(
    cluster2: dtkit.Cluster,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    format: str,  # noqa: A002
):
    options: dict[str, Any] = {"samples": make_samples(16, "llama"), "shuffle": "global"}
    run = train(cluster2, make_llama(), strategy=dtkit.Sharded(), **options)
    run.save(tmp_path / "model", format=format)
    other = make_llama()
    torch.nn.init.zeros_(other.lm_head.weight)
    train(cluster2, other, resume_from=tmp_path / "model", **options)
    assert "the optimizer and the steps start again" in capfd.readouterr().out
    expected = train(cluster2, run.model, **options).model.state_dict()
    again = train(cluster2, other, resume_from=tmp_path / "model", **options)
    for name, value in again.model.state_dict().items():
        assert (value - expected[name]).abs().max() < 1e-12, name
    assert not other.lm_head.weight.any()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_training_begins_with_an_adapter(cluster2: dtkit.Cluster, tmp_path: Path):
    def adapt() -> Any:
        return get_peft_model(make_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).double()

    run = train(cluster2, adapt(), make_samples(16, "llama"))
    run.save(tmp_path / "adapter", format="peft")
    begun = cluster2.train(
        adapt(),
        make_samples(16, "llama"),
        optimizer=small.sgd,
        batch_size=8,
        steps=2,
        resume_from=tmp_path / "adapter",
        start=False,
    )
    check_equal(begun.model, run.model)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("strategy", [dtkit.DataParallel(), slow(dtkit.Sharded()), slow(dtkit.Pipeline(2, 2))], ids=str)
def test_checkpoints_without_frozen_parameters_are_small_and_resumed_from(
    cluster2: dtkit.Cluster, tmp_path: Path, strategy: Any
):
    def adapt(seed: int) -> Any:
        torch.manual_seed(seed)
        return get_peft_model(make_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).double()

    options = {"checkpoint_dir": tmp_path / "a", "checkpoint_every": 2, "checkpoint_trainable_only": True}
    run = train(cluster2, adapt(0), make_samples(16, "llama"), strategy=strategy, shuffle="global", **options)
    checkpoint = dtkit.Checkpoint(tmp_path / "a")
    assert checkpoint.num_parameters == sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    check_equal(checkpoint.load_into(adapt(1)), run.model)
    with pytest.raises(ValueError, match=r"leaves out \d+ frozen parameters"):
        checkpoint.export(tmp_path / "hf", run.model, "hf")
    resumed = cluster2.train(
        adapt(1),
        make_samples(16, "llama"),
        optimizer=small.sgd,
        batch_size=8,
        steps=4,
        shuffle="global",
        resume_from=tmp_path / "a",
    )
    resumed.wait(60)
    whole = cluster2.train(
        adapt(0), make_samples(16, "llama"), optimizer=small.sgd, batch_size=8, steps=4, shuffle="global"
    )
    whole.wait(60)
    for name, value in resumed.model.state_dict().items():
        assert (value - whole.model.state_dict()[name]).abs().max() < 1e-12, name


def test_folder_of_another_model_is_refused(cluster2: dtkit.Cluster, tmp_path: Path):
    train(cluster2, make_bert(), make_samples(16, "bert")).save(tmp_path / "bert", format="hf")
    with pytest.raises(dtkit.errors.CheckpointError, match="is of another model: LlamaForCausalLM lacks"):
        train(cluster2, make_llama(), make_samples(16, "llama"), resume_from=tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(dtkit.errors.CheckpointError, match="can't be read as Hugging Face's folder"):
        train(cluster2, make_bert(), make_samples(16, "bert"), resume_from=tmp_path / "bert")


@pytest.mark.parametrize(
    ("format", "message"),
    [("hf", "Sequential has no config"), ("peft", "no peft_config"), ("onnx", "format='onnx'; ")],
)
def test_format_that_does_not_fit_is_refused(cluster2: dtkit.Cluster, tmp_path: Path, format: str, message: str):  # noqa: A002
    run = small.train(cluster2, steps=1)
    run.wait(60)
    with pytest.raises(ValueError, match=message):
        run.save(tmp_path / "model", format=format)
    with pytest.raises(ValueError, match=message if format == "onnx" else f"format='{format}' needs a folder"):
        run.save(format=format)


MEGABYTE = 2**20


def reset_peak() -> int:
    """Return this process's memory in bytes, from which its peak begins again."""
    import gc
    import resource

    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123 - a file of the kernel
        file.write("5")
    with open("/proc/self/statm") as file:  # noqa: PTH123 - as above
        return int(file.read().split()[1]) * resource.getpagesize()


def read_peak() -> int:
    with open("/proc/self/status") as file:  # noqa: PTH123 - as above
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["hf", "dcp"])
@pytest.mark.parametrize("strategy", [dtkit.Sharded(), dtkit.TensorParallel(2), dtkit.Pipeline(2, 2)], ids=str)
def test_no_rank_holds_the_whole_model_for_an_export(
    cluster2: dtkit.Cluster,
    tmp_path: Path,
    strategy: Any,
    format: str,  # noqa: A002
):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    model = make_llama(**sizes)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert num_bytes > 100 * MEGABYTE
    run = train(cluster2, model, make_samples(16, "llama"), strategy=strategy)
    run.save(tmp_path / "first", format=format)  # loads libraries
    before = cluster2.run(reset_peak)
    run.save(tmp_path / "model", format=format)
    peaks = [peak - rest for peak, rest in zip(cluster2.run(read_peak), before, strict=True)]
    assert max(peaks) < 0.8 * num_bytes, [peak // MEGABYTE for peak in peaks]
