"""Laws that hold for every run, whatever the placement and the workload."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InternalError
from dsim.metrics import weighted_sum
from dsim.pools import Pool, Role
from dsim.profile import BatchLimits, FirstToken, Handover, HandoverMode, Preemption, Profile

if TYPE_CHECKING:
    from dsim.result import Result

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Differences between times that are sums in another order, seconds; horizons go up to 1e5 s.
TOLERANCE_S = 1e-9


class Law(enum.Enum):
    """What must hold; the value says it in words."""

    REQUESTS = "requests are conserved"
    TOKENS = "tokens are conserved"
    CAUSALITY = "causes precede effects"
    CAPACITY = "capacity is never exceeded"
    OVERLAP = "steps of an instance never overlap"
    LITTLE = "Little's law"
    PORTS = "transfers on one port never overlap"
    WORK = "an instance idles only if no queued request passes its admission rule"
    FCFS = "first come, first served"


class BrokenLawError(InternalError):
    """A result breaks a law: a bug in dsim, never in its input."""

    def __init__(self, law: Law, detail: str) -> None:
        self.law = law
        self.detail = detail
        super().__init__(f"broken law '{law.value}': {detail}")


def check_laws(result: Result) -> None:
    """Verify a result against the laws of the design, and every step too where they were logged.

    Raises:
        BrokenLawError: a law is broken; names the law, who broke it and the numbers.
    """
    facts = Facts.of(result)
    _requests_conserved(facts)
    _causality(facts)
    _tokens_conserved(facts)
    _littles_law(facts)
    _capacity(facts)
    _transfers(facts)
    _first_come_first_served(facts)
    if Role.PREFILL in result.kv_blocks:
        _prefill_instances(facts)
    if result.steps is not None:
        from dsim.steplaws import check_steps

        check_steps(facts, result.steps)


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What the laws ask of a result.

    Args:
        queued_s: instant at which each request joins a queue.
        served: whether each request was not rejected.
        finished: whether each request has its last token.
        shown: which event shows token 1; None where the phases are not coupled by a handover.
    """

    result: Result
    queued_s: Floats
    served: Bools
    finished: Bools
    shown: FirstToken | None

    @classmethod
    def of(cls, result: Result) -> Facts:
        """Return the facts of a result."""
        columns = result.columns
        front = result.profiles[result.placement.pools[0].role]
        coupled = not result.placement.is_colocated and result.phase is None
        return cls(
            result=result,
            queued_s=columns["arrival_s"] + front.request_s,
            served=~columns["rejected"],
            finished=~np.isnan(columns["last_token_s"]),
            shown=result.profiles[Role.DECODE].handover.first_token_from if coupled else None,
        )

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.result.columns[name]

    @property
    def colocated(self) -> bool:
        """Whether the instances run both phases."""
        return self.result.placement.is_colocated

    @property
    def prefill_only(self) -> bool:
        """Whether requests end with their prefill."""
        return self.result.phase is Role.PREFILL

    @property
    def decode_only(self) -> bool:
        """Whether requests arrive with their prompt's KV and first token."""
        return self.result.phase is Role.DECODE

    @property
    def handover(self) -> Handover:
        """How KV gets to the decode side of a disaggregated placement."""
        return self.result.profiles[Role.DECODE].handover

    @property
    def layer_wise(self) -> bool:
        """Whether KV follows the prefill, so that transfers start before it ends."""
        return self.handover.mode is HandoverMode.LAYER_WISE and not self.decode_only

    @property
    def instants_repeat(self) -> bool:
        """Whether prompts may be pulled at an instant whose prefills have been launched already.

        After the launches, layer-wise handovers follow, and ends of driver holds that take no time.
        """
        if self.colocated or self.prefill_only:
            return False
        return self.layer_wise or self.result.placement.pool(Role.DECODE).parallelism.pp > 1

    @property
    def handed_over_s(self) -> Floats:
        """Instant at which the decode side hears of each request that goes there, shape (n,)."""
        if self.layer_wise:
            return self["prefill_start_s"]
        hop_s = 0.0 if self.decode_only else self.handover.hop_s
        ready_s: Floats = self["prefill_end_s"] + hop_s
        return ready_s

    @property
    def to_decode(self) -> Bools:
        """Which served requests go to the decode side of a disaggregated placement, shape (n,)."""
        if self.colocated or self.prefill_only:
            return np.zeros(len(self.served), dtype=bool)
        if self.decode_only or self.shown is FirstToken.PREFILL:
            return self.served & (self["output_tokens"] > 1)
        return self.served

    @property
    def recomputed(self) -> Bools:
        """Which requests may have got tokens from a recomputation instead of a decode step, shape (n,)."""
        role = Role.COLOCATED if self.colocated else Role.DECODE
        recomputes = self.result.profiles[role].preemption is Preemption.RECOMPUTE
        return (self["preemptions"] > 0) & recomputes

    def pool(self, role: Role) -> tuple[Pool, Profile]:
        """Return the pool of a role and its profile."""
        return self.result.placement.pool(role), self.result.profiles[role]

    def limits(self, role: Role) -> BatchLimits:
        """Return what bounds a batch of this role: the engine, the options, and the valid range of the profile."""
        pool, profile = self.pool(role)
        limits, options = profile.limits.get(role, BatchLimits()), self.result.options
        tokens, requests = limits.tokens, limits.requests
        limit = options.prefill_token_limit_at(pool.parallelism.tp)
        if role is Role.PREFILL and limit is not None:
            tokens = limit
        if not options.extrapolate:
            valid = profile.latency_at(pool.parallelism.tp).valid_range
            tokens = min(tokens, valid.prefill_tokens)
            if role is not Role.PREFILL:
                requests = min(requests, valid.decode_requests)
        if pool.token_budget is not None:
            requests = min(requests, pool.token_budget)
        return BatchLimits(tokens, requests)

    def blocks(self, tokens: Ints, role: Role) -> Ints:
        """Return the KV blocks that hold so many tokens."""
        return -(-tokens // self.result.profiles[role].block_tokens)

    def forbid(self, law: Law, broken: Bools, says: str, *values: NDArray[Any]) -> None:
        """Raise for the first request that breaks a law.

        Args:
            broken: shape (n,).
            says: the detail, with a place to format for each of `values`, shape (n,), at that request.
        """
        if broken.any():
            row = int(np.argmax(broken))
            raise BrokenLawError(law, f"request {row}: {says.format(*(value[row] for value in values))}")


# Requests and tokens


def _requests_conserved(facts: Facts) -> None:
    """Every request is served to the end, or rejected because it can never fit; the rejected leave no trace."""
    rejected = ~facts.served
    for name in ("prefill_start_s", "first_token_s", "last_token_s", "transfer_start_s", "decode_start_s"):
        times = facts[name]
        facts.forbid(Law.REQUESTS, rejected & ~np.isnan(times), f"rejected, but {name} is {{:.9g}}", times)
    if facts.result.drained:
        unserved = facts.served & ~facts.finished
        facts.forbid(Law.REQUESTS, unserved, "neither finished nor rejected when the run ended")
    capacity = " and ".join(f"{blocks} in {role.value}" for role, blocks in facts.result.kv_blocks.items())
    facts.forbid(
        Law.REQUESTS,
        _never_fits(facts) != rejected,
        f"rejected is {{}} with {{}} prompt and {{}} output tokens; KV blocks: {capacity}",
        rejected,
        facts["prompt_tokens"],
        facts["output_tokens"],
    )


def _never_fits(facts: Facts) -> Bools:
    prompts, outputs = facts["prompt_tokens"], facts["output_tokens"]
    capacity = facts.result.kv_blocks
    if facts.colocated:
        pool, _ = facts.pool(Role.COLOCATED)
        per_loop = capacity[Role.COLOCATED] // pool.parallelism.pp
        return facts.blocks(prompts + outputs - 1, Role.COLOCATED) > per_loop
    never = np.zeros(len(prompts), dtype=bool)
    if Role.PREFILL in capacity:
        never |= facts.blocks(prompts, Role.PREFILL) > capacity[Role.PREFILL]
    if Role.DECODE in capacity:
        ends_early = facts.result.profiles[Role.DECODE].handover.first_token_from is FirstToken.PREFILL
        reaches = (outputs > 1) | (not ends_early)
        never |= reaches & (facts.blocks(prompts + outputs - 1, Role.DECODE) > capacity[Role.DECODE])
    return never


def _tokens_conserved(facts: Facts) -> None:
    """Each output token after the first closes one gap."""
    gaps = facts.result.gaps
    if gaps is None:
        return
    counted = int(np.sum(np.array(gaps.weight, dtype=np.int64)))
    counted += int(np.dot(np.array(gaps.run_steps, dtype=np.int64), np.array(gaps.run_weight, dtype=np.int64)))
    later = np.zeros(len(facts.served), dtype=np.int64) if facts.prefill_only else facts["output_tokens"] - 1
    least = int(later[facts.finished].sum())
    most = least if facts.result.drained else int(later[facts.served].sum())
    if not least <= counted <= most:
        raise BrokenLawError(
            Law.TOKENS, f"{counted} gaps between tokens, where requests have {least} to {most} tokens after their first"
        )


# Causality


def _causality(facts: Facts) -> None:
    """Every request goes through its stages in order, and has token 1 from the event that the handover names."""
    queued_s, start_s, end_s = facts.queued_s, facts["prefill_start_s"], facts["prefill_end_s"]
    _precedes(facts, ("queued", queued_s), ("prefill_start_s", start_s))
    if not facts.decode_only:
        _precedes(facts, ("prefill_start_s", start_s), ("prefill_end_s", end_s), strictly=True)
    orders: list[tuple[str, ...]] = [("prefill_start_s", "prefill_end_s", "decode_start_s")]
    if not facts.colocated and not facts.prefill_only:
        _precedes(facts, ("handover", facts.handed_over_s), ("transfer_start_s", facts["transfer_start_s"]))
        handed_over = "prefill_start_s" if facts.layer_wise else "prefill_end_s"
        orders = [
            ("prefill_start_s", "prefill_end_s", "transfer_end_s", "decode_start_s"),
            (handed_over, "transfer_start_s", "transfer_end_s"),
        ]
    for order in orders:
        for before, after in pairwise(order):
            _precedes(facts, (before, facts[before]), (after, facts[after]))
            facts.forbid(
                Law.CAUSALITY,
                np.isnan(facts[before]) & ~np.isnan(facts[after]),
                f"{after} is {{:.9g}} without a {before}",
                facts[after],
            )
    last_s = facts["last_token_s"]
    _precedes(facts, ("decode_start_s", facts["decode_start_s"]), ("last_token_s", last_s), strictly=True)
    for name in dict.fromkeys(name for order in orders for name in order):
        _precedes(facts, (name, facts[name]), ("last_token_s", last_s))
    elapsed_s = facts.result.elapsed_s
    facts.forbid(Law.CAUSALITY, last_s > elapsed_s, f"last_token_s {{:.9g}} after the end {elapsed_s:.9g}", last_s)
    _presence(facts)
    _first_token(facts)


def _precedes(facts: Facts, before: tuple[str, Floats], after: tuple[str, Floats], *, strictly: bool = False) -> None:
    broken = before[1] >= after[1] if strictly else before[1] > after[1]
    facts.forbid(
        Law.CAUSALITY, broken, f"{before[0]} {{:.12g}} is not before {after[0]} {{:.12g}}", before[1], after[1]
    )


def _presence(facts: Facts) -> None:
    """A finished request went through exactly the stages of its kind."""
    to_decode, steps = facts.to_decode, facts["output_tokens"] > 1
    if facts.shown is FirstToken.DECODE:
        steps = facts.served
    decodes = facts.served & steps if facts.colocated else to_decode & steps
    for name, wanted, excused in (
        ("prefill_end_s", facts.served, None),
        ("transfer_end_s", to_decode, None),
        ("decode_start_s", decodes, facts.recomputed),
    ):
        known = ~np.isnan(facts[name])
        missing = facts.finished & wanted & ~known
        if excused is not None:
            missing &= ~excused
        facts.forbid(Law.CAUSALITY, missing, f"finished without a {name}")
        facts.forbid(Law.CAUSALITY, known & ~wanted, f"has a {name} but no business there")
    for name, role, wanted in _whereabouts(facts):
        count = facts.result.placement.pool(role).count
        where = facts[name]
        facts.forbid(Law.CAUSALITY, wanted & ((where < 0) | (where >= count)), f"{name} is {{}} of {count}", where)


def _whereabouts(facts: Facts) -> Iterator[tuple[str, Role, Bools]]:
    started = ~np.isnan(facts["prefill_start_s"])
    if facts.colocated:
        yield "prefill_instance", Role.COLOCATED, started
        yield "decode_instance", Role.COLOCATED, started
        return
    if not facts.decode_only:
        yield "prefill_instance", Role.PREFILL, started
    yield "decode_instance", Role.DECODE, ~np.isnan(facts["transfer_start_s"])


def _first_token(facts: Facts) -> None:
    first_s, last_s, single = facts["first_token_s"], facts["last_token_s"], facts["output_tokens"] == 1
    if facts.prefill_only:
        single = np.ones(len(single), dtype=bool)
    if facts.decode_only:
        source, shown_s = "queued", np.where(facts.served, facts.queued_s, np.nan)
    elif facts.shown is FirstToken.TRANSFER_END:
        source, shown_s = "transfer_end_s", facts["transfer_end_s"]
    else:
        source, shown_s = "prefill_end_s", facts["prefill_end_s"]
    if facts.shown is FirstToken.DECODE:
        _precedes(facts, ("transfer_end_s", facts["transfer_end_s"]), ("first_token_s", first_s), strictly=True)
        starts_s = np.where(facts.recomputed, np.nan, facts["decode_start_s"])
        _precedes(facts, ("decode_start_s", starts_s), ("first_token_s", first_s), strictly=True)
    else:
        facts.forbid(
            Law.CAUSALITY,
            (first_s != shown_s) & ~(np.isnan(first_s) & np.isnan(shown_s)),
            f"first_token_s {{:.12g}} is not {source} {{:.12g}}",
            first_s,
            shown_s,
        )
    facts.forbid(
        Law.CAUSALITY,
        facts.finished & np.where(single, first_s != last_s, ~(first_s < last_s)),
        "{} tokens, the first at {:.12g}, the last at {:.12g}",
        facts["output_tokens"],
        first_s,
        last_s,
    )


# Little's law


def _littles_law(facts: Facts) -> None:
    """The time integral of a number of requests is the sum of their times, in the system and between tokens."""
    if not facts.result.drained:
        return
    come_s, gone_s = facts["arrival_s"][facts.served], facts["last_token_s"][facts.served]
    times_s = np.concatenate([come_s, gone_s])
    change = np.repeat(np.array([1, -1], dtype=np.int64), len(come_s))
    # Arrivals before departures of the same instant.
    order = np.lexsort((-change, times_s))
    number = np.cumsum(change[order])
    if len(number) and (number.min() < 0 or number[-1] != 0):
        raise BrokenLawError(Law.LITTLE, f"the number in the system falls to {number.min()} and ends at {number[-1]}")
    area_s = weighted_sum(np.diff(times_s[order]), number[:-1]) if len(number) else 0.0
    _same_time("requests in the system", area_s, float(np.sum(gone_s - come_s)))
    gaps = facts.result.gaps
    if gaps is None:
        return
    gaps_s = weighted_sum(np.array(gaps.gap_s), np.array(gaps.weight))
    steps = np.array(gaps.run_steps, dtype=np.float64)
    of_one_s = steps * np.array(gaps.run_first_s) + 0.5 * steps * (steps - 1) * np.array(gaps.run_growth_s)
    gaps_s += weighted_sum(of_one_s, np.array(gaps.run_weight))
    spent_s = float(np.sum(gone_s - facts["first_token_s"][facts.served]))
    _same_time("requests between their first and last token", gaps_s, spent_s)


def _same_time(what: str, integral_s: float, sum_s: float) -> None:
    if not math.isclose(integral_s, sum_s, rel_tol=TOLERANCE_S, abs_tol=TOLERANCE_S):
        raise BrokenLawError(
            Law.LITTLE, f"the integral of the number of {what} is {integral_s:.12g} s, they spent {sum_s:.12g} s"
        )


# Capacity


def _capacity(facts: Facts) -> None:
    """No KV cache is overfull, and no instance works longer than the run lasts."""
    for role, peak in facts.result.kv_peak.items():
        if not 0 <= peak <= 1:
            raise BrokenLawError(Law.CAPACITY, f"{role.name.lower()} instances: peak of the KV cache is {peak:.9g}")
    for role, share in facts.result.utilization.items():
        if not 0 <= share <= 1:
            raise BrokenLawError(Law.CAPACITY, f"{role.name.lower()} instances: busy {share:.9g} of the time")


# Transfers


def _transfers(facts: Facts) -> None:
    """Transfers take their time, one after the other at each port, and end no sooner than the last KV is there."""
    start_s, end_s = facts["transfer_start_s"], facts["transfer_end_s"]
    moved = ~np.isnan(start_s)
    if facts.shown is None or not moved.any():
        return
    (sender, _), (receiver, profile) = facts.pool(Role.PREFILL), facts.pool(Role.DECODE)
    links = min(sender.parallelism.num_gpus, receiver.parallelism.num_gpus)
    crossings = facts.result.placement.crossings
    pairs = np.array(crossings) if crossings is not None else np.zeros((sender.count, receiver.count), dtype=bool)
    crosses = pairs[facts["prefill_instance"] * moved, facts["decode_instance"] * moved]
    reached = [profile.handover.reached_bytes_per_s(profile.gpu, crosses=c) for c in (False, True)]
    per_token_s = profile.model.kv_bytes_per_token / (links * np.where(crosses, reached[1], reached[0]))
    takes_s = profile.handover.latency_s + per_token_s * facts["prompt_tokens"]
    until_s: Floats = start_s + takes_s
    due_s = until_s
    if facts.layer_wise:
        last_layer_s = profile.handover.latency_s + per_token_s * facts["prompt_tokens"] / profile.model.layers
        due_s = np.maximum(until_s, facts["prefill_end_s"] + last_layer_s)
    facts.forbid(
        Law.PORTS,
        np.abs(end_s - due_s) > TOLERANCE_S,
        "its transfer takes {:.9g} s instead of {:.9g} s",
        end_s - start_s,
        due_s - start_s,
    )
    for name in ("prefill_instance", "decode_instance"):
        rows = np.flatnonzero(moved)
        port = facts[name]
        rows = rows[np.lexsort((until_s[rows], start_s[rows], port[rows]))]
        before, after = rows[:-1], rows[1:]
        bad = (port[before] == port[after]) & (start_s[after] < until_s[before] - TOLERANCE_S)
        if bad.any():
            a, b = int(before[bad][0]), int(after[bad][0])
            raise BrokenLawError(
                Law.PORTS,
                f"request {b}: its transfer at the port of {name} {port[a]} starts at {start_s[b]:.12g}, "
                f"before that of request {a} ends at {until_s[a]:.12g}",
            )


# Order of service


def _first_come_first_served(facts: Facts) -> None:
    """First admissions follow the queues: prefill by arrival, pulls by handover, decode by end of transfer."""
    rows = np.arange(len(facts.served))
    by_arrival = rows[~np.isnan(facts["prefill_start_s"])]
    if facts.colocated:
        pool, _ = facts.pool(Role.COLOCATED)
        if pool.parallelism.pp == 1:
            in_turn(facts, by_arrival, name="prefill_start_s", place="prefill_instance")
        return
    if not facts.decode_only:
        in_turn(facts, by_arrival, name="prefill_start_s", place="prefill_instance")
    if facts.prefill_only:
        return
    pulled = rows[~np.isnan(facts["transfer_start_s"])]
    # Layer-wise, prompts of several launches of one instant may come in any order.
    turn = facts["transfer_start_s"] if facts.layer_wise else np.zeros(len(rows))
    pulled = pulled[np.lexsort((pulled, turn[pulled], facts.handed_over_s[pulled]))]
    in_turn(facts, pulled, name="transfer_start_s", place="decode_instance")
    if facts.pool(Role.DECODE)[0].parallelism.pp == 1:
        # Whoever was preempted before the first launch may be overtaken; micro-batches overtake each other.
        joined = pulled[~np.isnan(facts["decode_start_s"][pulled]) & (facts["preemptions"][pulled] == 0)]
        joined = joined[np.argsort(facts["transfer_end_s"][joined], kind="stable")]
        in_turn(facts, joined, name="decode_start_s", place="decode_instance")


def in_turn(facts: Facts, queue: Ints, *, name: str, place: str) -> None:
    """Forbid that the times of one column fall along a queue, per instance.

    Args:
        queue: rows in order of their turn.
    """
    times_s, where = facts[name], facts[place]
    queue = queue[np.argsort(where[queue], kind="stable")]
    before, after = queue[:-1], queue[1:]
    bad = (where[before] == where[after]) & (times_s[after] < times_s[before])
    if bad.any():
        a, b = int(before[bad][0]), int(after[bad][0])
        raise BrokenLawError(
            Law.FCFS,
            f"request {b}: {name} {times_s[b]:.12g} at {place} {where[b]}, but request {a} before it in the queue has "
            f"{times_s[a]:.12g}",
        )


# Prefill instances


@dataclass(frozen=True, slots=True, eq=False)
class PrefillBatches:
    """Batches of one prefill instance in order of launch, as the columns tell them, shape (batches,).

    Args:
        first: position in `rows` of each batch's first request.
        rows: requests, by launch and then arrival.
        head: the first request of each batch.
        held: KV blocks taken just after launch, at least.
        held_most: the same, at most: a transfer that takes no time may end at the same instant after it.
        held_before: KV blocks taken just before the instant of the launch.
    """

    instance: int
    first: Ints
    rows: Ints
    head: Ints
    start_s: Floats
    end_s: Floats
    tokens: Ints
    requests: Ints
    held: Ints
    held_most: Ints
    held_before: Ints

    @classmethod
    def of(cls, facts: Facts, instance: int) -> PrefillBatches:
        """Return the batches of an instance that launched at least one."""
        starts_s = facts["prefill_start_s"]
        rows = np.flatnonzero((facts["prefill_instance"] == instance) & ~np.isnan(starts_s))
        rows = rows[np.argsort(starts_s[rows], kind="stable")]
        first = np.flatnonzero(np.diff(starts_s[rows], prepend=-np.inf) > 0)
        blocks = facts.blocks(facts["prompt_tokens"][rows], Role.PREFILL)
        taken = np.cumsum(np.add.reduceat(blocks, first))
        leaves_s = np.where(facts.to_decode[rows], facts["transfer_end_s"][rows], facts["prefill_end_s"][rows])
        start_s = starts_s[rows[first]]
        at_once = facts.to_decode[rows] & (facts["transfer_start_s"][rows] == leaves_s) & facts.instants_repeat
        left_upto = _freed(leaves_s, blocks, start_s, side="right")
        left_before = _freed(leaves_s, blocks, start_s, side="left")
        late = _freed(leaves_s[at_once], blocks[at_once], start_s, side="right")
        late -= _freed(leaves_s[at_once], blocks[at_once], start_s, side="left")
        return cls(
            instance=instance,
            first=first,
            rows=rows,
            head=rows[first],
            start_s=start_s,
            end_s=facts["prefill_end_s"][rows[first]],
            tokens=np.add.reduceat((facts["prompt_tokens"] - facts["cached_prompt_tokens"])[rows], first),
            requests=np.diff(first, append=len(rows)),
            held=taken - left_upto,
            held_most=taken - left_upto + late,
            held_before=np.concatenate([[0], taken[:-1]]) - left_before,
        )

    def batch(self, number: int) -> Ints:
        """Return the requests of one batch."""
        return self.rows[self.first[number] : self.first[number] + self.requests[number]]


def _freed(leaves_s: Floats, blocks: Ints, until_s: Floats, *, side: Literal["left", "right"]) -> Ints:
    """Return the blocks that were freed before each instant (`right`: or at it); those of NaN are still there."""
    order = np.argsort(leaves_s, kind="stable")
    freed = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(blocks[order])])
    found: Ints = freed[np.searchsorted(leaves_s[order], until_s, side=side)]
    return found


