"""Optimizer states in memory, by DeepSpeed on NVMe, and by this package: time, memory, bytes."""
