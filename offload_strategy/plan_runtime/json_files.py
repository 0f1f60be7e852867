"""JSON files of profiles, plans and comparisons: dataclasses that pydantic validates.

Each file has a format number. A file of another format is refused, as is one that contradicts the
types of its dataclass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from offload_strategy.errors import ConfigError

#: Format of the files; another one is refused.
FORMAT = 1

Data = TypeVar("Data")


def save_json(file: Path, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON.

    Args:
        file: The file, which is overwritten.
        figures: Values that JSON can hold, by name.

    Raises:
        ConfigError: If the file cannot be written.
    """
    write_text(file, json.dumps({"format": FORMAT, **figures}, indent=1) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a text file.

    Raises:
        ConfigError: If the file cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error


def load_json(file: Path, kind: type[Data], what: str, how: str) -> Data:
    """Read a dataclass from JSON.

    Args:
        file: The file.
        kind: The dataclass.
        what: Name of the content for error messages, such as "a profile".
        how: A sentence that says how to write such a file.

    Raises:
        ConfigError: If the file cannot be read, is of another format, or has wrong content.
    """
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        return TypeAdapter(kind).validate_python(found)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if isinstance(detail["input"], str | int | float):
            message += f", not {detail['input']!r}"
        reason = f"{where}: {message}" if where else message
        raise ConfigError(f"{file} cannot be read as {what}: {reason}. {how}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as {what}: {error}. {how}") from error
