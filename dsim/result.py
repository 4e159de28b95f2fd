"""Results: columns per request, and the statistics that are computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsim.metrics import Distribution, Saturation, saturation_of, weighted_distribution
from dsim.options import Options, Window
from dsim.pools import Placement, Role
from dsim.profile import Profile
from dsim.recorder import COUNT_COLUMNS, TIME_COLUMNS, Gaps
from dsim.records import KvRecord, StepRecord
from dsim.slo import Slo
from dsim.version import __version__

if TYPE_CHECKING:
    import pandas as pd

    from dsim.deployment import Deployment


#: Values of some requests, by name of the recorder's column.
Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Attainment:
    """Shares (0 to 1) of counted requests that met both limits, the TTFT limit, and the TPOT limit."""

    both: float
    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What one run did.

    Args:
        columns: per request that arrived, in order of arrival (docs/semantics.md, section 7).
        counted: the rows that count.
        steps: every launched batch, if asked for.
        kv: every change of the KV blocks taken on an instance, if steps were asked for.
        utilization: share of the time up to the last event that driver and first stage were busy, mean over a pool.
        kv_peak: largest share of one instance's KV cache ever taken.
        kv_blocks: KV blocks of one instance.
        events: simulator events scheduled.
        stopped_early: whether the window's misses ended the run.
        stopped_in_warmup: whether those of its look did.
        elapsed_s: instant of the last event.
    """

    placement: Placement
    profiles: Mapping[Role, Profile]
    options: Options
    window: Window
    phase: Role | None
    columns: Mapping[str, NDArray[Any]]
    counted: slice
    gaps: Gaps | None
    steps: list[StepRecord] | None
    kv: list[KvRecord] | None
    utilization: Mapping[Role, float]
    kv_peak: Mapping[Role, float]
    kv_blocks: Mapping[Role, int]
    events: int
    stopped_early: bool
    stopped_in_warmup: bool
    drained: bool
    elapsed_s: float

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        placement: Placement,
        profiles: Mapping[Role, Profile],
        *,
        options: Options,
        window: Window,
        phase: Role | None,
    ) -> Result:
        """Return the result of a run that has ended."""
        recorder = deployment.recorder
        n = recorder.arrived
        columns: dict[str, NDArray[Any]] = {
            name: np.array(getattr(recorder, name)[:n], dtype=np.float64) for name in TIME_COLUMNS
        }
        for name in COUNT_COLUMNS:
            columns[name] = np.array(getattr(recorder, name)[:n], dtype=np.int64)
        columns["rejected"] = columns["rejected"].astype(bool)
        stop = n if window.counted is None else min(n, window.warmup + window.counted)
        return cls(
            placement=placement,
            profiles={pool.role: profiles[pool.role] for pool in placement.pools},
            options=options,
            window=window,
            phase=phase,
            columns=columns,
            counted=slice(min(window.warmup, n), stop),
            gaps=recorder.gaps,
            steps=recorder.steps,
            kv=recorder.kv,
            utilization=utilization_of(deployment),
            kv_peak=deployment.kv_peak(),
            kv_blocks=deployment.kv_blocks(),
            events=deployment.clock.scheduled(),
            stopped_early=recorder.stopped_early,
            stopped_in_warmup=recorder.stopped_in_warmup,
            drained=not recorder.done,
            elapsed_s=deployment.clock.now_s,
        )

    def __len__(self) -> int:
        return int(self.counted.stop - self.counted.start)

    @property
    def _own(self) -> dict[str, NDArray[Any]]:
        return {name: values[self.counted] for name, values in self.columns.items()}

    def column(self, name: str) -> NDArray[Any]:
        """Return one column of the counted requests, shape (n,)."""
        return self.columns[name][self.counted]

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        """Time to first token of the counted requests, seconds; NaN where rejected or unfinished."""
        return first_token_s(self._own)

    @property
    def tpot_s(self) -> NDArray[np.float64]:
        """Time per output token of the counted requests, seconds; NaN for one-token outputs and unfinished ones."""
        return per_token_s(self._own)

    @property
    def e2e_s(self) -> NDArray[np.float64]:
        """Time from arrival to the last token of the counted requests, seconds; NaN where unfinished."""
        return end_to_end_s(self._own)

    def met_ttft(self, slo: Slo) -> NDArray[np.bool_]:
        """Whether each counted request met the TTFT limit."""
        return met_limits(self._own, slo, self.phase)[1]

    def met_tpot(self, slo: Slo) -> NDArray[np.bool_]:
        """Whether each counted request met the TPOT limit; one-token outputs did when they finished."""
        return met_limits(self._own, slo, self.phase)[2]

    def met(self, slo: Slo) -> NDArray[np.bool_]:
        """Whether each counted request met every limit; unfinished and rejected ones did not."""
        return met_limits(self._own, slo, self.phase)[0]

    def attainment(self, slo: Slo) -> Attainment:
        """Shares of the counted requests that met the limits; NaN without any request."""
        if not len(self):
            return Attainment(math.nan, math.nan, math.nan)
        return Attainment(*(float(np.mean(met)) for met in met_limits(self._own, slo, self.phase)))

    @property
    def saturation(self) -> Saturation:
        """Whether the backlog of waiting requests grew during the run."""
        return saturation_of(self.columns, self.counted)

    @property
    def throughput_per_s(self) -> float:
        """Completed requests per second; see `rate_of`."""
        return self.rate_of(np.ones(len(self.columns["arrival_s"])))

    def good_throughput_per_s(self, slo: Slo) -> float:
        """Completed requests per second that met every limit, over the same time as `throughput_per_s`.

        Of a finite run that is what serving benchmarks call request goodput.
        """
        return self.rate_of(replace(self, counted=slice(0, len(self.columns["arrival_s"]))).met(slo))

    def rate_of(self, amounts: NDArray[Any]) -> float:
        """Return what completed requests amount to, per second.

        Of a steady run, one with a warm-up whose arrivals go on after the counted ones, that is whatever completes
        between the first and the last counted arrival, the warm-up's requests too: none of the time is a ramp or a
        drain. Of any other run it is the counted requests, between their first arrival and their last completion.

        Args:
            amounts: of every request that arrived, shape (n,).
        """
        ends, arrival_s = self.columns["last_token_s"], self.column("arrival_s")
        served = ~np.isnan(ends)
        if not len(arrival_s):
            return 0.0
        start_s, stop_s = float(arrival_s[0]), float(arrival_s[-1])
        if self.window.counted is not None and self.window.warmup:
            served &= (ends > start_s) & (ends <= stop_s)
        else:
            served[: self.counted.start] = served[self.counted.stop :] = False
            stop_s = float(ends[served].max()) if served.any() else start_s
        amount = float(np.sum(amounts[served]))
        if not amount:
            return 0.0
        return amount / (stop_s - start_s) if stop_s > start_s else math.inf

    def ttft_parts_s(self) -> dict[str, float]:
        """Mean seconds between arrival and first decode launch, by part, each over the requests that had it.

        Which parts precede the first token depends on the handover: `first_token_after` names the last one that does.
        """
        parts = parts_s(self._own, colocated=self.placement.is_colocated)
        return {name: _mean(seconds) for name, seconds in parts.items()}

    @property
    def first_token_after(self) -> str:
        """The last of the parts of `ttft_parts_s` that the first token waits for."""
        return first_token_after(self.placement, self.profiles)

    def itl(self) -> Distribution:
        """Gaps between successive tokens of all requests, seconds; NaN if they were not tracked."""
        if self.gaps is None:
            return Distribution.of(np.array([]))
        return weighted_distribution(self.gaps)

    def summary(self, slo: Slo) -> dict[str, Any]:
        """Return the machine-readable summary (docs/output.md)."""
        attainment = self.attainment(slo)
        return {
            "num_requests": len(self),
            "attainment": {"both": attainment.both, "ttft": attainment.ttft, "tpot": attainment.tpot},
            "ttft_s": Distribution.of(self.ttft_s).to_dict(),
            "tpot_s": Distribution.of(self.tpot_s).to_dict(),
            "itl_s": self.itl().to_dict(),
            "e2e_s": Distribution.of(self.e2e_s).to_dict(),
            "throughput_per_s": self.throughput_per_s,
            "good_throughput_per_s": self.good_throughput_per_s(slo),
            "saturation": self.saturation.value,
            "ttft_parts_s": self.ttft_parts_s(),
            **summary_of_run(
                self,
                preemptions=int(self.columns["preemptions"].sum()),
                rejected=int(np.count_nonzero(self.column("rejected"))),
            ),
        }

    def to_frame(self) -> pd.DataFrame:
        """Return the counted requests as a data frame, by number of request, with `ttft_s`, `tpot_s` and `e2e_s`.

        The numbers are those of the step log: the requests of a warm-up have the first ones.
        """
        import pandas as pd

        rows = pd.RangeIndex(self.counted.start, self.counted.stop, name="request")
        frame = pd.DataFrame({name: values[self.counted] for name, values in self.columns.items()}, index=rows)
        frame["ttft_s"], frame["tpot_s"], frame["e2e_s"] = self.ttft_s, self.tpot_s, self.e2e_s
        return frame

    def arrivals(self) -> pd.DataFrame:
        """Return every request that arrived, those of the warm-up and after the counted ones too, with `counted`."""
        import pandas as pd

        rows = pd.RangeIndex(len(self.columns["arrival_s"]), name="request")
        frame = pd.DataFrame(dict(self.columns), index=rows)
        frame["counted"] = (rows >= self.counted.start) & (rows < self.counted.stop)
        return frame


