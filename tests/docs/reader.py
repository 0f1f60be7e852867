"""A reader who follows a page: saves its files, types its commands, and compares what they print.

A fenced block with a title is a file that the reader saves under that name. A block of `console` is
typed: lines after `$ ` are commands, and the others are what they print.

Python scripts and `ssd-offload` run in processes that are forked from one which has imported torch
and the frameworks, because most of the time would go into that. Other commands run as they are.
"""

import atexit
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from textwrap import dedent

from tests.module_map import ROOT

PRELOADED = [
    "torch",
    "lightning.pytorch",
    "transformers.models.llama.modeling_llama",
    "offload_strategy.cli",
    "offload_strategy.engine.offload_engine",
]
_TIMEOUT_SECONDS = 600
_ASSIGNMENT = re.compile(r"(\w+)=(.*)")
_FENCE = re.compile(r"^( *)```(\S+)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
#: A figure and its unit; also a version, and a number in hexadecimal or with an exponent.
_FIGURE = re.compile(
    r"0x[\da-f.]+p[-+]\d+|-?\d[\d.,:]*(?:e[-+]?\d+)?(?: ?(?:[KMGT]i?B(?:/s)?|[mµ]?s|h|B|%)\b)?"
)


@dataclass(frozen=True)
class Block:
    """One fenced block: where it is, its language, the name to save it under, and its text."""

    place: str
    language: str
    title: str | None
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page, also those inside of tabs and notes."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        title = _TITLE.search(match[3])
        yield Block(f"{page.name}:{line}", match[2], title[1] if title else None, dedent(match[4]))


def typed_in(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a block of `console`, with the lines of output that the page shows."""
    lines = block.text.splitlines()
    while lines:
        first = lines.pop(0)
        assert first.startswith("$ "), f"{block.place}: {first!r} follows no command"
        command = first[2:]
        while command.endswith("\\"):
            command = command[:-1] + lines.pop(0)
        shown = []
        while lines and not lines[0].startswith("$ "):
            shown.append(lines.pop(0))
        yield command, shown


def without_figures(line: str) -> str:
    """Replace what differs between two runs or machines, and spaces that line columns up."""
    return re.sub(r"[ \-]{2,}", " ", _FIGURE.sub("#", line)).strip()


def missing(shown: list[str], printed: str) -> list[str]:
    """Return the lines that were not printed, in this order and figures aside.

    The page may leave lines out, or the end of a line, and says so with `...`.
    """
    remaining = iter([without_figures(line) for line in printed.splitlines()])
    wanted = [line for line in shown if line.strip() not in ("", "...")]
    return [line for line in wanted if not any(_matches(line, each) for each in remaining)]


def _matches(shown: str, printed: str) -> bool:
    wanted = without_figures(shown.removesuffix("..."))
    return printed.startswith(wanted) if shown.endswith("...") else printed == wanted


class Reader:
    """Follows the blocks of a page in an empty folder; `disk` stands for its drives in `/mnt`."""

    def __init__(self, home: Path, disk: Path) -> None:
        self.home, self.disk = home, disk
        self.saved: set[str] = set()
        self.followed = 0
        self._commands: list[str] = []
        self._forks: ForkServerContext = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload(PRELOADED)
        disk.mkdir()

    def follow(self, block: Block) -> None:
        """Save a file or type commands; complain if a command fails or prints something else."""
        if block.language == "console":
            for command, shown in typed_in(block):
                status, printed = self._type(command)
                assert status == 0, f"{block.place}: $ {command}\n{printed}"
                absent = missing(shown, printed.replace(f"{self.disk}/", "/mnt/"))
                assert not absent, f"{block.place}: {absent} is not in\n{printed}"
        else:
            assert block.language in {"python", "yaml"}, f"{block.place}: {block.language}"
            assert block.title, f"{block.place}: a file needs a title to be saved under"
            (self.home / block.title).write_text(self._as_here(block.text), encoding="utf-8")
            self.saved.add(block.title)
        self.followed += 1

    def unused(self) -> set[str]:
        """Return the saved files that neither a command nor a script which was run has named."""
        words = {word for command in self._commands for word in shlex.split(command)}
        words |= {word.partition("=")[2] for word in words}
        run = [(self.home / name).read_text() for name in self.saved & words]
        return {name for name in self.saved - words if not any(f'"{name}"' in text for text in run)}

    def _as_here(self, text: str) -> str:
        return text.replace("/mnt/", f"{self.disk}/")

    def _type(self, command: str) -> tuple[int, str]:
        self._commands.append(command)
        words = shlex.split(self._as_here(command))
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "SSD_OFFLOAD_CACHE": str(self.home / "cache"),
            "SSD_OFFLOAD_DIR": str(self.disk),
            "PIP_NO_INDEX": "1",  # all is installed: nothing may be looked for
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "1000",  # paths are longer here than on the page
            "OMP_NUM_THREADS": "1",  # more would wait for each other on a machine that is busy
            "PYTHONUNBUFFERED": "1",  # what is printed and what is logged keep their order
        }
        while assignment := _ASSIGNMENT.fullmatch(words[0]):
            environment[assignment[1]] = assignment[2]
            words.pop(0)
        output = self.home / ".output"
        if words[0] == "ssd-offload" or (words[0] == "python" and words[1].endswith(".py")):
            arguments = (words, environment, self.home, output)
            process = self._forks.Process(target=_run, args=arguments)
            process.start()
            process.join(_TIMEOUT_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            return process.exitcode or 0, output.read_text(encoding="utf-8", errors="replace")
        with open(output, "wb") as file:
            done = subprocess.run(
                words, cwd=self.home, env=os.environ | environment, timeout=_TIMEOUT_SECONDS,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return done.returncode, output.read_text(encoding="utf-8", errors="replace")


def _run(words: Sequence[str], environment: dict[str, str], home: Path, output: Path) -> None:
    """Run a script or `ssd-offload` in this process, which was forked for it."""
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(environment)
    os.chdir(home)
    import torch

    torch.set_num_threads(1)
    try:
        if words[0] == "ssd-offload":
            from offload_strategy.cli import main

            sys.exit(main(list(words[1:])))
        sys.argv = list(words[1:])
        sys.path.insert(0, str(home))
        runpy.run_path(words[1], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not
        sys.stdout.flush()
