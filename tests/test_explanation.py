"""Step explanations as data, text, HTML and a figure, made from handwritten reports."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.text import Text

from dtkit.dashboard.figures import render, style
from dtkit.dashboard.text import data_parallel_text
from dtkit.explain.data_parallel import StepExplanation, max_or_none
from tests.support.step_reports import RANKS, make_explanation, make_report, make_reports, make_tensor_report


def many(ranks: int, rows: int = 4) -> list[tuple[int, list[int], float]]:
    return [(k, list(range(k, ranks * rows, ranks)), 1.0 + k / ranks) for k in range(ranks)]


# -- data ------------------------------------------------------------------------------------------------------------


def test_an_explanation_has_records_by_rank_and_by_layer():
    step = StepExplanation.from_reports(make_reports()[::-1])
    assert (step.model, step.step, step.epoch, step.samples, step.weight, step.lr) == ("Net", 7, 1, 8, 8, 0.1)
    assert [(r.rank, r.samples, r.loss, r.share) for r in step.ranks] == [
        (0, 3, 1, 0.375),
        (1, 5, 2, 0.625),
        (2, 0, None, 0),
    ]
    assert [layer.name for layer in step.layers] == ["0.weight", "0.bias"]
    assert step.layers[0].local_norm == (0.4, 0.5, None)
    assert step.layers[0].checksums == ("0123456789ab",) * 3
    assert step.loss == 1.0 * 3 / 8 + 2.0 * 5 / 8
    assert step.identical
    assert step.updated


def test_all_layers_have_the_norm_of_the_whole_gradient():
    total = make_explanation().all_layers
    assert total.tensors == 2
    assert total.local_norm == (pytest.approx(math.hypot(0.4, 0.4)), pytest.approx(math.hypot(0.5, 0.5)), None)
    assert total.reduced == (pytest.approx(math.hypot(0.3, 0.3)),) * 3
    assert total.cosine == (pytest.approx(0.5), pytest.approx(0.5), None)


def test_the_cosine_of_a_group_is_that_of_its_concatenated_vectors():
    """Own (3, 0 | 0, 4) against reduced (1, 1 | 1, -1), written as two layers."""
    layers = [
        make_tensor_report("a", 3.0, reduced=math.sqrt(2), cosine=1 / math.sqrt(2)),
        make_tensor_report("b", 4.0, reduced=math.sqrt(2), cosine=-1 / math.sqrt(2)),
    ]
    step = make_explanation(RANKS[:1], tensors=layers)
    assert step.all_layers.cosine == (pytest.approx(-1 / (5 * 2)),)


def test_ranks_that_differ_are_named():
    stray = make_reports()
    stray[1]["after"] = "cccccccccccc"
    stray[1]["tensors"][1]["checksum"] = "dddddddddddd"
    step = StepExplanation.from_reports(stray)
    assert not step.identical
    assert [layer.identical for layer in step.layers] == [True, False]
    assert "The nodes hold DIFFERENT parameters, in 0.bias." in repr(step)
    assert "DIFFERS" in repr(step)


def test_the_loss_without_any_sample_is_nan():
    step = StepExplanation.from_reports([make_report(0, [], None, 1, ("w",))])
    assert math.isnan(step.loss)
    assert "no node had a sample in this step" in repr(step)


def test_an_explanation_becomes_a_data_frame():
    frame = make_explanation().to_pandas()
    assert len(frame) == 2 * 3
    assert frame.groupby("rank").local_norm.sum().tolist() == [pytest.approx(0.8), pytest.approx(1.0), 0]
    first = frame.drop_duplicates("rank")
    assert (first.share * first.loss).sum() == pytest.approx(make_explanation().loss)
    assert frame.local_norm.dtype == float


@pytest.mark.parametrize(
    ("limit", "names"),
    [
        (6, ["a.0.w", "a.0.b", "a.1.w", "b.0.w", "b.0.b", "c"]),
        (5, ["a.0", "a.1.w", "b.0", "c"]),
        (4, ["a.0", "a.1.w", "b.0", "c"]),
        (3, ["a", "b", "c"]),
        (2, ["b", "2 others"]),
        (1, ["3 others"]),
    ],
)
def test_layers_are_grouped_by_module_as_finely_as_possible(limit, names):
    step = make_explanation(RANKS[:1], ("a.0.w", "a.0.b", "a.1.w", "b.0.w", "b.0.b", "c"))
    big = [dataclasses.replace(layer, reduced=(9.0,)) if layer.name == "b.0.w" else layer for layer in step.layers]
    found = dataclasses.replace(step, layers=tuple(big)).group_layers(limit)
    assert [record.name for record in found] == names
    assert sum(record.tensors for record in found) == 6
    assert math.hypot(*(record.reduced[0] for record in found)) == pytest.approx(math.hypot(9, *[0.3] * 5))


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="limit=0; it is the number of records to show, from 1 up"):
        make_explanation().group_layers(0)


def test_max_or_none_ignores_none():
    assert max_or_none([None, 1.0, 3.0]) == 3
    assert max_or_none([None]) is None


# -- text ------------------------------------------------------------------------------------------------------------

TIMES = "\N{MULTIPLICATION SIGN}"
TEXT = """\
Step 7 of Net on 3 nodes, epoch 2: 8 samples