class Run(Protocol):
    """What every run says, whether or not its requests were kept."""

    @property
    def placement(self) -> Placement:
        """What was simulated."""
        ...

    @property
    def profiles(self) -> Mapping[Role, Profile]:
        """With which numbers, by role."""
        ...

    @property
    def options(self) -> Options:
        """Choices of the run."""
        ...

    @property
    def utilization(self) -> Mapping[Role, float]:
        """Share of the time that driver and first stage were busy, by role."""
        ...

    @property
    def kv_peak(self) -> Mapping[Role, float]:
        """Largest share of one instance's KV cache ever taken, by role."""
        ...

    @property
    def kv_blocks(self) -> Mapping[Role, int]:
        """KV blocks of one instance, by role."""
        ...


def summary_of_run(run: Run, *, preemptions: int, rejected: int) -> dict[str, Any]:
    """Return the part of the summary that is not about times of requests."""
    options = run.options
    return {
        "first_token_after": first_token_after(run.placement, run.profiles),
        "utilization": {role.name.lower(): share for role, share in run.utilization.items()},
        "kv_peak": {role.name.lower(): share for role, share in run.kv_peak.items()},
        "kv_blocks": {role.name.lower(): blocks for role, blocks in run.kv_blocks.items()},
        "preemptions": preemptions,
        "rejected": rejected,
        "placement": str(run.placement),
        "num_gpus": run.placement.num_gpus,
        "seed": options.seed,
        "options": {
            "prefill_routing": options.prefill_routing.value,
            "decode_routing": options.decode_routing.value,
            "prefill_token_limit": options.prefill_token_limit,
        },
        "version": __version__,
    }


