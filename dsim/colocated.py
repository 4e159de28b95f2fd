"""Colocated instances: engine loops that run both phases under one policy."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from dsim.clock import STEP_END, Wake
from dsim.cruise import AffineCruise, Courses, TableCruise
from dsim.job import Job
from dsim.kv import KvCache, num_blocks
from dsim.pipeline import Stages
from dsim.policies import LoopState, Step, scheduling_policy
from dsim.pools import Pool, Role
from dsim.profile import BatchLimits, Preemption, Profile
from dsim.recorder import StepRecord
from dsim.routing import Load

if TYPE_CHECKING:
    import simpy

    from dsim.deployment import Deployment


class _Loop:
    """One engine loop: its state and the step that it has in flight."""

    __slots__ = ("course", "delay_s", "in_flight", "index", "launch_s", "load", "ready_s", "state", "step", "steps", "wake")

    def __init__(self, index: int, state: LoopState) -> None:
        self.index = index
        self.state = state
        self.load = Load()
        self.in_flight = False
        self.ready_s = 0.0
        self.step = Step()
        self.course: AffineCruise | TableCruise | None = None
        self.delay_s = 0.0
        self.launch_s = 0.0
        self.steps = 0
        self.wake: Wake | None = None


class ColocatedInstance:
    """One colocated instance (docs/semantics.md, section 6)."""

    pool_order = 2

    def __init__(self, deployment: Deployment, index: int, *, profile: Profile, pool: Pool) -> None:
        self.index = index
        self.touched = False
        self.load = Load()
        self.busy_s = 0.0
        self.launches = 0
        self._deployment = deployment
        parallelism = pool.parallelism
        self._pp = parallelism.pp
        self._latency = profile.latency_at(parallelism.tp)
        self._host = profile.host_of(Role.COLOCATED, self._pp)
        self._courses = Courses(self._latency, self._host)
        self._policy = scheduling_policy(pool.policy_or_fail, pool.token_budget)
        self._swap_s_per_token = profile.model.kv_bytes_per_token / (profile.swap_bytes_per_s * parallelism.num_gpus)
        self._stages = Stages(self._pp)
        self._driver_free_s = 0.0
        self._driver_wake: Wake | None = None
        engine = deployment.batch_limits(profile, Role.COLOCATED, parallelism.tp)
        budget = math.inf if pool.token_budget is None else pool.token_budget
        limits = BatchLimits(engine.tokens, min(engine.requests, budget))
        capacity_blocks = max(0, profile.kv_tokens(parallelism)) // profile.block_tokens // self._pp
        self._loops = []
        for part in range(self._pp):
            kv = KvCache(capacity_blocks * profile.block_tokens, profile.block_tokens)
            swaps = profile.preemption is Preemption.SWAP
            state = LoopState(kv, limits=limits, watermark=profile.admission_watermark, swaps=swaps)
            self._loops.append(_Loop(part, state))

    @property
    def loop_kv(self) -> list[KvCache]:
        """KV caches of the engine loops."""
        return [loop.state.kv for loop in self._loops]

    def enqueue(self, job: Job) -> None:
        """Take a request that was routed here."""
        loop = min(self._loops, key=lambda loop: loop.load.requests) if self._pp > 1 else self._loops[0]
        loop.load.add(job.prompt)
        loop.state.waiting.append(job)
        recorder = self._deployment.recorder
        recorder.prefill_instance[job.index] = recorder.decode_instance[job.index] = self.index

    def settle(self, now_s: float) -> None:
        """End runs of decode steps at the next boundary where the policy wants a turn."""
        for loop in self._loops:
            if loop.course is not None and loop.steps > 1 and self._policy.wants_turn(loop.state):
                steps = loop.course.steps_until(now_s) if now_s > loop.course.start_s else 1
                if steps < loop.steps:
                    self._set_alarm(loop, steps)

    def launch(self, now_s: float) -> None:
        """Start the next step of the loops that have one, as far as the driver is free."""
        if now_s < self._driver_free_s:
            self._wake_driver()
            return
        idle = [loop for loop in self._loops if not loop.in_flight]
        if len(idle) > 1:
            idle.sort(key=lambda loop: loop.ready_s)
        for loop in idle:
            step = self._policy.next_step(loop.state)
            if step.empty:
                continue
            self._start(loop, step, now_s)
            if now_s < self._driver_free_s:
                self._wake_driver()
                return

    def _wake_driver(self) -> None:
        if self._pp > 1 and self._driver_wake is None and any(not loop.in_flight for loop in self._loops):
            self._driver_wake = self._deployment.clock.at(self._driver_free_s, STEP_END, self._on_driver_free)

    def _on_driver_free(self, _event: simpy.Event) -> None:
        self._driver_wake = None
        self._deployment.touch(self)

    def _start(self, loop: _Loop, step: Step, now_s: float) -> None:
        state, recorder, clock = loop.state, self._deployment.recorder, self._deployment.clock
        running = state.running
        swap_s = self._swap_s_per_token * state.swapped_tokens
        state.swapped_tokens = 0
        again = bool(state.preempted_now)
        for job in state.preempted_now:
            recorder.preemptions[job.index] += 1
        state.preempted_now.clear()
        loop.in_flight = True
        loop.step = step
        self.launches += 1
        if step.decode:
            running.launch()
            self._record_starts(loop, now_s)
        for job, _, _ in step.chunks:
            if math.isnan(recorder.prefill_start_s[job.index]):
                recorder.prefill_start_s[job.index] = now_s
        if not step.chunks and self._pp == 1:
            loop.delay_s = swap_s
            loop.launch_s = now_s
            loop.course = self._courses.start(now_s + swap_s, running.requests, running.context)
            self._set_alarm(loop, self._steps(loop, again=again))
            self._log(loop, step, now_s, loop.course.end_s(1))
            return
        requests, context = (running.requests, running.context) if step.decode else (0, 0)
        chunks = [(tokens, cached) for _, tokens, cached in step.chunks]
        computed = sum(tokens for tokens, _ in chunks)
        mixed = bool(chunks and requests)
        host_s = self._host.launch_s(len(chunks) + requests, computed + context, mixed=mixed)
        stage_s = self._latency.mixed_s(chunks, requests, context) / self._pp
        if self._pp == 1:
            end_s = now_s + (swap_s + host_s + stage_s)
            self.busy_s += end_s - now_s
        else:
            self._driver_free_s = now_s + (swap_s + host_s)
            end_s = self._stages.pass_through(self._driver_free_s, stage_s, stage_s)
            self.busy_s += swap_s + host_s + stage_s
        self._log(loop, step, now_s, end_s)
        clock.at(end_s, STEP_END, partial(self._on_step_end, loop))

    def _steps(self, loop: _Loop, *, again: bool) -> int:
        """Return how many steps of the loop's cruise nothing but an arrival can disturb."""
        running = loop.state.running
        if again or self._deployment.recorder.steps is not None or self._policy.wants_turn(loop.state):
            return 1
        assert loop.course is not None
        steps = min(running.steps_to_finish(), loop.course.limit)
        return running.steps_in_memory(steps) if steps > 1 else steps

    def _set_alarm(self, loop: _Loop, steps: int) -> None:
        assert loop.course is not None
        if loop.wake is not None:
            loop.wake.cancel()
        loop.steps = steps
        end_s = loop.course.end_s(steps)
        loop.wake = self._deployment.clock.at(end_s, STEP_END, partial(self._on_steps_end, loop))

    def _record_starts(self, loop: _Loop, now_s: float) -> None:
        recorder = self._deployment.recorder
        for job in loop.state.running.newcomers:
            if math.isnan(recorder.decode_start_s[job.index]):
                recorder.decode_start_s[job.index] = now_s

    def _on_steps_end(self, loop: _Loop, _event: simpy.Event) -> None:
        course, running, gaps = loop.course, loop.state.running, self._deployment.recorder.gaps
        assert course is not None
        loop.wake = None
        loop.course = None
        steps = loop.steps
        end_s = course.end_s(steps)
        self.busy_s += end_s - course.start_s + loop.delay_s
        running.close_gaps(course.end_s(1), gaps)
        if steps > 1:
            if gaps is not None:
                gaps.add_course(course, steps, running.requests)
            running.advance(steps - 1)
            running.last_end_s = end_s
        self._end_decode(loop)
        self._free_loop(loop, end_s)

    def _on_step_end(self, loop: _Loop, _event: simpy.Event) -> None:
        recorder, now_s = self._deployment.recorder, self._deployment.clock.now
        state, step = loop.state, loop.step
        if step.decode:
            state.running.close_gaps(now_s, recorder.gaps)
            self._end_decode(loop)
        for job, tokens, _ in step.chunks:
            job.computed += tokens
            if job.computed < job.context:
                continue
            if job.produced:
                if recorder.gaps is not None:
                    recorder.gaps.add(now_s - job.last_token_s)
                job.last_token_s = now_s
            else:
                recorder.prefill_end_s[job.index] = now_s
                recorder.first_token(job, now_s)
            job.produced += 1
            if job.produced == job.output:
                state.kv.release(num_blocks(job.context - 1, state.kv.block_tokens))
                self._done(loop, job)
            else:
                state.running.join(job, job.context, covered=False)
        self._free_loop(loop, now_s)

    def _end_decode(self, loop: _Loop) -> None:
        for job in loop.state.running.complete():
            self._done(loop, job)

    def _free_loop(self, loop: _Loop, now_s: float) -> None:
        loop.in_flight = False
        loop.ready_s = now_s
        self._deployment.touch(self)

    def _done(self, loop: _Loop, job: Job) -> None:
        loop.load.remove(job.prompt)
        self.load.remove(job.prompt)
        self._deployment.finish(job)

    def _log(self, loop: _Loop, step: Step, now_s: float, end_s: float) -> None:
        steps = self._deployment.recorder.steps
        if steps is not None:
            prefill = tuple(job.index for job, _, _ in step.chunks)
            newcomers = loop.state.running
            decode = tuple(job.index for job in newcomers) if step.decode else ()
            steps.append(StepRecord("C", self.index, loop.index, now_s, end_s, prefill, decode))
