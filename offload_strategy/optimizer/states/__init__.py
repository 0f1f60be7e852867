"""States by subgroup: where parameters are cut, how tensors lie in a buffer, in which precision."""
