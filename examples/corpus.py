"""Real text that every machine has: the source files of the running Python's standard library."""

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

# Tests repeat themselves, installed packages differ from machine to machine, and the character and
# topic tables are generated: none of them is the text that we want to learn.
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
}
VALIDATION_SHARE = 0.1


def read_corpus(split: str) -> Tensor:
    """Read one split of the standard library, file by file in alphabetical order.

    A file belongs wholly to one split, chosen by a checksum of its name, so no text is in both and
    the split does not change when other files come or go.

    Args:
        split: "train" or "validation".

    Returns:
        The bytes of all files of the split, as one uint8 tensor.

    Raises:
        FileNotFoundError: This Python keeps no sources of its library (frozen or zipped).
    """
    if split not in ("train", "validation"):
        raise ValueError(f'the split is "train" or "validation", not {split!r}')
    library = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if LEFT_OUT.isdisjoint(name.parts):
            held_out = zlib.crc32(name.as_posix().encode()) < VALIDATION_SHARE * 2**32
            if held_out == (split == "validation"):
                text += path.read_bytes()
    if len(text) < 100_000:
        raise FileNotFoundError(
            f"the examples learn from the sources of Python's standard library, but {library} has"
            f" {len(text)} bytes of them for the {split} split: use a Python that keeps its .py"
            " files, not a frozen or zipped one"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of (text, the same text one byte later), cut from a corpus at random places.

    Which window comes at which index depends on the seed alone: a loader that does not shuffle
    gives every framework the same batches in the same order.

    Args:
        text: A corpus, as uint8.
        context: Bytes per window.
        count: Number of windows.
        seed: Chooses the places.
    """

    def __init__(self, text: Tensor, context: int, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.text = text
        self.context = context
        self.starts = torch.randint(len(text) - context, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(self.starts[index])
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]
