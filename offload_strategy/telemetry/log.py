"""The package's logger: what it has to say is seen, unless the program has logging of its own."""

from __future__ import annotations

import logging

_PACKAGE = "offload_strategy"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module of this package.

    Training scripts rarely set up logging, and Python then drops everything below a warning. So, as
    Lightning and Transformers do, the package brings a handler of its own, which steps aside when
    the root logger has one.
    """
    package = logging.getLogger(_PACKAGE)
    if not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ssd-offload: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        package.addHandler(handler)
        package.setLevel(logging.INFO)
    return logging.getLogger(name)
