"""The Lightning strategies."""
