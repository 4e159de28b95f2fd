"""Routers choose what a look at every instance would choose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.options import Routing
from dsim.routing import router


@given(
    st.sampled_from([Routing.JOIN_SHORTEST_QUEUE, Routing.LEAST_LOADED]),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=200),
)
def test_the_least_loaded_instance_ties_to_the_lowest(
    routing: Routing, count: int, moves: list[tuple[int, int]]
) -> None:
    """Each move routes a prompt of so many tokens and then lets some of the requests in the system finish."""
    chosen = router(routing, count, np.random.default_rng(0), shared=False)
    loads = [0] * count
    inside: list[tuple[int, int]] = []
    for tokens, leaving in moves:
        index = chosen.route(tokens)
        assert index == loads.index(min(loads))
        inside.append((index, tokens))
        loads[index] += tokens if routing is Routing.LEAST_LOADED else 1
        for _ in range(min(leaving, len(inside))):
            left, prompt = inside.pop(len(inside) // 2)
            chosen.leave(left, prompt)
            loads[left] -= prompt if routing is Routing.LEAST_LOADED else 1


@pytest.mark.parametrize("shared", [False, True])
def test_power_of_two_draws_one_request_after_the_other(shared: bool) -> None:
    """Drawn in advance or not: the numbers of docs/semantics.md, section 3."""
    rng, requests = np.random.default_rng(7), [0] * 5
    chosen = router(Routing.POWER_OF_TWO, 5, np.random.default_rng(7), shared=shared)
    for number in range(3000):
        a, b = int(rng.integers(5)), int(rng.integers(4))
        b += b >= a
        low, high = min(a, b), max(a, b)
        expected = high if requests[high] < requests[low] else low
        assert chosen.route(10) == expected
        requests[expected] += 1
        if number % 3:
            chosen.leave(expected, 10)
            requests[expected] -= 1


def test_round_robin() -> None:
    chosen = router(Routing.ROUND_ROBIN, 3, np.random.default_rng(0), shared=False)
    assert [chosen.route(1) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
