"""Reports without the scripts that dtkit itself puts into them."""

from __future__ import annotations

import re

from dtkit.dashboard.live.bundle import STATIC_FOLDER, bundle_modules


def remove_own_scripts(page: str) -> str:
    """Return a report without its data, in which nothing may look like a tag, and without the page's modules."""
    modules = bundle_modules(STATIC_FOLDER / "report.js").replace("</", "<\\/")
    page, num_data = re.subn(r'<script type="application/json" id="dtk-messages">[^<]*</script>', "", page)
    assert num_data == page.count(modules) == 1
    return page.replace(f'<script type="module">\n{modules}</script>', "")