def _prefill_instances(facts: Facts) -> None:
    """Batches of prefill instances respect their limits, never overlap, and leave out nobody who fits."""
    pool, _ = facts.pool(Role.PREFILL)
    capacity, least, most = facts.result.kv_blocks[Role.PREFILL], 0, 0
    for instance in range(pool.count):
        if not np.any((facts["prefill_instance"] == instance) & ~np.isnan(facts["prefill_start_s"])):
            continue
        batches = PrefillBatches.of(facts, instance)
        least, most = max(least, int(batches.held.max())), max(most, int(batches.held_most.max()))
        _prefill_capacity(facts, batches, capacity)
        _prefill_order(facts, batches, serial=pool.parallelism.pp == 1)
        _nobody_left_out(facts, batches, capacity)
        if pool.parallelism.pp == 1:
            never_idle(facts, batches, free_s=batches.end_s)
    peak = facts.result.kv_peak[Role.PREFILL]
    if facts.result.drained and not least / capacity - TOLERANCE_S <= peak <= most / capacity + TOLERANCE_S:
        counted = f"{least}" if least == most else f"{least} to {most}"
        raise BrokenLawError(
            Law.CAPACITY,
            f"prefill instances: peak of the KV cache is {peak:.9g}, a recount has {counted} of {capacity}",
        )


