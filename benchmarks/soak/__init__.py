"""Soak: hours of training with random models, configurations and faults."""
