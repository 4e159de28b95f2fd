"""What a run leaves behind: columns per request, gaps between tokens, and the decision to stop."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dsim.cruise import Cruise
from dsim.job import Job
from dsim.options import Window
from dsim.records import KvRecord, StepRecord
from dsim.trace import Trace

#: Float columns, one value per request, NaN where it did not happen.
TIME_COLUMNS = (
    "arrival_s",
    "prefill_start_s",
    "prefill_end_s",
    "transfer_start_s",
    "transfer_end_s",
    "decode_start_s",
    "first_token_s",
    "last_token_s",
)
#: Integer columns.
COUNT_COLUMNS = (
    "prompt_tokens",
    "output_tokens",
    "cached_prompt_tokens",
    "prefill_instance",
    "decode_instance",
    "preemptions",
    "rejected",
)


#: Runs of steps that are expanded at a time.
_PART = 2**15


class Gaps:
    """Gaps between successive tokens, pooled, without one number per token.

    A gap shared by several requests is (seconds, weight); a run of steps is (first, growth, steps, weight).
    """

    __slots__ = ("gap_s", "run_first_s", "run_growth_s", "run_steps", "run_weight", "weight")

    def __init__(self) -> None:
        self.gap_s = array("d")
        self.weight = array("q")
        self.run_first_s = array("d")
        self.run_growth_s = array("d")
        self.run_steps = array("q")
        self.run_weight = array("q")

    def add(self, gap_s: float, weight: int = 1) -> None:
        """Add one gap of `weight` requests."""
        self.gap_s.append(gap_s)
        self.weight.append(weight)

    def __reduce__(self) -> tuple[Callable[..., Gaps], tuple[array[float] | array[int], ...]]:
        """Say how to copy or pickle them, which a compiled class cannot find out."""
        gaps, runs = (self.gap_s, self.weight), (self.run_first_s, self.run_growth_s, self.run_steps, self.run_weight)
        return _gaps_of, (*gaps, *runs)

    def clear(self) -> None:
        """Forget all of them."""
        del self.gap_s[:]
        del self.weight[:]
        del self.run_first_s[:]
        del self.run_growth_s[:]
        del self.run_steps[:]
        del self.run_weight[:]

    def expanded(self) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Return every gap and how often it occurred, each shape (n,), runs step by step."""
        steps = np.array(self.run_steps, dtype=np.int64)
        single, every = len(self.gap_s), len(self.gap_s) + int(steps.sum())
        values, weights = np.empty(every, dtype=np.float64), np.empty(every, dtype=np.int32)
        values[:single], weights[:single] = self.gap_s, self.weight
        # Part by part: all at once would take several times the memory of the answer.
        place = single
        for first in range(0, len(steps), _PART):
            rows = slice(first, first + _PART)
            count = steps[rows]
            end = place + int(count.sum())
            own = values[place:end]
            own[:] = np.arange(end - place) - np.repeat(np.cumsum(count) - count, count)
            own *= np.repeat(np.array(self.run_growth_s[rows]), count)
            own += np.repeat(np.array(self.run_first_s[rows]), count)
            weights[place:end] = np.repeat(np.array(self.run_weight[rows], dtype=np.int32), count)
            place = end
        return values, weights

    def add_run(self, first_s: float, growth_s: float, steps: int, weight: int) -> None:
        """Add the gaps first, first + growth, ... of `weight` requests each."""
        self.run_first_s.append(first_s)
        self.run_growth_s.append(growth_s)
        self.run_steps.append(steps)
        self.run_weight.append(weight)

    def add_course(self, course: Cruise, steps: int, weight: int) -> None:
        """Add the gaps of the steps 2 to `steps` of a cruise of `weight` requests."""
        first_s, growth_s = course.gaps(steps)
        if growth_s == growth_s:
            # What `add_run` does.
            self.run_first_s.append(first_s + growth_s)
            self.run_growth_s.append(growth_s)
            self.run_steps.append(steps - 1)
            self.run_weight.append(weight)
        else:
            for step in range(2, steps + 1):
                self.add(course.end_s(step) - course.end_s(step - 1), weight)


def _gaps_of(
    gap_s: array[float],
    weight: array[int],
    run_first_s: array[float],
    run_growth_s: array[float],
    run_steps: array[int],
    run_weight: array[int],
) -> Gaps:
    """Return gaps with these columns."""
    gaps = Gaps()
    gaps.gap_s, gaps.weight = gap_s, weight
    gaps.run_first_s, gaps.run_growth_s, gaps.run_steps, gaps.run_weight = (
        run_first_s,
        run_growth_s,
        run_steps,
        run_weight,
    )
    return gaps


