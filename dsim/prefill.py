"""Prefill instances: whole prompts, first come first served, through pipeline stages."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from dsim.batching import take_batch
from dsim.clock import ARRIVAL, STEP_END
from dsim.job import Job
from dsim.kv import num_blocks
from dsim.pipeline import Stages
from dsim.pools import Parallelism, Role
from dsim.profile import BatchLimits, FirstToken, Handover, HandoverMode, Profile
from dsim.recorder import StepRecord
from dsim.routing import Load
from dsim.transfer import Port

if TYPE_CHECKING:
    import simpy

    from dsim.deployment import Deployment


class PrefillInstance:
    """One prefill instance (docs/semantics.md, section 4)."""

    pool_order = 0

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
        self.load = Load()
        self.egress = Port()
        self.queue: deque[Job] = deque()
        self.kv = deployment.kv_cache(
            Role.PREFILL, index, 0, capacity_tokens=profile.kv_tokens(parallelism), block_tokens=profile.block_tokens
        )
        self.busy_s = 0.0
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

    def enqueue(self, job: Job) -> None:
        """Take a request that was routed here."""
        self.queue.append(job)
        self._deployment.recorder.prefill_instance[job.index] = self.index

    def settle(self, now_s: float) -> None:
        """Nothing to do before the launches."""

    def launch(self, now_s: float) -> None:
        """Start the next batch if the first stage is free and the head of the queue fits."""
        if not self._launchable or not self.queue:
            return
        batch = take_batch(self.queue, self._limits, self.kv)
        if not batch:
            return
        chunks = [(job.prompt - job.cached, job.cached) for job in batch]
        tokens = sum(chunk[0] for chunk in chunks)
        host_s = self._host.launch_s(len(batch), tokens)
        stage_s = self._latency.prefill_s(chunks) / self._pp
        end_s = self._stages.pass_through(now_s, host_s + stage_s, stage_s)
        self.busy_s += host_s + stage_s
        recorder, clock = self._deployment.recorder, self._deployment.clock
        starts = recorder.prefill_start_s
        for job in batch:
            starts[job.index] = now_s
        if recorder.steps is not None:
            ids = tuple(job.index for job in batch)
            recorder.steps.append(StepRecord("P", self.index, 0, now_s, end_s, ids, ()))
        self._launchable = False
        if self._layer_wise:
            self._hand_over_early(batch, end_s)
        if self._pp > 1:
            clock.at(self._stages.free_s[0], STEP_END, self._on_first_stage_end)
            clock.at(end_s, STEP_END, lambda _event: self._end(batch))
        else:
            clock.at(end_s, STEP_END, lambda _event: self._end_of_only_stage(batch))

    def _on_first_stage_end(self, _event: simpy.Event) -> None:
        self._launchable = True
        if self.queue:
            self._deployment.touch(self)

    def _end_of_only_stage(self, batch: list[Job]) -> None:
        self._launchable = True
        self._end(batch)

    def _end(self, batch: list[Job]) -> None:
        deployment = self._deployment
        recorder, now_s = deployment.recorder, deployment.clock.now
        shown, later = self._shows_token, []
        for job in batch:
            recorder.prefill_end_s[job.index] = now_s
            if shown:
                job.produced = 1
                recorder.first_token(job, now_s)
                if job.output == 1 or deployment.prefill_only:
                    self.free(job)
                    deployment.finish(job)
                    continue
            if self._layer_wise:
                continue
            job.prefiller = self
            if self._hop_s:
                later.append(job)
            else:
                deployment.hand_over(job)
        if later:
            deployment.clock.at(now_s + self._hop_s, ARRIVAL, lambda _event: self._hand_over(later))
        if self.queue:
            deployment.touch(self)

    def _hand_over(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._deployment.hand_over(job)

    def _hand_over_early(self, batch: list[Job], end_s: float) -> None:
        """Hand over, at its launch, a batch whose KV follows the prefill layer by layer."""
        for job in batch:
            if self._shows_token and job.output == 1:
                continue
            job.prefiller = self
            job.prefilled_s = end_s
            self._deployment.hand_over(job)

    def free(self, job: Job) -> None:
        """Forget a prompt whose KV is not needed here any more."""
        self.kv.release(num_blocks(job.prompt, self.kv.block_tokens))
        self.load.remove(job.prompt)
        if self.queue:
            self._deployment.touch(self)
