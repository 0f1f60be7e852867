"""The analytical front: what a run would need and do, from numbers alone.

From the shape of a transformer and the figures of a machine it tells what fits, how long a step
takes and what limits it, how much host memory and disk that needs, and how long the drives last.
Nothing here opens a device or a path.
"""
