"""Nodes: where a placement's instances lie, and which of them a fast link joins (docs/semantics.md, section 10)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsim.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: No packing: less than any number of pairs, also after some were added.
_NONE = -(1 << 40)


@dataclass(frozen=True, slots=True, order=True)
class Nodes:
    """The nodes that a placement is packed onto.

    Args:
        num_gpus: of all of them; the last one may not be full.
        gpus_per_node: GPUs that a fast link joins.
        side_by_side: the stages of all instances lie side by side, segment by segment, as in DistServe's Algorithm 2;
            otherwise each instance lies by itself, within one node where it fits.
    """

    num_gpus: int
    gpus_per_node: int
    side_by_side: bool = False

    def __post_init__(self) -> None:
        for name, value in (("num_gpus", self.num_gpus), ("gpus_per_node", self.gpus_per_node)):
            if value < 1:
                raise InputError("nodes", "must be >= 1", name=name, value=value)

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPUs of each node."""
        full, rest = divmod(self.num_gpus, self.gpus_per_node)
        return (self.gpus_per_node,) * full + ((rest,) if rest else ())

    def segments(self, tp: int, pp: int) -> int | None:
        """Return into how many equal segments, one a node, the stages of an instance are cut: as few as fit.

        >>> Nodes(32, 8).segments(4, 2), Nodes(32, 8).segments(4, 6), Nodes(32, 8).segments(16, 1)
        (1, 3, None)
        """
        return self._fewest(pp, tp * pp)

    def common_segments(self, degrees: Sequence[tuple[int, int, int]]) -> int | None:
        """Return the same for instances side by side, (tp, pp, count) of each pool: node k has segment k of all."""
        return self._fewest(math.gcd(*(pp for _, pp, _ in degrees)), sum(tp * pp * count for tp, pp, count in degrees))

    def _fewest(self, stages: int, num_gpus: int) -> int | None:
        most = min(stages, -(-self.num_gpus // self.gpus_per_node))
        for segments in range(1, most + 1):
            if stages % segments == 0 and num_gpus <= segments * self.gpus_per_node:
                return segments
        return None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where instances lie.

    Args:
        pools: by pool and instance, the node of each segment of its stages, in order of the stages.
    """

    pools: tuple[tuple[tuple[int, ...], ...], ...]

    def crosses(self, sender: int, receiver: int) -> bool:
        """Return whether KV of any layer goes from node to node on its way from a prefill to a decode instance."""
        first, second = self.pools[0][sender], self.pools[1][receiver]
        if len(first) == len(second):
            return first != second
        parts = math.lcm(len(first), len(second))
        return any(first[k * len(first) // parts] != second[k * len(second) // parts] for k in range(parts))

    @property
    def crossings(self) -> tuple[tuple[bool, ...], ...]:
        """`crosses` of every prefill (first index) and decode instance."""
        senders, receivers = (range(len(pool)) for pool in self.pools)
        return tuple(tuple(self.crosses(i, j) for j in receivers) for i in senders)

    @property
    def nodes_used(self) -> int:
        """Nodes that have a stage."""
        return len({node for pool in self.pools for instance in pool for node in instance})


def layout(nodes: Nodes, degrees: Sequence[tuple[int, int, int]]) -> Layout | None:
    """Return where the instances lie, None where they do not fit.

    Args:
        degrees: (tp, pp, count) of each pool.
    """
    if nodes.side_by_side:
        return _side_by_side(nodes, degrees)
    segments = cuts(nodes, degrees)
    if segments is None:
        return None
    sizes = [tp * pp for tp, pp, _ in degrees]
    counts = [count for _, _, count in degrees]
    if segments == [1, 1]:
        held = _most_pairs(nodes, sizes, counts)
        if held is None:
            return None
        return Layout(tuple(tuple((node,) for node, n in enumerate(of) for _ in range(n)) for of in held))
    return _first_fit(nodes, sizes, counts, segments)


def cuts(nodes: Nodes, degrees: Sequence[tuple[int, int, int]]) -> list[int] | None:
    """Return into how many segments the instances of each pool are cut, None where some do not fit."""
    if nodes.side_by_side:
        common = nodes.common_segments(degrees)
        return None if common is None else [common] * len(degrees)
    found = [nodes.segments(tp, pp) for tp, pp, _ in degrees]
    return None if None in found else [cut for cut in found if cut is not None]


def fits(nodes: Nodes, degrees: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether `layout` finds one, without looking for it."""
    if not nodes.side_by_side and len(degrees) == 2:
        (tp, pp, n), (other_tp, other_pp, m) = degrees
        if nodes.segments(tp, pp) == nodes.segments(other_tp, other_pp) == 1:
            most = _pairs(nodes, tp * pp, other_tp * other_pp)[0]
            return n < most.shape[0] and m < most.shape[1] and bool(most[n, m] >= 0)
    return layout(nodes, degrees) is not None


def _side_by_side(nodes: Nodes, degrees: Sequence[tuple[int, int, int]]) -> Layout | None:
    segments = nodes.common_segments(degrees)
    if segments is None:
        return None
    each = sum(tp * pp * count for tp, pp, count in degrees) // segments
    if min(nodes.gpus[:segments]) < each:
        return None
    at = tuple(range(segments))
    return Layout(tuple((at,) * count for _, _, count in degrees))


def _most_pairs(nodes: Nodes, sizes: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """Return how many instances of each pool every node gets, so that most pairs of the two share one."""
    tables = _pairs(nodes, *sizes)
    n, m = counts
    if n >= tables[0].shape[0] or m >= tables[0].shape[1] or tables[0][n, m] < 0:
        return None
    held: tuple[list[int], list[int]] = ([], [])
    for node, gpus in enumerate(nodes.gpus):
        # Of equally good ones the one with most instances of the first pool in the first nodes, then of the second.
        for here, there in sorted(_shares(gpus, *sizes), reverse=True):
            if here <= n and there <= m and here * there + tables[node + 1][n - here, m - there] == tables[node][n, m]:
                n, m = n - here, m - there
                held[0].append(here)
                held[1].append(there)
                break
    return held


def _shares(gpus: int, first: int, second: int) -> Iterator[tuple[int, int]]:
    """Yield how many instances of two sizes one node may have."""
    for here in range(gpus // first + 1):
        for there in range((gpus - here * first) // second + 1):
            yield here, there


@functools.lru_cache(maxsize=256)
def _pairs(nodes: Nodes, first: int, second: int) -> tuple[NDArray[np.int64], ...]:
    """Return the most pairs, within a node each, that n and m instances make from node k on, shape (n + 1, m + 1)."""
    import numpy as np  # names and notations of placements do without

    gpus = nodes.gpus
    shape = tuple(sum(g // size for g in gpus) + 1 for size in (first, second))
    after = np.full(shape, _NONE)
    after[0, 0] = 0
    tables = [after]
    for of_node in reversed(gpus):
        here = np.full(shape, _NONE)
        for n, m in _shares(of_node, first, second):
            into = here[n:, m:]
            np.maximum(into, after[: shape[0] - n, : shape[1] - m] + n * m, out=into)
        after = here
        tables.append(after)
    return tuple(reversed(tables))


def _first_fit(nodes: Nodes, sizes: Sequence[int], counts: Sequence[int], segments: Sequence[int]) -> Layout | None:
    """Place instances, those of several segments first, each in the first nodes that have room for its segments."""
    room = list(nodes.gpus)
    found: list[tuple[tuple[int, ...], ...]] = [()] * len(sizes)
    for pool in sorted(range(len(sizes)), key=lambda i: (segments[i] == 1, i)):
        each = sizes[pool] // segments[pool]
        placed = []
        for _ in range(counts[pool]):
            at = tuple(node for node, free in enumerate(room) if free >= each)[: segments[pool]]
            if len(at) < segments[pool]:
                return None
            for node in at:
                room[node] -= each
            placed.append(at)
        found[pool] = tuple(placed)
    return Layout(tuple(found))
