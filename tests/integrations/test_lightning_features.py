"""Everything that Lightning's Trainer can do, with the strategy and with "auto", to the last bit.

What is found has to be what the table in `docs/lightning.md` says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_strategy import OffloadError
from tests.integrations.lightning_feature_list import FEATURES
from tests.integrations.lightning_features import (
    FAMILY,
    Feature,
    Outcome,
    Session,
    quiet,
)
from tests.optimizer.runs import assert_same_state_dict

DOCUMENT = Path(__file__).parents[2] / "docs" / "lightning.md"


def config(overlap: str) -> dict[str, Any]:
    return {
        "activations": {"min_size": "1KiB", "budget": "100%"},
        "optimizer": {"overlap": overlap},
    }


@pytest.mark.parametrize("feature", FEATURES.values(), ids=lambda feature: feature.name)
def test_a_feature_is_identical_or_refused(feature: Feature, tmp_path: Path) -> None:
    expected = _run(feature, _session(tmp_path, None))
    verdicts = []
    for overlap in ("commit", "eager"):
        session = _session(tmp_path, overlap)
        if overlap == "eager" and feature.refused_with_eager is not None:
            with pytest.raises(OffloadError, match=feature.refused_with_eager):
                _run(feature, session)
            micro_batches = 2  # of a step, at most
            assert session.steps in ([0] if feature.before_training else [1, micro_batches])
            # A backward that failed leaves nodes in autograd's queue, which the next one drops.
            torch.ones(1, requires_grad=True).sum().backward()
            verdicts.append("refused" if feature.before_training else "refused in the first step")
            continue
        assert_same_state_dict(_run(feature, session), expected, in_order=False)
        for client in ("activations", "optimizer"):
            assert (session.moved_bytes(client) > 0) == feature.trains
        verdicts.append("identical" if feature.trains else "identical; nothing is moved")
    row = f"| {feature.name} | {' | '.join(verdicts)} |"
    assert row in DOCUMENT.read_text().splitlines()


def _session(directory: Path, overlap: str | None) -> Session:
    root = directory / (overlap or "auto")
    root.mkdir()
    return Session(pytest.importorskip(FAMILY), root, None if overlap is None else config(overlap))


def _run(feature: Feature, session: Session) -> Outcome:
    with quiet():
        return feature.run(session)


def test_the_document_has_the_features_that_are_tried_and_no_others() -> None:
    pattern = r"^\| (.*?) \| (?:identical|refused)"
    names = re.findall(pattern, DOCUMENT.read_text(), flags=re.MULTILINE)
    assert names == list(FEATURES)
