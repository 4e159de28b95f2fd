"""A deployment in motion: its instances, what passes between them, and the order of one instant."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from dsim.clock import Clock
from dsim.colocated import ColocatedInstance, PipelinedColocatedInstance, SerialColocatedInstance
from dsim.decode import DecodeInstance, PipelinedDecodeInstance, SerialDecodeInstance
from dsim.errors import InfeasiblePlacementError, InputError
from dsim.job import Job
from dsim.kv import KvCache, LoggedKvCache, num_blocks
from dsim.options import Options
from dsim.pools import Placement, Pool, Role
from dsim.prefill import PrefillInstance
from dsim.profile import BatchLimits, FirstToken, Profile
from dsim.recorder import KvRecord, Recorder
from dsim.routing import Load, router
from dsim.workload.streams import stream

Instance = PrefillInstance | DecodeInstance | ColocatedInstance


def _instance_order(instance: Instance) -> tuple[int, int]:
    return instance.pool_order, instance.index


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
        for pool in placement.pools:
            if phase is None or pool.role is phase:
                self._build(pool, profiles[pool.role])
        self._front_loads: list[Load] = [instance.load for instance in self.prefills or self.colocated]
        self._decode_loads = [instance.load for instance in self.decodes]
        rng = stream(options.seed, "routing")
        self._front_router = router(options.prefill_routing, rng)
        self._decode_router = router(options.decode_routing, rng)
        self._touched: list[Instance] = []
        self._handovers: list[Job] = []
        if self.colocated:
            self._loop_blocks = self.colocated[0].loop_kv[0].capacity

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
            log.append(KvRecord(role.value, index, part, float(clock.now), blocks))

        return LoggedKvCache(capacity_tokens, block_tokens, tell)

    def batch_limits(self, profile: Profile, role: Role, tp: int) -> BatchLimits:
        """Return the engine's batch limits, within the latency model's valid range unless extrapolation is allowed."""
        limits = profile.limits.get(role, BatchLimits())
        tokens, requests = limits.tokens, limits.requests
        limit = self._prefill_token_limit_at(tp)
        if role is Role.PREFILL and limit is not None:
            tokens = limit
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

    def arrive(self, job: Job) -> None:
        """Route a request that is queued now, or reject it."""
        if self._never_fits(job):
            self.recorder.reject(job)
            self.left(job)
        elif self.prefills or self.colocated:
            index = self._front_router.choose(self._front_loads)
            self._front_loads[index].add(job.prompt)
            instance = self.prefills[index] if self.prefills else self.colocated[index]
            instance.enqueue(job)
            self.touch(instance)
        else:
            now_s = self.clock.now
            self.recorder.prefill_start_s[job.index] = self.recorder.prefill_end_s[job.index] = now_s
            self.recorder.first_token(job, now_s)
            job.produced = 1
            if job.output == 1:
                self.finish(job)
            else:
                self._handovers.append(job)

    def _never_fits(self, job: Job) -> bool:
        most = job.prompt + job.output - 1
        if self.colocated:
            return num_blocks(most, self.colocated[0].loop_kv[0].block_tokens) > self._loop_blocks
        if self.prefills:
            kv = self.prefills[0].kv
            if num_blocks(job.prompt, kv.block_tokens) > kv.capacity:
                return True
        if not self.decodes or (job.output == 1 and self._first_token_from is FirstToken.PREFILL):
            return False
        kv = self.decodes[0].kv
        return num_blocks(most, kv.block_tokens) > kv.capacity

    def hand_over(self, job: Job) -> None:
        """Route a prompt whose prefill has ended to the decode side, once all step ends of this instant are done."""
        self._handovers.append(job)

    def finish(self, job: Job) -> None:
        """Record that a request has its last token now."""
        self.recorder.finish(job, self.clock.now)
        self.left(job)

    def left(self, job: Job) -> None:
        """Tell a closed loop that a request has left the system."""
        if self.on_finish is not None:
            self.on_finish(job)

    # Instants

    def touch(self, instance: Instance) -> None:
        """Have an instance act before this instant is over."""
        if not instance.touched:
            instance.touched = True
            self._touched.append(instance)

    def run(self) -> None:
        """Let events happen until the recorder has what it needs or nothing is left to happen."""
        recorder, step, queue = self.recorder, self.clock.step, self.clock.pending
        touched, handovers = self._touched, self._handovers
        while queue and not recorder.done:
            step()
            if (touched or handovers) and (not queue or queue[0][0] > self.clock.now):
                self._settle()

    def _settle(self) -> None:
        """Do steps 4 and 5 of an instant at which nothing else is due."""
        clock = self.clock
        now_s = clock.now
        if self._handovers:
            self._route_handovers()
        touched = self._touched
        if len(touched) > 1:
            touched.sort(key=_instance_order)
        for instance in touched:
            instance.settle(now_s)
        if not clock.quiet:
            # A transfer that takes no time ends before anything is launched.
            return
        # Launches touch nobody: what they change at this instant is their own.
        for instance in touched:
            instance.touched = False
            instance.launch(now_s)
        touched.clear()
        if self._handovers:
            self._follow_launches(now_s)

    def _follow_launches(self, now_s: float) -> None:
        """Hand over, layer by layer, the prefill batches that were launched just now."""
        self._route_handovers()
        # Nobody else has been touched since.
        decodes = [instance for instance in self.decodes if instance.touched]
        self._touched.clear()
        for instance in decodes:
            instance.follow_launches(now_s)
        for instance in decodes:
            instance.touched = False
            instance.launch(now_s)

    def _route_handovers(self) -> None:
        handovers = self._handovers
        if len(handovers) > 1:
            handovers.sort(key=lambda job: job.index)
        for job in handovers:
            index = self._decode_router.choose(self._decode_loads)
            self._decode_loads[index].add(job.prompt)
            self.recorder.decode_instance[job.index] = index
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
        """Seconds that each instance's driver and first stage were busy, by role."""
        pools: dict[Role, list[float]] = {
            Role.PREFILL: [instance.busy_s for instance in self.prefills],
            Role.DECODE: [instance.busy_s for instance in self.decodes],
            Role.COLOCATED: [instance.busy_s for instance in self.colocated],
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
