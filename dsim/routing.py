"""Routers: which instance of a pool gets the next request."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Protocol

import numpy as np

from dsim.options import Routing

#: Random numbers that power-of-two routing draws at once.
_DRAWS: Final = 512


class Router(Protocol):
    """Chooses an instance by index, knowing what was routed to each and has not finished there."""

    def route(self, prompt_tokens: int) -> int:
        """Return the index of the instance that gets the next request, which counts there from now on."""
        ...

    def leave(self, index: int, prompt_tokens: int) -> None:
        """Count a request as finished at the instance it was routed to."""
        ...


class OnlyOne:
    """A pool of one instance."""

    def route(self, prompt_tokens: int) -> int:
        """Return 0."""
        del prompt_tokens
        return 0

    def leave(self, index: int, prompt_tokens: int) -> None:
        """Nothing to count."""


class RoundRobin:
    """One after the other."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0

    def route(self, prompt_tokens: int) -> int:
        """Return the next index in turn."""
        del prompt_tokens
        index = self._next
        self._next = (index + 1) % self._count
        return index

    def leave(self, index: int, prompt_tokens: int) -> None:
        """Nothing to count."""


class _Least:
    """The instance with the least load, ties to the lowest index, without looking at all of them.

    A heap of load * count + index, with an entry for every load that an instance came to since the heap was last built:
    those that are not true any more are dropped when they come up.
    """

    #: Whether a request loads its instance by its prompt tokens (> 0), and not by one.
    _by_tokens: bool

    def __init__(self, count: int) -> None:
        self._count = count
        self._loads = [0] * count
        self._heap = list(range(count))

    def route(self, prompt_tokens: int) -> int:
        """Return the first index with the least load."""
        heap, loads, count = self._heap, self._loads, self._count
        while True:
            load, index = divmod(heap[0], count)
            if loads[index] == load:
                break
            heappop(heap)
        load = loads[index] = load + (prompt_tokens if self._by_tokens else 1)
        heapreplace(heap, load * count + index)
        return index

    def leave(self, index: int, prompt_tokens: int) -> None:
        """Count a request as finished."""
        loads, count, heap = self._loads, self._count, self._heap
        load = loads[index] = loads[index] - (prompt_tokens if self._by_tokens else 1)
        heappush(heap, load * count + index)
        if len(heap) > 8 * count:
            heap[:] = [load * count + i for i, load in enumerate(loads)]
            heapify(heap)


class JoinShortestQueue(_Least):
    """The fewest unfinished requests."""

    _by_tokens = False


class LeastLoaded(_Least):
    """The fewest prompt tokens of unfinished requests."""

    _by_tokens = True


class PowerOfTwo:
    """The better of two instances drawn at random.

    Args:
        shared: whether another router draws from `rng` too, so that nothing may be drawn in advance.
    """

    def __init__(self, count: int, rng: np.random.Generator, *, shared: bool) -> None:
        self._requests = [0] * count
        self._pairs = _pairs(count, rng, together=1 if shared else _DRAWS)

    def route(self, prompt_tokens: int) -> int:
        """Return the one of two different instances with fewer requests; the lower index on a tie."""
        del prompt_tokens
        low, high = next(self._pairs)
        requests = self._requests
        index = high if requests[high] < requests[low] else low
        requests[index] += 1
        return index

    def leave(self, index: int, prompt_tokens: int) -> None:
        """Count a request as finished."""
        del prompt_tokens
        self._requests[index] -= 1


def _pairs(count: int, rng: np.random.Generator, *, together: int) -> Iterator[tuple[int, int]]:
    """Yield two different indices, the lower one first: integers(count), then integers(count - 1) past the first."""
    # Drawn together they are the numbers that come one by one.
    highs = np.tile(np.array([count, count - 1]), together)
    while True:
        drawn = iter(rng.integers(0, highs).tolist())
        for a, b in zip(drawn, drawn, strict=True):
            other = b + (b >= a)
            yield (a, other) if a < other else (other, a)


def router(routing: Routing, count: int, rng: np.random.Generator, *, shared: bool) -> Router:
    """Return a fresh router over `count` instances; `rng` is drawn from by `power-of-two` alone (see there)."""
    if count == 1:
        return OnlyOne()
    if routing is Routing.ROUND_ROBIN:
        return RoundRobin(count)
    if routing is Routing.JOIN_SHORTEST_QUEUE:
        return JoinShortestQueue(count)
    if routing is Routing.LEAST_LOADED:
        return LeastLoaded(count)
    return PowerOfTwo(count, rng, shared=shared)
