"""Sphinx configuration: `make docs` builds docs/_build/html from these pages, the notebooks and the docstrings.

With EXECUTE=1 in the environment, as `make docs` has it, the notebooks are executed. jupyter-cache keeps their outputs
until their code changes.
NOTEBOOKS=folder takes notebooks from another folder, such as executed copies.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes

import dtkit
from dtkit.strategies.base import Strategy

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"

project = "dtkit"
author = "the dtkit contributors"
copyright = author  # noqa: A001 - Sphinx's name
version = release = dtkit.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "README.md"]
templates_path = ["_templates"]
html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "dtkit"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}  # without it, the theme's script reports an invalid mode on each page
html_css_files = ["dtkit.css"]
html_js_files = ["search.js"]
html_show_sourcelink = False
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navbar_persistent": ["search-button"],
    "navigation_with_keys": False,
    "pygments_dark_style": "github-dark",  # the default has comments in the brightest color
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"index": [], "example": [], "contributing": [], "changelog": []}

# -- notebooks and Markdown -----------------------------------------------------------------------------------

nb_execution_mode = "cache" if os.environ.get("EXECUTE") == "1" else "off"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# Justified: the lexer of Python doesn't know the magics of a cell, and a live view has no form on a page.
suppress_warnings = ["misc.highlighting_failure", "mystnb.unknown_mime_type"]

# -- reference ------------------------------------------------------------------------------------------------

default_role = "code"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_param = napoleon_use_rtype = False
autosummary_generate = False  # its tables link to the pages of the reference, which show everything
autodoc_default_options = {"members": True}
toc_object_entries_show_parents = "hide"  # the list on the right is narrow
_MADE_BY_DTKIT = {"dtkit.Checkpoint", "dtkit.History", "dtkit.Partition", "dtkit.Run"}
_MADE_BY_USERS = ("dtkit.lessons.", "dtkit.types.", "dtkit.errors.", "dtkit.integrations.trackers.")
_STRATEGY_METHODS = {name for name in vars(Strategy) if not name.startswith("_")} | {"has_plain_sums"}
_NO_OUTPUTS = (
    '<div class="admonition note"><p class="admonition-title">Without outputs</p><p>This page was built without '
    "running the notebook. <code>make lab</code> opens it in JupyterLab, where its results and dashboards are live. "
    "<code>make docs</code> builds this page with the outputs.</p></div>"
)
_PICTURE = re.compile(r"^!\[(?P<alt>[^\]]+)\]\((?:\.\./)+notebooks/images/(?P<name>[\w-]+)\.png\)$", re.MULTILINE)
"""A line of a page that is a picture, as GitHub shows it."""
_ENTRY = re.compile(r"^(?:-|\|) \[[^\]]+\]\((?P<page>[^):#]+)\.(?:md|ipynb)\)", re.MULTILINE)
"""A page in the list or the table of an index."""
_OUTSIDE = {  # files that GitHub shows at these places -> the site's own pages
    "It is in the [README](../README.md#the-example).": (
        '```{include} ../README.md\n:start-after: "## The example"\n:end-before: "## Documentation"\n```'
    ),
    "../../README.md#the-example": "/example.md",
    "](../CONTRIBUTING.md)": "](contributing.md)",
    "](../CHANGELOG.md)": "](changelog.md)",
    "../../notebooks/": "/tutorials/",
}
_PARAMETER = re.compile(r"(?P<names>[*\w]+(, [*\w]+)*) : (?P<text>.*)")


def make_parameter_lists(_app: Any, _kind: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Turn dtkit's lines "name : text", with indented continuations, into bullet lists of reStructuredText."""
    source, is_list = list(lines), False
    lines.clear()
    for line in source:
        match = _PARAMETER.fullmatch(line)
        if match:
            lines += [] if is_list else [""]
            names = ", ".join(f"**{name}**" for name in match["names"].replace("*", "\\*").split(", "))
            lines.append(f"- {names}: {match['text']}")
        elif is_list and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            lines += ["", line] if is_list and line else [line]
        is_list = match is not None or (is_list and line.startswith("    "))


_SHOWN_PLACES = ("dtkit.", "dtkit.integrations.trackers.")


