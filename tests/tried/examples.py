"""Run the scripts of pytorch/examples and nanoGPT, and write docs/tried-examples.md.

``python -m tests.tried.examples EXAMPLES NANOGPT`` takes clones of https://github.com/pytorch/examples and
https://github.com/karpathy/nanoGPT; ``make test-all CLONES="EXAMPLES NANOGPT"`` runs it. Scripts are copied, their
lines for GPUs are replaced by those for CPUs, and ``cluster.torchrun`` runs them on two ranks. minGPT needs hydra-core
and boto3. nanoGPT's own script prepares the Shakespeare that minGPT brings along. Nothing is loaded from the network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import dtkit

PAGE = Path(__file__).parents[2] / "docs" / "tried-examples.md"
TIMEOUT_S, BOUND = 300.0, 1e-9
FOR_GPUS = {
    "if not verify_min_gpu_count(": "if False and not verify_min_gpu_count(",
    "torch.accelerator.current_accelerator().type": '"cpu"',
    "acc = torch.accelerator.current_accelerator()": 'acc = "cpu"',
    'torch.device(f"{acc}:{rank}")': 'torch.device("cpu")',
    'torch.device(f"{self.acc}:{self.local_rank}")': 'torch.device("cpu")',
    "self.acc = torch.accelerator.current_accelerator()": 'self.acc = "cpu"',
    "torch.accelerator.set_device_index(rank)": "pass",
    ", device_id=device)": ")",
    **dict.fromkeys((".to(rank)", ".to(self.gpu_id)", ".to(self.local_rank)"), '.to("cpu")'),
    **dict.fromkeys(
        (f"device_ids=[{name}]" for name in ("rank", "self.gpu_id", "self.local_rank", "ddp_local_rank")),
        "device_ids=None",
    ),
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))': "pass",
    'backend="nccl"': 'backend="gloo"',
    'f"cuda:{self.gpu_id}"': '"cpu"',
    'f"cuda:{self.local_rank}"': '"cpu"',
    "device = f'cuda:{ddp_local_rank}'": "device = 'cpu'",
    "torch.cuda.set_device(device)": "pass",
}
"""Lines for GPUs, and what takes their place."""


@dataclasses.dataclass(frozen=True)
class Script:
    path: str
    """Path within the folder `distributed` of pytorch/examples, or within nanoGPT."""
    arguments: tuple[str, ...] = ()
    expected: str = ""
    """A part of the output that only a run to the end prints."""


NANOGPT_ARGUMENTS = """config/train_shakespeare_char.py --device=cpu --compile=False --backend=gloo --dtype=float32
--gradient_accumulation_steps=2 --eval_interval=4 --eval_iters=2 --log_interval=1 --block_size=16 --batch_size=4
--n_layer=2 --n_head=2 --n_embd=16 --max_iters=8 --always_save_checkpoint=True"""
SCRIPTS = [
    Script("ddp/example.py", (), "training completed in rank 1"),
    Script("ddp-tutorial-series/multigpu_torchrun.py", ("2", "1"), "Epoch 1 | Training snapshot saved"),
    Script("ddp-tutorial-series/multinode.py", ("4", "1"), "Epoch 3 | Training snapshot saved"),
    Script("tensor_parallelism/tensor_parallel_example.py", (), "Tensor Parallel training completed"),
    Script("tensor_parallelism/sequence_parallel_example.py", (), "Sequence Parallel training completed"),
    Script("FSDP2/example.py"),
    Script("FSDP2/example.py", ("--mixed-precision", "--explicit-prefetching")),
    Script(
        "minGPT-ddp/mingpt/main.py",
        (
            "data_config.path=data/input.txt",
            "data_config.truncate=0.001",
            "gpt_config.n_layer=2",
            "gpt_config.n_embd=64",
            "trainer_config.max_epochs=3",
            "trainer_config.data_loader_workers=0",
        ),
        "Snapshot saved at epoch 3",
    ),
]
NANOGPT = Script("train.py", tuple(NANOGPT_ARGUMENTS.split()), "iter 8: loss")
STRATEGIES = [dtkit.DataParallel(), dtkit.Sharded(), dtkit.TensorParallel(2), dtkit.Pipeline(2, 2)]
NOT_RUN = {
    "tensor_parallelism/fsdp_tp_example.py": "torch registers no sharding of this attention for CPUs",
    "FSDP/T5_training.py": "needs `nlp`, a package that has ended, and downloads of T5 and of the data set wikihow",
    "ddp-tutorial-series/multigpu.py": "starts its own processes; multigpu_torchrun.py is the same for torchrun",
    "rpc/*": "each script starts its own processes with `mp.spawn` at a fixed port: torchrun doesn't start them either",
}

_INTRODUCTION = """\
`python -m tests.tried.examples EXAMPLES NANOGPT` writes this page; both are clones. Their scripts ran by
`cluster.torchrun(script, *arguments)` on two engines, without a change but of the lines that ask for GPUs (`FOR_GPUS`
in `tests/tried/examples.py`)."""
_MODEL = """\
nanoGPT's model as it is, in float64, by `cluster.train(model, (tokens, next_tokens), batch_size=7, steps=4,
training_step=lambda model, batch: model(*batch)[1], shuffle=None, strategy=..., optimizer=lambda model:
model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu"))`. A cell has the largest difference of any parameter from a
plain loop:"""


def prepare(folder: Path) -> int:
    """Replace the lines for GPUs; return how many there are."""
    count = 0
    for path in folder.rglob("*.py"):
        text = path.read_text()
        for gpu_line, line in FOR_GPUS.items():
            count += text.count(gpu_line)
            text = text.replace(gpu_line, line)
        path.write_text(text)
    return count


def run(cluster: dtkit.Cluster, folder: Path, script: Script) -> str:
    """Run a script in its own folder, and return what came of it."""
    path = folder / script.path
    with contextlib.chdir(path.parent):
        task = cluster.submit(path.name, *script.arguments)
        try:
            task.wait(TIMEOUT_S)
        except (dtkit.DtkitError, TimeoutError) as error:
            task.cancel()
            lines = [line for _, line in task.output[-3:]]
            return f"**FAILED: {str(error).splitlines()[0][:200]}** {lines}"
    printed = "\n".join(line for _, line in task.output)
    return "ran to its end" if script.expected in printed else "**ended early**"


def prepare_text(examples: Path, nanogpt: Path) -> None:
    """Let nanoGPT's own script make tokens of Shakespeare, from minGPT's copy of the text that it would download."""
    folder = nanogpt / "data" / "shakespeare_char"
    shutil.copy(examples / "minGPT-ddp" / "mingpt" / "data" / "input.txt", folder / "input.txt")
    subprocess.run([sys.executable, "prepare.py"], cwd=folder, check=True, timeout=60, stdout=subprocess.DEVNULL)


def compare_nanogpt(cluster: dtkit.Cluster, folder: Path) -> list[str]:
    """Train nanoGPT's model under each strategy, and return a table of differences from a plain loop."""
    with contextlib.chdir(folder):  # engines import the model from the notebook's folder
        sys.path.insert(0, str(folder))
        module = importlib.import_module("model")
        tokens = torch.randint(65, (28, 17), generator=torch.Generator().manual_seed(1))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

        def make() -> Any:
            torch.manual_seed(0)
            sizes = {"block_size": 16, "vocab_size": 65, "n_layer": 4, "n_head": 2, "n_embd": 16}
            return module.GPT(module.GPTConfig(**sizes, dropout=0.0, bias=False)).double()

        def configure(model: Any) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
            return optimizer

        def compute_loss(model: Any, batch: Any) -> Any:
            return model(*batch)[1]

        expected = make()
        optimizer = configure(expected)
        for batch in zip(inputs.split(7), targets.split(7), strict=True):
            optimizer.zero_grad()
            compute_loss(expected, batch).backward()
            optimizer.step()
        cells = []
        for strategy in STRATEGIES:
            try:
                run = cluster.train(
                    make(),
                    (inputs, targets),
                    training_step=compute_loss,
                    optimizer=configure,
                    batch_size=7,
                    steps=4,
                    shuffle=None,
                    strategy=strategy,
                )
                run.wait(120)
            except (dtkit.DtkitError, ValueError) as error:
                cells.append(f"refused: {str(error).splitlines()[0][:120]}")
                continue
            pairs = zip(run.model.parameters(), expected.parameters(), strict=True)
            difference = max(float((p - q).detach().abs().max()) for p, q in pairs)
            cells.append(f"{difference:.1e}" if difference < BOUND else f"**WRONG by {difference:.1e}**")
    names = " | ".join(f"`{strategy!r}`" for strategy in STRATEGIES)
    return [f"| {names} |", f"|{'---|' * len(cells)}", f"| {' | '.join(cells)} |"]


