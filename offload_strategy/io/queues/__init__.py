"""Queues: what waits for a path, most urgent first, and who may use the path now."""
