"""Page-aligned host buffers of exactly the size asked for, recycled under one budget."""
