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
    names = [("ParameterAveraging(every=8)",), ("DiLoCo, every 8",)]
    page = Table(("strategy",), names, {"strategy"}).to_html()
    assert ">Parameter<wbr>Averaging(<wbr>every=8)<" in page
    assert ">DiLoCo, every 8<" in page


def test_a_narrow_table_has_one_column_of_text():
    rows = [("Pipeline()", "0", "1 kB"), ("Pipeline()", "1", "2 kB"), ("Sharded()", "all", "3 kB")]
    table = Table(("strategy", "node", "needed"), rows, {"strategy", "node"}, is_narrow=True, caption="Parts")
    page = table.to_html().replace("<wbr>", "")
    assert page.count("<tr>") == 2 + 3
    assert page.index(">Parts<") < page.index(">strategy<") < page.index(">Pipeline(), node 1<") < page.index("2 kB")
    assert page.index("2 kB") < page.index(">Sharded()<") < page.index("3 kB")
    assert ">all<" not in page
    assert table.to_text().count("Pipeline()") == 2


def test_long_words_of_many_headers_may_break():
    names = ("strategy", "as sent", "parameters", "gradients", "optimizer", "activations", "overhead")
    page = Table(names, [("A()", *"123456")], {"strategy"}, is_narrow=True).to_html()
    assert all(f">{name}<" in page for name in ("as sent", "param&shy;eters", "activa&shy;tions", "over&shy;head"))


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


def test_a_table_wraps_headers_and_names_to_the_width_of_a_terminal():
    rows = [["a network of sixty-four hidden units", "1,234", "0.5"], ["b", "7", "0.25"]]
    table = Table(["run", "final training loss", "duration"], rows, {"run"})
    assert table.to_text(max_width=80) == table.to_text()
    assert table.to_text(max_width=40).splitlines() == [
        "run                   final  duration",
        "                   training",
        "                       loss",
        "a network of          1,234       0.5",
        "sixty-four hidden",
        "units",
        "b                         7      0.25",
    ]
    assert "1,234" in table.to_text(max_width=10)  # a number stays whole