def run_all(cluster: dtkit.Cluster, examples: Path, nanogpt: Path) -> list[str]:
    """Run all scripts, and return the lines of the page."""
    lines = ["| script | arguments | |", "|---|---|---|"]
    folders = [(examples, script) for script in SCRIPTS] + [(nanogpt, NANOGPT)]
    for folder, script in folders:
        outcome, owner = run(cluster, folder, script), "nanoGPT/" if script is NANOGPT else ""
        print(script.path, outcome, flush=True)
        lines.append(f"| {owner}{script.path} | {' '.join(script.arguments)} | {outcome} |")
    lines += [f"| {path} | | not run: {reason} |" for path, reason in NOT_RUN.items()]
    return [*lines, "", *_MODEL.splitlines(), "", *compare_nanogpt(cluster, nanogpt), ""]


def write_page(clones: tuple[Path, Path]) -> bool:
    """Write the page; return whether all is well."""
    lines = ["---", "orphan: true", "---", "", "# Scripts of pytorch/examples and nanoGPT", ""]
    lines += [*_INTRODUCTION.splitlines(), ""]
    with tempfile.TemporaryDirectory() as temporary, dtkit.Cluster(2, threads=1) as cluster:
        examples, nanogpt = Path(temporary) / "distributed", Path(temporary) / "nanogpt"
        shutil.copytree(clones[0] / "distributed", examples)
        shutil.copytree(clones[1], nanogpt)
        prepare(Path(temporary))
        prepare_text(examples, nanogpt)
        lines += run_all(cluster, examples, nanogpt)
    lines += [f"On CPUs, with torch {torch.__version__.partition('+')[0]}.", ""]
    PAGE.write_text("\n".join(lines))
    return "**" not in "".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("no clones of pytorch/examples and nanoGPT given (CLONES=): docs/tried-examples.md stays as it is")
        sys.exit()
    sys.exit(not write_page((Path(sys.argv[1]), Path(sys.argv[2]))))
