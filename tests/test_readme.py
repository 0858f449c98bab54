"""Python blocks of the README, docs/guides and docs/how-to run, in order, as the cells of one notebook."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.support.notebook import execute

if TYPE_CHECKING:
    from pathlib import Path

    from nbformat import NotebookNode

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"^```\{.*?^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "bash", "text"}  # only python is executed; text is code that needs TensorFlow
GUIDES = [
    "README.md",
    *(
        f"docs/guides/{name}.md"
        for name in ("training", "checkpoints", "failures", "inside-a-step", "own-loop", "models", "keras")
    ),
]
FURTHER_GUIDES = [
    f"docs/guides/{name}.md" for name in ("dashboard", "data", "map-and-search", "trackers", "traditional")
]
SET_UP = "docs/how-to/index.md"
"""The page from whose code most how-to pages go on."""
HOW_TO = [
    "docs/index.md",
    SET_UP,
    *(
        f"docs/how-to/{name}.md"
        for name in (
            "options",
            "gpus",
            "datasets",
            "pause",
            "check",
            "speed",
            "report",
            "lost-engine",
            "errors",
            "hang",
            "hugging-face",
            "own-loop",
            "torchrun-script",
            "other-trainers",
            "from-wandb",
            "save-model",
            "fine-tune",
            "predict",
            "resume",
            "reproducible",
            "memory",
            "several-runs",
            "log-numbers",
        )
    ),
]
pytestmark = pytest.mark.timeout(900)  # a fixture executes all blocks of many pages

PAGES = [*GUIDES, *FURTHER_GUIDES, *HOW_TO]
START = "cluster = dtkit.Cluster(2)\n"
LINK_TO_SET_UP = "First run the [set-up](index.md#set-up)"
RAISES = "# raises"
"""Ends the line of a block that shows an error."""
README_EPOCHS = "epochs=100,"
"""The README's training lasts until its reader has tried the buttons; tests shorten it."""
SHOWS_CHECKSUMS = "replicas  # as a comment of the README says"
NOT_EXECUTED = {"docs/guides/several-hosts.md"}  # needs hosts of its reader


def blocks(root: Path, pages: list[str] = PAGES) -> list[tuple[str, str]]:
    """Return (language, source) of all fenced blocks of the pages that are executed."""
    texts = [(root / page).read_text(encoding="utf-8") for page in pages]
    return [block for text in texts for block in FENCE.findall(DIRECTIVE.sub("", text))]


