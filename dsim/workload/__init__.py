"""Workloads: arrivals, lengths, traces and the random streams they are drawn from."""

from dsim.workload.arrivals import Arrivals, Constant, Gamma, Poisson, Replayed
from dsim.workload.core import ClosedLoop, Workload
from dsim.workload.lengths import (
    Empirical,
    Fixed,
    Lengths,
    LogNormal,
    MeanTokens,
    Tokens,
    Uniform,
    cv_from_median,
)
from dsim.workload.presets import PRESETS, TableLengths, preset
from dsim.workload.streams import replication_seed, stream

__all__ = [
    "PRESETS",
    "Arrivals",
    "ClosedLoop",
    "Constant",
    "Empirical",
    "Fixed",
    "Gamma",
    "Lengths",
    "LogNormal",
    "MeanTokens",
    "Poisson",
    "Replayed",
    "TableLengths",
    "Tokens",
    "Uniform",
    "Workload",
    "cv_from_median",
    "preset",
    "replication_seed",
    "stream",
]
