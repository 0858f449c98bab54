"""Panels of a run's figure: each module has one function ``draw(ax, history)``, or one that makes it.

The live view's half of a panel has the same name in ``live/static/panels/`` and shows the same numbers.
"""
