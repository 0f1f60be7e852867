"""Whole training scripts of frameworks, with offload and without."""
