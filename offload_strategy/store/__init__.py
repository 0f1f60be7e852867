"""The immutable tensor store: tickets over tiers."""
