"""The class that the user chose: whether it can be swapped, and running its own `step`."""
