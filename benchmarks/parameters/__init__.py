"""Training models that are larger than memory."""
