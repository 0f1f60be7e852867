"""Hooks of MkDocs: pages that are written from the code, links out of docs/, and strict checks.

`make docs` runs MkDocs with --strict, which makes an error of every warning that is logged here.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import griffe
import torch
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from offload_strategy import OffloadConfig, OffloadEngine, cli
from offload_strategy.callbacks import LoggedMetrics

log = get_plugin_logger("reference")

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

#: Pages of the site that lie outside of docs/, by their place on the site.
OUTSIDE = {
    f"{name.lower()}.md": ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are written from the code, and the sources of the examples."""
    pages = {
        "reference/config-keys.md": config_page(),
        "reference/cli.md": cli_page(),
        "reference/metrics.md": metrics_page(),
    }
    pages |= {place: file.read_text(encoding="utf-8") for place, file in OUTSIDE.items()}
    pages |= example_pages()
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    check_docstrings()
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to the pages that stand for these files on the site."""
    source = page.file.src_uri
    if source in OUTSIDE:
        markdown = markdown.replace("](docs/", "](").replace("](CHANGELOG.md", "](changelog.md")
    up = "../" * source.count("/")

    def target(match: re.Match[str]) -> str:
        place = match[1].removesuffix("/")
        if f"{place}.md" in files.src_uris:
            return f"]({up}{place}.md)"
        return f"]({up}examples/overview.md)"

    return re.sub(r"\]\((?:\.\./)+(examples(?:/[\w./-]*)?)\)", target, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that loads anything from another host."""
    for tag in re.findall(
        r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?https?:[^>]*>", output
    ):
        if 'rel="canonical"' not in tag:
            log.warning("%s loads something from another host: %s", page.file.src_uri, tag)
    return output


# ---------------------------------------------------------------------------- examples
def example_pages() -> dict[str, str]:
    """Return a page for each example: its source, and the list of all of them."""
    folder = ROOT / "examples"
    readme = (folder / "README.md").read_text(encoding="utf-8")
    pages = {"examples/overview.md": readme.replace("](unmodified)", "](unmodified/tiny.py.md)")}
    pages["examples/overview.md"] = pages["examples/overview.md"].replace("](../docs/", "](../")
    for file in sorted(folder.rglob("*")):
        if file.suffix in {".py", ".yaml"} or file.name.startswith("Dockerfile"):
            language = {".py": "python", ".yaml": "yaml"}.get(file.suffix, "dockerfile")
            place = file.relative_to(ROOT).as_posix()
            if file.stat().st_size and file.name != "__init__.py":
                source = file.read_text(encoding="utf-8")
                pages[f"{place}.md"] = f"# {place}\n\n````{language}\n{source}````\n"
    return pages


# ---------------------------------------------------------------------------- configuration
_CONFIG_HEAD = """# Every key of the configuration

Written from the schema, which `ssd-offload config schema` prints.
[Configuration](../configuration.md) says where a config is read from, and which environment
variables there are. A size is a number of bytes or text such as `512MiB`.
"""


def config_page() -> str:
    """Return the page of all keys of the configuration, from its JSON schema."""
    schema = OffloadConfig.model_json_schema()
    definitions, lines = schema["$defs"], [_CONFIG_HEAD]
    for name, entry in schema["properties"].items():
        reference = entry.get("$ref") or entry.get("items", {}).get("$ref")
        if reference is None:
            lines += [f"## {name}", *_keys_table({name: entry}, "", {})]
            continue
        section = definitions[reference.rpartition("/")[2]]
        prefix = f"{name}[]." if entry.get("type") == "array" else f"{name}."
        lines += [f"## {name}", "", _prose(entry.get("description") or section["description"])]
        lines += _keys_table(section["properties"], prefix, entry.get("default") or {})
    return "\n".join(lines) + "\n"


def _keys_table(keys: Mapping[str, Any], prefix: str, defaults: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "| key | value | default | meaning |", "|---|---|---|---|")
    for name, entry in keys.items():
        if not entry.get("description"):
            log.warning("the config key %s%s has no description", prefix, name)
        default = defaults.get(name, entry.get("default"))
        shown = "" if default is None else f"`{yaml.safe_dump(default).splitlines()[0]}`"
        value = ", ".join(dict.fromkeys(_values(entry)))
        yield f"| `{prefix}{name}` | {value} | {shown} | {_prose(entry.get('description', ''))} |"
    yield ""


def _values(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a key accepts, in words."""
    examples = [f"`{example}`" for example in entry.get("examples", []) if example != "auto"]
    if examples:
        yield from ["`auto`"] if "auto" in entry["examples"] else []
        yield f"such as {', '.join(examples)}"
    elif "anyOf" in entry:
        for each in entry["anyOf"]:
            yield from _values(each)
    elif "const" in entry:
        yield f"`{entry['const']}`"
    elif "enum" in entry:
        yield ", ".join(f"`{value}`" for value in entry["enum"])
    elif entry.get("format") == "path":
        yield "path"
    else:
        words = {"boolean": "true or false", "array": "list", "string": "text"}
        yield words.get(entry["type"], "null" if entry["type"] == "null" else "number")


def _prose(text: str) -> str:
    """Return a description as a line of Markdown that may stand in a table."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|").replace("$", "&#36;")


