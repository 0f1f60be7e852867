from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.rig import MakeRig, Rig


@pytest.fixture
def make_rig(disk: Path) -> Iterator[MakeRig]:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(disk, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.at_once()  # a disk that does not answer would be waited for
        rig.close()


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()
