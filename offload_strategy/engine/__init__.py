"""The engine: what the three lines of the public contract do, and what they open and close."""
