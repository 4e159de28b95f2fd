"""Decode instances: continuous batching over a paged KV cache that pulls prompts from the prefill side."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from dsim.circuit import Circuit
from dsim.clock import STEP_END, TRANSFER_END, Alarm, Wake
from dsim.cruise import AffineCruise, Courses, TableCruise
from dsim.job import Job
from dsim.kv import num_blocks
from dsim.pools import Parallelism, Role
from dsim.profile import BatchLimits, FirstToken, HandoverMode, Preemption, Profile
from dsim.records import StepRecord
from dsim.routing import OnlyOne
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
        self.ingress = Port()
        self.unpulled: deque[Job] = deque()
        self.pulled: deque[Job] = deque()
        self.preempted: deque[Job] = deque()
        self.kv = deployment.kv_cache(
            Role.DECODE, index, 0, capacity_tokens=profile.kv_tokens(parallelism), block_tokens=profile.block_tokens
        )
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
        self._posting_takes_time = self._post_s > 0 or self._post_block_s > 0
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
        self._shows_token_at_transfer_end = self._handover.first_token_from is FirstToken.TRANSFER_END
        self._router = deployment.decode_router
        self._pool_of_one = isinstance(self._router, OnlyOne)
        self._touched = deployment.touched
        recorder = deployment.recorder
        self._logs_steps = recorder.steps is not None
        self._gaps = recorder.gaps
        self._transfer_start_s, self._transfer_end_s = recorder.transfer_start_s, recorder.transfer_end_s
        self._decode_start_s = recorder.decode_start_s
        #: Whose transfers end next, unless layer-wise, in this order.
        self._in_transfer: deque[Job] = deque()
        self._transfer_wake = Wake(self._on_next_transfer_end)

    def busy_until_s(self, now_s: float) -> float:
        """Seconds that driver or first stage was busy up to now."""
        raise NotImplementedError

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
        if not self.touched:
            self.touched = True
            self._touched.append(self)

    # Pulls

    def _may_pull(self) -> bool:
        """Whether the pull rule lets the head of `unpulled` in, as far as the blocks known to be free tell."""
        return (
            bool(self.unpulled)
            and self._blocks_to_join < self._watermark_blocks
            and self.unpulled[0].prompt_blocks <= self.kv.free
        )

    def _pull(self, now_s: float) -> None:
        """Post the transfer of the head of `unpulled`."""
        job = self.unpulled.popleft()
        blocks = job.blocks = job.prompt_blocks
        self.kv.take(blocks)
        self._blocks_to_join += blocks
        prefiller = job.prefiller
        if prefiller is None:
            start_s = end_s = now_s
        else:
            times = self._times_from(prefiller)
            start_s, end_s = post(now_s, prefiller.egress, self.ingress, times.duration_s(job.prompt))
            if self._layer_wise:
                end_s = max(end_s, job.prefilled_s + times.last_layer_s(job.prompt))
        self._transfer_start_s[job.row] = start_s
        if self._posting_takes_time:
            self._extra_s += self._post_s + self._post_block_s * blocks
        self._pulling = self._stalls
        if self._layer_wise:
            self._deployment.clock.at(end_s, TRANSFER_END, partial(self._on_transfer_end, job))
        else:
            self._in_transfer.append(job)
            self._deployment.clock.wake(end_s, TRANSFER_END, self._transfer_wake)

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

    def _on_next_transfer_end(self, event: simpy.Event) -> None:
        self._on_transfer_end(self._in_transfer.popleft(), event)

    def _on_transfer_end(self, job: Job, _event: simpy.Event) -> None:
        deployment = self._deployment
        now_s = deployment.clock.now_s
        self._transfer_end_s[job.row] = now_s
        self._pulling = False
        if job.prefiller is not None:
            job.prefiller.free(job)
            job.prefiller = None
        if not self.touched:
            self.touched = True
            self._touched.append(self)
        if self._shows_token_at_transfer_end and not job.produced:
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
        emptiest, least = None, math.inf
        for batch in self.batches:
            if len(batch.members) < self._max_requests:
                context = batch.context + batch.fresh_context + batch.recompute_context
                if context < least:
                    emptiest, least = batch, float(context)
        return emptiest

    def _fits(self, job: Job) -> bool:
        return num_blocks(job.context, self.kv.block_tokens) - job.blocks <= self.kv.free

    def _join(self, job: Job, batch: RunningBatch) -> None:
        """Take the blocks of the job's next step and let it join, the head of its queue."""
        context = job.context
        more = num_blocks(context, self.kv.block_tokens) - job.blocks
        if more:
            self.kv.take(more)
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
        self._deployment.recorder.preemptions[job.row] += 1
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
        starts = self._decode_start_s
        for job in batch.newcomers:
            row = job.row
            if starts[row] != starts[row]:
                starts[row] = now_s

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
        if not self._pool_of_one:
            self._router.leave(self.index, job.prompt)
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
        recorder, now_s = deployment.recorder, deployment.clock.now_s
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
        #: Seconds that steps, swaps and postings take, without those of a cruise under way; and when a recompute ends.
        self._busy_s = 0.0
        self._recompute_end_s = 0.0
        self._batch = self.batches[0]
        self._courses = Courses(self._latency, self._host)
        self._cruise: AffineCruise | TableCruise | None = None
        #: Steps of the cruise to sleep through, and when the last of them ends.
        self._steps = 0
        self._end_s = 0.0
        self._delay_s = 0.0
        self._alarm = Alarm(deployment.clock, self._on_steps_end)
        self._in_flight = False

    def busy_until_s(self, now_s: float) -> float:
        """Seconds that steps, swaps and postings took up to now."""
        course = self._cruise
        if course is not None:
            return self._busy_s + (now_s - course.start_s + self._delay_s)
        return self._busy_s - max(0.0, self._recompute_end_s - now_s)

    def settle(self, now_s: float) -> None:
        """Pull and admit where the driver may act; otherwise see to it that it acts at the next boundary."""
        if self._in_flight:
            course = self._cruise
            if not self._pulls_in_turn:
                self._pull_in_flight(now_s, course)
                return
            if course is None or self._steps == 1 or not self._wants_turn():
                return
            # Let the cruise end with the step under way.
            steps = course.steps_until(now_s) if now_s > course.start_s else 1
            if steps >= self._steps:
                return
            self._steps = steps
            end_s = self._end_s = course.end_s(steps)
            if end_s > now_s:
                self._alarm.set(end_s)
                return
            # That step ends now; the cruise would have passed it by.
            self._alarm.set(math.inf)
            self._end_steps()
        if self._pulling:
            return
        if self._stalls:
            if self.unpulled and self._may_pull():
                self._pull(now_s)
                return
            if self.pulled or self.preempted:
                self._admit()
        else:
            self._pull_all(now_s)
            self._admit()
            self._pull_all(now_s)

    def follow_launches(self, now_s: float) -> None:
        """Pull what was handed over by the prefills launched just now."""
        if self._in_flight and self._cruise is not None and self._split(now_s, through=True):
            self._plan()
        self.settle(now_s)

    def _wants_turn(self) -> bool:
        """Whether the driver will have something to do where the step under way ends."""
        if self.unpulled and self._may_pull():
            return True
        return not self._stalls and bool(self.pulled or self.preempted)

    def _pull_in_flight(self, now_s: float, course: AffineCruise | TableCruise | None) -> None:
        """Pull during a step, from the blocks that are free at this instant."""
        if course is None:
            self._pull_all(now_s)
        elif self._may_pull() or self.pulled or self.preempted:
            self._split(now_s)
            self._pull_all(now_s)
            self._plan(again=bool(self.pulled or self.preempted or self._extra_s))

    def _admit(self) -> None:
        """Let preempted, then pulled requests join while they fit."""
        batch, kv, size = self._batch, self.kv, self._batch.block_tokens
        while self.pulled and not self.preempted:
            # What `_join` does, for the one batch there is.
            if len(batch.members) >= self._max_requests:
                return
            job = self.pulled[0]
            context = job.prompt + job.produced
            more = (context + size - 1) // size - job.blocks
            if more:
                if more > kv.free:
                    return
                kv.take(more)
            self.pulled.popleft()
            self._blocks_to_join -= job.blocks
            job.blocks = 0
            batch.join(job, context)
        if self.preempted:
            super()._admit()

    def _emptiest(self) -> RunningBatch | None:
        return self._batch if len(self._batch.members) < self._max_requests else None

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
            self._busy_s += end_s - now_s
            self._recompute_end_s = end_s
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
        self._plan(again=self._preempted_now or (self._pulls_in_turn and bool(self.unpulled) and self._may_pull()))
        if self._logs_steps:
            self._log(batch, now_s, self._cruise.end_s(1))

    def _plan(self, *, again: bool = False) -> None:
        """Choose how many steps of the cruise to sleep through, one if a turn is due `again`, and set the alarm."""
        course, batch = self._cruise, self._batch
        assert course is not None
        if again or self._logs_steps:
            steps = 1
        else:
            steps = batch.next_finish() - batch.launched + 1
            if steps > course.limit:
                steps = course.limit
            requests = batch.requests
            if steps > 1 and ((steps - 1) // batch.block_tokens + 1) * requests > self.kv.free:
                steps = batch.steps_in_memory(steps)
            if batch.context + (steps - 1) * requests > self._max_context:
                self._check_range(batch.context + requests)
                steps = 1 + int((self._max_context - batch.context) // requests)
        self._steps = steps
        end_s = self._end_s = course.end_s(steps)
        self._alarm.set(end_s)

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
        self._steps = done
        self._end_s = course.end_s(done)
        self._commit(course)
        batch.advance(1)
        self._cruise = self._courses.start(self._end_s, batch.requests, batch.context)
        return True

    def _commit(self, course: AffineCruise | TableCruise) -> None:
        """Account for the steps slept through, without those who finish in the last; leaves that one in flight."""
        batch, gaps, steps, end_s = self._batch, self._gaps, self._steps, self._end_s
        self._busy_s += end_s - course.start_s + self._delay_s
        self._delay_s = 0.0
        if self._late_first_token:
            self._close_step(batch, course.end_s(1))
        elif gaps is not None:
            batch.close_gaps(course.end_s(1) if steps > 1 else end_s, gaps)
        elif batch.newcomers:
            # The same where nobody asks about single steps.
            batch.newcomers = []
        if steps > 1:
            if gaps is not None:
                gaps.add_course(course, steps, batch.requests)
            batch.advance(steps - 1)
        batch.last_end_s = end_s

    def _on_steps_end(self, _event: simpy.Event) -> None:
        # What `Alarm.rings` does: this comes with nearly every event.
        alarm = self._alarm
        if alarm.time_s == alarm.clock.now_s:
            alarm.time_s = math.inf
            self._end_steps()
            if not self.touched:
                self.touched = True
                self._touched.append(self)

    def _end_steps(self) -> None:
        course = self._cruise
        assert course is not None
        self._commit(course)
        self._cruise = None
        self._in_flight = False
        finished = self._batch.complete()
        if finished:
            deployment = self._deployment
            recorder, now_s = deployment.recorder, deployment.clock.now_s
            for job in finished:
                # What `_done` does.
                if not self._pool_of_one:
                    self._router.leave(self.index, job.prompt)
                recorder.finish(job, now_s)
                if deployment.on_finish is not None:
                    deployment.on_finish(job)

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
        self._committed_s = -math.inf
        self._due_again = False
        #: Recompute members that the step in flight prefills.
        self._recomputing: list[list[Job]] = [[] for _ in self.batches]
        self._alarm = Alarm(deployment.clock, self._on_wake)

    def busy_until_s(self, now_s: float) -> float:
        """Seconds that the busier of the driver and the first stage was busy up to now."""
        return self._circuit.busy_until_s(now_s)

    def settle(self, now_s: float) -> None:
        """Pull and admit where the driver may act."""
        # Only layer-wise handovers of this very instant come before the end of a hold that takes no time.
        self._due_again = self._layer_wise and self._alarm.time_s == now_s
        circuit = self._circuit
        if self._committed_s != now_s or circuit.planned:
            self._commit(now_s)
        stalls = self._stalls
        acted = self._acted = now_s >= circuit.driver_free_s and not self._pulling and not circuit.all_in_flight
        if not stalls:
            if acted or not self._pulls_in_turn:
                self._pull_all(now_s)
        elif acted and self.unpulled and self._may_pull():
            self._pull(now_s)
            return
        if acted:
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
            self._circuit.ready_s[batch.index] = self._deployment.clock.now_s
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
            if batch.recompute or batch.growth() > self.kv.free:
                self._make_memory(batch)
            if batch.members:
                return batch

    def _longest_ready(self) -> RunningBatch | None:
        end_s, ready_s = self._circuit.end_s, self._circuit.ready_s
        longest, since_s = None, math.inf
        for part, batch in enumerate(self.batches):
            if batch.members and end_s[part] == math.inf and ready_s[part] < since_s:
                longest, since_s = batch, ready_s[part]
        return longest

    def _start(self, batch: RunningBatch, now_s: float) -> None:
        extra_s, self._extra_s = self._extra_s, 0.0
        jobs = self._recompute_chunks(batch) if batch.recompute else []
        self._recomputing[batch.index] = jobs
        if jobs:
            host_s, kernel_s = self._recompute_times(jobs)
        else:
            batch.launch()
            if batch.newcomers:
                self._record_starts(batch, now_s)
            if batch.context > self._max_context:
                self._check_range(batch.context)
            host_s = self._host.launch_s(batch.requests, batch.context)
            kernel_s = self._latency.decode_s(batch.requests, batch.context)
        end_s = self._circuit.launch(batch.index, now_s, hold_s=extra_s + host_s, kernel_s=kernel_s)
        self._log(batch, now_s, end_s, jobs)

    def _set_alarm(self) -> None:
        """Wake at the next own event that can change anything."""
        circuit = self._circuit
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
        if self._preempted_now or self._extra_s or self._logs_steps:
            return False
        if self._pulls_in_turn and (self._pulling or (self.unpulled and self._may_pull())):
            return False
        if not self._acted and (self.pulled or self.preempted):
            return False
        for batch in self.batches:  # noqa: SIM110 - a generator takes longer than this
            if batch.fresh or batch.recompute:
                return False
        return True

    def _on_wake(self, _event: simpy.Event) -> None:
        if self._alarm.rings():
            self._commit(self._deployment.clock.now_s)
            self._deployment.touch(self)

    def _commit(self, now_s: float, *, through: bool = False) -> None:
        self._committed_s = now_s
        self._circuit.commit(now_s, self.batches, self._land, self._gaps, through=through)

    def _land(self, part: int, end_s: float) -> None:
        """End the step in flight of a micro-batch; whoever finishes does so now."""
        batch, jobs = self.batches[part], self._recomputing[part]
        if jobs:
            self._recomputing[part] = []
            self._end_recompute(batch, jobs)
            return
        if self._gaps is not None or self._late_first_token:
            self._close_step(batch, end_s)
        else:
            # The same where nobody asks about single steps.
            batch.newcomers = []
            batch.last_end_s = end_s
        for job in batch.complete():
            self._done(job)
