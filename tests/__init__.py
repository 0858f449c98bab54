"""The tests. A package, so that its helpers are imported as `tests.x` and shadow nobody's module."""
