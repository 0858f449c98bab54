"""Documentation: links and anchors resolve, every public name has its place, and the site builds without a warning."""

from __future__ import annotations

import doctest
import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import nbformat
import pytest

import dtkit

if TYPE_CHECKING:
    from pathlib import Path

NEWCOMERS_WORDS = {
    "concepts/strategies": ["ddp", "fsdp", "data parallel"],
    "guides/checkpoints": ["checkpoint"],
    "guides/dashboard": ["dashboard", "fault injection"],
    "guides/map-and-search": ["hyperparameter search", "hyperparameter tuning"],
    "guides/trackers": ["tensorboard", "wandb"],
    "guides/training": ["progress bar", "validation"],
    "how-to/datasets": ["distributed sampler"],
    "how-to/gpus": ["multi gpu"],
    "how-to/options": [
        "early stopping",
        "early_stopping",
        "learning rate schedule",
        "mixed precision",
        "amp",
        "bf16",
        "gradient accumulation",
    ],
    "how-to/predict": ["inference", "prediction"],
    "how-to/resume": ["resume"],
    "how-to/save-model": ["save model", "load model"],
    "how-to/slurm": ["slurm"],
    "how-to/torchrun-script": ["torchrun"],
}
"""What users of other libraries type into the site's search, and the page that answers."""
LISTED = re.compile(r"^(?:-|\|) \[[^\]]+\]\(([^)#]+)\)", re.MULTILINE)
"""A page in the list or the table of an index."""
FENCE = re.compile(r"^(```|:::).*?^\1", re.MULTILINE | re.DOTALL)


def list_pages(root: Path) -> list[Path]:
    """Return all pages that are read on GitHub and on the site."""
    pages = [path for path in root.glob("docs/**/*.md") if "_build" not in path.parts]
    return [root / "README.md", root / "CONTRIBUTING.md", root / "CHANGELOG.md", *pages]


def make_slug(heading: str) -> str:
    """Return the anchor that GitHub and myst make of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.lower().strip()).replace(" ", "-")


def find_broken_links(path: Path) -> list[str]:
    """Return relative links to files or headings that don't exist."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = path.parent / file if file else path
        if not target.exists() and not file.startswith("_static/"):
            broken.append(link)
        elif anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            broken += [link] * (anchor not in map(make_slug, headings))
    return broken


def read_keywords(page: Path) -> list[str]:
    """Return the keywords of a page's front matter."""
    yaml = pytest.importorskip("yaml")
    text = page.read_text(encoding="utf-8")
    metadata = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else {}
    keywords: str = metadata.get("myst", {}).get("html_meta", {}).get("keywords", "")
    return [keyword.strip() for keyword in keywords.split(",")]


def find_type_fields(page: str) -> list[str]:
    """Return the texts of the fields "Type:", into which napoleon splits sentences with a colon."""
    fields = re.findall(r"<dt[^>]*>Type<span[^>]*>:</span></dt>\s*<dd[^>]*>(.*?)</dd>", page, re.DOTALL)
    return [re.sub(r"<[^>]+>", "", field).strip() for field in fields]


def test_links_and_anchors_of_all_pages_resolve(root: Path):
    broken = {path.relative_to(root).as_posix(): find_broken_links(path) for path in list_pages(root)}
    assert {page: links for page, links in broken.items() if links} == {}


def list_indexes(root: Path) -> list[Path]:
    docs = root / "docs"
    return [docs / "index.md", docs / "contributing.md", docs / "decisions" / "README.md", *docs.glob("*/index.md")]