def _prefill_capacity(facts: Facts, batches: PrefillBatches, capacity: int) -> None:
    limits = facts.limits(Role.PREFILL)
    over = (batches.tokens > limits.tokens) & (batches.requests > 1)
    for bad, what in (
        (batches.held > capacity, f"more than {capacity} KV blocks"),
        (batches.requests > limits.requests, f"more than {limits.requests:g} requests"),
        (over, f"more than {limits.tokens:g} tokens"),
    ):
        if bad.any():
            k = int(np.argmax(bad))
            raise BrokenLawError(
                Law.CAPACITY,
                f"prefill instance {batches.instance} at {batches.start_s[k]:.12g}: {what}: {batches.held[k]} blocks, "
                f"{batches.requests[k]} requests, {batches.tokens[k]} tokens",
            )


def _prefill_order(facts: Facts, batches: PrefillBatches, *, serial: bool) -> None:
    ends_s = facts["prefill_end_s"][batches.rows]
    apart = ~np.isnan(ends_s) & (ends_s != np.repeat(batches.end_s, batches.requests))
    if apart.any():
        row = int(batches.rows[np.argmax(apart)])
        raise BrokenLawError(
            Law.OVERLAP,
            f"request {row}: launched on prefill instance {batches.instance} with others at "
            f"{facts['prefill_start_s'][row]:.12g}, but ends apart from them at {facts['prefill_end_s'][row]:.12g}",
        )
    later_s = batches.start_s[1:] if serial else batches.end_s[1:]
    bad = later_s < batches.end_s[:-1] if serial else later_s <= batches.end_s[:-1]
    if bad.any():
        k = int(np.argmax(bad))
        raise BrokenLawError(
            Law.OVERLAP,
            f"prefill instance {batches.instance}: the batch of {batches.start_s[k]:.12g} to {batches.end_s[k]:.12g} "
            f"and the next, of {batches.start_s[k + 1]:.12g} to {batches.end_s[k + 1]:.12g}",
        )


