"""`python -m offload_strategy.cli` is `ssd-offload`."""

import sys

from offload_strategy.cli import main

if __name__ == "__main__":
    sys.exit(main())
