"""The table that all views share, and the registry of views."""

import subprocess
import sys

import pytest

from dtkit._util import views
from dtkit._util.table import Table

TABLE = Table(("name", "bytes"), [("a", "10"), ("<b>\x1b", "2,000")], {"name"})


def test_text_is_aligned_left_and_numbers_right():
    assert TABLE.to_text("  ").splitlines() == ["  name  bytes", "  a        10", "  <b>   2,000"]


def test_html_is_escaped_without_control_characters():
    page = TABLE.to_html()
    assert ">&lt;b&gt; <" in page
    assert "\x1b" not in page
    assert page.count("text-align: left") == page.count("white-space: nowrap") == 3


def test_a_table_without_a_header_has_text_only():
    table = Table((), [("strategy", "DataParallel()")])
    assert table.to_text() == "strategy  DataParallel()"
    assert "<thead>" not in table.to_html()
    assert "text-align: right" not in table.to_html()


def test_an_empty_table_has_no_text():
    assert Table((), []).to_text() == ""


def test_a_class_without_a_view_is_refused():
    with pytest.raises(TypeError, match="no view is registered for int"):
        views.draw(3)


def test_showing_text_loads_no_matplotlib():
    code = (
        "import sys; from dtkit.planning.memory_report import Memory, MemoryRow; "
        "repr(Memory('Net', 'DataParallel()', 1, [MemoryRow(0, 1, 1, 1, 1, None, None, None)])); "
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
