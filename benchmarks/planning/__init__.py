"""What was planned, beside what happens."""
