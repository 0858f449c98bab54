"""Run scripts of other libraries by ``cluster.torchrun``, and compare them with the same training by dtkit."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import dtkit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FOLDER = Path(__file__).parent
SHUFFLING = "lightning"
"""Library that shuffles the rows in its own way, also of a DataLoader that doesn't."""
DIVIDING_BY_MORE = "trainer_language_model"
"""Script whose loss of GPT2 is smaller by 1/16 here: it also counts the first label of each row, which has no loss."""
ARGUMENTS = {
    "trainer_text_classification": [
        *("--output_dir=out", "--do_train", "--do_eval", "--use_cpu", "--per_device_train_batch_size=4"),
        *("--num_train_epochs=2", "--learning_rate=1e-3", "--save_strategy=no", "--report_to=none"),
        *("--disable_tqdm=True", "--train_sampling_strategy=sequential"),
        "--average_tokens_across_devices=False",
    ]
}
"""Arguments of scripts that take some."""
LIBRARIES = {
    "accelerate": "Accelerate",
    "ddp": "DistributedDataParallel",
    "lightning": "Lightning's Trainer",
    "trainer": "Hugging Face's Trainer",
}
CHECKSUM_BOUND = 1e-5

INTRODUCTION = """\
Scripts of other libraries by `cluster.torchrun`, on two ranks (`tests/tried/scripts`). Next to them the same training
with `cluster.train` (`tests/tried/with_dtkit`): the lines of each, model and data included, formatted alike, and
whether the trained parameters are the same. A script also needs the command `torchrun --nproc-per-node 2 SCRIPT`, or
Accelerate's `accelerate launch`; in a notebook `cluster = dtkit.Cluster(2)` takes its place, once."""
_HEAD = ["| training | library | command | its script ran | lines | with dtkit | parameters |", f"|{'---|' * 7}"]


def make_table(cluster: dtkit.Cluster, trainings: Mapping[str, str]) -> list[str]:
    """Return a row for each script of the trainings, {part of the files' names: title}."""
    return _HEAD + [row for name, title in trainings.items() for row in compare_scripts(cluster, name, title)]


def run_script(cluster: dtkit.Cluster, path: Path) -> tuple[str, float | None]:
    """Return (whether a script's ranks end with equal parameters, their sum)."""
    task = cluster.submit(path, *ARGUMENTS.get(path.stem, ()))
    try:
        task.wait(180)
    except dtkit.DtkitError as error:
        return f"**FAILED: {str(error).splitlines()[0][:120]}**", None
    checksums = {line for _, line in task.output if line.startswith("checksum")}
    if len(checksums) == 1:
        return "unchanged", float(checksums.pop().removeprefix("checksum"))
    return f"**ranks differ: {sorted(checksums)}**", None


def compare_scripts(cluster: dtkit.Cluster, training: str, title: str) -> Iterator[str]:
    """Yield a row for each script of a training: how it ran, and the same with dtkit."""
    same = FOLDER / "with_dtkit" / f"{training}.py"
    expected = runpy.run_path(str(same), {"cluster": cluster})["checksum"]
    for path in sorted((FOLDER / "scripts").glob(f"*_{training}.py")):
        library = path.stem.removesuffix(f"_{training}")
        outcome, checksum = run_script(cluster, path)
        difference = abs(expected - (checksum or 0.0))
        result = "same" if difference < CHECKSUM_BOUND else f"**other, {difference:.1e}**"
        if library == SHUFFLING:
            result = "rows in another order"
        if path.stem == DIVIDING_BY_MORE and checksum is not None:
            result = "a smaller loss: the Trainer also counts labels that have none"
        yield format_row(path, (title, LIBRARIES[library]), outcome, (count_lines(path), count_lines(same)), result)


def format_row(path: Path, heads: tuple[str, str], outcome: str, lines: tuple[int, int], result: str) -> str:
    """Return a script's row of the table."""
    arguments = "".join(f', "{each}"' for each in ARGUMENTS.get(path.stem, ()))
    command = f'`cluster.torchrun("{path.name}"{arguments})`'
    more = "" if lines[1] <= lines[0] else "**"
    return f"| {' | '.join(heads)} | {command} | {outcome} | {lines[0]} | {more}{lines[1]}{more} | {result} |"


def count_lines(path: Path) -> int:
    """Return the number of lines with code."""
    text = ast.unparse(_drop_docstrings(ast.parse(path.read_text())))
    return sum(1 for line in text.splitlines() if line.strip())


def _drop_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree
