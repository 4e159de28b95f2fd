"""Decode instances: continuous batching over a paged KV cache that pulls prompts from the prefill side."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from dsim.circuit import Circuit
from dsim.clock import STEP_END, TRANSFER_END, Alarm
from dsim.cruise import AffineCruise, Courses, TableCruise
from dsim.job import Job
from dsim.kv import num_blocks
from dsim.pools import Parallelism, Role
from dsim.profile import BatchLimits, FirstToken, HandoverMode, Preemption, Profile
from dsim.recorder import StepRecord
from dsim.routing import Load
from dsim.running import RunningBatch
from dsim.transfer import Port, TransferTimes, post, transfer_times

if TYPE_CHECKING:
    import simpy

    from dsim.deployment import Deployment
    from dsim.prefill import PrefillInstance


class DecodeInstance:
    """What decode instances of any pp share: pulls, admissions, memory (docs/semantics.md, section 5)."""

    pool_order = 1

    def __init__(self, deployment: Deployment, index: int, *, profile: Profile, parallelism: Parallelism) -> None:
        self.index = index
        self.touched = False
        self.load = Load()
        self.ingress = Port()
        self.unpulled: deque[Job] = deque()
        self.pulled: deque[Job] = deque()
        self.preempted: deque[Job] = deque()
        self.kv = deployment.kv_cache(
            Role.DECODE, index, 0, capacity_tokens=profile.kv_tokens(parallelism), block_tokens=profile.block_tokens
        )
        self.busy_s = 0.0
        self.batches = [RunningBatch(self.kv, part) for part in range(parallelism.pp)]
        self._deployment = deployment
        self._latency = profile.latency_of(parallelism)
        self._host = profile.host_of(Role.DECODE, parallelism.pp)
        self._prefill_host = profile.host_of(Role.PREFILL, parallelism.pp)
        self._prefill_limits = profile.limits.get(Role.PREFILL, BatchLimits())
        self._max_requests = deployment.request_limit(profile, Role.DECODE, parallelism.tp)
        self._max_context = deployment.context_limit(profile, parallelism.tp)
        handover = self._handover = profile.handover
        self._stalls = handover.stalls_decode
        #: Pulls are posted only where the driver may act.
        self._pulls_in_turn = self._stalls or handover.mode is HandoverMode.PULL_AT_STEP
        self._layer_wise = handover.mode is HandoverMode.LAYER_WISE
        self._post_s, self._post_block_s = handover.post_s, handover.post_block_s
        self._swaps = profile.preemption is Preemption.SWAP
        self._swap_s_per_token = profile.model.kv_bytes_per_token / (profile.swap_bytes_per_s * parallelism.num_gpus)
        #: Driver time that the next launch takes for swaps and posted pulls.
        self._extra_s = 0.0
        self._watermark_blocks = profile.handover.watermark * self.kv.capacity
        self._blocks_to_join = 0
        self._pulling = False
        self._preempted_now = False
        self._transfer_times: list[TransferTimes] = []
        self._profile = profile
        self._parallelism = parallelism
        self._late_first_token = self._handover.first_token_from is FirstToken.DECODE

    def settle(self, now_s: float) -> None:
        """Do step 4 of an instant: pulls and admissions."""
        raise NotImplementedError

    def follow_launches(self, now_s: float) -> None:
        """Do step 4 once more, after all launches of this instant, those of a cruise that are due now too."""
        raise NotImplementedError

    def launch(self, now_s: float) -> None:
        """Do step 5 of an instant: launch what can be launched."""
        raise NotImplementedError

    def hand_over(self, job: Job) -> None:
        """Take a prompt that waits on the prefill side, or is here already in a decode-only run."""
        self.unpulled.append(job)
        self._deployment.touch(self)

    # Pulls

    def _may_pull(self) -> bool:
        """Whether the pull rule lets the head of `unpulled` in, as far as the blocks known to be free tell."""
        return (
            bool(self.unpulled)
            and self._blocks_to_join < self._watermark_blocks
            and num_blocks(self.unpulled[0].prompt, self.kv.block_tokens) <= self.kv.free
        )

    def _pull(self, now_s: float) -> None:
        """Post the transfer of the head of `unpulled`."""
        job = self.unpulled.popleft()
        job.blocks = num_blocks(job.prompt, self.kv.block_tokens)
        self.kv.take(job.blocks)
        self._blocks_to_join += job.blocks
        prefiller, recorder = job.prefiller, self._deployment.recorder
        if prefiller is None:
            start_s = end_s = now_s
        else:
            times = self._times_from(prefiller)
            start_s, end_s = post(now_s, prefiller.egress, self.ingress, times.duration_s(job.prompt))
            if self._layer_wise:
                end_s = max(end_s, job.prefilled_s + times.last_layer_s(job.prompt))
        recorder.transfer_start_s[job.index] = start_s
        self._extra_s += self._post_s + self._post_block_s * job.blocks
        self._pulling = self._stalls
        self._deployment.clock.at(end_s, TRANSFER_END, partial(self._on_transfer_end, job))

    def _pull_all(self, now_s: float) -> None:
        while self._may_pull():
            self._pull(now_s)

    def _times_from(self, prefiller: PrefillInstance) -> TransferTimes:
        """Return what transfers from a prefill instance take."""
        if not self._transfer_times:
            placement = self._deployment.placement
            sender, crossings = placement.pools[0], placement.crossings
            within, across = (
                transfer_times(self._profile, sender.parallelism, self._parallelism, crosses=crosses)
                for crosses in (False, True)
            )
            self._transfer_times = [
                across if crossings is not None and crossings[i][self.index] else within for i in range(sender.count)
            ]
        return self._transfer_times[prefiller.index]

    def _on_transfer_end(self, job: Job, _event: simpy.Event) -> None:
        deployment = self._deployment
        now_s = deployment.clock.now
        deployment.recorder.transfer_end_s[job.index] = now_s
        self._pulling = False
        if job.prefiller is not None:
            job.prefiller.free(job)
            job.prefiller = None
        deployment.touch(self)
        if self._handover.first_token_from is FirstToken.TRANSFER_END and not job.produced:
            job.produced = 1
            deployment.recorder.first_token(job, now_s)
            if job.output == 1:
                self.kv.release(job.blocks)
                self._blocks_to_join -= job.blocks
                self._done(job)
                return
        self.pulled.append(job)

    # Admissions

    def _admit(self) -> None:
        """Let preempted, then pulled requests join while they fit."""
        while self.preempted or self.pulled:
            job = self.preempted[0] if self.preempted else self.pulled[0]
            batch = self._emptiest()
            if batch is None or not self._fits(job):
                return
            self._join(job, batch)

    def _emptiest(self) -> RunningBatch | None:
        """Return the batch with the least context among those with room for one more request."""
        if len(self.batches) == 1:
            batch = self.batches[0]
            return batch if len(batch.members) < self._max_requests else None
        room = [batch for batch in self.batches if len(batch.members) < self._max_requests]
        return min(room, key=lambda batch: batch.total_context, default=None)

    def _fits(self, job: Job) -> bool:
        return num_blocks(job.context, self.kv.block_tokens) - job.blocks <= self.kv.free

    def _join(self, job: Job, batch: RunningBatch) -> None:
        """Take the blocks of the job's next step and let it join, the head of its queue."""
        context = job.context
        self.kv.take(num_blocks(context, self.kv.block_tokens) - job.blocks)
        if self.pulled and self.pulled[0] is job:
            self.pulled.popleft()
            self._blocks_to_join -= job.blocks
            job.blocks = 0
        else:
            self.preempted.popleft()
            if not self._swaps:
                batch.join_recompute(job)
                return
            self._extra_s += self._swap_s_per_token * (context - 1 if job.produced else context)
        batch.join(job, context)

    # Memory

    def _make_memory(self, batch: RunningBatch) -> None:
        """Preempt members of `batch`, the last to join first, until its next launch finds its blocks."""
        while not batch.recompute and batch.growth() > self.kv.free:
            job, stored = batch.preempt_last()
            self._preempt(job, stored)

    def _preempt(self, job: Job, stored_tokens: int) -> None:
        self._preempted_now = True
        self._deployment.recorder.preemptions[job.index] += 1
        if self._swaps:
            self._extra_s += self._swap_s_per_token * stored_tokens
        job.blocks = 0
        self.preempted.append(job)

    def _rescue(self) -> None:
        """Let the oldest waiting request join although later pulled ones hold its blocks."""
        if not self.preempted and not self.pulled:
            return
        job = self.preempted[0] if self.preempted else self.pulled[0]
        while not self._fits(job) and self.pulled and self.pulled[-1] is not job:
            evicted = self.pulled.pop()
            self.kv.release(evicted.blocks)
            self._blocks_to_join -= evicted.blocks
            self._preempt(evicted, evicted.context - 1 if evicted.produced else evicted.context)
        batch = self._emptiest()
        if batch is not None and self._fits(job):
            self._join(job, batch)

    # Tokens

    def _record_starts(self, batch: RunningBatch, now_s: float) -> None:
        """Note the first decode launch of those that join it."""
        starts = self._deployment.recorder.decode_start_s
        for job in batch.newcomers:
            if math.isnan(starts[job.index]):
                starts[job.index] = now_s

    def _close_step(self, batch: RunningBatch, end_s: float) -> None:
        """Account for the tokens of one step: the gaps they close, and who has token 1 from it."""
        recorder = self._deployment.recorder
        newcomers = batch.newcomers
        batch.close_gaps(end_s, recorder.gaps)
        if self._late_first_token:
            for job in newcomers:
                if not job.produced:
                    job.produced = 1
                    recorder.first_token(job, end_s)

    def _done(self, job: Job) -> None:
        self.load.remove(job.prompt)
        self._deployment.finish(job)

    def _check_range(self, context: int) -> None:
        if context > self._max_context:
            self._deployment.check_context(self._profile, self._parallelism.tp, context)

    # Recompute

    def _recompute_chunks(self, batch: RunningBatch) -> list[Job]:
        """Return the recompute members that the next prefill step of `batch` takes."""
        jobs: list[Job] = []
        tokens = 0
        for job in batch.recompute:
            tokens += job.context
            if jobs and (tokens > self._prefill_limits.tokens or len(jobs) >= self._prefill_limits.requests):
                break
            jobs.append(job)
        return jobs

    def _recompute_times(self, jobs: list[Job]) -> tuple[float, float]:
        """Return host and kernel seconds of a prefill step over recompute members."""
        chunks = [(job.context, 0) for job in jobs]
        tokens = sum(tokens for tokens, _ in chunks)
        return self._prefill_host.launch_s(len(jobs), tokens), self._latency.prefill_s(chunks)

    def _end_recompute(self, batch: RunningBatch, jobs: list[Job]) -> None:
        deployment = self._deployment
        recorder, now_s = deployment.recorder, deployment.clock.now
        for job in jobs:
            if job.produced:
                if recorder.gaps is not None:
                    recorder.gaps.add(now_s - job.last_token_s)
                job.last_token_s = now_s
            else:
                recorder.first_token(job, now_s)
            batch.recomputed(job)
            if job.produced == job.output:
                self._done(job)

    def _log(self, batch: RunningBatch, now_s: float, end_s: float, recompute: list[Job] | None = None) -> None:
        steps = self._deployment.recorder.steps
        if steps is not None:
            prefill = tuple(job.index for job in recompute or ())
            decode = () if recompute else tuple(job.index for job in batch)
            steps.append(StepRecord("D", self.index, batch.index, now_s, end_s, prefill, decode))


