"""Readers of a run: the live view in the notebook, the kept picture, the text of a terminal.

    source.py    what a view reads: the protocol that a run satisfies
    series.py    the one down-sampling: curves of a fixed number of buckets that keep extremes
    glance.py    the few numbers of now: throughput, loss, step time, and the same of every rank
    units.py     numbers as people read them
    throttle.py  at most so many updates a second, on a thread of their own, the last one always
    feed.py      what a page is sent: one snapshot, then changes only
    live.py      the anywidget over a feed; static/ is its half in the browser
    figures.py   matplotlib, for what is kept
    text.py      a terminal, or a plain log
    display.py   which of these `run` shows, and the picture that replaces the live view at the end

No view imports torch or ipyparallel, none touches training: they read, and they ask with ``source.post``.
"""
