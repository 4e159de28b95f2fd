"""A deployment in motion: its instances, what passes between them, and the order of one instant."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop
from typing import overload

import numpy as np
from numpy.typing import NDArray

from dsim.clock import Clock
from dsim.colocated import ColocatedInstance, PipelinedColocatedInstance, SerialColocatedInstance
from dsim.decode import DecodeInstance, PipelinedDecodeInstance, SerialDecodeInstance
from dsim.errors import InfeasiblePlacementError, InputError
from dsim.job import Job
from dsim.kv import KvCache, LoggedKvCache
from dsim.options import Options
from dsim.pools import Placement, Pool, Role
from dsim.prefill import PrefillInstance
from dsim.profile import BatchLimits, FirstToken, Profile
from dsim.recorder import Recorder
from dsim.records import KvRecord
from dsim.routing import Router, router
from dsim.workload.lengths import Integers
from dsim.workload.streams import stream


def _by_index(instance: PrefillInstance | DecodeInstance | ColocatedInstance) -> int:
    return instance.index


class Deployment:
    """The instances of one placement and the rules between them (docs/semantics.md, section 2).

    Args:
        phase: simulate one side of a disaggregated placement alone: with `Role.PREFILL` a request is finished when its
            prefill is, with `Role.DECODE` it arrives with its prompt's KV and first token.
    """

    def __init__(
        self,
        placement: Placement,
        profiles: Mapping[Role, Profile],
        *,
        options: Options,
        recorder: Recorder,
        phase: Role | None = None,
    ) -> None:
        self.clock = Clock()
        self.recorder = recorder
        self.extrapolate = options.extrapolate
        self.prefill_only = phase is Role.PREFILL
        self.placement = placement
        self.on_finish: Callable[[Job], None] | None = None
        self._prefill_token_limit_at = options.prefill_token_limit_at
        # The handover is the decode side's affair (docs/semantics.md, section 5).
        decode_side = profiles.get(Role.DECODE, profiles[placement.pools[0].role])
        self._handover = decode_side.handover
        self._first_token_from = self._handover.first_token_from
        self.prefills: list[PrefillInstance] = []
        self.decodes: list[DecodeInstance] = []
        self.colocated: list[ColocatedInstance] = []
        #: Instances that act before this instant is over: prefill ones, and decode or colocated ones.
        self.touched_prefills: list[PrefillInstance] = []
        self.touched: list[DecodeInstance | ColocatedInstance] = []
        #: Prompts to be routed to the decode side once all step ends of this instant are done.
        self.handovers: list[Job] = []
        pools = [pool for pool in placement.pools if phase is None or pool.role is phase]
        self.front_router, self.decode_router = self._routers(pools, options)
        for pool in pools:
            self._build(pool, profiles[pool.role])
        #: Tokens of a KV block, the same everywhere.
        self.block_tokens = profiles[pools[0].role].block_tokens
        #: Most KV blocks of a prompt, and of a whole request, the latter of requests with so many output tokens.
        self._prompt_blocks = self.prefills[0].kv.capacity if self.prefills else math.inf
        self._total_blocks: float = math.inf
        self._least_output = 1
        if self.colocated:
            self._total_blocks = float(self.colocated[0].loop_kv[0].capacity)
        elif self.decodes:
            self._total_blocks = float(self.decodes[0].kv.capacity)
            self._least_output = 2 if self._first_token_from is FirstToken.PREFILL else 1
        self._front: Sequence[PrefillInstance | ColocatedInstance] = self.prefills or self.colocated
        #: Takes a request that is queued now and fits.
        self.arrive: Callable[[Job], None] = self._enqueue if self._front else self._arrive_prefilled
        if len(self._front) == 1:
            self.arrive = self._front[0].enqueue

    @staticmethod
    def _routers(pools: list[Pool], options: Options) -> tuple[Router, Router]:
        """Return the routers of arrivals and of handovers, which share one stream of random numbers."""
        rng = stream(options.seed, "routing")
        counts = {pool.role: pool.count for pool in pools}
        front = counts.get(Role.PREFILL, counts.get(Role.COLOCATED, 1))
        decode = counts.get(Role.DECODE, 1)
        shared = front > 1 and decode > 1
        return (
            router(options.prefill_routing, front, rng, shared=shared),
            router(options.decode_routing, decode, rng, shared=shared),
        )

    def _build(self, pool: Pool, profile: Profile) -> None:
        if profile.kv_tokens(pool.parallelism) < profile.block_tokens:
            model, gpu = profile.model.name, profile.gpu.name
            raise InfeasiblePlacementError(
                str(pool), [f"{model} does not fit {pool.parallelism.num_gpus} x {gpu}: no memory is left for KV"]
            )
        for index in range(pool.count):
            if pool.role is Role.PREFILL:
                limits = self.batch_limits(profile, Role.PREFILL, pool.parallelism.tp)
                self.prefills.append(
                    PrefillInstance(
                        self,
                        index,
                        profile=profile,
                        parallelism=pool.parallelism,
                        limits=limits,
                        handover=self._handover,
                    )
                )
            elif pool.role is Role.DECODE:
                kind = SerialDecodeInstance if pool.parallelism.pp == 1 else PipelinedDecodeInstance
                self.decodes.append(kind(self, index, profile=profile, parallelism=pool.parallelism))
            else:
                serial = pool.parallelism.pp == 1
                build = SerialColocatedInstance if serial else PipelinedColocatedInstance
                self.colocated.append(build(self, index, profile=profile, pool=pool))

    def kv_cache(self, role: Role, index: int, part: int, *, capacity_tokens: int, block_tokens: int) -> KvCache:
        """Return the KV cache of an instance, or of one of its engine loops; its changes are logged if steps are."""
        log, clock = self.recorder.kv, self.clock
        if log is None:
            return KvCache(capacity_tokens, block_tokens)

        def tell(blocks: int) -> None:
            log.append(KvRecord(role.value, index, part, clock.now_s, blocks))

        return LoggedKvCache(capacity_tokens, block_tokens, tell)

    def batch_limits(self, profile: Profile, role: Role, tp: int) -> BatchLimits:
        """Return the engine's batch limits, within the latency model's valid range unless extrapolation is allowed."""
        limits = profile.limits.get(role, BatchLimits())
        tokens, requests = limits.tokens, limits.requests
        limit = self._prefill_token_limit_at(tp)
        if role is Role.PREFILL and limit is not None:
            tokens = float(limit)
        if not self.extrapolate:
            valid = profile.latency_at(tp).valid_range
            tokens = min(tokens, valid.prefill_tokens)
            if role is not Role.PREFILL:
                requests = min(requests, valid.decode_requests)
        return BatchLimits(tokens, requests)

    def check_context(self, profile: Profile, tp: int, context_tokens: int) -> None:
        """Refuse a decode step with more context than the latency model was measured with.

        Raises:
            InputError: it has, and extrapolation was not asked for.
        """
        limit = self.context_limit(profile, tp)
        if context_tokens > limit:
            raise InputError(
                f"profile {profile.name}",
                f"is beyond the valid range of {limit:g}",
                name="context_tokens of a decode step",
                value=context_tokens,
                hint="limit the decode batch, or allow extrapolation",
            )

    def context_limit(self, profile: Profile, tp: int) -> float:
        """Return the most context tokens of one decode step."""
        return math.inf if self.extrapolate else profile.latency_at(tp).valid_range.context_tokens

    def request_limit(self, profile: Profile, role: Role, tp: int) -> float:
        """Return the most requests of one batch of this role."""
        return self.batch_limits(profile, role, tp).requests

    # Requests

    def _enqueue(self, job: Job) -> None:
        """Route a request that is queued now and fits."""
        self._front[self.front_router.route(job.prompt)].enqueue(job)

    def _arrive_prefilled(self, job: Job) -> None:
        """Take a request of a decode-only run."""
        now_s, row = self.clock.now_s, job.row
        self.recorder.prefill_start_s[row] = self.recorder.prefill_end_s[row] = now_s
        self.recorder.first_token(job, now_s)
        job.produced = 1
        if job.output == 1:
            self.finish(job)
        else:
            self.handovers.append(job)

    def reject(self, job: Job) -> None:
        """Send a request away that never fits."""
        self.recorder.reject(job)
        self.left(job)

    @overload
    def never_fits(self, prompt_tokens: int, output_tokens: int) -> bool: ...

    @overload
    def never_fits(self, prompt_tokens: Integers, output_tokens: Integers) -> NDArray[np.bool_]: ...

    def never_fits(
        self, prompt_tokens: int | Integers, output_tokens: int | Integers
    ) -> bool | np.bool_ | NDArray[np.bool_]:
        """Return whether a request, or each of some as arrays, needs more KV blocks than an instance has."""
        size = self.block_tokens
        prompts, totals = -(-prompt_tokens // size), -(-(prompt_tokens + output_tokens - 1) // size)
        # Those that end with their prefill need none on the decode side.
        return (prompts > self._prompt_blocks) | ((totals > self._total_blocks) & (output_tokens >= self._least_output))

    def finish(self, job: Job) -> None:
        """Record that a request has its last token now."""
        self.recorder.finish(job, self.clock.now_s)
        if self.on_finish is not None:
            self.on_finish(job)

    def left(self, job: Job) -> None:
        """Tell a closed loop that a request has left the system."""
        if self.on_finish is not None:
            self.on_finish(job)

    # Instants

    def touch(self, instance: DecodeInstance | ColocatedInstance) -> None:
        """Have a decode or colocated instance act before this instant is over."""
        if not instance.touched:
            instance.touched = True
            self.touched.append(instance)

    def run(self) -> None:
        """Let events happen until the recorder has what it needs or nothing is left to happen.

        An instant's steps 4 and 5 follow when nothing else is due at it.
        """
        recorder, clock, queue = self.recorder, self.clock, self.clock.pending
        touched, prefills, handovers = self.touched, self.touched_prefills, self.handovers
        while queue and not recorder.done:
            # What `clock.step` does.
            now_s, _, _, event = heappop(queue)
            clock.now_s = now_s
            event.callback(event)
            if queue and queue[0][0] <= now_s and not self._ends_here():
                continue
            if handovers:
                self._route_handovers()
            if touched:
                if len(touched) > 1:
                    touched.sort(key=_by_index)
                for instance in touched:
                    instance.settle(now_s)
                if queue and queue[0][0] <= now_s:
                    # A transfer that takes no time ends before anything is launched.
                    continue
            # Launches touch nobody: what they change at this instant is their own.
            if prefills:
                if len(prefills) > 1:
                    prefills.sort(key=_by_index)
                for prefill in prefills:
                    prefill.touched = False
                    prefill.launch(now_s)
                prefills.clear()
            if touched:
                for instance in touched:
                    instance.touched = False
                    instance.launch(now_s)
                touched.clear()
            if handovers:
                self._follow_launches(now_s)

    def _ends_here(self) -> bool:
        """Whether the run has ended, and nothing else happens at this instant."""
        return self.recorder.done and self.clock.quiet

    def _follow_launches(self, now_s: float) -> None:
        """Hand over, layer by layer, the prefill batches that were launched just now."""
        self._route_handovers()
        # Nobody else has been touched since.
        decodes = [instance for instance in self.decodes if instance.touched]
        self.touched.clear()
        for instance in decodes:
            instance.follow_launches(now_s)
        for instance in decodes:
            instance.touched = False
            instance.launch(now_s)

    def _route_handovers(self) -> None:
        handovers = self.handovers
        if len(handovers) > 1:
            handovers.sort(key=lambda job: job.index)
        where = self.recorder.decode_instance
        for job in handovers:
            index = where[job.row] = self.decode_router.route(job.prompt)
            self.decodes[index].hand_over(job)
        handovers.clear()

    def kv_peak(self) -> dict[Role, float]:
        """Largest share of any instance's KV cache that was ever taken, by role."""
        peaks = {
            Role.PREFILL: [instance.kv.peak for instance in self.prefills],
            Role.DECODE: [instance.kv.peak for instance in self.decodes],
            Role.COLOCATED: [kv.peak for instance in self.colocated for kv in instance.loop_kv],
        }
        return {role: max(values) for role, values in peaks.items() if values}

    def busy_s(self) -> dict[Role, list[float]]:
        """Seconds up to now that each instance's driver and first stage were busy, by role."""
        now_s = self.clock.now_s
        pools: dict[Role, list[float]] = {
            Role.PREFILL: [instance.busy_until_s(now_s) for instance in self.prefills],
            Role.DECODE: [instance.busy_until_s(now_s) for instance in self.decodes],
            Role.COLOCATED: [instance.busy_until_s(now_s) for instance in self.colocated],
        }
        return {role: values for role, values in pools.items() if values}

    def kv_blocks(self) -> dict[Role, int]:
        """KV blocks of one instance, by role."""
        blocks = {}
        if self.prefills:
            blocks[Role.PREFILL] = self.prefills[0].kv.capacity
        if self.decodes:
            blocks[Role.DECODE] = self.decodes[0].kv.capacity
        if self.colocated:
            blocks[Role.COLOCATED] = sum(kv.capacity for kv in self.colocated[0].loop_kv)
        return blocks

    @property
    def leaked_blocks(self) -> int:
        """KV blocks still taken; 0 once every request has left."""
        caches = [instance.kv for instance in self.prefills]
        caches += [instance.kv for instance in self.decodes]
        caches += [kv for instance in self.colocated for kv in instance.loop_kv]
        return sum(kv.capacity - kv.free for kv in caches)


def longest_prompt(profiles: Mapping[Role, Profile], placement: Placement) -> float:
    """Return the longest prompt that every pool's latency model is valid for, tokens."""
    return min(
        (profiles[pool.role].latency_at(pool.parallelism.tp).valid_range.chunk_tokens for pool in placement.pools),
        default=math.inf,
    )
