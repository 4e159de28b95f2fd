"""Section 6 of docs/semantics.md: the colocated instance and its policies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsim.latency import LatencyModel
from dsim.pools import Policy, Pool, Role
from dsim.profile import BatchLimits, Preemption, Profile
from tests.reference.state import (
    KvCache,
    Pipeline,
    Request,
    Step,
    StepRecord,
    cache_blocks,
    computed_tokens,
    decoded_tokens,
    host_overhead,
    swap_s,
)


@dataclass(eq=False)
class Loop:
    """One engine loop: `running` in order of admission, at most one `partial` prompt, `idle_since_s` out of flight."""

    index: int
    cache: KvCache
    waiting: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    partial: Request | None = None
    step: Step | None = None
    idle_since_s: float = 0.0

    def requests(self) -> Iterator[tuple[Request, str]]:
        """Every unfinished request here and its state."""
        yield from ((r, "waiting") for r in self.waiting)
        yield from ((r, "preempted") for r in self.preempted)
        yield from ((r, "running") for r in self.running)
        if self.partial:
            yield self.partial, "partial"
        if self.step:
            yield from ((r, "prefilling") for r in self.step.prefills if r is not self.partial)


def prefill_length(request: Request) -> int:
    """Tokens that its prefill computes: all of its context once it has lost KV it had produced tokens with."""
    return request.context if request.produced else request.prompt - request.cached


def cached_tokens(request: Request) -> int:
    """Tokens in KV before its prefill starts."""
    return 0 if request.produced else request.cached


class ColocatedInstance:
    """`pp` engine loops that share one driver and `pp` stages."""

    def __init__(
        self, *, index: int, pool: Pool, profile: Profile, latency: LatencyModel, log: list[StepRecord]
    ) -> None:
        assert pool.policy is not None
        self.index = index
        self.pp = pool.parallelism.pp
        self.gpus = pool.parallelism.num_gpus
        self.policy = pool.policy
        self.profile = profile
        self.latency = latency
        self.host = host_overhead(profile, Role.COLOCATED, self.pp)
        limits = profile.limits.get(Role.COLOCATED, BatchLimits())
        self.token_limit: float = limits.tokens
        self.request_limit: float = limits.requests
        self.token_budget = pool.token_budget or 0
        if self.policy is Policy.CHUNKED:
            self.request_limit = min(limits.requests, self.token_budget)
        blocks = cache_blocks(profile, decoded_tokens(profile, pool.parallelism)) // self.pp
        self.loops = [Loop(i, KvCache(blocks=blocks, block_tokens=profile.block_tokens)) for i in range(self.pp)]
        self.pipeline = Pipeline(self.pp)
        self.log = log
        #: pp > 1: until when a launch holds the driver; None while none does. (pp = 1: the step does.)
        self.driver_held_until_s: float | None = None
        #: KV tokens swapped out or in since the last launch.
        self.swapped_tokens = 0

    # Events

    def pending_s(self) -> Iterator[float]:
        """Instants at which something here will end."""
        yield from (loop.step.end_s for loop in self.loops if loop.step)
        if self.driver_held_until_s is not None:
            yield self.driver_held_until_s

    def queue(self, request: Request) -> None:
        """Take in a request: it goes to the loop with the fewest unfinished ones."""
        loop = min(self.loops, key=lambda loop: (len(list(loop.requests())), loop.index))
        loop.waiting.append(request)

    def end_steps(self, now: float) -> list[Request]:
        """End what ends now; return the requests that finished."""
        if self.driver_held_until_s is not None and self.driver_held_until_s <= now:
            self.driver_held_until_s = None
        finished = []
        for loop in self.loops:
            if loop.step and loop.step.end_s <= now:
                finished += self._end_step(now, loop, loop.step)
        return finished

    def _end_step(self, now: float, loop: Loop, step: Step) -> list[Request]:
        loop.step = None
        loop.idle_since_s = now
        for request, tokens in step.chunks:
            request.computed += tokens
            if request.computed < prefill_length(request):
                assert request is loop.partial
                continue
            assert request.computed == prefill_length(request)
            request.show_token(now)
            if math.isnan(request.prefill_end_s):
                request.prefill_end_s = now
            loop.running.append(request)
        for request in step.decodes:
            request.show_token(now)
        finished = [r for r in loop.running if r.finished]
        for request in finished:
            loop.running.remove(request)
            self._free(loop, request)
        return finished

    # Launches

    def launch(self, now: float) -> None:
        """Do step 5 of the instant."""
        for loop in sorted(self.loops, key=lambda loop: (loop.idle_since_s, loop.index)):
            if loop.step is None and self.driver_held_until_s is None:
                chunks, decodes = self._compose(loop)
                if chunks or decodes:
                    self._start(now, loop, chunks, decodes)

    def _compose(self, loop: Loop) -> tuple[list[tuple[Request, int]], list[Request]]:
        """Return the prompts (with the tokens to compute) and the decode members of this loop's next step."""
        if self.policy in {Policy.PREFILL_FIRST, Policy.DECODE_FIRST}:
            if not loop.preempted and not (self.policy is Policy.DECODE_FIRST and loop.running):
                chunks = self._admit_whole(loop)
                if chunks:
                    return chunks, []
            self._make_room(loop)
            return [], list(loop.running)
        may_admit = self._make_room(loop)
        decodes = list(loop.running)
        if self.policy is Policy.ORCA:
            return self._admit_whole(loop) if may_admit else [], decodes
        return self._admit_chunks(loop, may_admit=may_admit), decodes

    def _make_room(self, loop: Loop) -> bool:
        """Do 1. (memory and swap-in); return whether something from `waiting` may be admitted in this step."""
        preempted_now = False
        while loop.cache.missing(loop.running) > loop.cache.free:
            self._preempt_last(loop)
            preempted_now = True
        for request in loop.running:
            request.kv = loop.cache.change(request.kv, request.context)
        while (
            not preempted_now
            and loop.preempted
            and loop.cache.missing(loop.preempted[:1]) <= loop.cache.free
            and len(loop.running) + bool(loop.partial) < self.request_limit
        ):
            request = loop.preempted.pop(0)
            request.kv = loop.cache.change(request.kv, request.context)
            self.swapped_tokens += request.stored
            loop.running.append(request)
        return not preempted_now and not loop.preempted

    def _preempt_last(self, loop: Loop) -> None:
        request = loop.partial or loop.running[-1]
        request.preemptions += 1
        request.computed = 0
        self._free(loop, request)
        if request is loop.partial:
            loop.partial = None
            loop.waiting.insert(0, request)
            return
        loop.running.remove(request)
        if self.profile.preemption is Preemption.SWAP:
            self.swapped_tokens += request.stored
            loop.preempted.append(request)
        else:
            loop.waiting.insert(0, request)

    def _admissible(self, loop: Loop, request: Request, occupied: int) -> bool:
        """Whether a prompt may be admitted beside `occupied` running, partial and just admitted requests."""
        kept = math.floor(self.profile.admission_watermark * loop.cache.capacity) if occupied else 0
        return occupied < self.request_limit and loop.cache.missing([request]) <= loop.cache.free - kept

    def _admit(self, loop: Loop) -> Request:
        request = loop.waiting.pop(0)
        request.kv = loop.cache.change(0, request.context)
        return request

    def _admit_whole(self, loop: Loop) -> list[tuple[Request, int]]:
        chunks: list[tuple[Request, int]] = []
        tokens = 0
        while loop.waiting:
            head = loop.waiting[0]
            tokens += prefill_length(head)
            if not self._admissible(loop, head, len(loop.running) + len(chunks)):
                break
            if chunks and tokens > self.token_limit:
                break
            chunks.append((self._admit(loop), prefill_length(head)))
        return chunks

    def _admit_chunks(self, loop: Loop, *, may_admit: bool) -> list[tuple[Request, int]]:
        chunks: list[tuple[Request, int]] = []
        budget = self.token_budget - len(loop.running)
        if loop.partial and budget > 0:
            chunks.append((loop.partial, min(prefill_length(loop.partial) - loop.partial.computed, budget)))
            budget -= chunks[0][1]
        beside = len(loop.running) + bool(loop.partial) - len(chunks)
        while (
            may_admit and budget > 0 and loop.waiting and self._admissible(loop, loop.waiting[0], beside + len(chunks))
        ):
            request = self._admit(loop)
            chunks.append((request, min(prefill_length(request), budget)))
            budget -= chunks[-1][1]
        if chunks:
            last, tokens = chunks[-1]
            loop.partial = last if last.computed + tokens < prefill_length(last) else None
        return chunks

    def _start(self, now: float, loop: Loop, prompts: list[tuple[Request, int]], decodes: list[Request]) -> None:
        chunks = [(tokens, cached_tokens(r) + r.computed) for r, tokens in prompts]
        context_tokens = sum(r.context for r in decodes)
        if not decodes:
            step_s = self.latency.prefill_s(chunks)
        elif not chunks:
            step_s = self.latency.decode_s(len(decodes), context_tokens)
        else:
            step_s = self.latency.mixed_s(chunks, len(decodes), context_tokens)
        host_s = self.host.launch_s(
            len(chunks) + len(decodes),
            computed_tokens(chunks) + context_tokens,
            mixed=bool(chunks and decodes),
        )
        held_s = swap_s(self.profile, self.swapped_tokens, self.gpus) + host_s
        self.swapped_tokens = 0
        end_s = self.pipeline.enter(now + held_s, [step_s / self.pp] * self.pp)
        if self.pp > 1:
            self.driver_held_until_s = now + held_s
        loop.step = Step(end_s, prompts, decodes)
        for request, _ in prompts:
            if math.isnan(request.prefill_start_s):
                request.prefill_start_s = now
        for request in decodes:
            if math.isnan(request.decode_start_s):
                request.decode_start_s = now
        prefill_ids, decode_ids = tuple(r.id for r, _ in prompts), tuple(r.id for r in decodes)
        self.log.append(StepRecord("C", self.index, loop.index, now, end_s, prefill_ids, decode_ids))

    def _free(self, loop: Loop, request: Request) -> None:
        request.kv = loop.cache.change(request.kv, 0)

    # Recount

    def places(self) -> Iterator[tuple[Request, str]]:
        """Every request here and its state."""
        for loop in self.loops:
            yield from loop.requests()

    def check(self) -> None:
        """Recount blocks and batches from the requests' states."""
        for loop in self.loops:
            here = list(loop.requests())
            for request, state in here:
                if state in {"waiting", "preempted"}:
                    assert request.kv == request.computed == 0
                elif state == "running":
                    assert request.context - 1 <= request.kv <= request.context
                else:
                    assert request.kv == request.context
            loop.cache.recount(r.kv for r, _ in here)
            admitted = [r for r, state in here if state in {"running", "partial", "prefilling"}]
            assert len(admitted) <= self.request_limit
            if loop.step:
                assert all(r in loop.running for r in loop.step.decodes)