class Recorder:
    """Columns of the requests seen so far, and whether the run may stop.

    A request has the row of its number; recorders that keep no rows of requests that are done give rows again.
    """

    def __init__(self, window: Window, *, track_itl: bool, log_steps: bool) -> None:
        nan = array("d")
        self.arrival_s = nan[:]
        self.prefill_start_s = nan[:]
        self.prefill_end_s = nan[:]
        self.transfer_start_s = nan[:]
        self.transfer_end_s = nan[:]
        self.decode_start_s = nan[:]
        self.first_token_s = nan[:]
        self.last_token_s = nan[:]
        whole = array("q")
        self.prompt_tokens = whole[:]
        self.output_tokens = whole[:]
        self.cached_prompt_tokens = whole[:]
        small = array("i")
        self.prefill_instance = small[:]
        self.decode_instance = small[:]
        self.preemptions = small[:]
        self.rejected = array("b")
        self.gaps = Gaps() if track_itl else None
        self.steps: list[StepRecord] | None = [] if log_steps else None
        self.kv: list[KvRecord] | None = [] if log_steps else None
        self.arrived = 0
        self.done = False
        self.stopped_early = False
        self._counts = window.counted is not None
        self._first = window.warmup
        self._last = math.inf if window.counted is None else window.warmup + window.counted
        self._left = math.inf if window.counted is None else window.counted
        #: Limits whose misses may end the run, if any.
        self.stop_slo = window.stop_slo
        self._max_misses = window.max_misses
        self._misses_per_request = window.misses_per_request
        self._misses = 0
        self._reached = self._first
        self._look = window.look
        self._look_misses = 0
        self._look_reached = 0 if window.look is None else window.look.first
        self.stopped_in_warmup = False

    def enter(self, block: Trace) -> Sequence[int]:
        """Take in requests that will arrive next, in this order; return their rows."""
        first = len(self.arrival_s)
        self.arrival_s.frombytes(block.arrival_s.astype(np.float64, copy=False).tobytes())
        self.prompt_tokens.frombytes(block.prompt_tokens.astype(np.int64, copy=False).tobytes())
        self.output_tokens.frombytes(block.output_tokens.astype(np.int64, copy=False).tobytes())
        self.cached_prompt_tokens.frombytes(block.cached_prompt_tokens.astype(np.int64, copy=False).tobytes())
        self._extend(len(block))
        return range(first, first + len(block))

    def enter_one(self, arrival_s: float, prompt_tokens: int, output_tokens: int) -> int:
        """Take in a request that arrives now; return its row."""
        self.arrival_s.append(arrival_s)
        self.prompt_tokens.append(prompt_tokens)
        self.output_tokens.append(output_tokens)
        self.cached_prompt_tokens.append(0)
        self._extend(1)
        return len(self.arrival_s) - 1

    def _extend(self, rows: int) -> None:
        """Append rows to the columns that say what happened: nothing yet."""
        nan = array("d", [math.nan]) * rows
        for name in TIME_COLUMNS[1:]:
            getattr(self, name).extend(nan)
        nowhere = array("i", [-1]) * rows
        self.prefill_instance.extend(nowhere)
        self.decode_instance.extend(nowhere)
        self.preemptions.extend(array("i", [0]) * rows)
        self.rejected.extend(array("b", [0]) * rows)

    def reject(self, job: Job) -> None:
        """Record that a request can never fit."""
        self.rejected[job.row] = 1
        self._miss(job)
        self._finished(job.index)

    def first_token(self, job: Job, now_s: float) -> None:
        """Record token 1."""
        row = job.row
        self.first_token_s[row] = now_s
        job.last_token_s = now_s
        slo = self.stop_slo
        if slo is not None and now_s - self.arrival_s[row] > slo.ttft_s:
            self._miss(job)

    def finish(self, job: Job, now_s: float) -> None:
        """Record the last token."""
        row = job.row
        self.last_token_s[row] = now_s
        slo = self.stop_slo
        if slo is not None and not job.missed:
            later = job.output - 1
            if (later and (now_s - self.first_token_s[row]) / later > slo.tpot_s) or (
                now_s - self.arrival_s[row] > slo.e2e_s
            ):
                self._miss(job)
        if self._counts:
            self._finished(job.index)

    def _miss(self, job: Job) -> None:
        if job.missed:
            return
        if not self._first <= job.index < self._last:
            self._miss_in_warmup(job)
            return
        job.missed = True
        self._misses += 1
        self._reached = max(self._reached, job.index + 1)
        allowed = self._max_misses
        if self._misses_per_request:
            allowed -= self._misses_per_request * (self._last - self._reached)
        if self._misses > allowed:
            self.stopped_early = self.done = True

    def _miss_in_warmup(self, job: Job) -> None:
        look = self._look
        if look is None or not look.first <= job.index < look.first + look.judged:
            return
        job.missed = True
        self._look_misses += 1
        self._look_reached = max(self._look_reached, job.index + 1)
        allowed = look.max_misses - self._misses_per_request * (look.first + look.judged - self._look_reached)
        if self._look_misses > allowed:
            self.stopped_early = self.stopped_in_warmup = self.done = True

    def _finished(self, index: int) -> None:
        if self._first <= index < self._last:
            self._left -= 1
            if not self._left:
                self.done = True
