"""The text and the model that the examples share."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from offload_strategy.examples.corpus import Windows, read_corpus
from offload_strategy.examples.gpt import GPT, GPTConfig


def test_the_corpus_is_large_repeatable_and_split_by_file() -> None:
    training, validation = read_corpus("train"), read_corpus("validation")
    assert len(training) > 2_000_000
    assert 0.02 < len(validation) / len(training) < 0.3
    assert torch.equal(validation, read_corpus("validation"))
    library = Path(sysconfig.get_paths()["stdlib"])
    text = (library / "argparse.py").read_bytes()
    found = [text in bytes(split.numpy()) for split in (training, validation)]
    assert sorted(found) == [False, True]


def test_a_python_without_sources_is_refused_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        read_corpus("train")


def test_windows_depend_on_the_seed_alone_and_targets_are_one_byte_later() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    windows = Windows(text, context=8, count=5, seed=1)
    tokens, targets = windows[3]
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, Windows(text, context=8, count=5, seed=1)[3][0])
    assert not torch.equal(windows.starts, Windows(text, context=8, count=5, seed=2).starts)


def test_the_model_sees_no_byte_that_is_yet_to_come_and_repeats_what_it_writes() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=32, context=16))
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = 7
    assert torch.equal(model(tokens)[:, :10], model(changed)[:, :10])
    assert not torch.equal(model(tokens)[:, 10:], model(changed)[:, 10:])
    text = model.generate(b"def ", 20)
    assert len(text) == 20
    assert text == model.generate(b"def ", 20)