@pytest.fixture(scope="module")
def done(root: Path, tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """The blocks of the README and of guides, which use the README's cluster."""
    sources = [source for language, source in blocks(root, GUIDES[:1]) if language == "python"]
    (lasting,) = [k for k, source in enumerate(sources) if README_EPOCHS in source]
    sources[lasting] = sources[lasting].replace(README_EPOCHS, "epochs=15,")
    sources.append(SHOWS_CHECKSUMS)
    later = [source.replace(START, "") for language, source in blocks(root, GUIDES[1:]) if language == "python"]
    return execute_blocks([*sources, *later], tmp_path_factory.mktemp("readme"))


@pytest.fixture(scope="module")
def how_to(root: Path, tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """The blocks of the site's first page and of docs/how-to. The pages after the first one use its cluster."""
    return execute_blocks(read_with_one_cluster(root, HOW_TO), tmp_path_factory.mktemp("how-to"))


@pytest.fixture(scope="module")
def further(root: Path, tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    return execute_blocks(read_with_one_cluster(root, FURTHER_GUIDES), tmp_path_factory.mktemp("guides"))


def read_with_one_cluster(root: Path, pages: list[str]) -> list[str]:
    """Return the Python blocks of the pages. The pages after the first one use its cluster."""
    (_, first), *others = [block for block in blocks(root, pages) if block[0] == "python"]
    assert START in first
    return [first, *(source.replace(START, "") for _, source in others)]


def execute_blocks(sources: list[str], folder: Path) -> NotebookNode:
    cells = [new_code_cell(source.rstrip("\n")) for source in [*sources, "cluster.close()"]]
    for cell in cells:
        cell.metadata["tags"] = ["raises-exception"] if RAISES in cell.source else []
    nbformat.write(new_notebook(cells=cells), folder / "blocks.ipynb")
    return execute(folder / "blocks.ipynb", timeout=120)


def get_cell_output(done: NotebookNode, source: str) -> str:
    """All that the one cell with `source` printed and showed, as text."""
    (cell,) = [cell for cell in done.cells if source in cell.source]
    return "".join(
        "".join(output.get("text", "")) + output.get("data", {}).get("text/plain", "") + "\n" for output in cell.outputs
    )


def test_each_fenced_block_is_found(root: Path):
    assert {language for language, _ in blocks(root)} == LANGUAGES
    texts = [(root / page).read_text(encoding="utf-8") for page in PAGES]
    fences = sum(text.count("```") - 2 * text.count("```{") for text in texts)  # without directives of the site
    assert fences == 2 * len(blocks(root))


def test_each_page_with_python_is_executed(root: Path):
    pages = {path.relative_to(root).as_posix() for path in [root / "README.md", *root.glob("docs/**/*.md")]}
    assert {page for page in pages if "```python" in (root / page).read_text(encoding="utf-8")} == set(
        PAGES
    ) | NOT_EXECUTED


@pytest.mark.parametrize("page", PAGES)
def test_a_page_needs_no_other_page(root: Path, page: str):
    """Its blocks, after the set-up that it names, name no variable or module that they don't define."""
    pages = [SET_UP, page] if LINK_TO_SET_UP in (root / page).read_text(encoding="utf-8") else [page]
    sources = [source for language, source in blocks(root, pages) if language == "python"]
    source = "".join(source for source in sources if not source.startswith("%%"))
    assert source.count(START.rstrip("\n")) == 1
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
    checked = subprocess.run(command, input=source, capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("page", [page for page in HOW_TO if page.startswith("docs/how-to/") and page != SET_UP])
def test_how_to_pages_neither_repeat_nor_change_what_the_set_up_has(root: Path, page: str):
    """A reader runs the set-up once, and then pages in any order."""
    ((_, set_up),) = blocks(root, [SET_UP])
    names = set(re.findall(r"^(\w+) =", set_up, re.MULTILINE))
    sources = "".join(source for language, source in blocks(root, [page]) if language == "python")
    sources = re.sub(r'""".*?"""', "", sources, flags=re.DOTALL)  # scripts
    assigned = set(re.findall(r"^(\w+) =", sources, re.MULTILINE))
    if LINK_TO_SET_UP in (root / page).read_text(encoding="utf-8"):
        assert names & assigned == set()
        assert [line for line in set_up.splitlines() if line and f"\n{line}\n" in f"\n{sources}"] == []
    else:  # which needs a few lines only
        first = sources.partition(START)[0]
        assert names & assigned == {"cluster"}
        assert len([line for line in first.splitlines() if line]) < 5


def test_make_targets_in_the_readme_exist(root: Path):
    readme, makefile = ((root / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    for target in re.findall(r"^make (\w+)", readme, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_to_this_repository_name_one_owner(root: Path):
    """Its place on GitHub is unknown yet. Pages with an address say what to replace, and none is a link to click."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *root.glob("docs/**/*.md"), *root.glob("notebooks/*.ipynb")]
    owners = {}
    for path in [*pages, root / "pyproject.toml"]:
        text = path.read_text(encoding="utf-8")
        owners |= dict.fromkeys(re.findall(r"https?://[\w./-]+/([\w-]+)/dtkit\b", text), path)
        assert "/OWNER/" not in text or re.search("[Rr]eplace OWNER", text), path
        assert not re.search(r"\]\(\S+/OWNER/", text), path
    assert len(owners) == 1, owners


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs"])
def test_links_point_to_existing_files(root: Path, page: str):
    path = root / page
    for file in [path] if path.is_file() else path.rglob("*.md"):
        text = file.read_text(encoding="utf-8")
        links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
        missing = [link for link in links if not (file.parent / link.partition("#")[0]).exists()]
        hosted = re.findall(r"/HEAD/([^)?]+)|/HEAD\?urlpath=lab/tree/([^)\s]+)", text)
        missing += [a or b for a, b in hosted if not (root / (a or b)).is_file()]
        assert missing == [], file


@pytest.mark.notebook
def test_the_readme_example_runs_as_described(done: NotebookNode):
    assert len(set(re.findall(r"node \d+\s+([0-9a-f]{8,})", get_cell_output(done, SHOWS_CHECKSUMS)))) == 1
    (kept,) = [cell for cell in done.cells if "run = cluster.train(\n    replicas" in cell.source]
    *_, place, picture = kept.outputs
    assert "dtkit-live" in place.data["text/html"]
    assert set(picture.data) == {"text/html", "image/png", "text/plain"}
    assert "completed" in picture.data["text/plain"]
    assert "PASS" in get_cell_output(done, "run.verify()")


@pytest.mark.notebook
def test_a_lost_engine_is_replaced(done: NotebookNode):
    assert "node 1 replaced: all go on from step 20" in get_cell_output(done, "disturbed.history.events")


@pytest.mark.notebook
def test_own_loops_run_as_described(done: NotebookNode):
    first, second = re.search(r"\[([\d.]+), ([\d.]+)\]", get_cell_output(done, "least_squares")).groups()
    assert first == second
    assert "[2.0, 2.0]" in get_cell_output(done, "cluster.torchrun(main)")
    px = get_cell_output(done, "%%px")
    assert "rank 0 of 2" in px
    assert "rank 1 of 2" in px


def mask_numbers(text: str) -> str:
    """Return a text without what differs from run to run: progress, numbers with units, and a ratio or its lack."""
    text = re.sub(r"^repeating .*\n", "", text)  # printed where a check takes long
    text = re.sub(r"(in one process): .*", r"\1", text)
    return re.sub(r"[\d.,]*\d(e-\d+)?( (ms|µs|s)\b)?", "#", text)


@pytest.mark.slow
@pytest.mark.notebook
def test_further_guides_run_as_described(further: NotebookNode):
    assert "2 nodes" in get_cell_output(further, 'by="stratified"')
    assert re.fullmatch(r"\[\d+(, \d+)+\]", get_cell_output(further, "cluster.map(").strip())
    assert "max_depth" in get_cell_output(further, "cluster.joblib()")


@pytest.mark.slow
@pytest.mark.notebook
def test_outputs_on_how_to_pages_are_what_the_code_prints(root: Path, how_to: NotebookNode):
    """On these pages, a block of text follows the code that prints it."""
    pairs = [
        (source, text)
        for page in HOW_TO
        for (language, source), (kind, text) in itertools.pairwise(blocks(root, [page]))
        if (language, kind) == ("python", "text")
    ]
    assert pairs
    for source, text in pairs:
        shown = get_cell_output(how_to, source.replace(START, "").strip())
        assert mask_numbers(text).strip() == mask_numbers(shown).strip()


@pytest.mark.slow
@pytest.mark.notebook
def test_how_to_pages_run_as_described(how_to: NotebookNode):
    assert "PASS" in get_cell_output(how_to, "run.verify()")
    assert "[1.0, 1.0]" in get_cell_output(how_to, "cluster.run(sum_of_ranks)")
    shown = get_cell_output(how_to, "show_rank.py")
    assert "0 of 2 ['--epochs', '3']" in shown
    assert "1 of 2 ['--epochs', '3']" in shown
    assert get_cell_output(how_to, 'resume_from="resumable"').endswith("True\n")
    assert "lr 0.02" in get_cell_output(how_to, "dtkit.compare(variants")
    grouped = get_cell_output(how_to, 'frame.groupby("first learning rate")').split("\n")
    rows = [line.split() for line in grouped if line][-2:]
    assert [(float(row[0]), int(row[-1])) for row in rows] == [(0.02, 3), (0.1, 3)]
    assert "array(" in get_cell_output(how_to, 'noted.history.scalar("output_norm")')
