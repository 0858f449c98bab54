"""Refusal of file names whose suffix promises another format than what is written, such as "m.pt" for a folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

_WEIGHTS = (".bin", ".ckpt", ".h5", ".keras", ".onnx", ".pkl", ".pt", ".pth", ".safetensors")
_PICTURES = (".gif", ".jpeg", ".jpg", ".pdf", ".png", ".svg", ".webp")
_TABLES = (".csv", ".parquet", ".tsv", ".xlsx")
_TEXTS = (".doc", ".docx", ".htm", ".html", ".ipynb", ".json", ".jsonl", ".md", ".tex", ".txt", ".zip", ".gz")
_KNOWN = frozenset((*_WEIGHTS, *_PICTURES, *_TABLES, *_TEXTS))
_SAVE_WEIGHTS = "For the weights in one file, use torch.save(run.model.state_dict(), {path!r})"
_SAVE_SAFETENSORS = "For the weights in one file, use safetensors.torch.save_file(run.model.state_dict(), {path!r})"
_SAVE_FIGURE = "For a picture, use .figure().savefig({path!r})"
_SAVE_TABLE = "For a table, use .to_pandas(), which pandas writes"


@dataclasses.dataclass(frozen=True)
class WrittenFormat:
    """What a function writes, the suffixes that fit, and how users get other formats."""

    name: str
    suffixes: tuple[str, ...]
    remedies: dict[str, str]
    """Remedies by suffix."""


FOLDER = WrittenFormat(
    "a folder", (), dict.fromkeys((".bin", ".pt", ".pth"), _SAVE_WEIGHTS) | {".safetensors": _SAVE_SAFETENSORS}
)
WEB_PAGE = WrittenFormat(
    "a web page (HTML)",
    (".html", ".htm"),
    dict.fromkeys(_PICTURES, _SAVE_FIGURE) | {".pdf": "For a PDF, print the page from a browser"},
)
JSON_LINES = WrittenFormat("lines of JSON", (".jsonl", ".json", ".txt"), dict.fromkeys(_TABLES, _SAVE_TABLE))
CHROME_TRACE = WrittenFormat("a trace in JSON", (".json", ".txt"), dict.fromkeys(_PICTURES, _SAVE_FIGURE))
COMPRESSED_TRACE = dataclasses.replace(CHROME_TRACE, suffixes=(".json", ".txt", ".gz"))
"""A trace that is compressed for ".gz"."""


def check_suffix(call: str, path: str | os.PathLike[str], written: WrittenFormat) -> None:
    """Raise ValueError if the suffix of a path promises another format. `call` is the function, or the argument."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in _KNOWN or suffix in written.suffixes or (written is FOLDER and path.is_dir()):
        return
    name = str(path.with_suffix(written.suffixes[0] if written.suffixes else ""))
    remedy = written.remedies.get(suffix, "").format(path=str(path))
    raise ValueError(
        f"{call}{str(path)!r}{')' * call.count('(')}: what is written is {written.name}, and {suffix} promises another "
        f"format. Use {call}{name!r}{')' * call.count('(')}{'. ' if remedy else ''}{remedy}"
    )
