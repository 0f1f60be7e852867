"""What the tests of the command line share: a way to run it, without the user's environment."""

import pytest

from offload_strategy.cli import main
from tests.support import no_environment

__all__ = ["no_environment"]


@pytest.fixture
def ssd_offload(capsys):
    """Runs the command line with words, checks its status, and returns what it printed."""

    def run(*words, status=0):
        try:
            found = main([*map(str, words)])
        except SystemExit as ended:  # argparse's own errors
            found = ended.code
        printed = capsys.readouterr()
        assert found == status, printed.err
        return printed

    return run
