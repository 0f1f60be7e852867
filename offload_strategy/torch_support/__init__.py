"""Small additions to PyTorch that several rooms need."""
