"""Bandwidth of a path: measured first, remembered between runs, learned from every block."""
