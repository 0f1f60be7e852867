"""Checkpoints: killed at any moment, and saved and loaded in little memory."""
