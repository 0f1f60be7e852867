"""LightningCLI: jsonargparse reads, documents and writes the strategy's options.

That training from the command line gives the same numbers is in `test_unmodified_scripts.py`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integrations.lightning_runs import in_both_installs, make_module, strategy_class

pytest.importorskip("jsonargparse")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "unmodified" / "lightning_cli.yaml"
OPTIONS: dict[str, Any] = {
    "tiers": [{"name": "host", "kind": "dram", "capacity": "1MiB"}],
    "activations": {"min_size": "2KiB"},
}


def make_cli(pl: Any, family: str, *arguments: str) -> Any:
    """Parse a command line, and make the module and the Trainer that it asks for."""
    cli = importlib.import_module(f"{family}.cli").LightningCLI
    module = type(make_module(pl))
    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    return cli(
        module,
        args=list(arguments),
        run=False,
        save_config_callback=None,
        trainer_defaults={**quiet, "enable_progress_bar": False},
    )


def class_path(family: str) -> str:
    strategy = strategy_class(family)
    return f"{strategy.__module__}.{strategy.__name__}"


@in_both_installs
def test_flags_choose_the_strategy_and_its_options(pl: Any, family: str) -> None:
    strategy = make_cli(pl, family, "--trainer.strategy=ssd_offload").trainer.strategy
    assert isinstance(strategy, strategy_class(family))
    assert strategy.config.activations.min_size == 1024  # of $SSD_OFFLOAD_CONFIG

    by_class = f"--trainer.strategy={class_path(family)}"
    preset = make_cli(pl, family, by_class, "--trainer.strategy.config=optimizer").trainer.strategy
    assert preset.config.optimizer.enabled
    assert not preset.config.activations.enabled

    misspelt = "--trainer.strategy.config={activations: {minsize: 2KiB}}"
    with pytest.raises(ValueError, match=r"unknown key; did you mean 'activations\.min_size'\?"):
        make_cli(pl, family, by_class, misspelt)


def test_options_may_come_from_a_file_and_survive_being_written(
    pl: Any, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    strategy = {"class_path": class_path(family), "init_args": {"config": OPTIONS}}
    file.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    given = make_cli(pl, family, f"--config={file}").trainer.strategy.config
    assert given.tiers[0].capacity == 1024 * 1024
    assert given.activations.min_size == 2048

    with pytest.raises(SystemExit):
        make_cli(pl, family, f"--config={file}", "--print_config")
    file.write_text(capsys.readouterr().out)
    assert make_cli(pl, family, f"--config={file}").trainer.strategy.config == given


def test_the_help_explains_the_options(
    pl: Any, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make_cli(pl, family, f"--trainer.strategy.help={class_path(family)}")
    printed = " ".join(capsys.readouterr().out.split())
    assert "Trains with activations and optimizer states on host memory and SSDs" in printed
    assert "--trainer.strategy.config CONFIG Sections tiers, activations, optimizer" in printed
    assert "ssd-offload config schema" in printed


def test_the_short_class_path_and_the_example_of_a_config_file_work(pl: Any, family: str) -> None:
    # Where both installs are imported, as here, the short path means the first one.
    strategy = make_cli(pl, family, f"--config={EXAMPLE}").trainer.strategy
    assert strategy.config.activations.min_size == 256 * 1024
