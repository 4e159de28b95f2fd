"""Section 5 of docs/semantics.md: transfers and the decode instance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsim.latency import LatencyModel
from dsim.pools import Pool, Role
from dsim.profile import BatchLimits, FirstToken, HandoverMode, Preemption, Profile
from tests.reference.prefill import PrefillInstance
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
    prefix_within,
    swap_s,
)


@dataclass(eq=False)
class Transfer:
    """A prompt's KV on its way from one prefill instance to one decode instance."""

    request: Request
    sender: PrefillInstance
    receiver: DecodeInstance
    end_s: float


class Network:
    """Ports and the transfers that hold them, in order of posting."""

    def __init__(self, profile: Profile, *, sender_gpus: int, receiver_gpus: int, crossings: list[list[bool]]) -> None:
        self.handover = profile.handover
        self.kv_bytes_per_token = profile.model.kv_bytes_per_token
        self.layers = profile.model.layers
        self.links = min(sender_gpus, receiver_gpus)
        self.crossings = crossings
        self.network_bytes_per_s = profile.gpu.network_bytes_per_s
        self.egress_s: dict[int, float] = {}
        self.ingress_s: dict[int, float] = {}
        self.transfers: list[Transfer] = []

    def post(self, now: float, request: Request, sender: PrefillInstance, receiver: DecodeInstance) -> None:
        start_s = max(now, self.egress_s.get(sender.index, -math.inf), self.ingress_s.get(receiver.index, -math.inf))
        link_bytes_per_s = self.handover.bandwidth_bytes_per_s
        if self.crossings[sender.index][receiver.index]:
            link_bytes_per_s = min(link_bytes_per_s, 0.8 * self.network_bytes_per_s)
            if self.handover.node_bandwidth_bytes_per_s is not None:
                link_bytes_per_s = self.handover.node_bandwidth_bytes_per_s
        bytes_per_s = self.links * link_bytes_per_s
        moving_s = request.prompt * self.kv_bytes_per_token / bytes_per_s
        end_s = start_s + self.handover.latency_s + moving_s
        self.egress_s[sender.index] = self.ingress_s[receiver.index] = end_s
        if self.handover.mode is HandoverMode.LAYER_WISE:
            end_s = max(end_s, request.prefill_due_s + self.handover.latency_s + moving_s / self.layers)
        request.transfer_start_s = start_s
        self.transfers.append(Transfer(request, sender, receiver, end_s))


@dataclass(eq=False)
class MicroBatch:
    """Members in order of joining; `ready_s` is since when it has been out of flight with members."""

    index: int
    members: list[Request] = field(default_factory=list)
    step: Step | None = None
    ready_s: float = 0.0

    @property
    def context(self) -> int:
        return sum(r.context for r in self.members)


