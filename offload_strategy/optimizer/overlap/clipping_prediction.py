"""What will be done to the gradients between backward and `step()`: learned from the last steps.

An update that runs ahead of `step()` must know by what gradients will be scaled: by 1 without
clipping or where clipping does not bite, by the loss scale's inverse under GradScaler. One that was
wrong is thrown away and run again, so running ahead pays only where it is right most of the time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

#: Steps that are remembered.
_WINDOW = 16
#: Share of them for which the prediction must have been right.
_WORTHWHILE = 0.75

Scaling = TypeVar("Scaling", bound=Hashable)


class Prediction(Generic[Scaling]):
    """Predicts what happens to the gradients, and says whether predicting pays.

    Args:
        untouched: what it means that nothing happens to them; expected at first.
    """

    def __init__(self, untouched: Scaling) -> None:
        self._seen: deque[Scaling | None] = deque(maxlen=_WINDOW)
        self._right: deque[bool] = deque(maxlen=_WINDOW)
        self.expected: Scaling = untouched

    @property
    def pays(self) -> bool:
        """Whether it was right often enough of late."""
        return sum(self._right) >= _WORTHWHILE * len(self._right)

    def note(self, scaling: Scaling | None) -> None:
        """Learn what a step did.

        Args:
            scaling: to be compared; None for what nobody could have predicted.
        """
        self._right.append(scaling is not None and scaling == self.expected)
        self._seen.append(scaling)
        known = [seen for seen in self._seen if seen is not None]
        if known:
            often = Counter(known)
            # The latest, unless it is an exception among others that come back: a limit that bites
            # now and then does so by another factor every time.
            repeated = [seen for seen in known if often[seen] > 1]
            self.expected = repeated[-1] if repeated else known[-1]
