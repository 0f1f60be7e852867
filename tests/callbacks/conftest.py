from tests.integrations.conftest import family, hints, pl, tier

__all__ = ["family", "hints", "pl", "tier"]
