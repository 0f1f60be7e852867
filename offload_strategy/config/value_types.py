"""The value types of a config: sizes, counts, budgets, and what JSON shows for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)

from offload_strategy.config.directories import expand_path
from offload_strategy.units import PAGE_BYTES, exact_size, parse_count, parse_size


def _must(be: str, allowed: Callable[[Any], bool]) -> AfterValidator:
    def validate(number: Any) -> Any:
        if not allowed(number):
            raise ValueError(f"must be {be}")
        return number

    return AfterValidator(validate)


def _auto_or(parse: Callable[[Any], Any]) -> PlainValidator:
    def validate(value: Any) -> Any:
        if isinstance(value, str) and value.strip().lower() == "auto":
            return "auto"
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{error}; or 'auto'") from None

    return PlainValidator(validate)


def _budget(value: Any) -> int | str:
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            share = float(value.strip().removesuffix("%"))
        except ValueError:
            raise ValueError(f"{value!r} is not a share such as '70%'") from None
        if not 0 <= share <= 100:
            raise ValueError(f"{value!r} is not between 0% and 100%")
        return f"{share:g}%"
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error}, nor a share such as '70%'") from None


def _expanded(path: Any) -> Any:
    return expand_path(os.fspath(path)) if isinstance(path, str | os.PathLike) else path


def _number(value: Any) -> Any:
    if isinstance(value, bool):  # which Python counts among the integers
        raise ValueError("must be a number, not true or false")
    return value


def _on_off_auto(value: Any) -> Any:
    if isinstance(value, bool) or value == "auto":
        return value
    raise ValueError("must be 'auto', true or false")


def _schema(*kinds: dict[str, Any], examples: list[Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(kinds), "examples": examples})


_AUTO = {"const": "auto", "type": "string"}
_TEXT = {"type": "string"}
_BYTES = {"type": "integer", "minimum": 0}
_SIZES = ["512MiB", 536870912]
# JSON and YAML show the text that a person would write; Python sees the number.
_AS_TEXT = PlainSerializer(
    lambda value: exact_size(value) if isinstance(value, int) else value, when_used="json"
)

Size = Annotated[int, PlainValidator(parse_size), _schema(_BYTES, _TEXT, examples=_SIZES), _AS_TEXT]
PositiveSize = Annotated[
    Size, _must("a size greater than 0 with its unit, such as '64GiB'", lambda size: size > 0)
]
BlockSize = Annotated[
    Size,
    _must(
        f"a positive multiple of {PAGE_BYTES} bytes: direct I/O moves whole pages",
        lambda size: size > 0 and size % PAGE_BYTES == 0,
    ),
]
AutoOrSize = Annotated[
    int | Literal["auto"],
    _auto_or(parse_size),
    _schema(_AUTO, _BYTES, _TEXT, examples=["auto", *_SIZES]),
    _AS_TEXT,
]
AutoOrPositiveSize = Annotated[AutoOrSize, _must("at least 1 B", lambda size: size != 0)]
Budget = Annotated[
    int | str,
    _auto_or(_budget),
    _schema(_AUTO, _BYTES, _TEXT, examples=["auto", "70%", *_SIZES]),
    _AS_TEXT,
]
AutoOrCount = Annotated[
    int | Literal["auto"],
    _auto_or(parse_count),
    _must("at least one parameter; or 'auto'", lambda count: count != 0),
    _schema(_AUTO, {**_BYTES, "minimum": 1}, _TEXT, examples=["auto", "100M", 100000000]),
]
AutoOrBool = Annotated[
    bool | Literal["auto"],
    PlainValidator(_on_off_auto),
    WithJsonSchema({"anyOf": [_AUTO, {"type": "boolean"}]}),
]

Count = Annotated[int, BeforeValidator(_number)]
OptionalFile = Annotated[Path | None, BeforeValidator(_expanded)]
StateType = Literal["float32", "bfloat16"]
Overlap = Literal["commit", "eager", "off"]
# YAML 1.1 reads a bare `off` as the boolean false, and `on` as true.
OverlapMode = Annotated[Overlap, BeforeValidator(lambda mode: "off" if mode is False else mode)]
ChecksumMode = Annotated[
    Literal["auto", "full", "sampled", "off"],
    BeforeValidator(lambda mode: ("off", "full")[mode] if isinstance(mode, bool) else mode),
]
