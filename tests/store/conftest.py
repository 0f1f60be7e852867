import pytest

from tests.store.rig import Rig


@pytest.fixture
def make_rig(disk):
    made: list[Rig] = []

    def make(**options):
        made.append(Rig(disk, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.at_once()  # a disk that does not answer would be waited for
        rig.close()


@pytest.fixture
def rig(make_rig):
    return make_rig()
