"""Turns what pydantic reports about a config into one message for people."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError


def describe(error: ValidationError, model: type[BaseModel], label: str) -> str:
    """Write every problem of a config as one message.

    Args:
        error: What pydantic found.
        model: The model of the whole config, whose keys are offered for unknown ones.
        label: Where the config comes from: the file, preset or variable.

    Returns:
        One line if there is one problem, otherwise one line for each below a heading. A line says
        where, what was given and what is allowed.
    """
    problems = [_problem(dict(detail), model) for detail in error.errors(include_url=False)]
    if len(problems) == 1:
        return f"{label}: {problems[0]}"
    return "\n".join([f"{label}: {len(problems)} problems", *(f"  {line}" for line in problems)])


def no_such_source(name: str, presets: Sequence[str]) -> str:
    """Write what to say when a name is neither a preset nor a file."""
    near = difflib.get_close_matches(name, presets, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{name!r} is neither a file that exists nor a preset ({', '.join(presets)}).{hint}"


def short(value: Any) -> str:
    """Show a value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def dotted(location: Sequence[str | int]) -> str:
    """Write a location as in the documentation: `tiers[0].capacity`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _problem(detail: Mapping[str, Any], model: type[BaseModel]) -> str:
    location, given = detail["loc"], detail["input"]
    where = dotted(location)
    match detail["type"]:
        case "extra_forbidden":
            return f"{where}: unknown key{_suggestion(location, model)}"
        case "missing":
            return f"{where}: missing, and it has no default"
        case "literal_error":
            return f"{where}: got {short(given)}, allowed are {detail['ctx']['expected']}"
        case "value_error":
            # A value inside a section is worth repeating; a whole section is not.
            shown = "" if isinstance(given, dict | list | BaseModel) else f"got {short(given)}: "
            message = str(detail["ctx"]["error"])
            if shown and message.startswith(repr(given)):
                shown = ""
            return f"{where}: {shown}{message}"
        case "model_type" | "dict_type" | "model_attributes_type":
            keys = ", ".join(_keys(location, model))
            return f"{where}: got {short(given)}, allowed is a section with the keys {keys}"
        case "too_short":
            return f"{where}: the list is empty; leave it out for the default"
        case "list_type":
            return f"{where}: got {short(given)}, allowed is a list such as [host, nvme0]"
        case "string_pattern_mismatch":
            return f"{where}: got {short(given)}, allowed are letters, digits and _ . -"
        case _:
            # Pydantic's own sentence says what is allowed: "Input should be greater than 0".
            return f"{where}: got {short(given)}, {_lower_first(detail['msg'])}"


def _suggestion(location: Sequence[str | int], model: type[BaseModel]) -> str:
    """Name the nearest key: a like-named one beside it, then the same one in another section."""
    *above, wrong = location
    wrong = _plain(str(wrong))
    here = _generic(above)
    beside: dict[str, str] = {}
    elsewhere: dict[str, list[str]] = {}
    for section, key in _all_keys(model):
        name = f"{section}.{key}" if section else key
        if section == here:
            beside[key] = name
        else:
            elsewhere.setdefault(key, []).append(name)

    near = difflib.get_close_matches(wrong, beside, 1, cutoff=0.8)
    if near:
        return f"; did you mean {beside[near[0]]!r}?"
    if wrong in elsewhere:
        return f"; did you mean {_or(elsewhere[wrong])}?"
    near = difflib.get_close_matches(wrong, beside, 1, cutoff=0.6)
    if near:
        return f"; did you mean {beside[near[0]]!r}?"
    near = difflib.get_close_matches(wrong, elsewhere, 1, cutoff=0.7)
    if near:
        return f"; did you mean {_or(elsewhere[near[0]])}?"
    return f"; the keys here are {', '.join(beside)}"


def _all_keys(model: type[BaseModel], section: str = "") -> Iterator[tuple[str, str]]:
    """Yield (section, key) for every key of a config, with lists written as `tiers[]`."""
    for key, field in model.model_fields.items():
        yield section, key
        inner, brackets = field.annotation, ""
        if typing.get_origin(inner) is list:
            inner, brackets = typing.get_args(inner)[0], "[]"
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _all_keys(
                inner, f"{section}.{key}{brackets}" if section else f"{key}{brackets}"
            )


def _keys(location: Sequence[str | int], model: type[BaseModel]) -> list[str]:
    here = _generic(location)
    return [key for section, key in _all_keys(model) if section == here]


def _generic(location: Sequence[str | int]) -> str:
    """Write a location with `[]` for every index, as `_all_keys` does."""
    text = ""
    for part in location:
        text += "[]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _or(names: Sequence[str]) -> str:
    return " or ".join(repr(name) for name in names[:3])


def _plain(key: str) -> str:
    return key.strip().lower().replace("-", "_")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
