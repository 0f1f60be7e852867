"""Activations kept, recomputed, or offloaded: throughput and peak memory."""
