"""How much and where: pure functions over numbers. No I/O, no work on devices."""
