"""Paths with bytes per second: spaces that own files, backends that move bytes."""