class DecodeInstance:
    """`pp` micro-batches over one KV cache, one driver and `pp` stages."""

    def __init__(
        self,
        *,
        index: int,
        pool: Pool,
        profile: Profile,
        latency: LatencyModel,
        senders: list[PrefillInstance],
        network: Network,
        log: list[StepRecord],
    ) -> None:
        self.index = index
        self.pp = pool.parallelism.pp
        self.gpus = pool.parallelism.num_gpus
        self.profile = profile
        self.latency = latency
        self.request_limit = profile.limits.get(Role.DECODE, BatchLimits()).requests
        self.prefill_limits = profile.limits.get(Role.PREFILL, BatchLimits())
        self.cache = KvCache(
            blocks=cache_blocks(profile, decoded_tokens(profile, pool.parallelism)), block_tokens=profile.block_tokens
        )
        self.pipeline = Pipeline(self.pp)
        self.senders = senders
        self.network = network
        self.log = log
        self.unpulled: list[Request] = []
        self.in_transfer: list[Request] = []
        self.pulled: list[Request] = []
        self.preempted: list[Request] = []
        self.micro_batches = [MicroBatch(i) for i in range(self.pp)]
        #: pp > 1: until when a launch holds the driver; None while none does. (pp = 1: the step does.)
        self.driver_held_until_s: float | None = None
        #: A transfer that stalls the loop holds the driver.
        self.stalled = False
        #: KV tokens swapped out or in since the last launch.
        self.swapped_tokens = 0
        #: Seconds of posting since the last launch.
        self.posting_s = 0.0
        #: An own event happened: not yet seen by step 4, not yet seen by step 5.
        self.news = self.news_for_launch = False

    # Events

    def notice(self) -> None:
        """Note that something happened to this instance at this instant."""
        self.news = self.news_for_launch = True

    def pending_s(self) -> Iterator[float]:
        """Instants at which something here will end (transfers apart)."""
        yield from (batch.step.end_s for batch in self.micro_batches if batch.step)
        if self.driver_held_until_s is not None:
            yield self.driver_held_until_s

    def end_steps(self, now: float) -> list[Request]:
        """End what ends now; return the requests that finished."""
        if self.driver_held_until_s is not None and self.driver_held_until_s <= now:
            self.driver_held_until_s = None
            self.notice()
        finished = []
        for batch in self.micro_batches:
            if batch.step and batch.step.end_s <= now:
                finished += self._end_step(now, batch, batch.step)
        return finished

    def _end_step(self, now: float, batch: MicroBatch, step: Step) -> list[Request]:
        self.notice()
        batch.step = None
        batch.ready_s = now
        finished = []
        for request in [*step.prefills, *step.decodes]:
            request.recompute = False
            request.show_token(now)
            if request.finished:
                batch.members.remove(request)
                self._free(request)
                finished.append(request)
        return finished

    def end_transfer(self, now: float, request: Request) -> None:
        """Take in a request whose transfer ended; it may be finished with that."""
        assert request.prefill_end_s <= now, "KV arrives before it is computed"
        self.notice()
        self.stalled = False
        self.in_transfer.remove(request)
        request.transfer_end_s = now
        if self.profile.handover.first_token_from is FirstToken.TRANSFER_END:
            request.show_token(now)
        if request.finished:
            self._free(request)
        else:
            self.pulled.append(request)

    def hand_over(self, request: Request) -> None:
        """Append a prefilled request (layer-wise: one whose prefill was launched) to `unpulled`."""
        request.decode_instance = self.index
        self.unpulled.append(request)
        self.notice()

    # Step 4: pulls and admissions

    def pull_and_admit(self, now: float) -> None:
        """Do step 4 of the instant, if something happened here."""
        if not self.news:
            return
        self.news = False
        if self.profile.handover.stalls_decode:
            if self._may_act():
                if self._pull_rule():
                    self._pull(now)
                    self.stalled = True
                else:
                    self._admit(now)
            return
        if self._may_act() or self.profile.handover.mode is not HandoverMode.PULL_AT_STEP:
            self._pull_all(now)
        if self._may_act():
            self._admit(now)
            self._pull_all(now)

    def _may_act(self) -> bool:
        held = self.stalled or self.driver_held_until_s is not None
        return not held and any(batch.step is None for batch in self.micro_batches)

    def _pull_rule(self) -> bool:
        if not self.unpulled:
            return False
        waiting = sum(self.cache.blocks(r.kv) for r in [*self.in_transfer, *self.pulled])
        return (
            self.cache.blocks(self.unpulled[0].prompt) <= self.cache.free
            and waiting < self.profile.handover.watermark * self.cache.capacity
        )

    def _pull(self, now: float) -> None:
        request = self.unpulled.pop(0)
        request.kv = self.cache.change(0, request.prompt)
        self.in_transfer.append(request)
        handover = self.profile.handover
        self.posting_s += handover.post_s + handover.post_block_s * self.cache.blocks(request.prompt)
        self.network.post(now, request, self.senders[request.prefill_instance], self)

    def _pull_all(self, now: float) -> None:
        while self._pull_rule():
            self._pull(now)

    def _admit(self, now: float) -> None:
        while self.preempted or self.pulled:
            candidate = (self.preempted or self.pulled)[0]
            if self._least_batch() is None or self.cache.missing([candidate]) > self.cache.free:
                return
            self._join(now, candidate)

    def _least_batch(self) -> MicroBatch | None:
        with_room = [batch for batch in self.micro_batches if len(batch.members) < self.request_limit]
        return min(with_room, key=lambda batch: (batch.context, batch.index), default=None)

    def _join(self, now: float, candidate: Request) -> MicroBatch:
        batch = self._least_batch()
        assert batch is not None
        if candidate in self.preempted:
            self.preempted.remove(candidate)
            self._count_swap(candidate)
        else:
            self.pulled.remove(candidate)
        candidate.kv = self.cache.change(candidate.kv, candidate.context)
        if not batch.members and batch.step is None:
            batch.ready_s = now
        batch.members.append(candidate)
        return batch

    # Step 5: launches

    def launch(self, now: float) -> None:
        """Do step 5 of the instant, if something happened here."""
        if not self.news_for_launch:
            return
        self.news_for_launch = False
        if not self._may_act():
            return
        ready = [batch for batch in self.micro_batches if batch.members and batch.step is None]
        for batch in sorted(ready, key=lambda batch: (batch.ready_s, batch.index)):
            if self._make_room(batch):
                self._start(now, batch)
                return
        if not any(batch.step for batch in self.micro_batches):
            self._rescue(now)

    def _make_room(self, batch: MicroBatch) -> bool:
        """Preempt until the step of this micro-batch has its blocks; return whether anything is left of it."""
        if any(r.recompute for r in batch.members):
            return True
        while self.cache.missing(batch.members) > self.cache.free:
            self._preempt(batch.members.pop())
        for request in batch.members:
            request.kv = self.cache.change(request.kv, request.context)
        return bool(batch.members)

    def _preempt(self, request: Request) -> None:
        request.preemptions += 1
        self._count_swap(request)
        self._free(request)
        request.recompute = self.profile.preemption is Preemption.RECOMPUTE
        self.preempted.append(request)

    def _count_swap(self, request: Request) -> None:
        if self.profile.preemption is Preemption.SWAP:
            self.swapped_tokens += request.stored

    def _free(self, request: Request) -> None:
        request.kv = self.cache.change(request.kv, 0)

    def _rescue(self, now: float) -> None:
        if not (self.preempted or self.pulled):
            return
        candidate = (self.preempted or self.pulled)[0]
        while self.cache.missing([candidate]) > self.cache.free and self.pulled and self.pulled[-1] is not candidate:
            self._preempt(self.pulled.pop())
        if self.cache.missing([candidate]) > self.cache.free:
            assert self.in_transfer, "nothing is left to evict, and nothing is coming"
            return
        self._start(now, self._join(now, candidate))

    def _start(self, now: float, batch: MicroBatch) -> None:
        recomputed = [r for r in batch.members if r.recompute]
        if recomputed:
            recomputed = recomputed[: prefix_within([r.context for r in recomputed], self.prefill_limits)]
            chunks = [(r.context, 0) for r in recomputed]
            step_s = self.latency.prefill_s(chunks)
            host_s = host_overhead(self.profile, Role.PREFILL, self.pp).launch_s(
                len(recomputed), computed_tokens(chunks)
            )
            decodes = []
        else:
            decodes = list(batch.members)
            step_s = self.latency.decode_s(len(decodes), batch.context)
            host_s = host_overhead(self.profile, Role.DECODE, self.pp).launch_s(len(decodes), batch.context)
            for request in decodes:
                if math.isnan(request.decode_start_s):
                    request.decode_start_s = now
        added_s = swap_s(self.profile, self.swapped_tokens, self.gpus) + self.posting_s
        held_s = added_s + host_s + self.profile.handover.step_s
        self.swapped_tokens = 0
        self.posting_s = 0.0
        end_s = self.pipeline.enter(now + held_s, [step_s / self.pp] * self.pp)
        if self.pp > 1:
            self.driver_held_until_s = now + held_s
        batch.step = Step(end_s, [(r, r.context) for r in recomputed], decodes)
        prefill_ids, decode_ids = tuple(r.id for r in recomputed), tuple(r.id for r in decodes)
        self.log.append(StepRecord("D", self.index, batch.index, now, end_s, prefill_ids, decode_ids))

    # Recount

    def places(self) -> Iterator[tuple[Request, str]]:
        """Every request here and its state."""
        yield from ((r, "unpulled") for r in self.unpulled)
        yield from ((r, "in transfer") for r in self.in_transfer)
        yield from ((r, "pulled") for r in self.pulled)
        yield from ((r, "preempted") for r in self.preempted)
        for batch in self.micro_batches:
            yield from ((r, "running") for r in batch.members)

    def check(self) -> None:
        """Recount blocks and members from the requests' states."""
        members = [r for batch in self.micro_batches for r in batch.members]
        for request in [*self.unpulled, *self.preempted]:
            assert request.kv == 0
        for request in [*self.in_transfer, *self.pulled]:
            assert request.kv == request.prompt
        for request in members:
            assert request.context - 1 <= request.kv <= request.context
        for batch in self.micro_batches:
            assert len(batch.members) <= self.request_limit
            if batch.step:
                stepping = [*batch.step.prefills, *batch.step.decodes]
                assert stepping
                assert all(r in batch.members and r.kv == r.context for r in stepping)
        self.cache.recount(r.kv for r in [*self.in_transfer, *self.pulled, *members])
        assert self.profile.preemption is Preemption.RECOMPUTE or not any(r.recompute for r in members)
