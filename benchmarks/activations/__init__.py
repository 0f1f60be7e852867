"""Activations kept, computed again, or moved: throughput beside peak memory."""