def test_each_page_is_in_the_index_of_its_folder_as_a_plain_link(root: Path):
    """GitHub shows neither Sphinx's lists of pages nor its cards."""
    listed: dict[Path, set[Path]] = {}
    for index in list_indexes(root):
        links = LISTED.findall(index.read_text(encoding="utf-8"))
        listed[index] = {(index.parent / link).resolve() for link in links} | {index}
    for index in list_indexes(root):
        folder = root / "notebooks" if index.parent.name == "tutorials" else index.parent
        found = set().union(*listed.values()) if folder == root / "docs" else listed[index]
        pages = {*folder.glob("*.md"), *folder.glob("*.ipynb")}
        sites_own = {folder / "contributing.md", folder / "changelog.md"}  # GitHub shows the files that they include
        assert pages - found - sites_own == set(), index


def test_no_index_has_a_directive_of_sphinx_instead_of_links(root: Path):
    for index in list_indexes(root):
        blocks = re.findall(r"^(?:```|:::+)\{([\w-]+)\}", index.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(blocks) <= {"include", "eval-rst"}, index  # the reference is made of docstrings


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path: Path):
    (tmp_path / "there.md").write_text("# A heading, `with` signs\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#a-heading-with-signs) [b](there.md#gone) [c](gone.md) [d](https://example.org/x)\n")
    assert find_broken_links(page) == ["there.md#gone", "gone.md"]


def test_the_reference_has_every_public_name(root: Path):
    text = "\n".join(page.read_text(encoding="utf-8") for page in root.glob("docs/reference/*.md"))
    documented = set(re.findall(r"^\.\. auto(?:class|function):: (\w+)$", text, re.MULTILINE))
    documented |= {name for name in ("errors", "lessons", "types") if f"automodule:: dtkit.{name}" in text}
    assert set(dtkit.__all__) - documented == {"DtkitError"}  # among the errors


def test_examples_in_docstrings_print_what_they_show():
    runner, report = doctest.DocTestRunner(), []
    for name in dtkit.__all__:
        for example in doctest.DocTestFinder().find(getattr(dtkit, name), name, globs={"dtkit": dtkit}):
            runner.run(example, out=report.append)
    assert "".join(report) == ""
    assert runner.summarize(verbose=False).attempted >= 6


