"""How many subgroups each path gets (MLP-Offload, section 3.3, equation 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from offload_strategy.errors import ConfigError
from offload_strategy.planner.transformer_shape import positive


def split_subgroups(count: int, bandwidths: Sequence[float]) -> list[int]:
    """Deal subgroups to paths in proportion to their bandwidth.

    T_i = ceil(M B_i / sum B), adjusted so that they add up to M. The paper leaves the adjustment
    open: what rounding up gave too much is taken back one by one, each time from the path that
    takes longest for its share.

    With 5.3 and 3.6 GB/s (table 1, the smaller of each path's two rates) this is 1.47 : 1, of 100
    subgroups 59 and 41. The paper writes 2 : 1 (section 4.3): that is what the equation gives for
    three subgroups, as many as it keeps in flight, and it is near the 1.92 : 1 of the rates of
    reading, 6.9 and 3.6 GB/s.

    Args:
        count: M, how many there are.
        bandwidths: B_i, in any unit.

    Returns:
        How many each path gets.

    Raises:
        ConfigError: if there is no path, or a number is negative or no bandwidth is above 0.
    """
    if count < 0:
        raise ConfigError(f"subgroups: there are {count} to deal; give 0 or more")
    if not bandwidths:
        raise ConfigError("subgroups: there is no path to deal them to; give a bandwidth for each")
    for place, rate in enumerate(bandwidths):
        if not rate >= 0:
            raise ConfigError(f"subgroups: bandwidth {place} is {rate}; give 0 or more")
    total = math.fsum(bandwidths)
    positive("subgroups: the sum of all bandwidths", total)
    shares = [math.ceil(count * rate / total) for rate in bandwidths]
    while sum(shares) > count:
        slowest = max(
            (place for place, share in enumerate(shares) if share),
            key=lambda place: shares[place] / bandwidths[place],
        )
        shares[slowest] -= 1
    return shares