def first_token_after(placement: Placement, profiles: Mapping[Role, Profile]) -> str:
    """Return the last of the parts of a request's way that its first token waits for."""
    if placement.is_colocated:
        return "prefill"
    return profiles[Role.DECODE].handover.first_token_from.last_part


def utilization_of(deployment: Deployment) -> dict[Role, float]:
    """Return the share of the time up to now that driver and first stage were busy, mean over a pool."""
    elapsed_s = deployment.clock.now_s
    return {role: _share(sum(values) / len(values), elapsed_s) for role, values in deployment.busy_s().items()}


def _share(busy_s: float, elapsed_s: float) -> float:
    """Return the busy share of a time; what rounding adds to an instance that never rests is left out."""
    share = busy_s / elapsed_s if elapsed_s > 0 else 0.0
    return min(1.0, share) if share < 1 + 1e-9 else share


# Of requests as columns


def first_token_s(columns: Columns) -> NDArray[np.float64]:
    """Return TTFT, seconds, shape (n,); NaN where rejected or unfinished."""
    seconds: NDArray[np.float64] = columns["first_token_s"] - columns["arrival_s"]
    return seconds


def per_token_s(columns: Columns) -> NDArray[np.float64]:
    """Return TPOT, seconds, shape (n,); NaN for one-token outputs and unfinished ones."""
    later = (columns["output_tokens"] - 1).astype(np.float64)
    later[later == 0] = np.nan
    seconds: NDArray[np.float64] = (columns["last_token_s"] - columns["first_token_s"]) / later
    return seconds


def end_to_end_s(columns: Columns) -> NDArray[np.float64]:
    """Return E2E, seconds, shape (n,); NaN where unfinished."""
    seconds: NDArray[np.float64] = columns["last_token_s"] - columns["arrival_s"]
    return seconds


def met_limits(columns: Columns, slo: Slo, phase: Role | None) -> tuple[NDArray[np.bool_], ...]:
    """Return whether each request met every limit of what was simulated, the TTFT limit, and the TPOT limit."""
    ttft = first_token_s(columns) <= slo.ttft_s
    single = (columns["output_tokens"] == 1) & ~np.isnan(columns["last_token_s"])
    tpot = (per_token_s(columns) <= slo.tpot_s) | single
    if phase is Role.PREFILL:
        return ttft, ttft, tpot
    if phase is Role.DECODE:
        return tpot, ttft, tpot
    return ttft & tpot & (end_to_end_s(columns) <= slo.e2e_s), ttft, tpot


def parts_s(columns: Columns, *, colocated: bool) -> dict[str, NDArray[np.float64]]:
    """Return the parts of each request's way to its first decode launch, seconds; NaN where it did not get there."""
    parts = {
        "queue": columns["prefill_start_s"] - columns["arrival_s"],
        "prefill": columns["prefill_end_s"] - columns["prefill_start_s"],
    }
    if not colocated:
        parts["transfer"] = columns["transfer_end_s"] - columns["prefill_end_s"]
        parts["decode_admission"] = columns["decode_start_s"] - columns["transfer_end_s"]
    return parts


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan
