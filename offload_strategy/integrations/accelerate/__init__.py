"""The Accelerate plugin, its launcher side, and the Transformers Trainer."""
