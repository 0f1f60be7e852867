"""Optimizer states on tiers: the user's own optimizer, subgroup by subgroup, exactly."""
