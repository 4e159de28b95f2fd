"""Section 10 of docs/semantics.md: nodes, by trying every packing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dsim.latency import Chunk, LatencyModel, ValidRange
from dsim.nodes import Nodes
from dsim.pools import Parallelism, Placement, Pool
from dsim.profile import PointToPoint, Profile

#: By pool and instance, the node of every stage.
Stages = list[list[list[int]]]


def capacities(nodes: Nodes) -> list[int]:
    """Return the GPUs of each node."""
    left, found = nodes.num_gpus, []
    while left > 0:
        found.append(min(left, nodes.gpus_per_node))
        left -= found[-1]
    return found


def where(placement: Placement) -> Stages | None:
    """Return the node of every stage of every instance; None where they do not fit, or where no nodes are named."""
    nodes = placement.nodes
    if nodes is None:
        return None
    room = capacities(nodes)
    shapes = [(pool.parallelism.tp, pool.parallelism.pp) for pool in placement.pools]
    counts = [pool.count for pool in placement.pools]
    gpus = [tp * pp for tp, pp in shapes]
    if sum(n * g for n, g in zip(counts, gpus, strict=True)) <= room[0]:
        return [[[0] * pp for _ in range(n)] for (_, pp), n in zip(shapes, counts, strict=True)]
    if nodes.side_by_side:
        for s in range(1, len(room) + 1):
            if all(pp % s == 0 for _, pp in shapes):
                each = sum(n * g for n, g in zip(counts, gpus, strict=True)) / s
                if each <= nodes.gpus_per_node:
                    fit = all(each <= room[k] for k in range(s))
                    return (
                        [_spread(list(range(s)), pp, n) for (_, pp), n in zip(shapes, counts, strict=True)]
                        if fit
                        else None
                    )
        return None
    cuts = []
    for tp, pp in shapes:
        fitting = [s for s in range(1, len(room) + 1) if pp % s == 0 and tp * pp // s <= nodes.gpus_per_node]
        if not fitting:
            return None
        cuts.append(fitting[0])
    if cuts == [1, 1]:
        return _most_pairs(room, gpus, counts, [pp for _, pp in shapes])
    found: Stages = [[] for _ in shapes]
    for spans in (True, False):
        for pool, s in enumerate(cuts):
            if (s > 1) != spans:
                continue
            for _ in range(counts[pool]):
                at = [k for k, free in enumerate(room) if free >= gpus[pool] // s][:s]
                if len(at) < s:
                    return None
                for k in at:
                    room[k] -= gpus[pool] // s
                found[pool] += _spread(at, shapes[pool][1], 1)
    return found


def _spread(at: list[int], pp: int, count: int) -> list[list[int]]:
    return [[node for node in at for _ in range(pp // len(at))] for _ in range(count)]


def _most_pairs(room: list[int], gpus: list[int], counts: list[int], pps: list[int]) -> Stages | None:
    best: tuple[int, list[tuple[int, int]]] | None = None
    for packing in _packings(room, gpus, counts):
        found = sum(x * y for x, y in packing), packing
        if best is None or found > best:
            best = found
    if best is None:
        return None
    return [[[k] * pps[pool] for k, held in enumerate(best[1]) for _ in range(held[pool])] for pool in range(2)]


def _packings(room: Sequence[int], gpus: Sequence[int], counts: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    if not room:
        if not any(counts):
            yield []
        return
    for x in range(counts[0] + 1):
        for y in range(counts[1] + 1):
            if x * gpus[0] + y * gpus[1] <= room[0]:
                for rest in _packings(room[1:], gpus, (counts[0] - x, counts[1] - y)):
                    yield [(x, y), *rest]


def crossings(placement: Placement, layers: int) -> list[list[bool]]:
    """Return whether KV of any layer goes to another node, by prefill and decode instance."""
    stages = where(placement)
    if stages is None:
        return [[False] * placement.pools[1].count for _ in range(placement.pools[0].count)]

    def nodes_of_layers(at: list[int]) -> list[int]:
        return [at[layer * len(at) // layers] for layer in range(layers)]

    return [[nodes_of_layers(p) != nodes_of_layers(d) for d in stages[1]] for p in stages[0]]


@dataclass(frozen=True)
class Sending:
    """Steps that also send what they compute from stage to stage: `fixed_s` + `token_s` a computed token."""

    model: LatencyModel
    fixed_s: float
    token_s: float

    @property
    def valid_range(self) -> ValidRange:
        return self.model.valid_range

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        return self.model.prefill_s(chunks) + self.fixed_s + self.token_s * sum(t for t, _ in chunks)

    def decode_s(self, requests: int, context_tokens: int) -> float:
        return self.model.decode_s(requests, context_tokens) + self.fixed_s + self.token_s * requests

    def mixed_s(self, chunks: Sequence[Chunk], requests: int, context_tokens: int) -> float:
        tokens = requests + sum(t for t, _ in chunks)
        return self.model.mixed_s(chunks, requests, context_tokens) + self.fixed_s + self.token_s * tokens

    def decode_line(self, requests: int) -> None:
        return None

    def decode_run_s(self, requests: int, context_tokens: int, steps: int) -> NDArray[np.float64]:
        return np.array([self.decode_s(requests, context_tokens + i * requests) for i in range(steps)])


def step_times(placement: Placement, pool: Pool, profile: Profile) -> LatencyModel:
    """Return the step times of the pool's instances, sends between their stages included."""
    tp, pp = pool.parallelism.tp, pool.parallelism.pp
    stages = where(placement)
    across = 0
    if stages is not None:
        at = stages[placement.pools.index(pool)]
        hops = {sum(a != b for a, b in pairwise(of)) for of in at}
        assert len(hops) == 1, "equal instances are cut alike"
        across = hops.pop()
    if not across:
        return profile.latency_of(Parallelism(tp, pp))
    p2p, network = profile.p2p, profile.gpu.network_bytes_per_s
    node_latency_s, node_rate = p2p.node_latency_s, p2p.node_bandwidth_bytes_per_s
    if (node_latency_s, node_rate) == (PointToPoint().node_latency_s, PointToPoint().node_bandwidth_bytes_per_s):
        node_latency_s, node_rate = 20e-6, 0.8 * network
    token_bytes = profile.model.hidden_size * profile.model.dtype_bytes
    within = pp - 1 - across
    return Sending(
        profile.latency_at(tp),
        within * p2p.latency_s + across * node_latency_s,
        within * token_bytes / p2p.bandwidth_bytes_per_s + across * token_bytes / node_rate,
    )
