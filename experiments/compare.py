"""Published numbers beside simulated ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsim.yamlfile import Scalar
from experiments.store import SweepResults, summarized


@dataclass(frozen=True, slots=True)
class Comparison:
    """One published number beside what was simulated.

    Args:
        factors: value by factor.
        simulated: mean over replications; None if every task failed or has no such number.
        low, high: its interval, where there is one.
    """

    factors: Mapping[str, Scalar]
    column: str
    published: float
    simulated: float | None
    low: float | None
    high: float | None
    note: str = ""

    @property
    def difference(self) -> float | None:
        """Simulated − published."""
        return None if self.simulated is None else self.simulated - self.published

    @property
    def ratio(self) -> float | None:
        """Simulated / published; None around 0."""
        return None if self.simulated is None or self.published == 0 else self.simulated / self.published

    def to_dict(self) -> dict[str, Any]:
        """Return it as a row of compare.csv."""
        return {
            **self.factors,
            "column": self.column,
            "published": self.published,
            "simulated": self.simulated,
            "low": self.low,
            "high": self.high,
            "difference": self.difference,
            "ratio": self.ratio,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Closeness:
    """How near the simulated numbers of one column are to the published ones.

    Args:
        points: numbers compared.
        mean: of the absolute differences.
        worst: the largest absolute difference.
        mean_ratio: geometric mean of simulated / published; None where a number is not positive.
    """

    column: str
    points: int
    mean: float
    worst: float
    mean_ratio: float | None


def compare(results: SweepResults) -> tuple[Comparison, ...]:
    """Return a comparison for every published number and every combination that it is about."""
    records = list(summarized(results.rows))
    return tuple(_compared(results, records))


def _compared(results: SweepResults, records: Sequence[Mapping[str, Any]]) -> Iterator[Comparison]:
    keys = results.outline.keys
    for point in results.outline.published.points:
        for record in records:
            if all(record[key] == value for key, value in point.where.items()):
                factors = {key: record[key] for key in keys}
                group = point.column.removesuffix(".best")
                yield Comparison(
                    factors,
                    point.column,
                    point.value,
                    simulated=_number(record.get(point.column)),
                    low=_number(record.get(f"{group}.low")),
                    high=_number(record.get(f"{group}.high")),
                    note=point.note,
                )


def closeness(comparisons: Sequence[Comparison]) -> tuple[Closeness, ...]:
    """Return how near each column comes to what was published, columns without a simulated number left out."""
    found = []
    for column in dict.fromkeys(comparison.column for comparison in comparisons):
        pairs = [(c.published, c.simulated) for c in comparisons if c.column == column and c.simulated is not None]
        if pairs:
            errors = [abs(simulated - published) for published, simulated in pairs]
            positive = all(published > 0 and simulated > 0 for published, simulated in pairs)
            logarithms = [math.log(simulated / published) for published, simulated in pairs] if positive else []
            ratio = math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None
            found.append(Closeness(column, len(pairs), math.fsum(errors) / len(errors), max(errors), ratio))
    return tuple(found)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
