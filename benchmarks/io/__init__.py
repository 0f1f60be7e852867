"""The package's I/O compared with peers: fio, DeepNVMe, a file per tensor, plain PyTorch.

python -m benchmarks.io [LINE ...] [--dir DIR] [--repeats N] [--json FILE] [--quick]
"""