def test_the_readme_is_short(root: Path):
    lines = (root / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 82  # with the picture, two screens of 1,080 pixels


def test_pictures_of_pages_are_small_and_there_are_two_for_light_and_dark_pages(root: Path):
    shown = set()
    for page in list_pages(root):
        for alt, image in re.findall(r"!\[(.*)\]\((.+\.png)\)", page.read_text(encoding="utf-8")):
            path = (page.parent / image).resolve()
            shown |= {path, path.with_stem(f"{path.stem}-dark")}
            assert len(alt) > 20, image
    for notebook in root.glob("notebooks/*.ipynb"):  # their own pictures fit both
        shown |= {root / "notebooks" / image for image in re.findall(r"!\[.*\]\((.+\.png)\)", notebook.read_text())}
    images = set((root / "notebooks" / "images").iterdir())
    assert {path.name for path in shown ^ images} == set()
    assert {path.name: path.stat().st_size for path in images if path.stat().st_size > 150_000} == {}


def test_pictures_of_pages_begin_with_an_empty_row_and_not_with_a_cut_line_of_text(root: Path):
    image = pytest.importorskip("PIL.Image")
    colors = {}
    for path in (root / "notebooks" / "images").iterdir():
        if not path.name.startswith("dashboard"):  # these begin at the dashboard's border
            with image.open(path) as picture:
                colors[path.name] = picture.convert("RGBA").crop((0, 0, picture.width, 1)).getcolors()
    assert {name: found for name, found in colors.items() if found is None or len(found) > 1} == {}


@pytest.mark.parametrize(("page", "words"), NEWCOMERS_WORDS.items())
def test_pages_have_the_words_of_other_libraries_as_keywords(root: Path, page: str, words: list[str]):
    assert set(words) <= set(read_keywords(root / f"docs/{page}.md"))


def build_site(root: Path, folder: Path, **environment: str) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", root / "docs", folder]
    variables = {**os.environ, "PYTHONPATH": str(root), **environment}
    done = subprocess.run(command, check=False, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(600)
def test_the_site_has_the_outputs_of_its_notebooks(root: Path, tmp_path: Path):
    """With code that takes no time; `make docs` runs that of the notebooks."""
    pytest.importorskip("myst_nb")
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    assert "docs: export EXECUTE ?= 1" in makefile
    copy = tmp_path / "copy"  # a build writes into docs/
    for name in ("dtkit", "docs", "notebooks"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("_build", "__pycache__"))
    for path in [*root.glob("*.md"), root / "LICENSE"]:
        shutil.copy(path, copy)
    for path in (copy / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for number, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
            cell.source = f"print({number} + 4000)"
        nbformat.write(notebook, path)
    build_site(copy, tmp_path / "site", EXECUTE="1")
    for page in (tmp_path / "site" / "tutorials").glob("0*.html"):
        assert ">4001\n<" in page.read_text(encoding="utf-8"), page.name
    assert len(list((tmp_path / "site" / "tutorials").glob("0*.html"))) == 7


@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning(root: Path, tmp_path: Path):
    pytest.importorskip("myst_nb")
    build_site(root, tmp_path, EXECUTE="0")
    page = (tmp_path / "reference" / "cluster.html").read_text(encoding="utf-8")
    assert 'id="dtkit.Cluster.train"' in page
    assert "<strong>batch_size</strong>" in page  # the lists of arguments are lists
    assert "<math" in (tmp_path / "tutorials" / "02_data_parallel.html").read_text(encoding="utf-8")
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("reference/*.html")}
    tables = (root / "docs/reference/index.md").read_text(encoding="utf-8")
    names = re.findall(r"^   ((?:Cluster|Run|History)\.\w+)$", tables, re.MULTILINE)
    assert "Run.verdict" in names  # a property of its base class
    assert [name for name in names if not any(f'id="dtkit.{name}"' in page for page in pages.values())] == []
    fields = {name: find_type_fields(page) for name, page in pages.items()}
    assert len(fields) > 5
    assert {name: found for name, found in fields.items() if found} == {}  # signatures have the types
    for name in ("pause.png", "pause-dark.png"):  # on light and on dark pages
        assert f'src="../_images/{name}"' in (tmp_path / "how-to" / "pause.html").read_text(encoding="utf-8")
    sidebar = (tmp_path / "how-to" / "gpus.html").read_text(encoding="utf-8").partition("bd-sidebar-primary")[2]
    assert re.search(r'<a class="reference internal" href="datasets.html">Train on a Dataset', sidebar)
    index = json.loads((tmp_path / "searchindex.js").read_text(encoding="utf-8").removeprefix("Search.setIndex(")[:-1])
    found = index["terms"]["dashboard"]
    assert index["docnames"].index("changelog") not in found
    assert len(found) > 5
    assert index["docnames"][index["terms"]["=multi gpu"]] == "how-to/gpus"  # a keyword, for search.js
    gpus = (tmp_path / "how-to" / "gpus.html").read_text(encoding="utf-8")
    assert '<meta content="multi, gpu, ' in gpus
    assert ", =" not in gpus.partition("<body")[0]


@pytest.mark.parametrize(
    ("module", "name", "public"),
    [
        ("dtkit.history.history", "History", {"evaluations", "events", "ranks_per_replica", "workload"}),
        ("dtkit.training.run", "Run", set()),
    ],
)
def test_attributes_that_only_dtkit_uses_are_not_in_the_reference(root: Path, module: str, name: str, public: set[str]):
    analyzer = pytest.importorskip("sphinx.pycode").ModuleAnalyzer
    page = (root / "docs/reference/runs.md").read_text(encoding="utf-8")
    excluded = re.findall(rf"autoclass:: {name}\n   :exclude-members: (.*)", page)[0].split(", ")
    attributes = {attribute for owner, attribute in analyzer.for_module(module).find_attr_docs() if owner == name}
    assert attributes - set(excluded) == public
