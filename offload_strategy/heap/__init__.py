"""The immutable tensor heap: tickets over tiers."""

from offload_strategy.heap.heap import Heap
from offload_strategy.heap.ticket import Ticket, TicketState
from offload_strategy.heap.tiers import HostTier, PathTier, Quota, Tier

__all__ = ["Heap", "HostTier", "PathTier", "Quota", "Ticket", "TicketState", "Tier"]
