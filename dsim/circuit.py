"""Pipelined instances: batches that circulate through one driver and the stages behind it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable

from dsim.latency import HostOverhead, LatencyModel
from dsim.pipeline import Stages
from dsim.recorder import Gaps
from dsim.running import RunningBatch

#: Fewest and most launches that one plan looks ahead: twice as many as the last one used.
_PLAN_LAUNCHES = (4, 96)


#: One planned launch: its instant, its batch, when it leaves the last stage; then when driver and stages are free, and
#: the seconds added to the driver's and a stage's work, since the plan was made.
_Launch = tuple[float, int, float, float, list[float], float, float]


class Circuit:
    """Driver, stages, and the batches (micro-batches or engine loops) in flight.

    Decode steps of batches that do not change follow a recursion: a closed tandem queue. `look_ahead` plans them up to
    the next one that needs a decision; `commit` makes those happen that have begun by the time something else does.

    Args:
        parts: how many batches circulate.
        stages: pipeline stages.
    """

    __slots__ = (
        "_before_s",
        "_driver_due",
        "_plan",
        "_plan_launches",
        "_stages",
        "driver_free_s",
        "driver_s",
        "end_s",
        "last_launch_s",
        "ready_s",
        "stage_s",
    )

    def __init__(self, *, parts: int, stages: int) -> None:
        self.driver_free_s = 0.0
        self.last_launch_s = -math.inf
        #: When the step in flight of each batch ends; infinite where none is.
        self.end_s = [math.inf] * parts
        #: Since when each batch has been out of flight.
        self.ready_s = [0.0] * parts
        #: Seconds that the driver, and that each stage, has been busy.
        self.driver_s = 0.0
        self.stage_s = 0.0
        self._driver_due = False
        self._stages = Stages(stages)
        #: When the first stage is done with all batches but the one launched last.
        self._before_s = 0.0
        self._plan: list[_Launch] | None = None
        self._plan_launches = _PLAN_LAUNCHES[0]

    def busy_until_s(self, now_s: float) -> float:
        """Seconds that the busier of the driver and the first stage was busy up to now; they overlap."""
        driver_s, stage_s, driver_free_s = self.driver_s, self.stage_s, self.driver_free_s
        before_s, stage_free_s = self._before_s, self._stages.free_s[0]
        plan = self._plan or []
        begun = bisect_left(plan, (now_s,))
        if begun:
            before_s = plan[begun - 2][4][0] if begun > 1 else stage_free_s
            _, _, _, driver_free_s, (stage_free_s, *_), more_driver_s, more_stage_s = plan[begun - 1]
            driver_s += more_driver_s
            stage_s += more_stage_s
        # What is launched is counted as a whole. Of what lies ahead the first stage waits for the last hold to end.
        ahead_s = max(0.0, stage_free_s - now_s) - max(0.0, driver_free_s - max(now_s, before_s))
        return max(driver_s - max(0.0, driver_free_s - now_s), stage_s - ahead_s)

    @property
    def planned(self) -> bool:
        """Whether there is a plan."""
        return self._plan is not None

    @property
    def all_in_flight(self) -> bool:
        """Whether every batch is in flight."""
        return math.inf not in self.end_s

    @property
    def any_in_flight(self) -> bool:
        """Whether some batch is in flight."""
        return min(self.end_s) < math.inf

    def launch(self, part: int, now_s: float, *, hold_s: float, kernel_s: float) -> float:
        """Launch a batch and return when it leaves the last stage.

        Args:
            hold_s: driver time before the first stage: swap and host.
            kernel_s: time in all stages together.
        """
        stage_s = kernel_s / len(self._stages.free_s)
        self.last_launch_s = now_s
        self.driver_free_s = now_s + hold_s
        self._driver_due = True
        self._before_s = self._stages.free_s[0]
        end_s = self._stages.pass_through(self.driver_free_s, stage_s, stage_s)
        self.end_s[part] = end_s
        self.driver_s += hold_s
        self.stage_s += stage_s
        return end_s

    def next_event_s(self, *, driver: bool) -> float:
        """Return the next end of a step, or, with `driver`, of the driver's hold; infinite if there is none."""
        next_s = min(self.end_s)
        return min(next_s, self.driver_free_s) if driver and self._driver_due else next_s

    def look_ahead(
        self,
        batches: Iterable[RunningBatch],
        latency: LatencyModel,
        host: HostOverhead,
        *,
        deadline_s: float,
        max_context: float,
    ) -> float:
        """Plan decode launches of unchanging batches; return the instant of the first decision.

        Args:
            batches: non-empty ones without fresh members, whose next launches are pure decode steps.
            deadline_s: when a decision about another batch is due.
            max_context: most context tokens of a launch.
        """
        courses: list[_Course] = []
        for batch in batches:
            index = batch.index
            course = _Course(batch, self.end_s[index], self.ready_s[index])
            course.line = latency.decode_line(course.requests)
            course.host_s = host.step_s + host.sequence_s * course.requests
            if course.in_flight and course.launched == course.finish and course.ready_s < deadline_s:
                deadline_s = course.ready_s
            courses.append(course)
        if not courses:
            return deadline_s
        free = {course.kv_id: course.free for course in courses}
        plan: list[_Launch] = []
        self._plan = plan
        driver_free_s, stage_free_s = self.driver_free_s, self._stages.free_s
        driver_s = stages_s = 0.0
        pp = len(stage_free_s)
        token_s = host.token_s
        for _ in range(self._plan_launches):
            course = courses[0]
            launch_s = course.ready_s
            for other in courses:
                if other.ready_s < launch_s:
                    course = other
                    launch_s = other.ready_s
            if driver_free_s > launch_s:
                launch_s = driver_free_s
            if launch_s >= deadline_s:
                return deadline_s
            launched = course.launched + 1
            growth = course.due[launched % course.block_tokens]
            context = course.context
            if course.in_flight:
                context += course.requests
            if context > max_context:
                return launch_s
            if growth:
                left = free[course.kv_id] - growth
                if left < 0:
                    return launch_s
                free[course.kv_id] = left
            course.in_flight = True
            course.launched = launched
            course.context = context
            line = course.line
            kernel_s = latency.decode_s(course.requests, context) if line is None else line[0] + line[1] * context
            host_s = course.host_s + token_s * context
            stage_s = kernel_s / pp
            leave_s = driver_free_s = launch_s + host_s
            if pp == 2:
                # What the loop below does, for the pipelines that are most.
                first_s, second_s = stage_free_s
                leave_s = first_s = (first_s if first_s > leave_s else leave_s) + stage_s
                leave_s = (second_s if second_s > leave_s else leave_s) + stage_s
                stage_free_s = [first_s, leave_s]
            else:
                after_s = []
                for free_s in stage_free_s:
                    if free_s > leave_s:
                        leave_s = free_s
                    leave_s += stage_s
                    after_s.append(leave_s)
                stage_free_s = after_s
            driver_s += host_s
            stages_s += stage_s
            course.ready_s = leave_s
            if launched == course.finish and leave_s < deadline_s:
                deadline_s = leave_s
            plan.append((launch_s, course.part, leave_s, driver_free_s, stage_free_s, driver_s, stages_s))
        return min(max(min(courses, key=_ready).ready_s, driver_free_s), deadline_s)

    def commit(
        self,
        now_s: float,
        batches: list[RunningBatch],
        land: Callable[[int, float], None],
        gaps: Gaps | None,
        *,
        through: bool = False,
    ) -> None:
        """Make the planned launches that began before `now_s` happen, and land the steps that have ended.

        Args:
            batches: all of them, by index.
            land: called with index and instant for each step that ends; it settles what the step produced.
            through: also launches that are due now.
        """
        plan, self._plan = self._plan, None
        if plan is not None:
            # Of equal instants a longer tuple is the later one.
            begun = bisect_left(plan, (now_s, math.inf) if through else (now_s,))
            fewest, most = _PLAN_LAUNCHES
            self._plan_launches = min(most, max(fewest, 2 * begun))
            if begun:
                self._make_happen(plan, begun, batches, land, gaps)
        for part, end_s in enumerate(self.end_s):
            if end_s <= now_s:
                self._land(part, land)
        if now_s >= self.driver_free_s:
            self._driver_due = False

    def _make_happen(
        self,
        plan: list[_Launch],
        begun: int,
        batches: list[RunningBatch],
        land: Callable[[int, float], None],
        gaps: Gaps | None,
    ) -> None:
        self.last_launch_s, _, _, self.driver_free_s, stage_free_s, driver_s, stages_s = plan[begun - 1]
        self._driver_due = True
        self._before_s = plan[begun - 2][4][0] if begun > 1 else self._stages.free_s[0]
        self._stages.free_s = stage_free_s[:]
        self.driver_s += driver_s
        self.stage_s += stages_s
        ends: dict[int, list[float]] = {}
        for launch in plan[:begun]:
            part = launch[1]
            if part in ends:
                ends[part].append(launch[2])
            else:
                ends[part] = [launch[2]]
        for part, part_ends_s in ends.items():
            if self.end_s[part] < math.inf:
                self._land(part, land)
            batch = batches[part]
            batch.launch()
            self.end_s[part] = part_ends_s[-1]
            if len(part_ends_s) > 1:
                batch.advance(len(part_ends_s) - 1)
                if gaps is None:
                    batch.last_end_s = part_ends_s[-2]
                else:
                    for end_s in part_ends_s[:-1]:
                        gaps.add(end_s - batch.last_end_s, batch.requests)
                        batch.last_end_s = end_s

    def _land(self, part: int, land: Callable[[int, float], None]) -> None:
        end_s = self.end_s[part]
        self.end_s[part] = math.inf
        self.ready_s[part] = end_s
        land(part, end_s)


class _Course:
    """What a plan knows of one batch."""

    __slots__ = (
        "block_tokens",
        "context",
        "due",
        "finish",
        "free",
        "host_s",
        "in_flight",
        "kv_id",
        "launched",
        "line",
        "part",
        "ready_s",
        "requests",
    )

    def __init__(self, batch: RunningBatch, end_s: float, ready_s: float) -> None:
        self.part = batch.index
        self.requests = batch.requests
        self.context = batch.context
        self.launched = batch.launched
        self.due = batch.due
        self.kv_id = id(batch.kv)
        self.free = batch.kv.free
        self.block_tokens = batch.block_tokens
        self.in_flight = end_s < math.inf
        self.ready_s = end_s if self.in_flight else ready_s
        self.finish = batch.next_finish()
        self.line: tuple[float, float] | None = None
        self.host_s = 0.0


def _ready(course: _Course) -> float:
    return course.ready_s
