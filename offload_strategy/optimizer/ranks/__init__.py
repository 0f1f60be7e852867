"""Ranks of data-parallel training that share the work of one optimizer."""
