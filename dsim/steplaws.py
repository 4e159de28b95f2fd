"""Laws that a step log can show: every batch is recounted from the requests in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from dsim.latency import HostOverhead
from dsim.laws import TOLERANCE_S, BrokenLawError, Facts, Floats, Ints, Law, PrefillBatches, in_turn, never_idle
from dsim.pools import Policy, Role
from dsim.profile import BatchLimits, FirstToken, HandoverMode, Preemption
from dsim.records import StepRecord


def check_steps(facts: Facts, steps: Sequence[StepRecord]) -> None:
    """Verify the logged steps of a run against the laws.

    Raises:
        BrokenLawError: a law is broken.
    """
    by_instance: dict[tuple[str, int], list[StepRecord]] = {}
    for step in steps:
        by_instance.setdefault((step.role, step.instance), []).append(step)
    for log in by_instance.values():
        # Stable: of simultaneous launches the log has the order.
        log.sort(key=lambda step: step.launch_s)
        _in_order(log)
    _tokens(facts, steps)
    _times(facts, by_instance)
    for (role, instance), log in by_instance.items():
        if role == Role.PREFILL.value:
            _prefill_steps(facts, log)
        elif role == Role.DECODE.value:
            _DecodeLog.of(facts, instance, log).check()
        else:
            _colocated_steps(facts, instance, log)


def _name(step: StepRecord) -> str:
    return f"step {step.role}{step.instance}.{step.part} of {step.launch_s:.12g} to {step.end_s:.12g}"


def _in_order(log: Sequence[StepRecord]) -> None:
    """Batches leave the last stage in the order of their launch; a micro-batch or loop has one step at a time."""
    last: dict[int, StepRecord] = {}
    for step in log:
        if not step.launch_s < step.end_s:
            raise BrokenLawError(Law.OVERLAP, f"{_name(step)}: takes no time")
        before = last.get(step.part)
        # The batches of a prefill instance share its stages alone.
        if step.role != Role.PREFILL.value and before is not None and step.launch_s < before.end_s:
            raise BrokenLawError(Law.OVERLAP, f"{_name(step)}: before the end of {_name(before)}")
        last[step.part] = step
    for before, step in pairwise(log):
        if step.end_s <= before.end_s:
            raise BrokenLawError(Law.OVERLAP, f"{_name(step)}: overtakes {_name(before)}")


# Requests and tokens


def _tokens(facts: Facts, steps: Iterable[StepRecord]) -> None:
    """The steps a finished request takes part in produce its tokens, each once."""
    prefills: Counter[int] = Counter()
    recomputed: Counter[int] = Counter()
    decoded: Counter[int] = Counter()
    for step in steps:
        members = step.prefill + step.decode
        if len(set(members)) < len(members):
            raise BrokenLawError(Law.REQUESTS, f"{_name(step)}: a request takes part twice in {members}")
        (recomputed if step.role == Role.DECODE.value else prefills).update(step.prefill)
        decoded.update(step.decode)
    chunked = facts.colocated and facts.result.placement.pools[0].policy is Policy.CHUNKED
    swaps = facts.colocated and facts.pool(Role.COLOCATED)[1].preemption is Preemption.SWAP
    shown_before = 0 if facts.colocated or facts.shown is FirstToken.DECODE else 1
    outputs = np.ones_like(facts["output_tokens"]) if facts.prefill_only else facts["output_tokens"]
    for i in np.flatnonzero(facts.finished).tolist():
        tokens, once = int(outputs[i]), prefills[i]
        if chunked:
            by_prefill = tokens - decoded[i]
            most = 1 if swaps else 1 + int(facts["preemptions"][i])
            right = 1 <= by_prefill <= min(most, once)
        elif facts.colocated:
            right = once + decoded[i] == tokens
        else:
            right = once == (not facts.decode_only) and shown_before + recomputed[i] + decoded[i] == tokens
        if not right:
            raise BrokenLawError(
                Law.TOKENS,
                f"request {i}: {tokens} tokens of {once} prefill, {recomputed[i]} recompute, {decoded[i]} decode steps",
            )


def _times(facts: Facts, by_instance: dict[tuple[str, int], list[StepRecord]]) -> None:
    """The columns have the times of the steps: first launches and last ends, at the instance where they happened."""
    first_prefill: dict[int, StepRecord] = {}
    first_decode: dict[int, StepRecord] = {}
    first_here: dict[int, StepRecord] = {}
    last: dict[int, StepRecord] = {}
    for (role, _), log in by_instance.items():
        for step in log:
            for i in step.prefill:
                if role != Role.DECODE.value:
                    first_prefill.setdefault(i, step)
            for i in step.decode:
                first_decode.setdefault(i, step)
            for i in step.prefill + step.decode:
                if role == Role.DECODE.value:
                    first_here.setdefault(i, step)
                if i not in last or step.end_s > last[i].end_s:
                    last[i] = step
    for steps, name, place in (
        (first_prefill, "prefill_start_s", "prefill_instance"),
        (first_decode, "decode_start_s", "decode_instance"),
    ):
        times_s, where = facts[name], facts[place]
        for i, step in steps.items():
            if times_s[i] != step.launch_s or where[i] != step.instance:
                raise BrokenLawError(
                    Law.CAUSALITY,
                    f"request {i}: {name} {times_s[i]:.12g} at {place} {where[i]} is not that of {_name(step)}",
                )
    if facts.shown is FirstToken.DECODE:
        first_s = facts["first_token_s"]
        for i, step in first_here.items():
            if step.end_s != first_s[i] and facts.finished[i]:
                raise BrokenLawError(
                    Law.CAUSALITY, f"request {i}: first_token_s is {first_s[i]:.12g}, its first step {_name(step)}"
                )
    last_s = facts["last_token_s"]
    ends_elsewhere = facts["output_tokens"] == 1
    for i in np.flatnonzero(facts.finished & ~(ends_elsewhere & (facts.shown is FirstToken.TRANSFER_END))).tolist():
        if i in last and last[i].end_s != last_s[i]:
            raise BrokenLawError(
                Law.CAUSALITY, f"request {i}: last_token_s is {last_s[i]:.12g}, its last step {_name(last[i])}"
            )


# Prefill instances


def _prefill_steps(facts: Facts, log: Sequence[StepRecord]) -> None:
    """Stages take the model's time and serve one batch at a time."""
    pool, profile = facts.pool(Role.PREFILL)
    pp = pool.parallelism.pp
    host, latency = profile.host_of(Role.PREFILL, pp), profile.latency_of(pool.parallelism)
    batches = PrefillBatches.of(facts, log[0].instance)
    lengths = (facts["prompt_tokens"] - facts["cached_prompt_tokens"]).tolist()
    cached = facts["cached_prompt_tokens"].tolist()
    free_s: list[float] = []
    left_s = 0.0
    for number, step in enumerate(log):
        if step.prefill != tuple(batches.batch(number).tolist()) or step.decode:
            raise BrokenLawError(Law.TOKENS, f"{_name(step)}: prefills {step.prefill}, the columns say otherwise")
        chunks = [(lengths[i], cached[i]) for i in step.prefill]
        stage_s = latency.prefill_s(chunks) / pp
        first_s = host.launch_s(len(chunks), sum(tokens for tokens, _ in chunks)) + stage_s
        least_s = max(step.launch_s + first_s + (pp - 1) * stage_s, left_s + stage_s)
        if step.end_s < least_s - TOLERANCE_S or (pp == 1 and step.end_s > least_s + TOLERANCE_S):
            raise BrokenLawError(Law.OVERLAP, f"{_name(step)}: its stages need until {least_s:.12g}")
        if free_s and step.launch_s < free_s[-1] - TOLERANCE_S:
            raise BrokenLawError(Law.OVERLAP, f"{_name(step)}: the first stage is taken until {free_s[-1]:.12g}")
        free_s.append(step.launch_s + first_s)
        left_s = step.end_s
    never_idle(facts, batches, free_s=np.array(free_s))


