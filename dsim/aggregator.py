"""Aggregator: the recorder of a run of which only aggregates are kept."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dsim.aggregates import Aggregates
from dsim.errors import InputError
from dsim.job import Job
from dsim.metrics import Saturation, backlog_marks, saturation_from, times_of, waits
from dsim.options import Options, Window
from dsim.pools import Placement, Role
from dsim.profile import Profile
from dsim.recorder import COUNT_COLUMNS, TIME_COLUMNS, Recorder
from dsim.result import Attainment, end_to_end_s, first_token_s, met_limits, parts_s, per_token_s, utilization_of
from dsim.sketch import Sketch
from dsim.slo import Slo
from dsim.trace import Trace

if TYPE_CHECKING:
    from dsim.deployment import Deployment

#: Requests that have left are put into the statistics so many at a time.
_PART: Final = 4096


class _Means:
    """Means over the requests that have a value, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, values: NDArray[np.float64]) -> None:
        total, count = self.sums.get(name, (0.0, 0))
        known = values[~np.isnan(values)]
        self.sums[name] = (total + float(known.sum()), count + len(known))

    def mean(self, name: str) -> float:
        total, count = self.sums[name]
        return total / count if count else math.nan


class Aggregator(Recorder):
    """A recorder that forgets requests once they have left: it adds them up and gives their rows to later ones.

    Args:
        num_requests: that the source has, None if it has no end.
        slo: limits that the attainment is about.
        colocated: as the placement is.
    """

    def __init__(
        self,
        window: Window,
        *,
        num_requests: int | None,
        slo: Slo,
        phase: Role | None,
        colocated: bool,
        track_itl: bool,
    ) -> None:
        if window.max_misses < math.inf:
            raise InputError("window", "cannot end a run of which only aggregates are kept", name="max_misses")
        super().__init__(window, track_itl=track_itl, log_steps=False)
        stop = math.inf if num_requests is None else num_requests
        if window.counted is not None:
            stop = min(stop, window.warmup + window.counted)
        if stop == math.inf:
            raise InputError("window", "must be given for an endless source", name="counted")
        self.counted = slice(min(window.warmup, int(stop)), int(stop))
        self._window = window
        self._limits = slo
        self._phase = phase
        self._colocated = colocated
        self._steady = window.counted is not None and window.warmup > 0
        #: Number of the request in each row; -1 where there is none.
        self._numbers = array("q")
        self._free: list[int] = []
        self._gone: list[int] = []
        self._entered = 0
        self._judged, self._marks = backlog_marks(self.counted)
        #: Arrivals at the marks, and at the first and the last request that counts; infinite until they are known.
        self._marks_s = np.full(len(self._marks), np.inf)
        self._start_s = self._stop_s = math.inf
        #: Changes of the backlog up to each mark.
        self._waiting = np.zeros(len(self._marks) + 1, dtype=np.int64)
        self._sketches = {name: Sketch() for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")}
        self._means = _Means()
        self._met = np.zeros(3, dtype=np.int64)
        self._served = self._served_well = 0
        self._last_end_s = -math.inf
        self._all_preemptions = self._all_rejected = self._all_counted = 0

    # Rows

    def enter(self, block: Trace) -> Sequence[int]:
        """Take in requests that will arrive next, in this order; return their rows."""
        rows = self._rows(block.arrival_s)
        at = np.array(rows, dtype=np.int64)
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "cached_prompt_tokens"):
            np.asarray(getattr(self, name))[at] = getattr(block, name)
        return rows

    def enter_one(self, arrival_s: float, prompt_tokens: int, output_tokens: int) -> int:
        """Take in a request that arrives now; return its row."""
        (row,) = self._rows(np.array([arrival_s]))
        self.arrival_s[row] = arrival_s
        self.prompt_tokens[row] = prompt_tokens
        self.output_tokens[row] = output_tokens
        self.cached_prompt_tokens[row] = 0
        return row

    def _rows(self, arrival_s: NDArray[np.float64]) -> list[int]:
        """Return rows for requests with these arrivals, in which nothing has happened yet."""
        count, first = len(arrival_s), self._entered
        if len(self._free) < count:
            self._grow(max(count, len(self.arrival_s)))
        rows = self._free[-count:]
        del self._free[-count:]
        np.asarray(self._numbers)[rows] = np.arange(first, first + count)
        for k in np.flatnonzero((self._marks >= first) & (self._marks < first + count)).tolist():
            self._marks_s[k] = arrival_s[self._marks[k] - first]
        if first <= self.counted.start < first + count:
            self._start_s = float(arrival_s[self.counted.start - first])
        if first < self.counted.stop <= first + count:
            self._stop_s = float(arrival_s[self.counted.stop - 1 - first])
        self._entered += count
        return rows

    def _grow(self, rows: int) -> None:
        first = len(self.arrival_s)
        self.arrival_s.extend(array("d", [math.nan]) * rows)
        for name in ("prompt_tokens", "output_tokens", "cached_prompt_tokens"):
            getattr(self, name).extend(array("q", [0]) * rows)
        self._numbers.extend(array("q", [-1]) * rows)
        self._extend(rows)
        self._free.extend(range(first, first + rows))

    # Statistics

    def reject(self, job: Job) -> None:
        """Record that a request can never fit."""
        super().reject(job)
        self._leave(job)

    def finish(self, job: Job, now_s: float) -> None:
        """Record the last token."""
        # What `Recorder.finish` does where no misses end the run.
        self.last_token_s[job.row] = now_s
        if self._counts:
            self._finished(job.index)
        self._leave(job)

    def _leave(self, job: Job) -> None:
        gone = self._gone
        gone.append(job.row)
        if len(gone) >= _PART:
            self._add_up(gone)

    def _add_up(self, gone: list[int]) -> None:
        """Put these rows into the statistics and free them."""
        rows = np.array(gone, dtype=np.int64)
        columns: dict[str, NDArray[Any]] = {}
        for name in (*TIME_COLUMNS, *COUNT_COLUMNS):
            columns[name] = np.asarray(getattr(self, name))[rows]
        columns["rejected"] = columns["rejected"].astype(bool)
        numbers = np.asarray(self._numbers)[rows]
        self._statistics(columns, numbers)
        np.asarray(self._numbers)[rows] = -1
        for name in TIME_COLUMNS[1:]:
            np.asarray(getattr(self, name))[rows] = np.nan
        for name, value in (("prefill_instance", -1), ("decode_instance", -1), ("preemptions", 0), ("rejected", 0)):
            np.asarray(getattr(self, name))[rows] = value
        self._free.extend(gone)
        gone.clear()
        if self.gaps is not None:
            self._sketches["itl_s"].add(*self.gaps.expanded())
            self.gaps.clear()

    def _statistics(self, columns: Mapping[str, NDArray[Any]], numbers: NDArray[np.int64]) -> None:
        start, stop = self.counted.start, self.counted.stop
        met_all, met_ttft, met_tpot = met_limits(columns, self._limits, self._phase)
        self._all_preemptions += int(columns["preemptions"].sum())
        counted = (numbers >= start) & (numbers < stop)
        self._rates(columns["last_token_s"], met_all, counted)
        self._backlog(columns, numbers)
        self._all_counted += int(np.count_nonzero(counted))
        self._met += [int(np.count_nonzero(kind & counted)) for kind in (met_all, met_ttft, met_tpot)]
        own = {name: values[counted] for name, values in columns.items()}
        self._all_rejected += int(np.count_nonzero(own["rejected"]))
        self._sketches["ttft_s"].add(first_token_s(own))
        self._sketches["tpot_s"].add(per_token_s(own))
        self._sketches["e2e_s"].add(end_to_end_s(own))
        for name, part_s in parts_s(own, colocated=self._colocated).items():
            self._means.add(name, part_s)

    def _rates(self, ends_s: NDArray[np.float64], met_all: NDArray[np.bool_], counted: NDArray[np.bool_]) -> None:
        """Count what `Result.rate_of` counts."""
        if self._steady:
            served = (ends_s > self._start_s) & (ends_s <= self._stop_s)
        else:
            served = counted & ~np.isnan(ends_s)
            if served.any():
                self._last_end_s = max(self._last_end_s, float(ends_s[served].max()))
        self._served += int(np.count_nonzero(served))
        self._served_well += int(np.count_nonzero(served & met_all))

    def _backlog(self, columns: Mapping[str, NDArray[Any]], numbers: NDArray[np.int64]) -> None:
        """Count who waits at the marks, of the requests up to the last one that counts, and add up their times."""
        early = {name: values[numbers < self.counted.stop] for name, values in columns.items()}
        begins, ends = waits(early)
        for sign, instants in ((1, begins), (-1, ends)):
            for times_s in instants:
                known = times_s[~np.isnan(times_s)]
                place = np.searchsorted(self._marks_s, known, side="left")
                self._waiting += sign * np.bincount(place, minlength=len(self._waiting))
        judged = (numbers >= self._judged.start) & (numbers < self._judged.stop)
        part = {name: values[judged] for name, values in columns.items()}
        for number, times_s in enumerate(times_of(part)):
            self._means.add(f"saturation {number}", times_s)

    def _rate_per_s(self, amount: int) -> float:
        if not amount:
            return 0.0
        stop_s = self._stop_s if self._steady else self._last_end_s
        return amount / (stop_s - self._start_s) if stop_s > self._start_s else math.inf

    def aggregates(
        self, deployment: Deployment, placement: Placement, profiles: Mapping[Role, Profile], *, options: Options
    ) -> Aggregates:
        """Return the statistics of a run that has ended.

        Raises:
            InputError: the source ended before the requests that count had arrived.
        """
        if self.arrived < self.counted.stop:
            raise InputError(
                "window",
                f"is {self.counted.stop} with the warm-up, of a source that ended after {self.arrived} requests",
                name="counted",
                value=self.counted.stop - self.counted.start,
            )
        numbers = np.array(self._numbers)
        staying = (numbers >= 0) & (numbers < self.arrived)
        staying[self._gone] = False
        self._add_up([*self._gone, *np.flatnonzero(staying).tolist()])
        count, sketches = self._all_counted, self._sketches
        both, by_ttft, by_tpot = (int(hits) / count if count else math.nan for hits in self._met)
        waiting = np.maximum(0, np.cumsum(self._waiting)[:-1])
        sums = [self._means.sums[f"saturation {number}"] for number in range(4)]
        parts = [name for name in self._means.sums if not name.startswith("saturation")]
        return Aggregates(
            placement=placement,
            profiles={pool.role: profiles[pool.role] for pool in placement.pools},
            options=options,
            window=self._window,
            phase=self._phase,
            slo=self._limits,
            num_requests=count,
            attainment=Attainment(both, by_ttft, by_tpot),
            ttft_s=sketches["ttft_s"].distribution(),
            tpot_s=sketches["tpot_s"].distribution(),
            itl_s=sketches["itl_s"].distribution(),
            e2e_s=sketches["e2e_s"].distribution(),
            throughput_per_s=self._rate_per_s(self._served),
            good_throughput_per_s=self._rate_per_s(self._served_well),
            saturation=saturation_from(waiting, self._judged, sums) if len(waiting) else Saturation.STABLE,
            ttft_parts_s={name: self._means.mean(name) for name in parts},
            utilization=utilization_of(deployment),
            kv_peak=deployment.kv_peak(),
            kv_blocks=deployment.kv_blocks(),
            preemptions=self._all_preemptions,
            rejected=self._all_rejected,
            events=deployment.clock.scheduled(),
            drained=not self.done,
            elapsed_s=deployment.clock.now_s,
        )