class SerialDecodeInstance(DecodeInstance):
    """pp = 1: the driver waits for each step, so a constant batch is one closed form."""

    def __init__(self, deployment: Deployment, index: int, *, profile: Profile, parallelism: Parallelism) -> None:
        super().__init__(deployment, index, profile=profile, parallelism=parallelism)
        self._batch = self.batches[0]
        self._courses = Courses(self._latency, self._host)
        self._cruise: AffineCruise | TableCruise | None = None
        self._steps = 0
        self._delay_s = 0.0
        self._alarm = Alarm(deployment.clock, self._on_steps_end)
        self._in_flight = False

    def settle(self, now_s: float) -> None:
        """Pull and admit where the driver may act; otherwise see to it that it acts at the next boundary."""
        if self._pulls_in_turn and self._in_flight and self._cruise is not None:
            self._cut_short(now_s)
        if self._in_flight:
            if self._pulls_in_turn:
                return
            if self._cruise is None:
                self._pull_all(now_s)
            elif self._may_pull() or self.pulled or self.preempted:
                self._split(now_s)
                self._pull_all(now_s)
                self._plan(now_s, limit=1 if self.pulled or self.preempted or self._extra_s else None)
            return
        if self._pulling:
            return
        if self._stalls:
            if self._may_pull():
                self._pull(now_s)
                return
            self._admit()
        else:
            self._pull_all(now_s)
            self._admit()
            self._pull_all(now_s)

    def follow_launches(self, now_s: float) -> None:
        """Pull what was handed over by the prefills launched just now."""
        if self._in_flight and self._cruise is not None and self._split(now_s, through=True):
            self._plan(now_s, limit=None)
        self.settle(now_s)

    def _cut_short(self, now_s: float) -> None:
        """Let the cruise end with the step under way where the driver will have something to do then."""
        if self._may_pull() or (not self._stalls and (self.pulled or self.preempted)):
            self._plan(now_s, limit=1, split=True)
            if self._alarm.is_set_for(now_s):
                # That step ends now; the cruise would have passed it by.
                self._alarm.cancel()
                self._end_steps()

    def launch(self, now_s: float) -> None:
        """Start the next step, or cruise, if the driver is free."""
        if self._in_flight or self._pulling:
            return
        batch = self._batch
        self._preempted_now = False
        if batch.growth() > self.kv.free:
            self._make_memory(batch)
        if not batch.members:
            self._rescue()
            if not batch.members:
                return
        self._in_flight = True
        extra_s, self._extra_s = self._extra_s, 0.0
        if batch.recompute:
            jobs = self._recompute_chunks(batch)
            host_s, kernel_s = self._recompute_times(jobs)
            end_s = now_s + (extra_s + host_s + kernel_s)
            self.busy_s += end_s - now_s
            self._log(batch, now_s, end_s, jobs)
            self._cruise = None
            self._deployment.clock.at(end_s, STEP_END, partial(self._on_recompute_end, jobs))
            return
        batch.launch()
        if batch.newcomers:
            self._record_starts(batch, now_s)
        if batch.context > self._max_context:
            self._check_range(batch.context)
        self._delay_s = extra_s
        self._cruise = self._courses.start(now_s + extra_s, batch.requests, batch.context)
        # Another turn of the driver is due at the next boundary where a pull is allowed already, or where a preemption
        # may have freed more than it needed.
        again = self._preempted_now or (self._pulls_in_turn and self._may_pull())
        self._plan(now_s, limit=1 if again else None)
        if self._deployment.recorder.steps is not None:
            self._log(batch, now_s, self._cruise.end_s(1))

    def _plan(self, now_s: float, *, limit: int | None, split: bool = False) -> None:
        """Choose how many steps of the cruise to sleep through and set the alarm."""
        course, batch = self._cruise, self._batch
        assert course is not None
        if split:
            steps = course.steps_until(now_s) if now_s > course.start_s else 1
            if steps >= self._steps:
                return
        elif limit == 1 or self._deployment.recorder.steps is not None:
            steps = 1
        else:
            steps = min(batch.steps_to_finish(), course.limit)
            if steps > 1:
                steps = batch.steps_in_memory(steps)
            if batch.context + (steps - 1) * batch.requests > self._max_context:
                self._check_range(batch.context + batch.requests)
                steps = 1 + int((self._max_context - batch.context) // batch.requests)
        self._steps = steps
        self._alarm.set(course.end_s(steps))

    def _split(self, now_s: float, *, through: bool = False) -> bool:
        """Commit the steps of the cruise that have ended, so that the free blocks are those of this instant.

        Args:
            through: also one that ends now, whose follower was launched just now.

        Returns:
            Whether there were any.
        """
        course, batch = self._cruise, self._batch
        assert course is not None
        if now_s <= course.start_s:
            return False
        done = course.steps_until(now_s)
        if not through or course.end_s(done) > now_s:
            done -= 1
        if not done:
            return False
        self._commit(done)
        batch.advance(1)
        start_s = course.end_s(done)
        self._cruise = self._courses.start(start_s, batch.requests, batch.context)
        return True

    def _commit(self, steps: int) -> None:
        """Account for `steps` completed steps, without those who finish in the last; leaves that one in flight."""
        course, batch = self._cruise, self._batch
        assert course is not None
        gaps = self._deployment.recorder.gaps
        end_s = course.end_s(steps)
        self.busy_s += end_s - course.start_s + self._delay_s
        self._delay_s = 0.0
        self._close_step(batch, course.end_s(1))
        batch.run_on(course, steps, gaps)

    def _on_steps_end(self, _event: simpy.Event) -> None:
        self._end_steps()
        self._deployment.touch(self)

    def _end_steps(self) -> None:
        self._commit(self._steps)
        self._cruise = None
        self._in_flight = False
        for job in self._batch.complete():
            self._done(job)

    def _on_recompute_end(self, jobs: list[Job], _event: simpy.Event) -> None:
        self._in_flight = False
        self._end_recompute(self._batch, jobs)
        self._deployment.touch(self)


class PipelinedDecodeInstance(DecodeInstance):
    """pp > 1: micro-batches circulate through the stages; every launch holds the one driver for its host time."""

    def __init__(self, deployment: Deployment, index: int, *, profile: Profile, parallelism: Parallelism) -> None:
        super().__init__(deployment, index, profile=profile, parallelism=parallelism)
        self._circuit = Circuit(parts=parallelism.pp, stages=parallelism.pp)
        self._acted = False
        self._due_again = False
        #: Recompute members that the step in flight prefills.
        self._recomputing: list[list[Job]] = [[] for _ in self.batches]
        self._alarm = Alarm(deployment.clock, self._on_wake)

    def settle(self, now_s: float) -> None:
        """Pull and admit where the driver may act."""
        # Only layer-wise handovers of this very instant come before the end of a hold that takes no time.
        self._due_again = self._layer_wise and self._alarm.is_set_for(now_s)
        self._commit(now_s)
        stalls = self._stalls
        self._acted = self._driver_free(now_s) and not self._circuit.all_in_flight
        if not stalls:
            if self._acted or not self._pulls_in_turn:
                self._pull_all(now_s)
        elif self._acted and self._may_pull():
            self._pull(now_s)
            return
        if self._acted:
            self._admit()
            if not stalls:
                self._pull_all(now_s)

    def follow_launches(self, now_s: float) -> None:
        """Pull what was handed over by the prefills launched just now."""
        self._commit(now_s, through=True)
        if self._circuit.last_launch_s == self._circuit.driver_free_s == now_s:
            # The end of a hold that takes no time comes after this.
            self._alarm.set(now_s)
        self.settle(now_s)

    def _driver_free(self, now_s: float) -> bool:
        return now_s >= self._circuit.driver_free_s and not self._pulling

    def _join(self, job: Job, batch: RunningBatch) -> None:
        if not batch.members:
            # A micro-batch's turn counts from its first member.
            self._circuit.ready_s[batch.index] = self._deployment.clock.now
        super()._join(job, batch)

    def launch(self, now_s: float) -> None:
        """Launch the micro-batch that has been ready longest, if the driver is free; set the next alarm."""
        if self._driver_free(now_s):
            batch = self._next_batch()
            if batch is not None:
                self._start(batch, now_s)
        self._set_alarm()

    def _next_batch(self) -> RunningBatch | None:
        """Return the micro-batch to launch now, its memory found; None if there is none."""
        self._preempted_now = False
        while True:
            batch = self._longest_ready()
            if batch is None:
                if self._circuit.any_in_flight:
                    return None
                self._rescue()
                batch = self._longest_ready()
                if batch is None:
                    return None
            self._make_memory(batch)
            if batch.members:
                return batch

    def _longest_ready(self) -> RunningBatch | None:
        end_s, ready_s = self._circuit.end_s, self._circuit.ready_s
        ready = [batch for batch in self.batches if batch.members and end_s[batch.index] == math.inf]
        return min(ready, key=lambda batch: ready_s[batch.index], default=None)

    def _start(self, batch: RunningBatch, now_s: float) -> None:
        extra_s, self._extra_s = self._extra_s, 0.0
        jobs = self._recompute_chunks(batch) if batch.recompute else []
        self._recomputing[batch.index] = jobs
        if jobs:
            host_s, kernel_s = self._recompute_times(jobs)
        else:
            batch.launch()
            self._record_starts(batch, now_s)
            self._check_range(batch.context)
            host_s = self._host.launch_s(batch.requests, batch.context)
            kernel_s = self._latency.decode_s(batch.requests, batch.context)
        end_s = self._circuit.launch(batch.index, now_s, hold_s=extra_s + host_s, kernel_s=kernel_s)
        self._log(batch, now_s, end_s, jobs)

    def _set_alarm(self) -> None:
        """Wake at the next own event that can change anything."""
        circuit = self._circuit
        self.busy_s = circuit.busy_s
        if self._due_again:
            return
        if self._may_cruise():
            batches = [batch for batch in self.batches if batch.members]
            next_s = circuit.look_ahead(
                batches, self._latency, self._host, deadline_s=math.inf, max_context=self._max_context
            )
        else:
            next_s = circuit.next_event_s(driver=self._preempted_now or not circuit.all_in_flight)
        self._alarm.set(next_s)

    def _may_cruise(self) -> bool:
        """Whether only the ends of planned steps can change anything, until an outside event or a finished request."""
        if self._preempted_now or self._extra_s or (self._pulls_in_turn and (self._pulling or self._may_pull())):
            return False
        if self._deployment.recorder.steps is not None or (not self._acted and (self.pulled or self.preempted)):
            return False
        return not any(batch.fresh or batch.recompute for batch in self.batches)

    def _on_wake(self, _event: simpy.Event) -> None:
        self._commit(self._deployment.clock.now)
        self._deployment.touch(self)

    def _commit(self, now_s: float, *, through: bool = False) -> None:
        self._circuit.commit(now_s, self.batches, self._land, self._deployment.recorder.gaps, through=through)

    def _land(self, part: int, end_s: float) -> None:
        """End the step in flight of a micro-batch; whoever finishes does so now."""
        batch, jobs = self.batches[part], self._recomputing[part]
        if jobs:
            self._recomputing[part] = []
            self._end_recompute(batch, jobs)
            return
        self._close_step(batch, end_s)
        for job in batch.complete():
            self._done(job)
