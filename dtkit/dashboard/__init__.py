"""Readers of a run: the live view in the notebook, the kept picture, the text of a terminal.

    source.py    what a view reads: the protocol that a run satisfies
    series.py    the one down-sampling: curves of a fixed number of buckets that keep extremes
    timing.py    where a step's time goes: each rank's mean step in phases, and who keeps the others waiting
    glance.py    the few numbers of now: throughput, loss, step time, waiting, and the same of every rank
    remarks.py   what every view says in words: whether the ranks agree, who is slowed on purpose
    units.py     numbers as people read them
    fates.py     which nodes are lost, by the events
    outliers.py  which of many nodes are worth a name, and spotlight.py their lines
    strip.py     what each node did when in the last step, and the plan behind it
    throttle.py  at most so many updates a second, on a thread of their own, the last one always
    feed.py      what a page is sent: one snapshot, then changes only
    asks.py      what a page may ask of the run, and what is said when it has taken effect
    custom.py    the user's own panels, drawn by matplotlib for the live view as well
    live.py      the anywidget over a feed; static/ is its half in the browser, one file a panel
    bundle.py    one ES module out of the files of static/
    axes.py      how kept pictures look: colours, lines with their names, marks of events
    panels/      matplotlib, one file a panel: what is drawn on an Axes from a History
    figures.py   the kept picture of a run: its panels under a title
    compare.py   several runs beside each other, and compare_figure.py their picture, compare_live.py the live view
    report.py    a run as one HTML file
    text.py      a terminal, or a plain log
    display.py   which of these `run` shows, and the picture that replaces the live view at the end

No view imports torch or ipyparallel, none touches training: they read, and they ask with ``source.post``.
"""
