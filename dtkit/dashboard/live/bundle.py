"""One ES module made of several small files, for a page that loads a single text.

Each file is a module that a browser or node.js can load. The bundle has them in the order of their imports, without
import lines, and with ``export`` in the entry only. So top-level names must differ between all files; otherwise a
browser refuses to load the bundle.
"""

from __future__ import annotations

import re
from pathlib import Path

STATIC_FOLDER = Path(__file__).parent / "static"
"""The modules and styles of all live views."""
_IMPORT_PATTERN = re.compile(r'^import \{[^}]*\} from "(\.{1,2}/[\w./]+)";\n', re.MULTILINE)
_EXPORT_PATTERN = re.compile(r"^export (?=(?:async )?function|const|let|class)", re.MULTILINE)


def bundle_modules(entry: Path) -> str:
    """Return the entry and all its imports as the text of one module with the exports of the entry."""
    order: list[Path] = []
    _collect_modules(entry.resolve(), order)
    parts = [_IMPORT_PATTERN.sub("", path.read_text(encoding="utf-8")) for path in order]
    return "\n".join([*(_EXPORT_PATTERN.sub("", part) for part in parts[:-1]), parts[-1]])


def _collect_modules(path: Path, modules: list[Path]) -> None:
    """Append the imports of `path`, each once, and then `path`."""
    for imported in _IMPORT_PATTERN.findall(path.read_text(encoding="utf-8")):
        target = (path.parent / imported).resolve()
        if target not in modules:
            _collect_modules(target, modules)
    modules.append(path)
