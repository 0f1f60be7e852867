"""What was planned, relative to what happens."""
