"""The search: of all settings of a machine the fastest, by the analytical front, as a config."""
