"""Views of runs, calls and results. They read and post commands, but never touch the training.

From the bottom: ``run_view.py`` has the protocols that views read; ``summary/`` computes what they show; ``text/``,
``figures/`` and ``live/`` show it; ``display.py``, ``call_display.py``, ``compare.py`` and ``report.py`` choose between
them. ``views.py`` registers the views of results such as plans and timelines. No view imports torch or ipyparallel.
"""
