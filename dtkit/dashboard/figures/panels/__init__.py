"""The panels of a run's figure: each is one file with one function, ``draw(ax, history)``.

The live view's half of a panel has the same name in ``static/panels/``, and is fed with the same numbers.
"""
