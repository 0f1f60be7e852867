"""Examples to run: one small language model, through Lightning, Accelerate and PyTorch."""
