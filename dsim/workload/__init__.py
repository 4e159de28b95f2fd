"""Workloads: arrivals, lengths, traces and the random streams they are drawn from."""

from dsim.workload.arrivals import Arrivals, Constant, Gamma, Poisson, Replayed
from dsim.workload.core import DEFAULT_REQUESTS, DEFAULT_WARMUP, ClosedLoop, Workload
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
from dsim.workload.parse import names_a_file, parse_arrivals, parse_workload
from dsim.workload.presets import PRESETS, TableLengths, preset
from dsim.workload.streams import replication_seed, stream
from dsim.workload.traces import read_lengths, read_trace, rescale

__all__ = [
    "DEFAULT_REQUESTS",
    "DEFAULT_WARMUP",
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
    "names_a_file",
    "parse_arrivals",
    "parse_workload",
    "preset",
    "read_lengths",
    "read_trace",
    "replication_seed",
    "rescale",
    "stream",
]
