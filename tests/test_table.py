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
    assert page.count("text-align: left") == 3
    assert page.count("white-space: nowrap") == 2  # the names of columns may wrap


def test_names_break_where_a_reader_would():
    page = Table(("strategy",), [("ParameterAveraging(every=8)",)], {"strategy"}).to_html()
    assert ">Parameter<wbr>Averaging(<wbr>every=8)<" in page


def test_a_stacked_table_has_a_line_above_each_row():
    rows = [("Pipeline()", "0", "1 kB"), ("Pipeline()", "1", "2 kB"), ("Sharded()", "all", "3 kB")]
    table = Table(("strategy", "node", "needed"), rows, {"strategy", "node"}, is_stacked=True)
    page = table.to_html().replace("<wbr>", "")
    assert page.count("<tr>") == 2 + 2 * 3
    assert page.index(">Pipeline(), node 1<") < page.index("2 kB") < page.index(">Sharded()<") < page.index("3 kB")
    assert ">all<" not in page
    assert table.to_text().count("Pipeline()") == 2


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
