"""The fault matrix: what dtkit does when a rank dies, hangs, fails or is slow, on real engines.

A *cell* is a fault, a strategy and a place (:mod:`~tests.faults.cells`). :mod:`~tests.faults.runner` runs a small
training for it, in which a :class:`~tests.faults.trap.Trap` fires once, and :mod:`~tests.faults.expect` checks the
outcome. A seeded sample runs as a test. ``make faults`` runs all cells and prints the table; ``make soak`` injects
faults into one training for half an hour.
"""
