"""Inputs: the profiles, traces and workloads that a setting names, by name or as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from dsim.errors import InputError
from dsim.hugging_face import is_config
from dsim.options import Evidence
from dsim.pools import Role
from dsim.profile import Profile
from dsim.units import parse_rate_per_s
from dsim.workload import DEFAULT_REQUESTS, DEFAULT_WARMUP, Workload, parse_arrivals, parse_workload, read_trace
from dsim.yamlfile import Field, Section
from experiments.settings import Measure, Traffic
from experiments.values import path_at, placed, text_at, whole_at
from profiles.choice import choose_colocated, choose_profile


def profiles_of(section: Section, measure: Measure, *, folder: Path) -> dict[Role, Profile]:
    """Return the profile of each role; none where the measure needs none and none is named."""
    if measure is Measure.QUEUEING and "model" not in section and "profile" not in section:
        return {}
    changes = _changes(section)
    evidence = section.get("evidence")
    with placed(section, "model"):
        used = choose_profile(
            model=_model(section, folder),
            gpu=text_at(section, "gpu"),
            engine=text_at(section, "engine"),
            file=path_at(section, "profile", folder),
            evidence=None if evidence is None else evidence.choice(Evidence),
            changes=changes,
        )
    colocated = _colocated(section, used, measure, changes, folder=folder)
    return {Role.PREFILL: used, Role.DECODE: used, Role.COLOCATED: colocated}


def _colocated(
    section: Section, used: Profile, measure: Measure, changes: Mapping[str, Field], *, folder: Path
) -> Profile:
    engine, file = text_at(section, "colocated_engine"), path_at(section, "colocated_profile", folder)
    if engine is None and file is None and measure is not Measure.SEARCH:
        return used
    with placed(section, "colocated_engine" if file is None else "colocated_profile"):
        return choose_colocated(used, engine=engine, file=file, changes=changes)


def _model(section: Section, folder: Path) -> str | None:
    """Return the model's name, or the path of its config file, which starts from the sweep file's folder."""
    name = text_at(section, "model")
    return name if name is None or not is_config(str(folder / name)) else str(folder / name)


def _changes(section: Section) -> dict[str, Field]:
    """Return the values of `profile_set` by dotted key."""
    field = section.get("profile_set")
    return {} if field is None else dict(_leaves(field.section(), ""))


def _leaves(section: Section, prefix: str) -> Iterator[tuple[str, Field]]:
    for key, field in section.fields.items():
        path = f"{prefix}{key}"
        if isinstance(field.value, dict):
            yield from _leaves(field.section(), f"{path}.")
        else:
            yield path, field


def traffic_of(
    section: Section, measure: Measure, profiles: Mapping[Role, Profile], *, folder: Path, gpus: int | None
) -> Traffic:
    """Return the requests of a run.

    Args:
        profiles: whose model's context bounds the requests; empty where the measure needs none.
        folder: that the files of lengths, arrivals and traces start from.
        gpus: that `rate_per_gpu` is about; None where there are none.
    """
    finite = section.flag("finite", default=False)
    requests, warmup = whole_at(section, "requests", at_least=1), whole_at(section, "warmup", at_least=0)
    rate_per_s = _rate_per_s(section, gpus)
    if "trace" in section:
        return _replayed(section, profiles, folder=folder, requests=requests, warmup=warmup or 0)
    lengths, process = text_at(section, "workload") or "sharegpt", text_at(section, "arrivals") or "poisson"
    with placed(section, "workload"):
        drawn = parse_workload(lengths, folder=folder)
    with placed(section, "arrivals"):
        arrivals = parse_arrivals(process, folder=folder)
    workload = Workload(arrivals, drawn)
    if rate_per_s is None and measure in {Measure.SIMULATE, Measure.QUEUEING} and arrivals.native_rate_per_s is None:
        raise InputError(section.field.where, "is missing", name="rate", hint="add rate, rate_per_gpu or a trace")
    if profiles and measure in {Measure.SIMULATE, Measure.GOODPUT, Measure.SEARCH}:
        with placed(section, "rate" if "rate" in section else "rate_per_gpu"):
            # Requests are drawn when they are needed: see now whether they can be.
            context_tokens = min(profile.model.context_tokens for profile in profiles.values())
            workload.trace(num_requests=1, seed=0, context_tokens=context_tokens, rate_per_s=rate_per_s or 1.0)
    return Traffic(
        workload=workload,
        trace=None,
        rate_per_s=rate_per_s if rate_per_s is not None else arrivals.native_rate_per_s,
        requests=DEFAULT_REQUESTS if requests is None else requests,
        warmup=warmup if warmup is not None else 0 if finite else DEFAULT_WARMUP,
        finite=finite,
    )


def _replayed(
    section: Section, profiles: Mapping[Role, Profile], *, folder: Path, requests: int | None, warmup: int
) -> Traffic:
    for key in ("workload", "arrivals", "rate", "rate_per_gpu", "finite"):
        if key in section:
            raise section.need(key).error("does not go with trace", "leave one of the two out")
    file = path_at(section, "trace", folder)
    assert file is not None
    context_tokens = min((profile.model.context_tokens for profile in profiles.values()), default=None)
    trace = read_trace(file, context_tokens=context_tokens)
    rows = len(trace) if requests is None else warmup + requests
    if rows > len(trace) or warmup >= len(trace):
        field = section.need("warmup" if requests is None else "requests")
        raise field.error("asks for more requests than the trace has", f"it has {len(trace)}")
    return Traffic(
        workload=None,
        trace=trace.first(rows),
        rate_per_s=None,
        requests=rows - warmup,
        warmup=warmup,
        finite=True,
    )


def _rate_per_s(section: Section, gpus: int | None) -> float | None:
    whole, per_gpu = section.get("rate"), section.get("rate_per_gpu")
    if whole is not None and per_gpu is not None:
        raise per_gpu.error("does not go with rate", "leave one of the two out")
    field = whole or per_gpu
    if field is None:
        return None
    if isinstance(field.value, str):
        rate_per_s = parse_rate_per_s(field.value, field.where, name=field.name)
    else:
        rate_per_s = field.number()
    if not 1e-9 <= rate_per_s <= 1e9:
        raise field.error("must be between 1e-9 and 1e9 requests per second", "as in 6 or 90/min")
    if per_gpu is None:
        return rate_per_s
    return None if gpus is None else rate_per_s * gpus
