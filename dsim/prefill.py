"""Prefill instances: whole prompts, first come first served, through pipeline stages."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from dsim.batching import take_batch
from dsim.clock import ARRIVAL, STEP_END, Wake
from dsim.job import Job
from dsim.pipeline import Stages
from dsim.pools import Parallelism, Role
from dsim.profile import BatchLimits, FirstToken, Handover, HandoverMode, Profile
from dsim.records import StepRecord
from dsim.routing import OnlyOne
from dsim.transfer import Port

if TYPE_CHECKING:
    import simpy

    from dsim.deployment import Deployment


class PrefillInstance:
    """One prefill instance (docs/semantics.md, section 4)."""

    def __init__(
        self,
        deployment: Deployment,
        index: int,
        *,
        profile: Profile,
        parallelism: Parallelism,
        limits: BatchLimits,
        handover: Handover,
    ) -> None:
        self.index = index
        self.touched = False
        self.egress = Port()
        self.queue: deque[Job] = deque()
        self.kv = deployment.kv_cache(
            Role.PREFILL, index, 0, capacity_tokens=profile.kv_tokens(parallelism), block_tokens=profile.block_tokens
        )
        #: Seconds of the driver and the first stage for all that was launched, and when the last of it ends there.
        self._busy_s = 0.0
        self._busy_end_s = 0.0
        self._deployment = deployment
        self._latency = profile.latency_of(parallelism)
        self._host = profile.host_of(Role.PREFILL, parallelism.pp)
        self._shows_token = handover.first_token_from is FirstToken.PREFILL or deployment.prefill_only
        self._layer_wise = handover.mode is HandoverMode.LAYER_WISE and not deployment.prefill_only
        self._hop_s = handover.hop_s
        self._limits = limits
        self._pp = parallelism.pp
        self._stages = Stages(parallelism.pp)
        self._launchable = True
        self._router = deployment.front_router
        self._pool_of_one = isinstance(self._router, OnlyOne)
        self._touched = deployment.touched_prefills
        recorder = self._recorder = deployment.recorder
        self._instance, self._start_s, self._end_s = (
            recorder.prefill_instance,
            recorder.prefill_start_s,
            recorder.prefill_end_s,
        )
        #: The batch of the only stage.
        self._batch: list[Job] = []
        self._end_wake = Wake(self._on_end)

    def busy_until_s(self, now_s: float) -> float:
        """Seconds that the driver and the first stage were busy up to now."""
        return self._busy_s - max(0.0, self._busy_end_s - now_s)

    def enqueue(self, job: Job) -> None:
        """Take a request that was routed here."""
        self.queue.append(job)
        self._instance[job.row] = self.index
        # Otherwise the end of the first stage has it act.
        if self._launchable and not self.touched:
            self.touched = True
            self._touched.append(self)

    def launch(self, now_s: float) -> None:
        """Start the next batch if the first stage is free and the head of the queue fits."""
        if not self._launchable or not self.queue:
            return
        batch = take_batch(self.queue, self._limits, self.kv)
        if not batch:
            return
        starts = self._start_s
        chunks, tokens = [], 0
        for job in batch:
            starts[job.row] = now_s
            computed = job.prompt - job.cached
            tokens += computed
            chunks.append((computed, job.cached))
        host_s = self._host.launch_s(len(batch), tokens)
        stage_s = self._latency.prefill_s(chunks) / self._pp
        first_s = host_s + stage_s
        # A launch waits for the first stage.
        end_s = now_s + first_s if self._pp == 1 else self._stages.pass_through(now_s, first_s, stage_s)
        self._busy_s += first_s
        self._busy_end_s = now_s + first_s
        steps, clock = self._recorder.steps, self._deployment.clock
        if steps is not None:
            ids = tuple(job.index for job in batch)
            steps.append(StepRecord("P", self.index, 0, now_s, end_s, ids, ()))
        self._launchable = False
        if self._layer_wise:
            self._hand_over_early(batch, end_s)
        if self._pp > 1:
            clock.at(self._stages.free_s[0], STEP_END, self._on_first_stage_end)
            clock.at(end_s, STEP_END, lambda _event: self._end(batch))
        else:
            self._batch = batch
            clock.wake(end_s, STEP_END, self._end_wake)

    def _on_first_stage_end(self, _event: simpy.Event) -> None:
        self._launchable = True
        self._touch()

    def _on_end(self, _event: simpy.Event) -> None:
        self._launchable = True
        self._end(self._batch)

    def _touch(self) -> None:
        if self.queue and self._launchable and not self.touched:
            self.touched = True
            self._touched.append(self)

    def _end(self, batch: list[Job]) -> None:
        deployment, recorder, ends = self._deployment, self._recorder, self._end_s
        now_s = deployment.clock.now_s
        shown, prefill_only, layer_wise = self._shows_token, deployment.prefill_only, self._layer_wise
        later = [] if self._hop_s else deployment.handovers
        watched, first_s = recorder.stop_slo is not None, recorder.first_token_s
        for job in batch:
            row = job.row
            ends[row] = now_s
            if shown:
                job.produced = 1
                if watched:
                    recorder.first_token(job, now_s)
                else:
                    # What it does if nobody watches.
                    first_s[row] = job.last_token_s = now_s
                if job.output == 1 or prefill_only:
                    self.free(job)
                    deployment.finish(job)
                    continue
            if not layer_wise:
                job.prefiller = self
                later.append(job)
        if self._hop_s and later:
            deployment.clock.at(now_s + self._hop_s, ARRIVAL, lambda _event: deployment.handovers.extend(later))
        self._touch()

    def _hand_over_early(self, batch: list[Job], end_s: float) -> None:
        """Hand over, at its launch, a batch whose KV follows the prefill layer by layer."""
        for job in batch:
            if self._shows_token and job.output == 1:
                continue
            job.prefiller = self
            job.prefilled_s = end_s
            self._deployment.handovers.append(job)

    def free(self, job: Job) -> None:
        """Forget a prompt whose KV is not needed here any more."""
        self.kv.release(job.prompt_blocks)
        if not self._pool_of_one:
            self._router.leave(self.index, job.prompt)
        if self.queue:
            self._touch()