1. Each node takes rows of its own and computes the mean loss over them.

   node  samples   loss  weight in the mean  rows
      0        3  1.000        3/8 = 0.3750  3, 18, 0
      1        5  2.000        5/8 = 0.6250  4 to 8
      2        0      —                   0  no sample in this step

   loss of the step = 3/8 * 1.000 + 5/8 * 2.000 = 1.625

2. Each node computes the gradient of its own loss. The all-reduce sums these gradients, each times
   its weight, and leaves the sum on every node. Norms:

   layer                shape      node 0  node 1  node 2  all-reduced  cosine   update  checksum after
   0.weight             8*4        0.4000  0.5000       —       0.3000    0.50  0.03000  0123456789ab
   0.bias               8*4        0.4000  0.5000       —       0.3000    0.50  0.03000  0123456789ab
   all layers           2 tensors  0.5657  0.7071       —       0.4243    0.50  0.04243  identical
   cosine with the sum               0.50    0.50       —

   The cosine compares a node's own gradient with the sum: 1 the same direction, 0 at right angles,
   -1 the opposite direction. Where nodes disagree, parts cancel and the sum is shorter than the
   gradients it is made of.

3. Every node takes the same update (learning rate 0.1). Checksums of all parameters:

   node  before        after
      0  aaaaaaaaaaaa  bbbbbbbbbbbb
      1  aaaaaaaaaaaa  bbbbbbbbbbbb
      2  aaaaaaaaaaaa  bbbbbbbbbbbb

   All 3 nodes hold identical parameters, bit by bit."""


def test_the_text_of_a_step_equals_the_expected_text():
    assert repr(make_explanation()) == TEXT.replace("*", TIMES)


def test_the_text_shows_clipping():
    over, within = repr(make_explanation(clip=0.1853)), repr(make_explanation(clip=1.0))
    assert "Clipping: the norm over all layers, 0.4243, is over the limit: all is multiplied by 0.1853." in over
    assert "Clipping: the norm over all layers is within the limit" in within
    assert "Clipping" not in repr(make_explanation())


def test_the_text_shows_fractional_weights():
    step = make_explanation(RANKS[:2], weight=2.5, share=0.5)
    assert f"loss of the step = 0.5000 {TIMES} 1.000 + 0.5000 {TIMES} 2.000 = 1.500" in repr(step)


def test_the_text_shows_a_step_without_an_update():
    text = repr(make_explanation(after=None, lr=None, clip=1.0))
    assert "3. No update: the gradients are not finite." in text
    assert "Every node takes" not in text
    assert "Clipping" not in text


def test_the_text_of_one_rank_compares_nothing():
    text = repr(make_explanation(RANKS[:1]))
    assert "on 1 node, epoch 2: 3 samples" in text
    assert "One node: there is nothing to compare." in text


def test_the_text_describes_streams_and_shortens_many_rows():
    rows = [row * 3 for row in range(50)]
    assert "0, 3, 6, 9, 12, 15, 18, 21, …\n" in repr(make_explanation([(0, rows, 1.0)]))
    assert "of a stream, without numbers" in repr(make_explanation(RANKS[:1], rows=None))


def test_the_text_of_many_ranks_fits_the_page():
    text = repr(make_explanation(many(40)))
    assert "and 24 more nodes" in text
    assert "smallest own  largest own" in text
    assert f" + … + 4/160 {TIMES} 1.975 = " in text
    assert max(map(len, text.splitlines())) < 120


def test_long_names_and_control_characters_are_cleaned():
    text = repr(make_explanation(RANKS[:1], ("encoder." * 9 + "weight", "a\nb\x1b[31m"), model="N" * 400))
    assert "…" + ("encoder." * 9 + "weight")[-43:] in text
    assert "a b [31m" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) < 130


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "—"),
        (0.0, "0"),
        (math.nan, "NaN"),
        (math.inf, "inf"),
        (12345.6, "1.235e+04"),
        (1234.4, "1234"),
        (0.5, "0.5000"),
    ],
)
def test_numbers_have_four_digits(value, text):
    assert data_parallel_text.format_number(value) == text


# -- HTML ------------------------------------------------------------------------------------------------------------


def test_the_html_has_the_content_of_the_text():
    page = make_explanation()._repr_html_()
    assert 'src="data:image/png;base64,' in page
    for words in ("no sample in this step", "3/8 = 0.3750", "0123456789ab", "identical parameters, bit by bit"):
        assert words in page
    assert page.count("<table") == page.count("</table>") == 3
    assert page.count("<tr>") == (1 + 3) + (1 + 4) + (1 + 3)


def test_names_cannot_inject_html():
    page = make_explanation(RANKS[:1], ("<script>alert(1)</script>",), model="<b>Net")._repr_html_()
    assert "<script" not in page
    assert "<b>Net" not in page
    assert "&lt;script&gt;" in page


# -- the picture -----------------------------------------------------------------------------------------------------


def test_the_figure_has_rows_losses_and_gradients():
    figure = make_explanation().figure()
    rows, losses, gradients, columns = figure.axes
    assert [len(lines.get_segments()) for lines in rows.collections] == [3, 5]
    assert [text.get_text() for text in rows.texts] == ["no sample in this step"]
    areas = sum(bar.get_width() * bar.get_height() for bar in losses.patches)
    assert areas == pytest.approx(make_explanation().loss)
    assert losses.get_lines()[0].get_ydata()[0] == pytest.approx(make_explanation().loss)
    bars = {group[0].get_gid(): [bar.get_width() for bar in group] for group in gradients.containers}
    assert bars == {"node 0": [0.4, 0.4], "node 1": [0.5, 0.5], "node 2": [0, 0], "all-reduced": [0.3, 0.3]}
    assert [label.get_text() for label in gradients.get_yticklabels()] == ["0.weight", "0.bias"]
    assert "0123456789ab" in [text.get_text() for text in columns.texts]
    line = figure.get_supxlabel()
    assert line == "Parameters aaaaaaaaaaaa → bbbbbbbbbbbb. All 3 nodes hold identical parameters, bit by bit."


def test_the_figure_shows_that_ranks_differ():
    stray = make_reports()
    stray[2]["after"] = "cccccccccccc"
    stray[2]["tensors"][0] |= {"update": 0.04, "checksum": "cccccccccccc"}
    figure = StepExplanation.from_reports(stray).figure()
    marked = [text.get_text() for text in figure.axes[3].texts if text.get_color() == style.COLORS[5]]
    assert marked == ["nodes differ", "DIFFERS"]
    assert figure.get_supxlabel() == "The nodes hold DIFFERENT parameters, in 0.weight."


@pytest.mark.parametrize("ranks", [9, 40])
def test_many_ranks_are_drawn_as_one_bar_from_smallest_to_largest(ranks):
    figure = make_explanation(many(ranks)).figure()
    spread, reduced = figure.axes[2].containers
    largest_own = 0.4 + (ranks - 1) / 10
    assert [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in spread] == [(0.4, pytest.approx(largest_own))] * 2
    assert reduced[0].get_gid() == "all-reduced"
    assert figure.get_figheight() < 12


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_figure_of_many_layers_fits_on_a_page(ranks):
    figure = make_explanation(many(ranks), tuple(f"{k}.weight" for k in range(60))).figure()
    assert len(figure.axes[2].get_yticks()) <= 20
    assert figure.get_figheight() < 12


def test_gradients_of_very_different_sizes_get_a_logarithmic_axis():
    small = [make_tensor_report("a", 1e-5, reduced=1e-5), make_tensor_report("b", 1.0)]
    assert make_explanation(RANKS[:2], tensors=small).figure().axes[2].get_xscale() == "log"
    assert make_explanation().figure().axes[2].get_xscale() == "linear"


STRANGE = {
    "not a number": {"loss": math.nan, "after": None, "lr": None},
    "infinite": {"loss": math.inf},
    "below zero": {"loss": -3.0},
    "zero": {"loss": 0.0},
    "a stream": {"rows": None},
    "nothing reduced": {"tensors": [make_tensor_report("w", None, reduced=None, update=0.0)]},
    "no gradient at all": {"tensors": [make_tensor_report("w", 0.0, reduced=0.0, cosine=None, update=0.0)]},
    "gradients not finite": {
        "tensors": [make_tensor_report("w", math.inf, reduced=math.nan, cosine=None, update=None)]
    },
    "a huge gradient": {
        "tensors": [make_tensor_report("w", 1e300, reduced=1e300), make_tensor_report("v", 1e300, reduced=1e300)]
    },
    "mathematics": {"model": "$Net_0$", "tensors": [make_tensor_report("$a_0", 1.0)]},
    "far rows": {"rows": np.array([0, 10**12])},
}


@pytest.mark.parametrize("name", STRANGE)
def test_unusual_steps_are_drawn_without_a_warning(name):
    step = make_explanation(RANKS[:2], **STRANGE[name])
    assert render.render_png(step.figure()).startswith(b"\x89PNG")
    assert repr(step).startswith("Step 7 of ")


def test_text_needs_neither_torch_nor_matplotlib_and_figures_no_pyplot():
    code = (
        "import sys; from tests.support.step_reports import make_explanation\n"
        "assert 'torch' not in sys.modules\n"
        "make_explanation().figure(); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    code = (
        "import sys, dtkit.explain.data_parallel, dtkit.dashboard.text.data_parallel_text\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_figure_fits_a_cell_of_616_pixels_with_readable_texts():
    figure = make_explanation().figure()
    texts = [text for ax in figure.axes for text in ax.findobj(Text) if text.get_text() and text.get_visible()]
    pixels = 616 / figure.get_figwidth() / 72  # of a point
    assert min(pixels * text.get_fontsize() for text in texts) >= 8
    figure.draw_without_rendering()
    bars, columns = figure.axes[2:]
    title = next(text for text in bars.findobj(Text) if text.get_text().startswith("Gradient"))
    assert all(title.get_window_extent().x1 < text.get_window_extent().x0 for text in columns.texts)
