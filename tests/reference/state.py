"""Plain state that the reference's instances are made of: requests, KV blocks, pipeline stages, routers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsim.latency import Chunk, HostOverhead
from dsim.pools import Parallelism, Role
from dsim.profile import BatchLimits, Profile

NAN = math.nan


@dataclass(eq=False)
class Request:
    """One request and everything that has happened to it.

    Args:
        prefill_kv: tokens whose blocks it holds on a prefill instance.
        prefill_due_s: when its prefill ends, known from the launch on.
        kv: tokens whose blocks it holds on a decode or colocated instance.
        computed: tokens of its current colocated prefill that are done.
        recompute: it lost its KV and its next step on the decode instance is a prefill.
    """

    id: int
    arrival_s: float
    prompt: int
    output: int
    cached: int = 0
    user: int = -1
    produced: int = 0
    prefill_kv: int = 0
    kv: int = 0
    computed: int = 0
    recompute: bool = False
    prefill_instance: int = -1
    decode_instance: int = -1
    preemptions: int = 0
    rejected: bool = False
    prefill_due_s: float = NAN
    prefill_start_s: float = NAN
    prefill_end_s: float = NAN
    transfer_start_s: float = NAN
    transfer_end_s: float = NAN
    decode_start_s: float = NAN
    token_times: list[float] = field(default_factory=list)

    @property
    def context(self) -> int:
        """Prompt and produced tokens: what its next (or current) decode step attends to."""
        return self.prompt + self.produced

    @property
    def stored(self) -> int:
        """Tokens of KV stored between steps."""
        return max(self.prompt, self.context - 1)

    @property
    def most_kv(self) -> int:
        """The most tokens it ever needs blocks for."""
        return self.prompt + self.output - 1

    @property
    def finished(self) -> bool:
        return self.produced == self.output

    def show_token(self, now: float) -> None:
        assert not self.finished
        assert not self.token_times or now >= self.token_times[-1]
        self.produced += 1
        self.token_times.append(now)

    def __repr__(self) -> str:
        return f"Request({self.id})"


@dataclass(frozen=True)
class StepRecord:
    """One step: which instance (and which of its loops or micro-batches) launched what, and when it ended.

    Args:
        role: the letter of the placement notation.
        index: loop or micro-batch; 0 on a prefill instance.
        launch_s: the instant of launch; host work and swapping come after it.
        end_s: when it left the last stage.
        prefill_ids: requests that computed prompt tokens, in batch order (a decode instance: recomputed).
        decode_ids: requests that decoded, in batch order.
    """

    role: str
    instance: int
    index: int
    launch_s: float
    end_s: float
    prefill_ids: tuple[int, ...]
    decode_ids: tuple[int, ...]


@dataclass(eq=False)
class Step:
    """A step in flight; `chunks` pairs requests with the tokens computed for each."""

    end_s: float
    chunks: list[tuple[Request, int]]
    decodes: list[Request]

    @property
    def prefills(self) -> list[Request]:
        return [request for request, _ in self.chunks]


class KvCache:
    """A count of used blocks. Who holds them is written in the requests, and recounted from there."""

    def __init__(self, *, blocks: int, block_tokens: int) -> None:
        self.capacity = max(blocks, 0)
        self.block_tokens = block_tokens
        self.used = 0

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def change(self, held_tokens: int, wanted_tokens: int) -> int:
        """Count a holder of `held_tokens` as one of `wanted_tokens`, and return the latter."""
        self.used += self.blocks(wanted_tokens) - self.blocks(held_tokens)
        assert 0 <= self.used <= self.capacity, "KV blocks out of range"
        return wanted_tokens

    def missing(self, members: Iterable[Request]) -> int:
        """Blocks that these requests lack for their contexts."""
        return sum(self.blocks(r.context) - self.blocks(r.kv) for r in members)

    def recount(self, held_tokens: Iterable[int]) -> None:
        assert self.used == sum(self.blocks(tokens) for tokens in held_tokens), "KV blocks not conserved"


def decoded_tokens(profile: Profile, parallelism: Parallelism) -> int:
    """Return the tokens of KV that an instance that decodes may hold: memory, and the context that was measured."""
    return int(min(profile.kv_tokens(parallelism), profile.latency_at(parallelism.tp).valid_range.context_tokens))


def host_overhead(profile: Profile, role: Role, pp: int) -> HostOverhead:
    """Return the engine's own overhead of a launch; the KV connector's `step_s` comes on top where there is one."""
    own = profile.host_pipelined if pp > 1 and role in profile.host_pipelined else profile.host
    return own.get(role, HostOverhead())


def cache_blocks(profile: Profile, kv_tokens: int) -> int:
    """Return the blocks of an instance with room for `kv_tokens`."""
    return max(kv_tokens, 0) // profile.block_tokens


class Pipeline:
    """Stages in series, each serving one batch at a time in order of entry."""

    def __init__(self, stages: int) -> None:
        self.left_s = [-math.inf] * stages

    def enter(self, enter_s: float, stage_s: Sequence[float]) -> float:
        """Send a batch through, `stage_s` seconds in each stage, and return when it leaves the last."""
        at_s = enter_s
        for stage, service_s in enumerate(stage_s):
            start_s = max(at_s, self.left_s[stage])
            at_s = start_s + service_s
            assert at_s >= self.left_s[stage]
            self.left_s[stage] = at_s
        return at_s


class Router:
    """Chooses an instance of one pool; knows which requests are routed there and not finished there."""

    def __init__(self, name: str, count: int, generator: np.random.Generator) -> None:
        self.name = name
        self.generator = generator
        self.unfinished: list[list[Request]] = [[] for _ in range(count)]
        self.routed = 0

    def route(self, request: Request) -> int:
        index = self._choose()
        self.routed += 1
        self.unfinished[index].append(request)
        return index

    def finish(self, request: Request, index: int) -> None:
        self.unfinished[index].remove(request)

    def _choose(self) -> int:
        count = len(self.unfinished)
        if self.name == "round-robin":
            return self.routed % count
        if self.name == "join-shortest-queue":
            return min(range(count), key=lambda i: (len(self.unfinished[i]), i))
        if self.name == "least-loaded":
            return min(range(count), key=lambda i: (sum(r.prompt for r in self.unfinished[i]), i))
        if self.name == "power-of-two":
            if count == 1:
                return 0
            a = int(self.generator.integers(count))
            b = int(self.generator.integers(count - 1))
            b += b >= a
            return min((a, b), key=lambda i: (len(self.unfinished[i]), i))
        raise ValueError(f"unknown router {self.name!r}")


def prefix_within(lengths: Sequence[int], limits: BatchLimits) -> int:
    """Return how many of the first prompts make a batch; the first is exempt from the token limit.

    >>> prefix_within([5, 3, 3, 1], BatchLimits(tokens=8)), prefix_within([9, 1], BatchLimits(tokens=8))
    (2, 1)
    """
    taken = tokens = 0
    for length in lengths:
        tokens += length
        if taken and (taken + 1 > limits.requests or tokens > limits.tokens):
            break
        taken += 1
    return taken


def swap_s(profile: Profile, tokens: int, gpus: int) -> float:
    """Seconds to move the KV of `tokens` over the host links of `gpus`."""
    return tokens * profile.model.kv_bytes_per_token / (profile.swap_bytes_per_s * gpus)


def computed_tokens(chunks: Sequence[Chunk]) -> int:
    """Return the tokens computed in all chunks together."""
    return sum(tokens for tokens, _ in chunks)
