"""Defaults, nothing configured, in less and less memory."""