def _nobody_left_out(facts: Facts, batches: PrefillBatches, capacity: int) -> None:
    """The first request of a batch could not have been the last one of the batch before."""
    limits, head = facts.limits(Role.PREFILL), batches.head[1:]
    tokens = (facts["prompt_tokens"] - facts["cached_prompt_tokens"])[head]
    bad = facts.queued_s[head] <= batches.start_s[:-1]
    bad &= batches.requests[:-1] < limits.requests
    bad &= batches.tokens[:-1] + tokens <= limits.tokens
    bad &= batches.held_most[:-1] + facts.blocks(facts["prompt_tokens"][head], Role.PREFILL) <= capacity
    if bad.any():
        k = int(np.argmax(bad))
        raise BrokenLawError(
            Law.WORK,
            f"request {head[k]}: waited on prefill instance {batches.instance} since {facts.queued_s[head[k]]:.12g} "
            f"and fits the batch launched at {batches.start_s[k]:.12g}",
        )


def never_idle(facts: Facts, batches: PrefillBatches, *, free_s: Floats) -> None:
    """Forbid that a prefill instance waits with a request that fits.

    Args:
        free_s: when the first stage is done with each batch, shape (batches,).
    """
    capacity = facts.result.kv_blocks[Role.PREFILL]
    could_s = np.maximum(np.concatenate([[0.0], free_s[:-1]]), facts.queued_s[batches.head])
    blocks = facts.blocks(facts["prompt_tokens"][batches.head], Role.PREFILL)
    bad = (batches.start_s > could_s + TOLERANCE_S) & (batches.held_before + blocks <= capacity)
    if bad.any():
        k = int(np.argmax(bad))
        raise BrokenLawError(
            Law.WORK,
            f"request {batches.head[k]}: could start on prefill instance {batches.instance} at {could_s[k]:.12g}, "
            f"starts at {batches.start_s[k]:.12g} with {capacity - batches.held_before[k]} blocks free for {blocks[k]}",
        )
