"""Saved tensors leave after the forward pass and are back before the backward pass needs them."""
