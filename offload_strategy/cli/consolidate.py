"""`ssd-offload consolidate`: one plain file of a checkpoint that several ranks saved in parts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of `ssd-offload`."""
    parser = commands.add_parser(
        "consolidate",
        help="make one plain file of a checkpoint that several ranks saved in parts",
        description="Make one file that torch.load reads of a folder that was saved with "
        "torch.distributed.checkpoint, or by Lightning in parts: a plain optimizer, or a Trainer "
        "with one device, loads it. Needs as much memory as the checkpoint is large.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="FOLDER", help="what the ranks saved")
    parser.add_argument("file", type=Path, metavar="FILE", help="is written, or replaced")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    # Brings torch along, which the other commands need not wait for.
    from offload_strategy.checkpoints import consolidate

    keys = consolidate(options.checkpoint, options.file)
    print(f"{options.file}: {options.file.stat().st_size} bytes; {', '.join(keys)}")
