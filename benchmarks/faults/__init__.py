"""Faults of storage, provoked for real, and what a training that meets them sees.

`disk_faults`, `call_faults` and `sharing` have the faults; the tests check what came of each, and
`python -m benchmarks.io faults` prints it.
"""
