from tests.integrations.fixtures import _one_thread, family, hints, pl, tier

__all__ = ["_one_thread", "family", "hints", "pl", "tier"]
