"""The tests of configs run without the user's environment."""

from tests.support import no_environment

__all__ = ["no_environment"]
