"""Colocated instances: engine loops that run both phases under one policy."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dsim.circuit import Circuit
from dsim.clock import STEP_END, Alarm, Wake
from dsim.cruise import AffineCruise, Courses, TableCruise
from dsim.errors import InfeasiblePlacementError
from dsim.job import Job
from dsim.kv import KvCache, num_blocks
from dsim.policies import DECODE, IDLE, LoopState, Step, scheduling_policy
from dsim.pools import Pool, Role
from dsim.profile import BatchLimits, Preemption, Profile
from dsim.records import StepRecord
from dsim.routing import OnlyOne

if TYPE_CHECKING:
    import simpy

    from dsim.deployment import Deployment


class _Loop:
    """One engine loop: its state and the step that it has in flight."""

    __slots__ = ("index", "state", "step", "unfinished")

    def __init__(self, index: int, state: LoopState) -> None:
        self.index = index
        self.state = state
        self.unfinished = 0
        self.step = IDLE


class ColocatedInstance:
    """What colocated instances of any pp share (docs/semantics.md, section 6)."""

    def __init__(self, deployment: Deployment, index: int, *, profile: Profile, pool: Pool) -> None:
        self.index = index
        self.touched = False
        self._router = deployment.front_router
        self._pool_of_one = isinstance(self._router, OnlyOne)
        self._deployment = deployment
        parallelism = pool.parallelism
        self._latency = profile.latency_of(parallelism)
        self._host = profile.host_of(Role.COLOCATED, parallelism.pp)
        self._max_context = deployment.context_limit(profile, parallelism.tp)
        self._profile = profile
        self._tp = parallelism.tp
        self._policy = scheduling_policy(pool.policy_or_fail, pool.token_budget)
        self._swap_s_per_token = profile.model.kv_bytes_per_token / (profile.swap_bytes_per_s * parallelism.num_gpus)
        engine = deployment.batch_limits(profile, Role.COLOCATED, parallelism.tp)
        budget = math.inf if pool.token_budget is None else pool.token_budget
        most = self._latency.valid_range.prefill_tokens
        if pool.token_budget is not None and budget > most and not deployment.extrapolate:
            reason = f"a token budget of {budget} is beyond profile {profile.name}'s {most:g} prefill tokens a step"
            raise InfeasiblePlacementError(pool.label, [reason])
        limits = BatchLimits(engine.tokens, min(engine.requests, budget))
        capacity_blocks = max(0, profile.kv_tokens(parallelism)) // profile.block_tokens // parallelism.pp
        self._loops = []
        for part in range(parallelism.pp):
            kv = deployment.kv_cache(
                Role.COLOCATED,
                index,
                part,
                capacity_tokens=capacity_blocks * profile.block_tokens,
                block_tokens=profile.block_tokens,
            )
            swaps = profile.preemption is Preemption.SWAP
            state = LoopState(kv, part, limits=limits, watermark=profile.admission_watermark, swaps=swaps)
            self._loops.append(_Loop(part, state))

    @property
    def loop_kv(self) -> list[KvCache]:
        """KV caches of the engine loops."""
        return [loop.state.kv for loop in self._loops]

    def busy_until_s(self, now_s: float) -> float:
        """Seconds that driver or first stage was busy up to now."""
        raise NotImplementedError

    def settle(self, now_s: float) -> None:
        """Do step 4 of an instant."""
        raise NotImplementedError

    def launch(self, now_s: float) -> None:
        """Do step 5 of an instant: launch what can be launched."""
        raise NotImplementedError

    def enqueue(self, job: Job) -> None:
        """Take a request that was routed here."""
        loops = self._loops
        loop = min(loops, key=lambda loop: loop.unfinished) if len(loops) > 1 else loops[0]
        loop.unfinished += 1
        loop.state.waiting.append(job)
        recorder = self._deployment.recorder
        recorder.prefill_instance[job.row] = recorder.decode_instance[job.row] = self.index
        self._deployment.touch(self)

    def _begin(self, loop: _Loop, step: Step, now_s: float) -> float:
        """Account for the launch of a step; return the seconds of the swaps it pays for."""
        state, recorder = loop.state, self._deployment.recorder
        swap_s = 0.0
        if state.swapped_tokens:
            swap_s = self._swap_s_per_token * state.swapped_tokens
            state.swapped_tokens = 0
        if state.preempted_now:
            for job in state.preempted_now:
                recorder.preemptions[job.row] += 1
            state.preempted_now.clear()
        loop.step = step
        if step.decode:
            running = state.running
            running.launch()
            if running.context > self._max_context:
                self._deployment.check_context(self._profile, self._tp, running.context)
            if running.newcomers:
                _set_once(recorder.decode_start_s, running.newcomers, now_s)
        if step.chunks:
            _set_once(recorder.prefill_start_s, [chunk[0] for chunk in step.chunks], now_s)
        return swap_s

    def _times(self, step: Step, state: LoopState) -> tuple[float, float]:
        """Return host and kernel seconds of a step."""
        running = state.running
        requests, context = (running.requests, running.context) if step.decode else (0, 0)
        chunks = [(tokens, cached) for _, tokens, cached in step.chunks]
        computed = sum(tokens for tokens, _ in chunks)
        mixed = bool(chunks and requests)
        host_s = self._host.launch_s(len(chunks) + requests, computed + context, mixed=mixed)
        return host_s, self._latency.mixed_s(chunks, requests, context)

    def _end_step(self, loop: _Loop, end_s: float) -> None:
        """Hand out the tokens of a step; whoever finishes does so now."""
        recorder, state, step = self._deployment.recorder, loop.state, loop.step
        if step.decode:
            state.running.close_gaps(end_s, recorder.gaps)
            self._end_decode(loop)
        for job, tokens, _ in step.chunks:
            job.computed += tokens
            if job.computed < job.prompt + job.produced:
                continue
            if job.produced:
                if recorder.gaps is not None:
                    recorder.gaps.add(end_s - job.last_token_s)
                job.last_token_s = end_s
            else:
                recorder.prefill_end_s[job.row] = end_s
                recorder.first_token(job, end_s)
            job.produced += 1
            if job.produced == job.output:
                state.kv.release(num_blocks(job.context - 1, state.kv.block_tokens))
                self._done(loop, job)
            else:
                state.running.join(job, job.context, covered=False)

    def _end_decode(self, loop: _Loop) -> None:
        for job in loop.state.running.complete():
            self._done(loop, job)

    def _done(self, loop: _Loop, job: Job) -> None:
        loop.unfinished -= 1
        if not self._pool_of_one:
            self._router.leave(self.index, job.prompt)
        self._deployment.finish(job)

    def _log(self, loop: _Loop, now_s: float, end_s: float) -> None:
        steps, step = self._deployment.recorder.steps, loop.step
        if steps is not None:
            prefill = tuple(job.index for job, _, _ in step.chunks)
            decode = tuple(job.index for job in loop.state.running) if step.decode else ()
            steps.append(StepRecord("C", self.index, loop.index, now_s, end_s, prefill, decode))


class SerialColocatedInstance(ColocatedInstance):
    """pp = 1: one loop; runs of decode steps are one closed form."""

    def __init__(self, deployment: Deployment, index: int, *, profile: Profile, pool: Pool) -> None:
        super().__init__(deployment, index, profile=profile, pool=pool)
        self._loop = self._loops[0]
        #: Seconds of the steps and their swaps, without those of a run under way; and when a step that prefills ends.
        self._busy_s = 0.0
        self._step_end_s = 0.0
        self._courses = Courses(self._latency, self._host)
        self._in_flight = False
        self._course: AffineCruise | TableCruise | None = None
        self._delay_s = 0.0
        #: Steps of the run, and when the last of them ends.
        self._steps = 0
        self._end_s = 0.0
        self._alarm = Alarm(deployment.clock, self._on_run_end)
        self._end_wake = Wake(self._on_step_end)

    def busy_until_s(self, now_s: float) -> float:
        """Seconds that steps and swaps took up to now."""
        course = self._course
        if course is not None:
            return self._busy_s + (now_s - course.start_s + self._delay_s)
        return self._busy_s - max(0.0, self._step_end_s - now_s)

    def settle(self, now_s: float) -> None:
        """End a run of decode steps at the next boundary where the policy wants a turn."""
        course = self._course
        if course is None or self._steps == 1:
            return
        state = self._loop.state
        if state.waiting and self._policy.wants_turn(state):
            steps = course.steps_until(now_s) if now_s > course.start_s else 1
            if steps < self._steps:
                self._set_alarm(course, steps)

    def launch(self, now_s: float) -> None:
        """Start the next step, or run of decode steps."""
        if self._in_flight:
            return
        loop = self._loop
        state = loop.state
        step = self._policy.next_step(state)
        if step is IDLE:
            return
        again = bool(state.preempted_now)
        swap_s = self._begin(loop, step, now_s)
        self._in_flight = True
        if step.chunks:
            host_s, kernel_s = self._times(step, state)
            end_s = now_s + (swap_s + host_s + kernel_s)
            self._busy_s += end_s - now_s
            self._step_end_s = end_s
            self._log(loop, now_s, end_s)
            self._deployment.clock.wake(end_s, STEP_END, self._end_wake)
            return
        running = state.running
        self._delay_s = swap_s
        course = self._course = self._courses.start(now_s + swap_s, running.requests, running.context)
        if again or self._deployment.recorder.steps is not None or (state.waiting and self._policy.wants_turn(state)):
            steps = 1
        else:
            steps = min(running.next_finish() - running.launched + 1, course.limit)
            if steps > 1 and ((steps - 1) // running.block_tokens + 1) * running.requests > state.kv.free:
                steps = running.steps_in_memory(steps)
            if running.context + (steps - 1) * running.requests > self._max_context:
                steps = 1 + int((self._max_context - running.context) // running.requests)
        self._set_alarm(course, steps)
        if self._deployment.recorder.steps is not None:
            self._log(loop, now_s, course.end_s(1))

    def _set_alarm(self, course: AffineCruise | TableCruise, steps: int) -> None:
        self._steps = steps
        end_s = self._end_s = course.end_s(steps)
        self._alarm.set(end_s)

    def _on_run_end(self, _event: simpy.Event) -> None:
        if not self._alarm.rings():
            return
        course, steps, running = self._course, self._steps, self._loop.state.running
        assert course is not None
        gaps = self._deployment.recorder.gaps
        self._course = None
        end_s = self._end_s
        self._busy_s += end_s - course.start_s + self._delay_s
        if gaps is not None:
            running.close_gaps(course.end_s(1), gaps)
            running.run_on(course, steps, end_s, gaps)
        else:
            # The same where nobody asks about single steps.
            running.newcomers = []
            running.advance(steps - 1)
            running.last_end_s = end_s
        self._end_decode(self._loop)
        self._in_flight = False
        self._deployment.touch(self)

    def _on_step_end(self, _event: simpy.Event) -> None:
        self._end_step(self._loop, self._deployment.clock.now_s)
        self._in_flight = False
        self._deployment.touch(self)


class PipelinedColocatedInstance(ColocatedInstance):
    """pp > 1: as many engine loops as stages share driver and stages."""

    def __init__(self, deployment: Deployment, index: int, *, profile: Profile, pool: Pool) -> None:
        super().__init__(deployment, index, profile=profile, pool=pool)
        self._circuit = Circuit(parts=len(self._loops), stages=len(self._loops))
        #: Loops that were asked for their next step at this instant.
        self._asked: set[int] = set()
        self._batches = [loop.state.running for loop in self._loops]
        self._alarm = Alarm(deployment.clock, self._on_wake)

    def busy_until_s(self, now_s: float) -> float:
        """Seconds that the busier of the driver and the first stage was busy up to now."""
        return self._circuit.busy_until_s(now_s)

    def settle(self, now_s: float) -> None:
        """Let what has begun by now have happened."""
        self._commit(now_s)

    def launch(self, now_s: float) -> None:
        """Start the next steps of the loops that have one, as far as the driver is free; set the next alarm."""
        circuit = self._circuit
        self._asked.clear()
        if now_s >= circuit.driver_free_s:
            idle = [loop for loop in self._loops if circuit.end_s[loop.index] == math.inf]
            idle.sort(key=lambda loop: circuit.ready_s[loop.index])
            for loop in idle:
                self._asked.add(loop.index)
                step = self._policy.next_step(loop.state)
                if step is not IDLE:
                    self._start(loop, step, now_s)
                    break
        self._set_alarm()

    def _start(self, loop: _Loop, step: Step, now_s: float) -> None:
        swap_s = self._begin(loop, step, now_s)
        host_s, kernel_s = self._times(step, loop.state)
        end_s = self._circuit.launch(loop.index, now_s, hold_s=swap_s + host_s, kernel_s=kernel_s)
        self._log(loop, now_s, end_s)

    def _set_alarm(self) -> None:
        """Wake at the next step end or turn of the driver that needs a decision."""
        self._alarm.set(self._next_decision_s())

    def _next_decision_s(self) -> float:
        circuit = self._circuit
        if self._deployment.recorder.steps is not None:
            return circuit.next_event_s(driver=not circuit.all_in_flight)
        deadline_s = math.inf
        cruising = []
        for loop in self._loops:
            end_s, state = circuit.end_s[loop.index], loop.state
            flying = end_s < math.inf
            unasked = not flying and loop.index not in self._asked and bool(state.waiting)
            decides = state.running.fresh or state.wants_step or self._policy.wants_turn(state)
            if unasked or decides or (flying and loop.step.chunks):
                deadline_s = min(deadline_s, end_s if flying else circuit.next_event_s(driver=True))
            elif state.running.members:
                cruising.append(state.running)
        return circuit.look_ahead(
            cruising, self._latency, self._host, deadline_s=deadline_s, max_context=self._max_context
        )

    def _on_wake(self, _event: simpy.Event) -> None:
        if self._alarm.rings():
            self._commit(self._deployment.clock.now_s)
            self._deployment.touch(self)

    def _commit(self, now_s: float) -> None:
        self._circuit.commit(now_s, self._batches, self._land, self._deployment.recorder.gaps)

    def _land(self, part: int, end_s: float) -> None:
        loop = self._loops[part]
        self._end_step(loop, end_s)
        # What follows without a decision is a decode step.
        loop.step = DECODE


def _set_once(times_s: array[float], jobs: Iterable[Job], now_s: float) -> None:
    """Set the times that are not known yet."""
    for job in jobs:
        row = job.row
        if times_s[row] != times_s[row]:
            times_s[row] = now_s
