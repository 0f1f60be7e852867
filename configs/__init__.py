"""Presets, each a YAML file that `OffloadConfig.load` knows by its name."""
