"""Faults of storage, provoked for real, and what a training that meets them sees.

`scenes` has each fault on its own disk; the tests check what came of it, and
`python -m benchmarks.io faults` prints it.
"""
