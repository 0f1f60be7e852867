"""Reads the sections of a config from all that can stand for one, and leaves their values alone."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from offload_strategy.config.directories import expand_path
from offload_strategy.config.messages import short
from offload_strategy.errors import ConfigError

CONFIG_VARIABLE = "SSD_OFFLOAD_CONFIG"
ACCELERATE_SECTION = "ssd_offload_config"

#: The sections of a config, and the words for where they come from.
Sections = tuple[Mapping[str, Any], str]


def presets() -> dict[str, str]:
    """Return the YAML text of each preset by name."""
    entries = resources.files("offload_strategy.configs").iterdir()
    return {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in sorted(entries, key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    }


def read(source: Mapping[str, Any] | str | os.PathLike[str] | None) -> Sections:
    """Read the sections of a config; see `OffloadConfig.load` for what may stand for one."""
    if source is not None:
        return _read(source, "", ())
    from_environment = os.environ.get(CONFIG_VARIABLE, "").strip()
    if from_environment:
        return _read(from_environment, f"${CONFIG_VARIABLE}: ", ())
    return {}, "the default config"


def _read(source: Any, where: str, seen: tuple[Path, ...]) -> Sections:
    """Read anything but None; `where` starts each message, `seen` holds the files that led here."""
    if isinstance(source, Mapping):
        return _sections(source, f"{where}the given mapping", seen)
    if isinstance(source, str) and source.lstrip().startswith("{"):
        label = f"{where}the JSON text"
        return _sections(_parse(source, label, is_json=True), label, seen)
    if isinstance(source, str) and source in (known := presets()):
        label = f"{where}preset {source!r}"
        return _sections(_parse(known[source], label), label, seen)
    if isinstance(source, str | os.PathLike):
        return _read_file(os.fspath(source), where, seen)
    raise ConfigError(
        f"{where}cannot read a config from {type(source).__name__} {short(source)}: give an "
        "OffloadConfig, a mapping, the path of a YAML or JSON file, JSON text, the name of a "
        "preset, or None"
    )


def _read_file(name: str, where: str, seen: tuple[Path, ...]) -> Sections:
    try:
        path = Path(expand_path(name))
    except ValueError as error:
        raise ConfigError(f"{where}{error}") from None
    if seen and (beside := seen[-1].parent / name).is_file():
        path = beside  # Named in another file: what lies beside that file goes first.
    label = f"{where}file {str(path)!r}"
    if path in seen:
        raise ConfigError(f"{label} leads back to itself")
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        known = list(presets())
        near = difflib.get_close_matches(name, known, 1)
        raise ConfigError(
            f"{where}{name!r} is neither a file that exists nor a preset ({', '.join(known)})."
            + (f" Did you mean {near[0]!r}?" if near else "")
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{label} is a directory: give a YAML or JSON file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{label} cannot be read: {error}") from None
    return _sections(_parse(text, label, is_json=path.suffix == ".json"), label, (*seen, path))


def _sections(content: Any, label: str, seen: tuple[Path, ...]) -> Sections:
    if content is None:
        content = {}  # A file, or a section, in which every line is a comment.
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{label}: got {short(content)}, allowed are sections such as 'activations:'"
        )
    if ACCELERATE_SECTION in content:
        inner = content[ACCELERATE_SECTION]
        label = f"{label}, {ACCELERATE_SECTION}"
        if isinstance(inner, str):
            return _read(inner, f"{label}: ", seen)
        return _sections(inner, label, seen)
    if "compute_environment" in content:
        raise ConfigError(
            f"{label} is an Accelerate launch file and has no '{ACCELERATE_SECTION}:' section: "
            "add one"
        )
    for key in content:
        if not isinstance(key, str):
            raise ConfigError(f"{label}: the key {short(key)} is not text")
    return content, label


def _parse(text: str, label: str, is_json: bool = False) -> Any:
    try:
        # A SafeLoader underneath: no file can make Python objects.
        return json.loads(text) if is_json else yaml.load(text, _UniqueKeyLoader)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{label} is not valid JSON: {error.msg} in {place}") from None
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        # Constructors of YAML's types raise others than YAML's own: a month 13, `!!int abc`.
        problem, mark = getattr(error, "problem", error), getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{label} is not valid YAML: {problem}{place}") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that refuses a key given twice, where PyYAML silently takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)
