"""Backends: each moves blocks between a file and memory in its own way."""
