"""Turns what pydantic reports about a config into one message for people."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError


def describe(error: ValidationError, model: type[BaseModel], label: str) -> str:
    """Write all problems of a config, a line each: where, what was given and what is allowed.

    `label` says where the config comes from.
    """
    problems = [_problem(dict(detail), model) for detail in error.errors(include_url=False)]
    if len(problems) == 1:
        return f"{label}: {problems[0]}"
    return "\n".join([f"{label}: {len(problems)} problems", *(f"  {line}" for line in problems)])


def short(value: Any) -> str:
    """Show a value in a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _dotted(location: Sequence[str | int]) -> str:
    """Write a location as in the documentation: `tiers[0].capacity`."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")


def _problem(detail: Mapping[str, Any], model: type[BaseModel]) -> str:
    location, given = detail["loc"], detail["input"]
    where = f"{_dotted(location)}:" if location else "config:"
    got = f"{where} got {short(given)}"
    match detail["type"]:
        case "extra_forbidden":
            return f"{where} unknown key{_suggestion(location, model)}"
        case "missing":
            return f"{where} missing, and it has no default"
        case "value_error":
            message = str(detail["ctx"]["error"])
            # A value inside a section is worth repeating, unless the message begins with it.
            alone = isinstance(given, dict | list | BaseModel) or message.startswith(repr(given))
            return f"{where if alone else got + ':'} {message}"
        case "model_type" | "dict_type" | "model_attributes_type":
            here = _section(location)
            keys = ", ".join(key for section, key in _all_keys(model) if section == here)
            return f"{got}, allowed is a section with the keys {keys}"
        case "too_short":
            return f"{where} the list is empty; leave it out for the default"
        case "list_type":
            return f"{got}, allowed is a list such as [host, nvme0]"
        case "string_pattern_mismatch":
            return f"{got}, allowed are letters, digits and _ . -"
        case _:
            # Pydantic's own sentence says what is allowed: "Input should be greater than 0".
            return f"{got}, {detail['msg'][:1].lower()}{detail['msg'][1:]}"


def _suggestion(location: Sequence[str | int], model: type[BaseModel]) -> str:
    """Name the nearest key: a like-named one beside it, then the same one in another section."""
    *above, wrong = location
    wrong = str(wrong).strip().lower().replace("-", "_")
    here = _section(above)
    beside: dict[str, list[str]] = {}
    elsewhere: dict[str, list[str]] = {}
    for section, key in _all_keys(model):
        known = beside if section == here else elsewhere
        known.setdefault(key, []).append(repr(f"{section}.{key}".lstrip(".")))
    for known, cutoff in ((beside, 0.8), (elsewhere, 1.0), (beside, 0.6), (elsewhere, 0.7)):
        if near := difflib.get_close_matches(wrong, known, 1, cutoff):
            return f"; did you mean {' or '.join(known[near[0]][:3])}?"
    return f"; the keys here are {', '.join(beside)}"


def _section(location: Sequence[str | int]) -> str:
    """Write a location with `[]` for every index, as `_all_keys` does."""
    return re.sub(r"\[\d+\]", "[]", _dotted(location))


def _all_keys(model: type[BaseModel], section: str = "") -> Iterator[tuple[str, str]]:
    """Yield (section, key) for every key of a config, with lists written as `tiers[]`."""
    for key, field in model.model_fields.items():
        yield section, key
        inner, name = field.annotation, f"{section}.{key}".lstrip(".")
        if typing.get_origin(inner) is list:
            inner, name = typing.get_args(inner)[0], f"{name}[]"
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _all_keys(inner, name)
