"""File names whose suffix promises another format than what is written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

import dtkit
from dtkit._util.suffixes import FOLDER, WEB_PAGE, check_suffix
from dtkit.testing.fake_transport import FakeTransport
from tests.support.small import train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def run() -> Iterator[dtkit.Run]:
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        run = train(cluster, steps=2)
        run.wait(60)
        yield run


CALLS: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "weights": (
        lambda run, folder: run.save(folder / "m.pt"),
        r"save\(path='.*m.pt'\): .* a folder, and .pt .* Use save\(path='.*/m'\)\. .*torch\.save\(.*, '.*m.pt'\)",
    ),
    "safetensors": (lambda run, folder: run.save(folder / "m.safetensors"), r"safetensors\.torch\.save_file"),
    "export": (lambda run, folder: run.save(folder / "m.bin", format="hf"), r"save\(path='.*m.bin'\): .*torch\.save"),
    "PDF": (
        lambda run, folder: run.report(folder / "r.PDF"),
        r"report\('.*r.PDF'\): .* web page .* Use report\('.*r.html'\)\. For a PDF, print the page from a browser",
    ),
    "picture": (lambda run, folder: run.report(folder / "r.png"), r"\.figure\(\)\.savefig\('.*r.png'\)"),
    "text": (lambda run, folder: run.report(folder / "r.docx"), r"\.docx promises another format\. Use report\("),
    "comparison": (lambda run, folder: dtkit.compare(run, run).report(folder / "c.pdf"), r"report\('.*c.pdf'\): "),
    "table": (lambda run, folder: run.history.to_jsonl(folder / "h.csv"), r"Use to_jsonl\('.*h.jsonl'\)\. .*to_pandas"),
}


@pytest.mark.parametrize("name", CALLS)
def test_suffix_of_another_format_is_refused_with_the_remedy(run: dtkit.Run, tmp_path: Path, name: str):
    call, expected = CALLS[name]
    with pytest.raises(ValueError, match=expected):
        call(run, tmp_path)
    assert not list(tmp_path.iterdir())


def test_folder_for_checkpoints_that_is_named_as_a_file_is_refused_at_once():
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        with pytest.raises(ValueError, match=r"checkpoint_dir='m\.ckpt': .* Use checkpoint_dir='m'$"):
            train(cluster, checkpoint_dir="m.ckpt")


@pytest.mark.parametrize("name", ["m", "m.v1", "model-0.5", "runs.d/m"])
def test_other_names_of_folders_are_taken(name: str):
    check_suffix("save(", name, FOLDER)


def test_existing_folder_is_taken_by_any_name(tmp_path: Path):
    folder = tmp_path / "m.pt"
    folder.mkdir()
    check_suffix("save(", folder, FOLDER)
    check_suffix("report(", "a.HTML", WEB_PAGE)
    with pytest.raises(ValueError, match=re.escape("report('a.md')")):
        check_suffix("report(", "a.md", WEB_PAGE)
