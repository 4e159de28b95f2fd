"""Colocated scheduling policies: which prompts and which decodes the next step of an engine loop takes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from dsim.errors import InputError
from dsim.job import Job
from dsim.kv import KvCache, num_blocks
from dsim.pools import Policy
from dsim.profile import BatchLimits
from dsim.running import RunningBatch

#: (request, tokens computed in a step, tokens before them).
JobChunk = tuple[Job, int, int]


class Step:
    """What a loop does next.

    Args:
        chunks: in order.
        decode: whether the running requests decode in it.
    """

    __slots__ = ("chunks", "decode")

    def __init__(self, chunks: Sequence[JobChunk], *, decode: bool) -> None:
        self.chunks = chunks
        self.decode = decode


#: Nothing to do.
IDLE: Final = Step((), decode=False)
#: A decode step of all that runs.
DECODE: Final = Step((), decode=True)


class LoopState:
    """Queues and memory of one engine loop (docs/semantics.md, section 6); no times.

    Args:
        watermark: share of the blocks kept free when a prompt is admitted.
        swaps: preempted requests keep their KV on the host; otherwise they recompute it.
    """

    __slots__ = (
        "kv",
        "limits",
        "partial",
        "preempted",
        "preempted_now",
        "reserve",
        "running",
        "swapped_tokens",
        "swaps",
        "waiting",
    )

    def __init__(self, kv: KvCache, index: int = 0, *, limits: BatchLimits, watermark: float, swaps: bool) -> None:
        self.kv = kv
        self.limits = limits
        self.reserve = math.floor(watermark * kv.capacity)
        self.swaps = swaps
        self.waiting: deque[Job] = deque()
        self.preempted: deque[Job] = deque()
        self.running = RunningBatch(kv, index)
        self.partial: Job | None = None
        #: Requests preempted by the step being formed, and KV tokens swapped for it.
        self.preempted_now: list[Job] = []
        self.swapped_tokens = 0

    def admissible(self, admitted: int) -> bool:
        """Whether the head of `waiting` may start, after `admitted` others in this step."""
        if not self.waiting:
            return False
        others = len(self.running.members) + (self.partial is not None) + admitted
        if others >= self.limits.requests:
            return False
        job = self.waiting[0]
        blocks = num_blocks(job.prompt + job.produced, self.kv.block_tokens) if job.produced else job.prompt_blocks
        return blocks <= self.kv.free - (self.reserve if others else 0)

    def admit(self) -> Job:
        """Remove the head of `waiting` and take the blocks of its whole prompt."""
        job = self.waiting.popleft()
        self.kv.take(num_blocks(job.context, self.kv.block_tokens) if job.produced else job.prompt_blocks)
        return job

    def prepare_decode(self) -> bool:
        """Find the blocks of a decode step, preempting and swapping in; return whether prompts may be admitted."""
        running = self.running
        growth = running.growth()
        while growth > self.kv.free:
            self._preempt()
            growth = running.growth()
        if growth:
            running.reserve()
        if not self.preempted_now:
            while self.preempted and self._swap_in():
                pass
        return not self.preempted and not self.preempted_now

    def _preempt(self) -> None:
        job = self.partial
        if job is not None:
            self.partial = None
            self.kv.release(num_blocks(job.context, self.kv.block_tokens))
            job.computed = 0 if job.produced else job.cached
            self.waiting.appendleft(job)
        else:
            job, stored = self.running.preempt_last()
            if self.swaps:
                self.swapped_tokens += stored
                self.preempted.append(job)
            else:
                job.computed = 0
                self.waiting.appendleft(job)
        self.preempted_now.append(job)

    @property
    def wants_step(self) -> bool:
        """Whether the next step is more than a decode step of what runs, whatever the policy: a chunk or a swap-in."""
        return self.partial is not None or (bool(self.preempted) and self._may_swap_in())

    def _may_swap_in(self) -> bool:
        blocks = num_blocks(self.preempted[0].context, self.kv.block_tokens)
        others = len(self.running) + (self.partial is not None)
        return blocks <= self.kv.free and others < self.limits.requests

    def _swap_in(self) -> bool:
        if not self._may_swap_in():
            return False
        job = self.preempted[0]
        blocks = num_blocks(job.context, self.kv.block_tokens)
        self.preempted.popleft()
        self.kv.take(blocks)
        self.swapped_tokens += job.context - 1
        self.running.join(job, job.context)
        return True

    def whole_prompts(self) -> Sequence[JobChunk]:
        """Admit prompts whole, within the token limit; one over the limit goes alone."""
        if not self.waiting:
            return ()
        chunks: list[JobChunk] = []
        tokens = 0
        while self.admissible(len(chunks)):
            head = self.waiting[0]
            tokens += head.context - head.computed
            if chunks and tokens > self.limits.tokens:
                break
            job = self.admit()
            chunks.append((job, job.context - job.computed, job.computed))
            if tokens > self.limits.tokens:
                break
        return chunks


class SchedulingPolicy(Protocol):
    """Forms the steps of an engine loop."""

    def next_step(self, loop: LoopState) -> Step:
        """Admit, preempt and swap in as the policy has it, and return the next step; `IDLE` if there is none."""
        ...

    def wants_turn(self, loop: LoopState) -> bool:
        """Whether an arrival should end a run of decode steps at the next boundary."""
        ...


class PrefillFirst:
    """Prompts before decodes, in steps of their own (vLLM v0)."""

    def next_step(self, loop: LoopState) -> Step:
        """Prefill whatever is admissible, else decode."""
        if not loop.preempted:
            chunks = loop.whole_prompts()
            if chunks:
                return Step(chunks, decode=False)
        return _decode_step(loop)

    def wants_turn(self, loop: LoopState) -> bool:
        """Whether a prompt could be admitted."""
        return not loop.preempted and loop.admissible(0)


class DecodeFirst:
    """Decodes before prompts: a new batch starts when the last has finished (request-level batching)."""

    def next_step(self, loop: LoopState) -> Step:
        """Decode while anything runs, else prefill."""
        if not loop.running.members and not loop.preempted:
            return _step(loop.whole_prompts(), decode=False)
        return _decode_step(loop)

    def wants_turn(self, loop: LoopState) -> bool:
        """Never: arrivals wait for the batch."""
        return False


class Orca:
    """Prompts join the running batch whole (Orca's iteration-level scheduling)."""

    def next_step(self, loop: LoopState) -> Step:
        """Decode what runs and prefill what is admissible, in one step."""
        chunks = loop.whole_prompts() if _decodes_ready(loop) else ()
        return _step(chunks, decode=len(loop.running.members) > 0)

    def wants_turn(self, loop: LoopState) -> bool:
        """Whether a prompt could be admitted."""
        return not loop.preempted and loop.admissible(0)


class Chunked:
    """A token budget a step: decodes first, then prompt chunks (Sarathi-Serve, vLLM V1)."""

    def __init__(self, token_budget: int) -> None:
        self._token_budget = token_budget

    def next_step(self, loop: LoopState) -> Step:
        """Decode what runs and fill the budget with chunks."""
        may_admit = _decodes_ready(loop)
        decoding = len(loop.running.members)
        chunks: list[JobChunk] = []
        budget = self._token_budget - decoding
        if loop.partial is not None and budget > 0:
            job = loop.partial
            budget -= self._take(loop, chunks, job, budget)
        while may_admit and budget > 0 and loop.partial is None and loop.admissible(len(chunks)):
            job = loop.admit()
            budget -= self._take(loop, chunks, job, budget)
        return _step(chunks, decode=decoding > 0)

    @staticmethod
    def _take(loop: LoopState, chunks: list[JobChunk], job: Job, budget: int) -> int:
        """Give `job` what it needs of the budget; it stays or becomes partial if that is not all."""
        tokens = min(job.context - job.computed, budget)
        chunks.append((job, tokens, job.computed))
        loop.partial = job if job.computed + tokens < job.context else None
        return tokens

    def wants_turn(self, loop: LoopState) -> bool:
        """Whether a prompt could be admitted and has budget left."""
        return not loop.preempted and len(loop.running) < self._token_budget and loop.admissible(0)


def _decodes_ready(loop: LoopState) -> bool:
    """Do step 1 of section 6 where there is something to decode; return whether prompts may be admitted."""
    if loop.running.members or loop.preempted:
        return loop.prepare_decode()
    return True


def _decode_step(loop: LoopState) -> Step:
    _decodes_ready(loop)
    return DECODE if loop.running.members else IDLE


def _step(chunks: Sequence[JobChunk], *, decode: bool) -> Step:
    if chunks:
        return Step(chunks, decode=decode)
    return DECODE if decode else IDLE


def scheduling_policy(policy: Policy, token_budget: int | None) -> SchedulingPolicy:
    """Return the policy object of a colocated pool."""
    if policy is Policy.CHUNKED:
        if token_budget is None:
            raise InputError("placement", "is needed by the chunked policy", name="token_budget")
        return Chunked(token_budget)
    whole: dict[Policy, SchedulingPolicy] = {
        Policy.PREFILL_FIRST: PrefillFirst(),
        Policy.DECODE_FIRST: DecodeFirst(),
        Policy.ORCA: Orca(),
    }
    return whole[policy]
