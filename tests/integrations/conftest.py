from tests.integrations.fixtures import _one_thread, family, pl, tier

__all__ = ["_one_thread", "family", "pl", "tier"]
