"""What all comparisons share: where the measurements lie, errors, and how they are printed."""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from dsim.pools import Parallelism, Placement, Policy, Role
from dsim.profile import BatchLimits, Profile
from profiles.shipped import find_profile

SHARED = Path(__file__).parents[3] / "shared" / "data"
TRUTH = SHARED / "truth"
needs_truth = pytest.mark.skipif(not TRUTH.is_dir(), reason="needs the measurements beside the repository")
ONE_GPU = Parallelism(1, 1)


@dataclass(frozen=True)
class Pair:
    """One predicted and one measured number."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.measured - 1


@functools.cache
def rows(name: str) -> tuple[Mapping[str, str], ...]:
    """Return the rows of one file of measurements."""
    with (TRUTH / name).open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


@functools.cache
def profile_of(model: str, gpu: str, engine: str) -> Profile:
    """Return a shipped profile."""
    return find_profile(model, gpu, engine=engine)


def mean_error(pairs: Iterable[Pair]) -> float:
    """Return the mean of the absolute relative errors."""
    return float(np.mean([abs(pair.error) for pair in pairs]))


def worst_error(pairs: Iterable[Pair]) -> float:
    """Return the largest absolute relative error."""
    return max(abs(pair.error) for pair in pairs)


def colocated(policy: Policy, token_budget: int | None = None) -> Placement:
    """Return one GPU that does everything."""
    return Placement.colocated(parallelism=ONE_GPU, count=1, policy=policy, token_budget=token_budget)


def limited(profile: Profile, *, tokens: int, requests: int, kv_tokens: int | None = None) -> Profile:
    """Return the profile with the settings that an engine ran with."""
    limits = {**profile.limits, Role.COLOCATED: BatchLimits(tokens=tokens, requests=requests)}
    capacity = profile.kv_capacity_tokens if kv_tokens is None else {ONE_GPU: kv_tokens}
    return replace(profile, limits=limits, kv_capacity_tokens=capacity)


def percent(share: float) -> str:
    """Return an unsigned error.

    >>> percent(0.0345)
    '3.5 %'
    """
    return f"{100 * share:.1f} %"


def signed(share: float) -> str:
    """Return a signed error; none is -0.0."""
    text = f"{100 * share:+.1f}"
    return ("+0.0" if text == "-0.0" else text).replace("-", "−") + " %"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)).replace(
        "| " + " | ".join(["---"] * len(head)) + " |", "|" + "---|" * len(head)
    )
