"""Measurements of this package beside its peers, and what they need."""
