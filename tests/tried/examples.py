"""Run the scripts of pytorch/examples, and write docs/tried-examples.md: ``python -m tests.tried.examples FOLDER``.

FOLDER is a clone of https://github.com/pytorch/examples. Its scripts are copied, their lines for GPUs are replaced by
those for CPUs, and ``cluster.torchrun`` runs them on two ranks. minGPT needs hydra-core and boto3. Nothing is loaded
from the network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
import tempfile
from pathlib import Path

import torch

import dtkit
from dtkit.training.script_task import submit_script

PAGE = Path(__file__).parents[2] / "docs" / "tried-examples.md"
TIMEOUT_S = 170.0
FOR_GPUS = {
    "if not verify_min_gpu_count(": "if False and not verify_min_gpu_count(",
    "torch.accelerator.current_accelerator().type": '"cpu"',
    "acc = torch.accelerator.current_accelerator()": 'acc = "cpu"',
    'torch.device(f"{acc}:{rank}")': 'torch.device("cpu")',
    'torch.device(f"{self.acc}:{self.local_rank}")': 'torch.device("cpu")',
    "self.acc = torch.accelerator.current_accelerator()": 'self.acc = "cpu"',
    "torch.accelerator.set_device_index(rank)": "pass",
    ".to(self.local_rank)": ".to(self.device)",
    "device_ids=[self.local_rank]": "device_ids=None",
    ", device_id=device)": ")",
}
"""Lines for GPUs, and what takes their place."""


@dataclasses.dataclass(frozen=True)
class Script:
    path: str
    """Path within the folder `distributed`."""
    arguments: tuple[str, ...] = ()
    expected: str = ""
    """A part of the output that only a run to the end prints."""


SCRIPTS = [
    Script("tensor_parallelism/tensor_parallel_example.py", (), "Tensor Parallel training completed"),
    Script("tensor_parallelism/sequence_parallel_example.py", (), "Sequence Parallel training completed"),
    Script("FSDP2/example.py"),
    Script("FSDP2/example.py", ("--mixed-precision", "--explicit-prefetching")),
    Script(
        "minGPT-ddp/mingpt/main.py",
        (
            "data_config.path=data/input.txt",
            "data_config.truncate=0.002",
            "gpt_config.n_layer=2",
            "gpt_config.n_embd=64",
            "trainer_config.max_epochs=3",
            "trainer_config.data_loader_workers=0",
        ),
        "Snapshot saved at epoch 3",
    ),
]
NOT_RUN = {
    "tensor_parallelism/fsdp_tp_example.py": "torch registers no sharding of this attention for CPUs",
    "FSDP/T5_training.py": "needs `nlp`, a package that has ended, and downloads of T5 and of the data set wikihow",
    "rpc/*": "each script starts its own processes with `mp.spawn` at a fixed port: torchrun doesn't start them either",
}

_INTRODUCTION = """\
`python -m tests.tried.examples FOLDER` writes this page; FOLDER is a clone of pytorch/examples. Its scripts ran by
`cluster.torchrun` on two engines, without a change but of the lines that ask for GPUs (`FOR_GPUS` in
`tests/tried/examples.py`)."""


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
        task = submit_script(cluster._engine_group, path.name, script.arguments, {})
        try:
            task.wait(TIMEOUT_S)
        except (dtkit.DtkitError, TimeoutError) as error:
            task.cancel()
            lines = [line for _, line in task.output[-3:]]
            return f"**FAILED: {str(error).splitlines()[0][:200]}** {lines}"
    printed = "\n".join(line for _, line in task.output)
    return "ran to its end" if script.expected in printed else "**ended early**"


def write_page(clone: Path) -> bool:
    """Write the page; return whether all is well."""
    lines = [
        "---",
        "orphan: true",
        "---",
        "",
        "# Scripts of pytorch/examples",
        "",
        *_INTRODUCTION.splitlines(),
        "",
        "| script | arguments | |",
        "|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary, dtkit.Cluster(2, threads=1) as cluster:
        folder = Path(temporary) / "distributed"
        shutil.copytree(clone / "distributed", folder)
        prepare(folder)
        for script in SCRIPTS:
            outcome = run(cluster, folder, script)
            print(script.path, outcome, flush=True)
            lines.append(f"| {script.path} | {' '.join(script.arguments)} | {outcome} |")
    lines += [f"| {path} | | not run: {reason} |" for path, reason in NOT_RUN.items()]
    lines += ["", f"On CPUs, with torch {torch.__version__.partition('+')[0]}.", ""]
    PAGE.write_text("\n".join(lines))
    return "**" not in "".join(lines)


if __name__ == "__main__":
    sys.exit(not write_page(Path(sys.argv[1])))
