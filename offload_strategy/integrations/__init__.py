"""Where each framework lets the engine in; nothing here that another framework would need."""
