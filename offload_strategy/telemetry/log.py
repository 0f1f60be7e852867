"""The package's logger, which is visible unless the program configures logging itself."""

from __future__ import annotations

import logging

_PACKAGE = "offload_strategy"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module of this package.

    Training scripts rarely configure logging, and Python then drops everything below a warning. So,
    as Lightning and Transformers do, the package has a handler, which is inactive if the root
    logger has one.
    """
    package = logging.getLogger(_PACKAGE)
    if not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ssd-offload: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        package.addHandler(handler)
        package.setLevel(logging.INFO)
    return logging.getLogger(name)
