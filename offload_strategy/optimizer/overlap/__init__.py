"""Updates while backward goes on: when, how, and whether they hold at `step()`."""