# ---------------------------------------------------------------------------- command line
def cli_page() -> str:
    """Return the page of the command line, from its argparse parsers."""
    lines = ["# Command line", "", "Written from the options that the command `ssd-offload` has."]
    for parser in _parsers(cli._parser()):
        lines += ["", f"## {parser.prog}", "", (parser.description or "").strip(), "", "```text"]
        lines += [parser.format_usage().removeprefix("usage: ").rstrip(), "```"]
        for group in parser._action_groups:
            actions = [a for a in group._group_actions if not isinstance(a, argparse._HelpAction)]
            subcommands = [a for a in actions if isinstance(a, argparse._SubParsersAction)]
            if subcommands:
                named = [(each.dest, each.help) for each in subcommands[0]._choices_actions]
            else:
                named = [(_option(parser, action), _help(parser, action)) for action in actions]
            if named:
                usual = group.title in {"options", "positional arguments"}
                lines += ["", *([] if usual else [f"**{group.title}**", ""]), "| | |", "|---|---|"]
                lines += [f"| `{name}` | {_prose(text or '')} |" for name, text in named]
            for name, text in named:
                if not text:
                    log.warning("%s: %s has no help text", parser.prog, name)
    return "\n".join(lines) + "\n"


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its subcommands."""
    # As wide on each machine.
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)  # type: ignore
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    return formatter._format_action_invocation(action)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


# ---------------------------------------------------------------------------- metrics
_METRICS_HEAD = """# Metrics

The integrations log these figures; `engine.metrics()` returns all but those of loggers
([read the metrics](../how-to/read-metrics.md)). Written from what an engine returns: a metric
without a line here, or a line without a metric, fails the build. `CLIENT` is `activations`,
`optimizer` or `parameters`; `TIER` is the name of a tier. Figures without another note are sums
since the engine was created, of one process.
"""


def metrics_page() -> str:
    """Return the page of all metrics: those that an engine has, with what docs/metrics.yml says."""
    groups: dict[str, dict[str, str]] = yaml.safe_load((DOCS / "metrics.yml").read_text())
    described = {key for group in groups.values() for key in group}
    measured = {_placeholder(key) for key in metric_keys()}
    for key in sorted(measured - described):
        log.warning("docs/metrics.yml does not describe the metric %s", key)
    for key in sorted(described - measured):
        log.warning("docs/metrics.yml describes %s, which no engine has", key)
    lines = [_METRICS_HEAD]
    for title, group in groups.items():
        lines += [f"## {title}", "", "| metric | meaning |", "|---|---|"]
        lines += [f"| `{key}` | {_prose(text)} |" for key, text in group.items()]
        lines += [""]
    return "\n".join(lines)


def _placeholder(key: str) -> str:
    client = r"^offload/(activations|optimizer|parameters)/((?:written|read|forwarded)_bytes|stall)"
    key = re.sub(r"^offload/waits/\w+_share", "offload/waits/CLIENT_share", key)
    return re.sub(client, r"offload/CLIENT/\2", key.replace("/nvme0/", "/TIER/"))


def metric_keys() -> set[str]:
    """Return the names of the metrics of an engine that does everything there is."""
    with tempfile.TemporaryDirectory() as folder:
        tiers = [{"name": "nvme0", "kind": "ssd", "path": folder, "capacity": "64MiB"}]
        config = {"tiers": tiers, "mode": "always", "planning": {"device_memory": "64GiB"}}
        with OffloadEngine(config) as engine:
            model = torch.nn.Linear(8, 8)
            optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            return set(engine.metrics()) | set(LoggedMetrics(engine.metrics).read())


# ---------------------------------------------------------------------------- docstrings
def check_docstrings() -> None:
    """Warn of each public function, class and method of the API pages without a docstring."""
    package = griffe.load("offload_strategy", search_paths=[str(ROOT)])
    for page in sorted((DOCS / "reference").glob("*.md")):
        for name in re.findall(r"^::: ([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            found = package[name.removeprefix("offload_strategy.")]
            for each in _public([found]):
                if not each.has_docstring:
                    log.warning("%s: %s has no docstring", page.name, each.path)


def _public(objects: Iterable[Any]) -> Iterator[Any]:
    for each in objects:
        each = each.final_target if each.is_alias else each
        if each.is_function or each.is_class:
            yield each
        if each.is_class or each.is_module:
            members = each.all_members if each.is_class else each.members
            yield from _public(m for name, m in members.items() if not name.startswith("_"))
