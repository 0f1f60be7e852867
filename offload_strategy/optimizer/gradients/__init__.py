"""`p.grad` between backward and `step()`, when the gradient's values are elsewhere."""
