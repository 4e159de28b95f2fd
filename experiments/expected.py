"""Expected rows: what is known of a task's row before the task has run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dsim.pools import Placement, Role
from dsim.profile import Profile
from dsim.yamlfile import Scalar
from experiments.keys import QUANTILES
from experiments.measures import columns
from experiments.settings import Formula, Measure, Method, Setting, StepPhase
from placement.search import Mode

#: Columns of a search as DistServe does it.
_OF_AUTHORS: Final = frozenset(
    {"model", "gpu", "max_gpus", "placement", "num_gpus", "rate_per_gpu_per_s", "candidates", "probes"}
)
#: Columns of a step of one phase only.
_SPEEDS: Final = frozenset({"tokens_per_s", "tokens_per_gpu_per_s"})
_OF_PHASES: Final[Mapping[StepPhase, frozenset[str]]] = {
    StepPhase.PREFILL: _SPEEDS,
    StepPhase.DECODE: _SPEEDS,
    StepPhase.MIXED: frozenset({"added_s", "slowdown"}),
    StepPhase.CHUNKED: frozenset(
        ("chunks", "ttft_s", "longest_step_s", "reread_chunks", "reread_tokens", "reread_bytes", "reread_s")
    ),
}
#: What one pool alone does not show.
_AFTER_PREFILL: Final = ("transfer_s.", "ttft_parts_s.transfer", "ttft_parts_s.decode_admission", "parts_s.transfer")
_NOT_OF_PHASES: Final = {
    Role.PREFILL: ("tpot_s.", "itl_s.", "e2e_s.", "output_tokens_", "parts_s.decode", *_AFTER_PREFILL),
    Role.DECODE: ("ttft_s.", "itl_s.", "e2e_s."),
}
_BY_ROLE: Final = ("utilization", "kv_peak", "kv_blocks")


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a row.

    Args:
        columns: every column in which it may have a value.
        values: of the columns that are known already; the others are results.
    """

    columns: frozenset[str]
    values: Mapping[str, Scalar]


def expected(setting: Setting, factors: Mapping[str, Scalar], *, others: Iterable[str] = ()) -> Expected:
    """Return what is known of the row of a setting with these factor values.

    Args:
        others: columns beside those of factors and measures.
    """
    missing = tuple(_missing(setting))
    found = {name for name in columns(setting.measure) if not name.startswith(missing)}
    if setting.measure is Measure.SEARCH and setting.search is not None and setting.search.method is Method.AUTHORS:
        found &= {*_OF_AUTHORS, "elapsed_s", "cpu_s"}
    # A measured column takes the place of a factor of its name.
    values = {name: value for name, value in factors.items() if name not in found} | dict(_values(setting))
    return Expected(frozenset({*found, *factors, *others}), values)


def _missing(setting: Setting) -> Iterator[str]:
    """Yield how the columns begin in which the row has no value."""
    if setting.measure is Measure.STEP and setting.step is not None:
        others = frozenset.union(*_OF_PHASES.values()) - _OF_PHASES[setting.step.phase]
        yield from others
    elif setting.measure is Measure.QUEUEING and setting.queueing is not None:
        if setting.queueing.formula is not Formula.SPEEDUP or setting.queueing.tp_speedup >= 2:
            yield "crossover_"
    elif setting.measure is Measure.SEARCH and setting.search is not None:
        yield from () if setting.search.timing else ("elapsed_s", "cpu_s")
        yield from () if setting.search.mode is not Mode.DISAGGREGATED else ("best.colocated.", "best.ratio.")
        yield from () if setting.search.mode is not Mode.COLOCATED else ("best.disaggregated.", "best.ratio.")
    elif setting.placement is not None:
        roles = [pool.role for pool in setting.placement.pools] if setting.phase is None else [setting.phase]
        yield from (f"{group}.{role.name.lower()}" for group in _BY_ROLE for role in Role if role not in roles)
        yield from _AFTER_PREFILL if setting.placement.is_colocated else ()
    if setting.measure is Measure.SIMULATE:
        yield from () if setting.slo is not None else ("attainment.", "good_throughput_per_s")
        yield from () if setting.phase is None else _NOT_OF_PHASES[setting.phase]
        yield from (f"quantiles.{name}" for name in QUANTILES if name not in setting.quantiles)


def _values(setting: Setting) -> Iterator[tuple[str, Scalar]]:
    """Yield the measured columns that are known, and their values."""
    if setting.measure in {Measure.SIMULATE, Measure.GOODPUT} and setting.placement is not None:
        yield from _of_placement(setting, setting.placement)
    elif setting.measure is Measure.STEP and setting.step is not None:
        yield from _of_profile(setting.profiles[setting.step.role])
        yield "num_gpus", setting.step.tp * setting.step.pp
    elif setting.measure is Measure.SEARCH and setting.search is not None:
        yield "max_gpus", setting.search.cluster.num_gpus
    elif setting.measure is Measure.QUEUEING:
        yield "num_gpus", setting.num_gpus
    rate_per_s = setting.traffic.rate_per_s
    if setting.measure in {Measure.SIMULATE, Measure.QUEUEING} and rate_per_s is not None:
        yield from (("rate_per_s", rate_per_s), ("rate_per_gpu_per_s", rate_per_s / setting.num_gpus))


def _of_placement(setting: Setting, placement: Placement) -> Iterator[tuple[str, Scalar]]:
    pool = placement.pools[0]
    yield "placement", str(placement)
    yield "policy", None if pool.policy is None else pool.policy.value
    yield "token_budget", pool.token_budget
    yield "num_gpus", setting.num_gpus
    yield from _of_profile(setting.profiles[setting.phase or pool.role])


def _of_profile(profile: Profile) -> Iterator[tuple[str, Scalar]]:
    yield from (("model", profile.model.name), ("gpu", profile.gpu.name), ("engine", profile.engine))
