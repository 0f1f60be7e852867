"""The exceptions that the package raises on purpose.

Catch `OffloadError` to catch them all. A message says what failed, where, with how many bytes, and
what to do.
"""


class OffloadError(RuntimeError):
    """Anything that the package refuses or cannot finish; the parent of all errors below.

    Raised itself when no narrower class fits: the engine is closed, the same parameters are
    attached twice, an optimizer cannot be swapped.
    """


class ConfigError(OffloadError, ValueError):
    """A configuration is wrong: an unknown key, a value out of range, a file that cannot be read.

    Raised before anything is allocated or written.
    """


class TierFullError(OffloadError):
    """A tensor fits into none of the tiers that it may go to.

    Raised before training when the plan does not fit, and while training when a tier runs out of
    room.
    """


class StorageError(OffloadError):
    """A path cannot be used, or a read or write on it failed.

    Raised when a directory is missing or not writable, and when the operating system reports an
    error or moves fewer bytes than asked.
    """


class CorruptDataError(StorageError):
    """Bytes that came back are not the bytes that were written.

    Raised when a check of the data that was read fails; the values are never handed on.
    """
