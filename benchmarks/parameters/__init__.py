"""Models that are larger than memory."""
