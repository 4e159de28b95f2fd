"""Colocated scheduling policies: which prompts and which decodes the next step of an engine loop takes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from dsim.errors import InputError
from dsim.job import Job
from dsim.kv import KvCache, num_blocks
from dsim.pools import Policy
from dsim.profile import BatchLimits
from dsim.running import RunningBatch


@dataclass(slots=True)
class Step:
    """What a loop does next.

    Args:
        chunks: (request, tokens computed in this step, tokens before them), in order.
        decode: whether the running requests decode in it.
    """

    chunks: list[tuple[Job, int, int]] = field(default_factory=list)
    decode: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.chunks and not self.decode


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
        others = len(self.running) + (self.partial is not None) + admitted
        if others >= self.limits.requests:
            return False
        reserve = self.reserve if others else 0
        return num_blocks(self.waiting[0].context, self.kv.block_tokens) <= self.kv.free - reserve

    def admit(self) -> Job:
        """Remove the head of `waiting` and take the blocks of its whole prompt."""
        job = self.waiting.popleft()
        self.kv.take(num_blocks(job.context, self.kv.block_tokens))
        return job

    def prepare_decode(self) -> bool:
        """Find the blocks of a decode step, preempting and swapping in; return whether prompts may be admitted."""
        running = self.running
        while running.growth() > self.kv.free:
            self._preempt()
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

    def whole_prompts(self) -> list[tuple[Job, int, int]]:
        """Admit prompts whole, within the token limit; one over the limit goes alone."""
        chunks: list[tuple[Job, int, int]] = []
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
        """Admit, preempt and swap in as the policy has it, and return the next step (empty: nothing to do)."""
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
                return Step(chunks)
        return _decode_step(loop)

    def wants_turn(self, loop: LoopState) -> bool:
        """Whether a prompt could be admitted."""
        return not loop.preempted and loop.admissible(0)


class DecodeFirst:
    """Decodes before prompts: a new batch starts when the last has finished (request-level batching)."""

    def next_step(self, loop: LoopState) -> Step:
        """Decode while anything runs, else prefill."""
        if not len(loop.running) and not loop.preempted:
            return Step(loop.whole_prompts())
        return _decode_step(loop)

    def wants_turn(self, loop: LoopState) -> bool:
        """Never: arrivals wait for the batch."""
        return False


class Orca:
    """Prompts join the running batch whole (Orca's iteration-level scheduling)."""

    def next_step(self, loop: LoopState) -> Step:
        """Decode what runs and prefill what is admissible, in one step."""
        chunks = loop.whole_prompts() if _decodes_ready(loop) else []
        return Step(chunks, decode=len(loop.running) > 0)

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
        step = Step(decode=len(loop.running) > 0)
        budget = self._token_budget - len(loop.running)
        if loop.partial is not None and budget > 0:
            job = loop.partial
            budget -= self._take(loop, step, job, budget)
        while may_admit and budget > 0 and loop.partial is None and loop.admissible(len(step.chunks)):
            job = loop.admit()
            budget -= self._take(loop, step, job, budget)
        return step

    @staticmethod
    def _take(loop: LoopState, step: Step, job: Job, budget: int) -> int:
        """Give `job` what it needs of the budget; it stays or becomes partial if that is not all."""
        tokens = min(job.context - job.computed, budget)
        step.chunks.append((job, tokens, job.computed))
        loop.partial = job if job.computed + tokens < job.context else None
        return tokens

    def wants_turn(self, loop: LoopState) -> bool:
        """Whether a prompt could be admitted and has budget left."""
        return not loop.preempted and len(loop.running) < self._token_budget and loop.admissible(0)


def _decodes_ready(loop: LoopState) -> bool:
    """Do step 1 of section 6 where there is something to decode; return whether prompts may be admitted."""
    if len(loop.running) or loop.preempted:
        return loop.prepare_decode()
    return True


def _decode_step(loop: LoopState) -> Step:
    _decodes_ready(loop)
    return Step(decode=len(loop.running) > 0)


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
