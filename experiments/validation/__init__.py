"""Measured runs, replayed: `read_run` reads one, `validate` compares it with what dsim predicts (docs/validate.md).

run = read_run("requests.csv")
found = validate(run, profiles=profile, placement=Placement.parse("1xC:tp1"), given={"policy": ("chunked",)})
found.of("ttft_s.mean").error
"""

from experiments.validation.fit import HostFit, fit_host
from experiments.validation.inputs import NAMES, Input, Loop, Origin, parse_assumption
from experiments.validation.measured import Kind, Measured, Requests, TpotDefinition
from experiments.validation.readers import aggregate, read_run, read_runs
from experiments.validation.replay import Replay, replay
from experiments.validation.report import Comparison, Validation, compare, validate
from experiments.validation.settle import settle

__all__ = [
    "NAMES",
    "Comparison",
    "HostFit",
    "Input",
    "Kind",
    "Loop",
    "Measured",
    "Origin",
    "Replay",
    "Requests",
    "TpotDefinition",
    "Validation",
    "aggregate",
    "compare",
    "fit_host",
    "parse_assumption",
    "read_run",
    "read_runs",
    "replay",
    "settle",
    "validate",
]
