"""Copies on GPUs of several types, of each of which there are only so many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from dsim.errors import InputError
from dsim.pools import Placement

if TYPE_CHECKING:
    from placement.size import Block

#: Combinations of numbers of GPUs that are looked at, at most: a second or two.
_MOST: Final = 250_000


def gpus_by_type(placement: Placement) -> dict[str | None, int]:
    """Return the GPUs of a placement by type; None for pools that name none.

    >>> gpus_by_type(Placement.parse("2xP:tp2@h100-sxm + 3xD:tp1@h20-96g"))
    {'h100-sxm': 4, 'h20-96g': 3}
    """
    found: dict[str | None, int] = {}
    for pool in placement.pools:
        found[pool.gpu] = found.get(pool.gpu, 0) + pool.num_gpus
    return found


def usage(chosen: Mapping[Block, int]) -> dict[str | None, int]:
    """Return the GPUs of copies by type."""
    found: dict[str | None, int] = {}
    for block, count in chosen.items():
        for gpu, number in gpus_by_type(block.trial.placement).items():
            found[gpu] = found.get(gpu, 0) + number * count
    return found


def check_available(available: Mapping[str, int], total: int | None = None, where: str = "--gpus") -> None:
    """Refuse more GPUs than can be looked at by type.

    Raises:
        InputError: there are too many.
    """
    within = math.inf if total is None else math.comb(total + len(available), len(available))
    if min(math.prod(number + 1 for number in available.values()), within) > _MOST:
        shown = ",".join(f"{name}={number}" for name, number in available.items())
        raise InputError(where, "is too many to plan by type", value=shown, hint="give one number, of all together")


def _within(available: Sequence[int], most: float) -> Iterator[tuple[int, ...]]:
    """Yield every combination of numbers up to those available whose sum is at most so much, in order."""
    if not available:
        yield ()
        return
    for first in range(int(min(available[0], most)) + 1):
        for rest in _within(available[1:], most - first):
            yield (first, *rest)


class Limited:
    """What copies of blocks serve at most on so many GPUs of each type, for every such combination.

    Args:
        available: GPUs of each type that the blocks lie on.
        total: GPUs of all types together; None: no limit of its own.
        serve: which of `serves` counts: `low`, `best` or `high`.
    """

    def __init__(
        self, blocks: Sequence[Block], available: Mapping[str, int], *, total: int | None = None, serve: str = "low"
    ) -> None:
        check_available(available, total)
        self._types = list(available)
        self._blocks = list(blocks)
        needs = [gpus_by_type(block.trial.placement) for block in blocks]
        self._needs = [tuple(need.get(name, 0) for name in self._types) for need in needs]
        serves = [float(getattr(block.serves, serve)) for block in blocks]
        #: By GPUs of each type: what they serve at most, the last copy (-1 for none), and the weight of all.
        self._most: dict[tuple[int, ...], tuple[float, int, int]] = {}
        most = math.inf if total is None else total
        for at in _within([available[name] for name in self._types], most):
            best = (0.0, -1, 0)
            for number, need in enumerate(self._needs):
                left = tuple(a - n for a, n in zip(at, need, strict=True))
                if min(left) >= 0 and self._most[left][0] + serves[number] > best[0]:
                    before = self._most[left]
                    best = (before[0] + serves[number], number, before[2] + blocks[number].weight)
            self._most[at] = best

    @property
    def most(self) -> float:
        """What all GPUs serve at most."""
        return max(serves for serves, _, _ in self._most.values())

    def cover(self, amount: float) -> dict[Block, int]:
        """Return the copies that serve an amount with the least weight, of equal ones those that serve most.

        Returns:
            No copies where the GPUs do not suffice.
        """
        enough = [(weight, -serves, at) for at, (serves, _, weight) in self._most.items() if serves >= amount]
        return self._copies(min(enough)[2]) if enough else {}

    def _copies(self, at: tuple[int, ...]) -> dict[Block, int]:
        found: dict[Block, int] = {}
        while (number := self._most[at][1]) >= 0:
            found[self._blocks[number]] = found.get(self._blocks[number], 0) + 1
            at = tuple(a - n for a, n in zip(at, self._needs[number], strict=True))
        return found