# Decode instances


@dataclass(frozen=True, slots=True)
class _DecodeStep:
    """A decode step, recounted.

    Args:
        context: total of its members.
        blocks: KV blocks of its members.
        host_s: driver time without swapping.
        stage_s: time in each stage.
    """

    record: StepRecord
    context: int
    blocks: int
    host_s: float
    stage_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeLog:
    """The steps of one decode instance in order of launch."""

    facts: Facts
    instance: int
    pp: int
    steps: tuple[_DecodeStep, ...]

    @classmethod
    def of(cls, facts: Facts, instance: int, log: Sequence[StepRecord]) -> _DecodeLog:
        """Return the recounted log."""
        pool, profile = facts.pool(Role.DECODE)
        pp = pool.parallelism.pp
        latency = profile.latency_of(pool.parallelism)
        hosts: tuple[HostOverhead, HostOverhead] = (profile.host_of(Role.DECODE, pp), profile.host_of(Role.PREFILL, pp))
        # Context of each request's next step here.
        contexts = (facts["prompt_tokens"] + (0 if facts.shown is FirstToken.DECODE else 1)).tolist()
        steps = []
        for record in log:
            members = record.decode or record.prefill
            each = [contexts[i] for i in members]
            for i in members:
                contexts[i] += 1
            context, size = sum(each), profile.block_tokens
            if record.decode:
                kernel_s, host = latency.decode_s(len(each), context), hosts[0]
            else:
                kernel_s, host = latency.prefill_s([(tokens, 0) for tokens in each]), hosts[1]
            blocks = sum(-(-tokens // size) for tokens in each)
            steps.append(_DecodeStep(record, context, blocks, host.launch_s(len(each), context), kernel_s / pp))
        return cls(facts, instance, pp, tuple(steps))

    def check(self) -> None:
        """Verify the laws of a decode instance."""
        self._capacity()
        self._stages()
        self._postings()
        self._turns()
        self._work()

    def _capacity(self) -> None:
        facts = self.facts
        limits, prefill = facts.limits(Role.DECODE), facts.pool(Role.DECODE)[1].limits.get(Role.PREFILL, BatchLimits())
        capacity = facts.result.kv_blocks[Role.DECODE]
        in_flight: dict[int, _DecodeStep] = {}
        for step in self.steps:
            record = step.record
            members = len(record.decode) + len(record.prefill)
            most = limits.requests if record.decode else min(limits.requests, prefill.requests)
            if members > most or bool(record.decode) == bool(record.prefill):
                raise BrokenLawError(
                    Law.CAPACITY,
                    f"{_name(record)}: decodes {len(record.decode)}, recomputes {len(record.prefill)}, limit {most:g}",
                )
            if len(record.prefill) > 1 and step.context > prefill.tokens:
                raise BrokenLawError(
                    Law.CAPACITY, f"{_name(record)}: recomputes {step.context} tokens, limit {prefill.tokens:g}"
                )
            in_flight[record.part] = step
            blocks = sum(other.blocks for other in in_flight.values() if other.record.end_s > record.launch_s)
            if blocks > capacity:
                raise BrokenLawError(Law.CAPACITY, f"{_name(record)}: {blocks} blocks in flight, capacity {capacity}")

    def _stages(self) -> None:
        """The driver starts one batch at a time, the stages serve one at a time, and both take the model's time."""
        left_s = 0.0
        for before, step in zip((None, *self.steps), self.steps, strict=False):
            record = step.record
            least_s = max(record.launch_s + step.host_s + self.pp * step.stage_s, left_s + step.stage_s)
            if record.end_s < least_s - TOLERANCE_S:
                raise BrokenLawError(Law.OVERLAP, f"{_name(record)}: its stages need until {least_s:.12g}")
            if before is not None and record.launch_s < before.record.launch_s + before.host_s - TOLERANCE_S:
                raise BrokenLawError(
                    Law.OVERLAP, f"{_name(record)}: the driver is held {before.host_s:.9g} s by {_name(before.record)}"
                )
            left_s = record.end_s

    @property
    def _launch_s(self) -> Floats:
        return np.array([step.record.launch_s for step in self.steps])

    def _pulled(self) -> Ints:
        """Return the requests that were pulled to this instance."""
        return np.flatnonzero(
            (self.facts["decode_instance"] == self.instance) & ~np.isnan(self.facts["transfer_start_s"])
        )

    def _pending_s(self) -> Floats:
        """Return the driver time of posting pulls that each launch pays for, at most.

        When a pull was posted is not on record: not before its handover, and not after its transfer began.
        """
        posted_s = self._posting_s(self._launch_s, "handover", side="right")
        paid_s = self._posting_s(np.concatenate([[-np.inf], self._launch_s[:-1]]), "transfer", side="left")
        pending_s: Floats = posted_s - paid_s
        return pending_s

    def _posting_s(
        self, until_s: Floats, since: Literal["handover", "transfer"], *, side: Literal["left", "right"]
    ) -> Floats:
        """Return the driver time of posting the pulls handed over, or begun, before each instant; `right`: or at it."""
        facts, rows, handover = self.facts, self._pulled(), self.facts.handover
        post_s = handover.post_s + handover.post_block_s * facts.blocks(facts["prompt_tokens"][rows], Role.DECODE)
        since_s = facts.handed_over_s[rows] if since == "handover" else facts["transfer_start_s"][rows]
        order = np.argsort(since_s)
        sums = np.concatenate([[0.0], np.cumsum(post_s[order])])
        found: Floats = sums[np.searchsorted(since_s[order], until_s, side=side)]
        return found

    def _postings(self) -> None:
        """Posting a pull holds the driver at the next launch; but for swaps nothing else makes a step longer."""
        facts, steps = self.facts, self.steps
        swaps = facts.pool(Role.DECODE)[1].preemption is Preemption.SWAP
        hold_s = np.array(
            [step.record.end_s - step.record.launch_s - step.host_s - self.pp * step.stage_s for step in steps]
        )
        if self.pp == 1 and not (swaps and np.any(facts["preemptions"][self._pulled()])):
            pending_s = self._pending_s()
            bad = hold_s > pending_s + TOLERANCE_S
            if bad.any():
                k = int(np.argmax(bad))
                raise BrokenLawError(
                    Law.OVERLAP,
                    f"{_name(steps[k].record)}: takes {hold_s[k]:.9g} s longer than its host work and kernels, posting "
                    f"pulls {pending_s[k]:.9g} s at most",
                )
        host_s = np.array([step.host_s for step in steps])
        hold_s[:-1] = np.minimum(hold_s[:-1], np.diff(self._launch_s) - host_s[:-1])
        needed_s = self._posting_s(self._launch_s, "transfer", side="left")
        bad = np.cumsum(hold_s) < needed_s - TOLERANCE_S * np.arange(1, len(steps) + 1)
        if bad.any():
            k = int(np.argmax(bad))
            raise BrokenLawError(
                Law.OVERLAP,
                f"{_name(steps[k].record)}: posting the pulls before it takes {needed_s[k]:.9g} s, the launches up to "
                f"it leave {np.cumsum(hold_s)[k]:.9g} s",
            )

    def _turns(self) -> None:
        """Pulls that wait for the driver's turn are posted only then; those that stall it hold it to their end."""
        facts, handover = self.facts, self.facts.handover
        stalls = handover.stalls_decode
        if not stalls and handover.mode is not HandoverMode.PULL_AT_STEP:
            return
        starts_s, ends_s = facts["transfer_start_s"], facts["transfer_end_s"]
        freed = _port_ends(facts)
        launch_s = self._launch_s
        step_ends_s = np.array([step.record.end_s for step in self.steps])
        for i in self._pulled().tolist():
            start_s = float(starts_s[i])
            begun = int(np.searchsorted(launch_s, start_s))
            later = int(np.searchsorted(launch_s, start_s, side="right"))
            if stalls and later < np.searchsorted(launch_s, ends_s[i]):
                raise BrokenLawError(
                    Law.OVERLAP, f"{_name(self.steps[later].record)}: the driver waits for the pull of request {i}"
                )
            if freed.get(start_s, set()) - {i}:
                # It waited for a port: when it was posted is not on record.
                continue
            in_flight = begun - int(np.searchsorted(step_ends_s, start_s, side="right"))
            driver_s = launch_s[begun - 1] + self.steps[begun - 1].host_s if begun and self.pp > 1 else 0.0
            if in_flight >= self.pp or start_s < driver_s - TOLERANCE_S:
                raise BrokenLawError(
                    Law.CAUSALITY,
                    f"request {i}: pulled at {start_s:.12g}, amid {_name(self.steps[begun - 1].record)}, when the "
                    "driver has no turn",
                )

    def _work(self) -> None:
        """A micro-batch that is ready is launched as soon as the driver is free, unless the driver waits for a pull."""
        facts, last = self.facts, dict[int, StepRecord]()
        here = facts["decode_instance"] == self.instance
        transfer_ends_s = set(facts["transfer_end_s"][here].tolist())
        stalls = facts.handover.stalls_decode
        preempted = facts["preemptions"] > 0
        # Swaps hold the driver for longer than the log tells.
        known_driver = self.pp == 1 or not bool(np.any(preempted & here))
        staying: set[int] = set(np.flatnonzero(here & ~preempted).tolist())
        pending_s = self._pending_s().tolist()
        before: _DecodeStep | None = None
        for number, step in enumerate(self.steps):
            record = step.record
            launch_s, previous = record.launch_s, last.get(record.part)
            last[record.part] = record
            driver_s = 0.0 if before is None else before.record.launch_s + before.host_s + pending_s[number - 1]
            ended_s = 0.0 if before is None else before.record.end_s
            before = step
            if launch_s in transfer_ends_s and (stalls or previous is None):
                continue
            if self.pp == 1 and launch_s != ended_s and launch_s not in transfer_ends_s:
                raise BrokenLawError(
                    Law.WORK, f"{_name(record)}: launched for no reason, the step before ended at {ended_s:.12g}"
                )
            if previous is None or not known_driver or not staying.intersection(previous.decode, record.decode):
                continue
            ready_s = previous.end_s if self.pp == 1 else max(previous.end_s, driver_s)
            if launch_s > ready_s + TOLERANCE_S:
                raise BrokenLawError(Law.WORK, f"{_name(record)}: could be launched at {ready_s:.12g}")


def _port_ends(facts: Facts) -> dict[float, set[int]]:
    """Return the requests whose transfers leave their ports at an instant."""
    ends: dict[float, set[int]] = {}
    known = np.flatnonzero(~np.isnan(facts["transfer_end_s"]))
    for i, end_s in zip(known.tolist(), facts["transfer_end_s"][known].tolist(), strict=True):
        ends.setdefault(end_s, set()).add(i)
    return ends


# Colocated instances


def _colocated_steps(facts: Facts, instance: int, log: Sequence[StepRecord]) -> None:
    parts: dict[int, list[StepRecord]] = {}
    for step in log:
        parts.setdefault(step.part, []).append(step)
    for steps in parts.values():
        _loop_capacity(facts, steps)
        if len(parts) > 1:
            _loop_order(facts, steps)
    _busy_while_needed(facts, instance, log)


def _loop_capacity(facts: Facts, steps: Sequence[StepRecord]) -> None:
    """Batch limits, and at least the blocks of those who take part."""
    pool, profile = facts.pool(Role.COLOCATED)
    limits, chunked = facts.limits(Role.COLOCATED), pool.policy is Policy.CHUNKED
    capacity = facts.result.kv_blocks[Role.COLOCATED] // pool.parallelism.pp
    prompts = facts["prompt_tokens"].tolist()
    cached = facts["cached_prompt_tokens"].tolist()
    produced: Counter[int] = Counter()
    for step in steps:
        members = len(step.prefill) + len(step.decode)
        lengths = [prompts[i] + produced[i] - (0 if produced[i] else cached[i]) for i in step.prefill]
        tokens = sum(lengths)
        over = not chunked and len(lengths) > 1 and tokens > limits.tokens
        if members > limits.requests or over:
            raise BrokenLawError(
                Law.CAPACITY,
                f"{_name(step)}: {members} requests of {limits.requests:g}, {tokens} tokens of {limits.tokens:g}",
            )
        size = profile.block_tokens
        # Which chunk ends a prompt is not logged, so under `chunked` recomputed tokens are left out.
        blocks = sum(-(-(prompts[i] + (0 if chunked else produced[i])) // size) for i in step.prefill)
        blocks += sum(-(-(prompts[i] + produced[i]) // size) for i in step.decode)
        if blocks > capacity:
            raise BrokenLawError(Law.CAPACITY, f"{_name(step)}: {blocks} KV blocks in the step, capacity {capacity}")
        produced.update(step.decode)
        for i in step.prefill:
            if not chunked or not produced[i]:
                produced[i] += 1


def _loop_order(facts: Facts, steps: Sequence[StepRecord]) -> None:
    """First prefills of one engine loop are in order of arrival."""
    members = sorted({i for step in steps for i in step.prefill})
    in_turn(facts, np.array(members, dtype=np.int64), name="prefill_start_s", place="prefill_instance")


def _idle(log: Sequence[StepRecord]) -> Iterator[tuple[float, StepRecord]]:
    """Yield from when an instance has had no step in flight, and the step that ended this."""
    until_s = 0.0
    for step in log:
        if step.launch_s > until_s:
            yield until_s, step
        until_s = max(until_s, step.end_s)


def _busy_while_needed(facts: Facts, instance: int, log: Sequence[StepRecord]) -> None:
    """While a request is queued or runs, some step is in flight: the oldest request always fits."""
    rows = np.flatnonzero((facts["prefill_instance"] == instance) & facts.served)
    queued_s: Floats = facts.queued_s[rows]
    gone_s: Floats = np.where(np.isnan(facts["last_token_s"][rows]), np.inf, facts["last_token_s"][rows])
    left_s = np.sort(gone_s)
    for since_s, step in _idle(log):
        # Those queued before the launch minus those gone when the idleness began: routed in order of arrival.
        waiting = int(np.searchsorted(queued_s, step.launch_s)) - int(np.searchsorted(left_s, since_s, side="right"))
        if waiting > 0:
            late: Ints = rows[(queued_s < step.launch_s) & (gone_s > since_s)]
            raise BrokenLawError(
                Law.WORK, f"{_name(step)}: nothing in flight since {since_s:.12g} while request {late[0]} is waiting"
            )
