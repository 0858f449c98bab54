"""One ES module out of several: what the page loads is a single text, and what we edit are small files.

Each file is a module that a browser or node.js can load as it stands. Here they are put one after the other, in the
order of their imports; their own import lines go, and ``export`` goes everywhere but in the entry. So the names at the
top level of all files must differ, as they would have to in one file; a browser refuses to load the bundle otherwise.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_IMPORT_PATTERN = re.compile(r'^import \{[^}]*\} from "(\.{1,2}/[\w./]+)";\n', re.MULTILINE)
_EXPORT_PATTERN = re.compile(r"^export (?=(?:async )?function|const|let|class)", re.MULTILINE)


def bundle_modules(entry: Path) -> str:
    """The entry and all that it imports, as the text of one module that exports what the entry does."""
    order: list[Path] = []
    _collect_modules(entry.resolve(), order)
    parts = [_IMPORT_PATTERN.sub("", path.read_text(encoding="utf-8")) for path in order]
    return "\n".join([*(_EXPORT_PATTERN.sub("", part) for part in parts[:-1]), parts[-1]])


def _collect_modules(path: Path, modules: list[Path]) -> None:
    """Append what `path` imports, each once, and then `path` itself."""
    for found in _IMPORT_PATTERN.findall(path.read_text(encoding="utf-8")):
        target = (path.parent / found).resolve()
        if target not in modules:
            _collect_modules(target, modules)
    modules.append(path)
