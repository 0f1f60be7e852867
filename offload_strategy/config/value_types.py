"""The value types of a config: sizes, counts, budgets, and what JSON shows for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from offload_strategy.units import PAGE_BYTES, exact_size, format_size, parse_count, parse_size


def _size(minimum: int) -> Callable[[Any], int]:
    def validate(value: Any) -> int:
        size = parse_size(value)
        if size < minimum:
            raise ValueError(f"must be at least {format_size(minimum)}")
        return size

    return validate


def _auto_or(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def validate(value: Any) -> Any:
        if isinstance(value, str) and value.strip().lower() == "auto":
            return "auto"
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{error}; or 'auto'") from None

    return validate


def _budget(value: Any) -> int | str:
    if isinstance(value, str) and value.strip().endswith("%"):
        text = value.strip()[:-1].strip()
        try:
            share = float(text)
        except ValueError:
            raise ValueError(f"{value!r} is not a share such as '70%'") from None
        if not 0 <= share <= 100:
            raise ValueError(f"{value!r} is not between 0% and 100%")
        return f"{share:g}%"
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error}, nor a share such as '70%'") from None


def _positive_count(value: Any) -> int:
    count = parse_count(value)
    if count < 1:
        raise ValueError("must be at least one parameter")
    return count


def _block_size(value: Any) -> int:
    size = parse_size(value)
    if size <= 0 or size % PAGE_BYTES:
        raise ValueError(
            f"must be a positive multiple of {PAGE_BYTES} bytes: direct I/O moves whole pages"
        )
    return size


def _on_off_auto(value: Any) -> bool | str:
    if isinstance(value, bool):
        return value
    if value == "auto":
        return "auto"
    raise ValueError("must be 'auto', true or false")


_SIZE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}],
    "examples": ["512MiB", 536870912],
}
_COUNT_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}],
    "examples": ["100M", 100000000],
}


def _or_auto(schema: dict[str, Any], *examples: str) -> dict[str, Any]:
    return {
        "anyOf": [{"const": "auto", "type": "string"}, *schema["anyOf"]],
        "examples": ["auto", *examples, *schema["examples"]],
    }


# JSON and YAML show the text that a person would write; Python sees the number.
_AS_TEXT = PlainSerializer(
    lambda value: exact_size(value) if isinstance(value, int) else value, when_used="json"
)

PositiveSize = Annotated[int, PlainValidator(_size(1)), WithJsonSchema(_SIZE_SCHEMA), _AS_TEXT]
Size = Annotated[int, PlainValidator(_size(0)), WithJsonSchema(_SIZE_SCHEMA), _AS_TEXT]
BlockSize = Annotated[int, PlainValidator(_block_size), WithJsonSchema(_SIZE_SCHEMA), _AS_TEXT]
AutoOrSize = Annotated[
    int | Literal["auto"],
    PlainValidator(_auto_or(parse_size)),
    WithJsonSchema(_or_auto(_SIZE_SCHEMA)),
    _AS_TEXT,
]
Budget = Annotated[
    int | str,
    PlainValidator(_auto_or(_budget)),
    WithJsonSchema(_or_auto(_SIZE_SCHEMA, "70%")),
    _AS_TEXT,
]
AutoOrCount = Annotated[
    int | Literal["auto"],
    PlainValidator(_auto_or(_positive_count)),
    WithJsonSchema(_or_auto(_COUNT_SCHEMA)),
]
AutoOrBool = Annotated[
    bool | Literal["auto"],
    PlainValidator(_on_off_auto),
    WithJsonSchema({"anyOf": [{"const": "auto", "type": "string"}, {"type": "boolean"}]}),
]