def keep_colons(_app: Any, kind: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Begin an attribute's text with an empty comment, because napoleon splits it at a colon."""
    if kind in {"attribute", "data", "property"}:
        lines[:0] = ["..", ""]


def hide_constructor(
    _app: Any, kind: str, name: str, _object: Any, _options: Any, _signature: str, returned: str
) -> tuple[str, str] | None:
    """Leave out the constructors of classes that dtkit makes itself, such as a run."""
    is_made = name in _MADE_BY_DTKIT or name.count(".") > 1  # classes outside of the root are returned by calls
    return ("", returned) if kind == "class" and is_made and not name.startswith(_MADE_BY_USERS) else None


def skip_internal(_app: Any, kind: str, name: str, _object: Any, skip: bool, _options: Any) -> bool | None:  # noqa: FBT001 - Sphinx's signature
    """Leave out the methods of strategies that dtkit itself calls."""
    return True if kind == "class" and name in _STRATEGY_METHODS else skip or None


def adapt_links(_app: Any, document: str, content: list[str]) -> None:
    """Show pictures in the theme's colors, and let links to the README, notebooks and headings point into the site.

    An index becomes the parent of the pages that it lists.
    """
    text = _PICTURE.sub(_show_in_both_themes, content[0])
    for outside, inside in _OUTSIDE.items():
        text = text.replace(outside, inside)
    if document.endswith(("index", "README", "contributing")):
        text = re.sub(r"^# .+\n", lambda heading: heading[0] + _make_toctrees(text), text, count=1, flags=re.MULTILINE)
    if document.startswith("tutorials/"):
        text = re.sub(r"\]\(#([^)]+)\)", lambda match: f"](#{_make_slug(match[1])})", text)
    content[0] = text


def _make_toctrees(index: str) -> str:
    """Return a hidden toctree of the pages that each section of an index lists, so that GitHub shows none."""
    sections = [
        (section.partition("\n")[0], _ENTRY.findall(section))
        for section in re.split(r"^##? ", index, flags=re.MULTILINE)
    ]
    listed = [(heading, pages) for heading, pages in sections if pages]
    return "".join(
        "\n".join(
            ["", "```{toctree}", ":hidden:", *[f":caption: {heading}"] * (len(listed) > 1), "", *pages, "```", ""]
        )
        for heading, pages in listed
    )


def _show_in_both_themes(picture: re.Match[str]) -> str:
    """Return directives that show a picture on light pages, and its double NAME-dark.png on dark ones."""
    images = [
        f":::{{image}} /_static/{picture['name']}{ending}.png\n:alt: {picture['alt']}\n:class: {shown}\n:::\n"
        for ending, shown in (("", "only-light"), ("-dark", "only-dark"))
    ]
    return "::::{div} scrolling-picture\n" + "\n".join(images) + "::::"


def note_missing_outputs(
    _app: Any, page: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
) -> None:
    """Begin a tutorial with a note that its outputs are missing, where the notebooks were not run."""
    if page.startswith("tutorials/0") and nb_execution_mode == "off" and "NOTEBOOKS" not in os.environ:
        context["body"] = f"{_NO_OUTPUTS}{context['body']}"


def index_keywords(_app: Any, document: nodes.document) -> None:
    """Let Sphinx's index have each word of a page's keywords, and each keyword as "=keyword", which search.js looks up.

    The index itself takes a keyword of several words as one word, which no query has.
    """
    for node in document.findall(nodes.meta):
        if node.get("name") == "keywords":
            keywords = [keyword.strip() for keyword in node["content"].lower().split(",")]
            words = dict.fromkeys(word for keyword in keywords for word in keyword.split())
            node["content"] = ", ".join([*words, *(f"={keyword}" for keyword in keywords)])


def hide_places(_app: Any, document: nodes.document) -> None:
    """Leave the module out before a class that users get from a call, and never import."""
    for node in list(document.findall(addnodes.desc_addname)):
        if node.astext() not in _SHOWN_PLACES:
            node.parent.remove(node)


def show_keywords(
    _app: Any, _page: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
) -> None:
    """Leave the marks of `index_keywords` out of the page itself."""
    context["metatags"] = re.sub(r", =[^,\"]*", "", context.get("metatags", ""))


def name_pictures(
    _app: Any, _page: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
) -> None:
    """Replace the file names that myst-nb gives to pictures of cells as their texts."""
    alt = 'alt="The picture that this cell shows"'
    context["body"] = re.sub(r'alt="[./]*_images/[0-9a-f]+\.png"', alt, context.get("body", ""))


def _make_slug(heading: str) -> str:
    """Return "1-partitions" for JupyterLab's "1.-Partitions"."""
    return re.sub(r"[^\w-]", "", heading.lower())


def _write_inline_math(translator: Any, node: Any) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _write_block_math(translator: Any, node: Any) -> None:
    translator.body.append(f"<div class='math-block'>{tex2mathml(node.astext(), as_block=True)}</div>")
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Connect this file's functions to Sphinx. Formulas become MathML, which needs no script from another host."""
    app.add_html_math_renderer("mathml", (_write_inline_math, None), (_write_block_math, None))
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon, whose priority is 500
    app.connect("autodoc-process-docstring", make_parameter_lists)
    app.connect("autodoc-process-signature", hide_constructor)
    app.connect("autodoc-skip-member", skip_internal)
    app.connect("source-read", adapt_links)
    app.connect("html-page-context", note_missing_outputs)
    app.connect("html-page-context", name_pictures)
    app.connect("html-page-context", show_keywords)
    app.connect("doctree-read", index_keywords)
    app.connect("doctree-read", hide_places)


def copy_tutorials() -> None:
    """Copy the notebooks and pages that lie outside of docs/ into it, because Sphinx reads one folder."""
    for notebook in sorted(Path(os.environ.get("NOTEBOOKS") or ROOT / "notebooks").glob("*.ipynb")):
        _copy_if_different(notebook, TUTORIALS / notebook.name)
    for image in sorted((ROOT / "notebooks" / "images").iterdir()):
        _copy_if_different(image, ROOT / "docs" / "_static" / image.name)


def _copy_if_different(source: Path, target: Path) -> None:
    if not target.exists() or source.read_bytes() != target.read_bytes():
        shutil.copyfile(source, target)


copy_tutorials()
