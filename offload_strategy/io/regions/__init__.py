"""Regions: the preallocated bytes of a path, and the extents handed out of them."""
