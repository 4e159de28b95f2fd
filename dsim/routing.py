"""Routers: which instance of a pool gets the next request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dsim.options import Routing


class Load:
    """Requests routed to one instance and not finished there, and their prompt tokens."""

    __slots__ = ("prompt_tokens", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0

    def add(self, prompt_tokens: int) -> None:
        """Count a request that was routed here."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens

    def remove(self, prompt_tokens: int) -> None:
        """Count a request that finished here."""
        self.requests -= 1
        self.prompt_tokens -= prompt_tokens


class Router(Protocol):
    """Chooses an instance by index."""

    def choose(self, loads: Sequence[Load]) -> int:
        """Return the index of the instance that gets the next request."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, loads: Sequence[Load]) -> int:
        """Return the next index in turn."""
        index = self._next % len(loads)
        self._next += 1
        return index


class JoinShortestQueue:
    """The fewest unfinished requests."""

    def choose(self, loads: Sequence[Load]) -> int:
        """Return the first index with the fewest requests."""
        if len(loads) == 1:
            return 0
        return min(range(len(loads)), key=lambda i: loads[i].requests)


class LeastLoaded:
    """The fewest prompt tokens of unfinished requests."""

    def choose(self, loads: Sequence[Load]) -> int:
        """Return the first index with the fewest prompt tokens."""
        if len(loads) == 1:
            return 0
        return min(range(len(loads)), key=lambda i: loads[i].prompt_tokens)


class PowerOfTwo:
    """The better of two instances drawn at random."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, loads: Sequence[Load]) -> int:
        """Return the less busy of two different indices; the lower one on a tie."""
        count = len(loads)
        if count == 1:
            return 0
        a = int(self._rng.integers(count))
        b = int(self._rng.integers(count - 1))
        b += b >= a
        low, high = min(a, b), max(a, b)
        return high if loads[high].requests < loads[low].requests else low


def router(routing: Routing, rng: np.random.Generator) -> Router:
    """Return a fresh router; `rng` is drawn from by `power-of-two` alone."""
    if routing is Routing.ROUND_ROBIN:
        return RoundRobin()
    if routing is Routing.JOIN_SHORTEST_QUEUE:
        return JoinShortestQueue()
    if routing is Routing.LEAST_LOADED:
        return LeastLoaded()
    return PowerOfTwo(rng)
