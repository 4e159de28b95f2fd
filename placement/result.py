"""What a search answers: trials, the best of each kind, and what they were compared by."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsim.pools import Placement, Role
from dsim.version import __version__
from placement.goodput import Goodput, ratio
from placement.statistics import Interval

if TYPE_CHECKING:
    import pandas as pd


class State(enum.Enum):
    """What became of a candidate."""

    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    INFEASIBLE = "INFEASIBLE"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Operation:
    """How a placement runs just below its goodput (at the highest rate probed that it sustains).

    Args:
        rate_per_s: of the whole placement.
        attainment: shares (0 to 1) that met all limits, the TTFT limit, the TPOT limit.
        utilization: by role.
        limiting: the role whose limit is missed most; the busier one where the limits do not tell.
        ttft_parts_s: mean seconds, by part.
        stable_rate_per_s: the largest rate at which the backlog does not grow; None if it was not measured.
    """

    rate_per_s: float
    attainment: Mapping[str, float]
    utilization: Mapping[Role, float]
    limiting: Role
    ttft_parts_s: Mapping[str, float]
    stable_rate_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate.

    Args:
        replicas: copies of the placement that the cluster holds; goodput per GPU is that of one.
        reasons: why it cannot run (INFEASIBLE), what pruned it (PRUNED), the error (FAILED).
        bound_per_gpu_per_s: analytic upper bound on its goodput, None where there is none.
        failed_at_per_gpu_per_s: lowest rate at which simulations of a pruned one fell short; evidence, not a bound.
        tied: its goodput is not significantly below the best of the table.
        tied_in_kind: nor below the best of its kind (disaggregated, colocated).
        thrift: what goodput per GPU is multiplied by to rank: GPUs over cost, relative to the cheapest GPU, where GPUs
            differ in price and the objective is goodput per dollar.
    """

    placement: Placement
    state: State
    replicas: int = 1
    reasons: tuple[str, ...] = ()
    goodput: Goodput | None = None
    bound_per_gpu_per_s: float | None = None
    failed_at_per_gpu_per_s: float | None = None
    operation: Operation | None = None
    tied: bool = False
    tied_in_kind: bool = False
    thrift: float = 1.0

    @property
    def num_gpus(self) -> int:
        """GPUs of one copy."""
        return self.placement.num_gpus

    @property
    def goodput_per_gpu_per_s(self) -> Interval | None:
        """Largest sustainable rate per GPU used; None unless the trial is complete."""
        return None if self.goodput is None else self.goodput.rate_per_s / self.num_gpus

    @property
    def total_per_s(self) -> Interval | None:
        """Largest sustainable rate of all copies that the cluster holds."""
        return None if self.goodput is None else self.goodput.rate_per_s * self.replicas

    @property
    def load(self) -> float | None:
        """Goodput as a share of the largest stable rate: how close to saturation the placement would run."""
        if self.goodput is None or self.operation is None or not self.operation.stable_rate_per_s:
            return None
        return self.goodput.rate_per_s.best / self.operation.stable_rate_per_s

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as in docs/output.md."""
        goodput, total, operation = self.goodput_per_gpu_per_s, self.total_per_s, self.operation
        return {
            **self.placement.named_dict(),
            "num_gpus": self.num_gpus,
            **self.placement.layout_dict(),
            "replicas": self.replicas,
            "state": self.state.value,
            "reasons": list(self.reasons),
            "goodput_per_gpu_per_s": None if goodput is None else goodput.to_dict(),
            "total_per_s": None if total is None else total.to_dict(),
            "bound_per_gpu_per_s": self.bound_per_gpu_per_s,
            "failed_at_per_gpu_per_s": self.failed_at_per_gpu_per_s,
            "tied": self.tied,
            "tied_in_kind": self.tied_in_kind,
            "monotone": None if self.goodput is None else self.goodput.monotone,
            "replications": None if self.goodput is None else len(self.goodput.log_rates),
            "rate_per_s": None if operation is None else operation.rate_per_s,
            "attainment": None if operation is None else dict(operation.attainment),
            "utilization": None
            if operation is None
            else {role.name.lower(): share for role, share in operation.utilization.items()},
            "limiting_role": None if operation is None else operation.limiting.name.lower(),
            "ttft_parts_s": None if operation is None else dict(operation.ttft_parts_s),
            "load": self.load,
        }


@dataclass(frozen=True, slots=True)
class Best:
    """The best complete trial of each kind, None where no placement of the kind sustains any rate.

    Args:
        confidence: of the interval of the ratio.
    """

    disaggregated: Trial | None
    colocated: Trial | None
    confidence: float = 0.95

    @property
    def overall(self) -> Trial | None:
        """The better of the two, the one with fewer GPUs if they are equal."""
        found = [trial for trial in (self.disaggregated, self.colocated) if trial is not None]
        return min(found, key=rank, default=None)

    @property
    def ratio(self) -> Interval | None:
        """Goodput per GPU (per dollar if that is sought), disaggregated / colocated, from paired replications."""
        a, b = self.disaggregated, self.colocated
        if a is None or b is None or a.goodput is None or b.goodput is None:
            return None
        paired = ratio(a.goodput, b.goodput, confidence=self.confidence)
        return None if paired is None else paired * (b.num_gpus / a.num_gpus * (a.thrift / b.thrift))


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The answer to a question.

    Args:
        trials: every candidate: complete ones by goodput, then pruned by the rate, failed, infeasible.
        most_total: the complete trial whose copies serve most on the whole cluster.
        transient: goodput is that of a finite run from an empty system, not of the steady state.
        question: what was asked, in words and numbers.
        probes: simulations run.
        requests: requests simulated.
    """

    best: Best
    trials: tuple[Trial, ...]
    most_total: Trial | None
    transient: bool
    question: Mapping[str, Any]
    probes: int
    requests: int
    warnings: tuple[str, ...] = ()
    version: str = field(default=__version__)

    @property
    def complete(self) -> tuple[Trial, ...]:
        """The trials with a goodput, best first."""
        return tuple(trial for trial in self.trials if trial.state is State.COMPLETE)

    @property
    def infeasible(self) -> Mapping[str, tuple[Placement, ...]]:
        """Placements that cannot run, by reason."""
        found: dict[str, list[Placement]] = {}
        for trial in self.trials:
            if trial.state is State.INFEASIBLE:
                for reason in trial.reasons:
                    found.setdefault(reason, []).append(trial.placement)
        return {reason: tuple(placements) for reason, placements in found.items()}

    @property
    def is_feasible(self) -> bool:
        """Whether any placement sustains any rate within the limits."""
        return self.best.overall is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as in docs/output.md."""
        best = self.best
        spread = best.ratio
        return {
            "best": {
                "disaggregated": None if best.disaggregated is None else best.disaggregated.to_dict(),
                "colocated": None if best.colocated is None else best.colocated.to_dict(),
                "ratio": None if spread is None else spread.to_dict(),
            },
            "most_total": None if self.most_total is None else self.most_total.to_dict(),
            "trials": [trial.to_dict() for trial in self.trials],
            "transient": self.transient,
            "question": dict(self.question),
            "warnings": list(self.warnings),
            "probes": self.probes,
            "requests": self.requests,
            "version": self.version,
        }

    def to_frame(self) -> pd.DataFrame:
        """Return the trials as a data frame, one row each, best first."""
        import pandas as pd  # half a second that only this needs

        rows = []
        for trial in self.trials:
            row = trial.to_dict()
            for name in ("goodput_per_gpu_per_s", "total_per_s", "attainment", "utilization", "ttft_parts_s"):
                values = row.pop(name) or {}
                row.update({f"{name}_{key}": value for key, value in values.items()})
            row["reasons"] = "; ".join(row["reasons"])
            rows.append(row)
        return pd.DataFrame(rows)


def rank(trial: Trial) -> tuple[float, int, str]:
    """Return the key that sorts complete trials: goodput by the objective, ties to fewer GPUs, then by name."""
    goodput = trial.goodput_per_gpu_per_s
    worth = 0.0 if goodput is None else goodput.best * trial.thrift
    return (-worth, trial.num_gpus, trial.placement.label)


def by_worth(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the trials in the order of the table."""
    order = list(State)

    def key(trial: Trial) -> tuple[int, float, int, str]:
        worth, num_gpus, label = rank(trial)
        if trial.goodput is None:
            known = [r for r in (trial.bound_per_gpu_per_s, trial.failed_at_per_gpu_per_s) if r is not None]
            worth = -min(known, default=0.0) * trial.thrift
        return (order.index(trial.state), worth, num_gpus, label)

    return tuple(sorted(trials, key=key))
