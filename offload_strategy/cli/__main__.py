"""`python -m offload_strategy.cli` is `ssd-offload`."""

import sys

from offload_strategy.cli import program

if __name__ == "__main__":
    sys.exit(program())
