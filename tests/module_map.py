"""The module map: every file of the package with the first sentence of its docstring.

`make module-map` writes it to docs/module_map.md; tests/test_architecture.py compares.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "offload_strategy"
MAP = ROOT / "docs" / "module_map.md"

_HEAD = """# Module map

Written by `make module-map` from the first line of each docstring. Imports point downwards in the
order of the rooms in `pyproject.toml` (`[tool.importlinter]`).
"""


def source_files() -> Iterator[Path]:
    """Yield the files of the package, without the folders that are linked into it."""
    for file in sorted(PACKAGE.rglob("*.py")):
        if not any(folder.is_symlink() for folder in file.parents):
            yield file


def first_sentence(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def written() -> str:
    lines = [_HEAD]
    for folder in sorted({file.parent for file in source_files()}):
        files = [file for file in source_files() if file.parent == folder]
        lines.append(f"\n## {folder.relative_to(ROOT)}\n")
        for file in files:
            if file.name == "__init__.py":
                lines.append(f"{first_sentence(file)}\n")
        lines += ["| file | content |", "|---|---|"]
        lines += [
            f"| `{file.name}` | {first_sentence(file).replace('|', '·')} |"
            for file in files
            if file.name != "__init__.py"
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    MAP.write_text(written(), encoding="utf-8")
