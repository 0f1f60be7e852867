"""`python -m offload_strategy.cli` is `ssd-offload`."""

import sys

from offload_strategy.cli import main

sys.exit(main())
