"""What this package does on an accelerator, from evidence: bits, memory, speed."""
