"""Scripts that know nothing of this package; run them by path."""
