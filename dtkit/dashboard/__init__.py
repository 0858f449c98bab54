"""Views of runs, calls and results. They read and post commands, but never touch the training.

From the bottom: ``run_view.py`` has the protocols that views read. ``summary/`` computes numbers and sentences, and
``text/``, ``figures/`` and ``live/`` show them. ``display.py``, ``call_display.py``, ``compare.py`` and ``report.py``
choose between these. ``views.py`` registers the views of results such as plans and timelines. No view imports torch or
ipyparallel.
"""
