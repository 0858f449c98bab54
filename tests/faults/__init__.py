"""The fault matrix: what dtkit does when a rank dies, hangs, fails or is slow, on real engines.

A *cell* is a fault, a strategy and a place (:mod:`~tests.faults.cells`). :mod:`~tests.faults.runner` plays one: a small
training in which a :class:`~tests.faults.trap.Trap` springs once, and what must be true afterwards
(:mod:`~tests.faults.expect`). A seeded sample runs as a test; ``make faults`` plays all and prints the table, ``make
soak`` goes on for half an hour.
"""
