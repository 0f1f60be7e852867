"""What Lightning and Accelerate share when DeepSpeed trains."""
