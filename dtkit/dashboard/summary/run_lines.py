"""Color and dashes of each run's line, the same in the live comparison, the picture and the report."""

NUM_COLORS, NUM_DASHES = 8, 4


def choose_dash(run: int) -> int:
    """Return the number of the dashes of a run's line; its color is ``run % NUM_COLORS``.

    The pairs of 32 runs differ. Colors four apart are alike (blue and sky blue), so up to 16 runs with colors that are
    alike differ in dashes, too. ``runDash`` in ``static/chart/lines.js`` is the same.
    """
    return (run + 2 * (run // NUM_DASHES) + run // NUM_COLORS) % NUM_DASHES
