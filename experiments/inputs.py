"""Inputs: the profiles, traces and workloads that a setting names, by name or as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from dsim.errors import InputError
from dsim.handovers import Link, parse_kv_link, parse_nic
from dsim.hugging_face import is_config
from dsim.options import Evidence
from dsim.pools import Role
from dsim.profile import Profile
from dsim.units import parse_rate_per_s
from dsim.workload import (
    DEFAULT_REQUESTS,
    DEFAULT_WARMUP,
    Workload,
    names_a_file,
    parse_arrivals,
    parse_workload,
    read_trace,
)
from dsim.yamlfile import Field, Section
from experiments.mixed import are_apart, first_of, mixes_at
from experiments.settings import Measure, Traffic
from experiments.values import check_file, file_at, placed, text_at, whole_at
from profiles.choice import choose_colocated, choose_profile
from profiles.handover import parse_handover, with_handover, with_nic


def profiles_of(section: Section, measure: Measure, *, folder: Path) -> dict[Role, Profile]:
    """Return the profile of each role; none where the measure needs none and none is named."""
    if measure is Measure.QUEUEING and "model" not in section and "profile" not in section:
        return {}
    changes = _changes(section)
    evidence = section.get("evidence")
    model, file = text_at(section, "model"), file_at(section, "profile", folder)
    config = None if model is None or not is_config(str(folder / model)) else folder / model
    if config is not None:
        check_file(section.need("model"), config)
    if are_apart(section):
        return first_of(mixes_of_setting(section, measure, folder=folder))
    with placed(section, "profile_set" if changes else "model", files={"model": config, "profile": file}):
        used = choose_profile(
            model=model if config is None else str(config),
            gpu=text_at(section, "gpu"),
            engine=text_at(section, "engine"),
            file=file,
            evidence=None if evidence is None else evidence.choice(Evidence),
            changes=changes,
        )
    colocated = _colocated(section, used, measure, changes, folder=folder)
    handing = _handing(section, used, folder=folder)
    return {Role.PREFILL: handing, Role.DECODE: handing, Role.COLOCATED: handing if colocated is used else colocated}


def mixes_of_setting(section: Section, measure: Measure, *, folder: Path) -> tuple[Mapping[Role, Profile], ...]:
    """Return every mix of the GPUs that a setting names; none where it names none by role."""
    if not are_apart(section):
        return ()
    model = text_at(section, "model")
    return mixes_at(
        section,
        measure,
        model=str(folder / model) if model is not None and is_config(str(folder / model)) else model,
        changes=_changes(section),
        hand_over=lambda profile, link: _handing(section, profile, folder=folder, mixed=link),
        folder=folder,
    )


def _handing(section: Section, used: Profile, *, folder: Path, mixed: str | None = None) -> Profile:
    """Return the profile with the handover that the section asks for, over the link that it asks for.

    Args:
        mixed: what KV goes over between GPUs of two types, where the section does not say it.
    """
    asked, link = section.get("handover"), text_at(section, "kv_link")
    handover = None
    if asked is not None and isinstance(asked.value, dict):
        handover = asked.section()
    elif asked is not None:
        with placed(section, "handover"):
            handover = parse_handover(asked.text(), folder=folder)
    with placed(section, "kv_link" if handover is None else "handover"):
        over = link or mixed
        found = None if over is None else parse_kv_link(over)
        if mixed is not None and isinstance(found, Link) and found is not Link.NIC:
            rule = "is within a node, and nodes have GPUs of one type"
            raise section.need("kv_link").error(rule, "leave it out, or give nic or a rate")
        used = with_handover(used, handover, kv_link=found, crosses_nodes=mixed is not None)
    nic = text_at(section, "nic")
    if nic is None:
        return used
    with placed(section, "nic"):
        return with_nic(used, parse_nic(nic))


def _colocated(
    section: Section, used: Profile, measure: Measure, changes: Mapping[str, Field], *, folder: Path
) -> Profile:
    engine, file = text_at(section, "colocated_engine"), file_at(section, "colocated_profile", folder)
    if engine is None and file is None and measure is not Measure.SEARCH:
        return used
    key = "profile_set" if changes else "colocated_engine" if file is None else "colocated_profile"
    with placed(section, key, files={"colocated_profile": file}):
        return choose_colocated(used, engine=engine, file=file, changes=changes)


def _changes(section: Section) -> dict[str, Field]:
    """Return the values of `profile_set` by dotted key."""
    field = section.get("profile_set")
    changes: dict[str, Field] = {}
    for path, value in () if field is None else _leaves(field.section(), ""):
        if path in changes:
            hint = f"it also stands on line {changes[path].line}; keep one of the two"
            raise value.error_of_key("stands twice, dotted and nested", hint)
        changes[path] = value
    return changes


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
    files = {"workload": _file_of(section, "workload", folder), "arrivals": _file_of(section, "arrivals", folder)}
    with placed(section, "workload", files=files):
        drawn = parse_workload(lengths, folder=folder)
    with placed(section, "arrivals", files=files):
        arrivals = parse_arrivals(process, folder=folder)
    workload = Workload(arrivals, drawn)
    if rate_per_s is None and measure in {Measure.SIMULATE, Measure.QUEUEING} and arrivals.native_rate_per_s is None:
        name = f"{section.field.name}.rate".lstrip(".")
        raise InputError(section.field.where, "is missing", name=name, hint="add rate, rate_per_gpu or a trace")
    if profiles and measure in {Measure.SIMULATE, Measure.GOODPUT, Measure.SEARCH}:
        with placed(section, "rate" if "rate" in section else "rate_per_gpu", files=files):
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
    file = file_at(section, "trace", folder)
    assert file is not None
    context_tokens = min((profile.model.context_tokens for profile in profiles.values()), default=None)
    with placed(section, "trace", files={"trace": file}):
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


def _file_of(section: Section, key: str, folder: Path) -> Path | None:
    """Return the file that a key of lengths or arrivals names; None where it names something else."""
    text = text_at(section, key)
    if text is None or not names_a_file(text, folder=folder):
        return None
    check_file(section.need(key), folder / text)
    return folder / text
