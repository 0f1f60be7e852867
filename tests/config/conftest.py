from tests.cli.conftest import _no_environment

__all__ = ["_no_environment"]
