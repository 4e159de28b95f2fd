"""The requests of a simulated run: drawn, replayed from a trace, or of users in a closed loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsim.cli.inputs import rate_per_s, seconds, whole
from dsim.cli.options import ArrivalsText, WorkloadText, file_path, whole_number
from dsim.errors import InputError, by_option
from dsim.options import Window

if TYPE_CHECKING:
    from dsim.profile import Profile
    from dsim.trace import Trace
    from dsim.workload import ClosedLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """Which requests come, and which of them count."""

    rate: Annotated[
        str | None, typer.Option("--rate", "-r", metavar="RATE", help="Requests per second of all instances together.")
    ] = None
    workload: WorkloadText = None
    arrivals: ArrivalsText = None
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", "-n", parser=whole_number, metavar="N", help="Requests that count. [default: 10000]"
        ),
    ] = None
    warmup: Annotated[
        int | None,
        typer.Option(
            "--warmup",
            parser=whole_number,
            metavar="N",
            help="Requests before them, not counted. [default: 1000; finite runs 0]",
        ),
    ] = None
    finite: Annotated[
        bool,
        typer.Option("--finite", help="Stop arrivals after the last counted request: a transient, as papers run it."),
    ] = False
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            parser=file_path,
            metavar="FILE",
            help="Replay arrival_s, prompt_tokens, output_tokens from CSV or JSONL.",
        ),
    ] = None
    closed_loop: Annotated[
        int | None,
        typer.Option(
            "--closed-loop",
            parser=whole_number,
            metavar="USERS",
            help="Users who each send when their last request is done.",
        ),
    ] = None
    turnaround: Annotated[
        str | None, typer.Option("--turnaround", metavar="TIME", help="A user's pause between requests. [default: 0]")
    ] = None
    stagger: Annotated[
        str | None, typer.Option("--stagger", metavar="TIME", help="Time between the users' starts. [default: 0]")
    ] = None
    skip_first_wave: Annotated[
        bool, typer.Option("--skip-first-wave", help="Do not count the first request of each user.")
    ] = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of a run, which of them count, and how to call it."""

    source: Trace | Iterator[Trace] | ClosedLoop
    window: Window
    label: str
    described: dict[str, Any]
    num_requests: int | None = None


def asked_traffic(asked: TrafficOptions, profile: Profile, *, seed: int, aggregate: bool) -> Traffic:
    """Return the requests that the options ask for.

    Args:
        aggregate: they need not all be there at once.

    Raises:
        InputError: an option, what is wrong with it and what to do.
    """
    if asked.requests is not None:
        whole("--requests", asked.requests, at_least=1)
    if asked.warmup is not None:
        whole("--warmup", asked.warmup, at_least=0)
    _check_combination(asked)
    try:
        if asked.trace is not None:
            return _replayed(asked, asked.trace, profile)
        if asked.closed_loop is not None:
            return _looped(asked, asked.closed_loop)
        return _generated(asked, profile, seed=seed, aggregate=aggregate)
    except InputError as error:
        raise by_option(error) from None


def _check_combination(asked: TrafficOptions) -> None:
    """Refuse options of one kind of traffic beside another kind."""
    replays, loops = asked.trace is not None, asked.closed_loop is not None
    if not replays and not loops and asked.rate is None and not _has_own_rate(asked.arrivals):
        hint = "as in --rate 6; or replay with --trace FILE, or close the loop with --closed-loop USERS"
        raise InputError("--rate", "is needed", hint=hint)
    chosen = "--trace" if replays else "--closed-loop" if loops else "an open loop"
    foreign: dict[str, object] = {}
    if replays:
        foreign |= {"--closed-loop": asked.closed_loop, "--workload": asked.workload}
    if replays or loops:
        foreign |= {"--rate": asked.rate, "--arrivals": asked.arrivals, "--finite": asked.finite or None}
    if not loops:
        foreign |= {
            "--turnaround": asked.turnaround,
            "--stagger": asked.stagger,
            "--skip-first-wave": asked.skip_first_wave or None,
        }
    for option, value in foreign.items():
        if value is not None:
            shown = None if value is True else value
            raise InputError(option, f"does not go with {chosen}", value=shown, hint="leave one of the two out")


def _has_own_rate(arrivals: str | None) -> bool:
    """Return whether the arrivals are those of a file."""
    return arrivals is not None and arrivals.partition(":")[0] not in ("poisson", "constant", "gamma")


def _replayed(asked: TrafficOptions, path: Path, profile: Profile) -> Traffic:
    from dsim.workload.traces import read_trace

    trace = read_trace(path, context_tokens=profile.model.context_tokens)
    warmup = asked.warmup or 0
    rows = len(trace) if asked.requests is None else warmup + asked.requests
    if rows > len(trace) or warmup >= len(trace):
        option = "--warmup" if asked.requests is None else "--requests"
        hint = f"{path} has {len(trace)} requests"
        raise InputError(option, "asks for more requests than the trace has", value=rows, hint=hint)
    counted = rows - warmup
    return Traffic(
        trace.first(rows),
        Window(warmup=warmup),
        f"{counted} requests replayed from {path}" + (f" after {warmup} of warm-up" if warmup else ""),
        {"kind": "trace", "trace": str(path), "warmup": warmup, "requests": counted},
    )


def _looped(asked: TrafficOptions, users: int) -> Traffic:
    from dsim.workload import DEFAULT_REQUESTS, ClosedLoop
    from dsim.workload.parse import parse_workload

    whole("--closed-loop", users, at_least=1)
    text = "sharegpt" if asked.workload is None else asked.workload
    counted = DEFAULT_REQUESTS if asked.requests is None else asked.requests
    warmup = asked.warmup if asked.warmup is not None else users if asked.skip_first_wave else 0
    loop = ClosedLoop(
        users,
        parse_workload(text),
        counted + warmup,
        stagger_s=0.0 if asked.stagger is None else seconds("--stagger", asked.stagger),
        turnaround_s=0.0 if asked.turnaround is None else seconds("--turnaround", asked.turnaround),
    )
    return Traffic(
        loop,
        Window(warmup=warmup),
        f"{counted} requests of {users} users in a closed loop, {text} lengths"
        + (f", after {warmup} of warm-up" if warmup else ""),
        {
            "kind": "closed_loop",
            "users": users,
            "workload": text,
            "turnaround_s": loop.turnaround_s,
            "stagger_s": loop.stagger_s,
            "warmup": warmup,
            "requests": counted,
        },
    )


def _generated(asked: TrafficOptions, profile: Profile, *, seed: int, aggregate: bool) -> Traffic:
    from dsim.workload import DEFAULT_REQUESTS, DEFAULT_WARMUP, Workload
    from dsim.workload.parse import parse_arrivals, parse_workload

    text = "sharegpt" if asked.workload is None else asked.workload
    process = "poisson" if asked.arrivals is None else asked.arrivals
    workload = Workload(parse_arrivals(process), parse_workload(text))
    rate = None if asked.rate is None else rate_per_s(asked.rate)
    counted = DEFAULT_REQUESTS if asked.requests is None else asked.requests
    warmup = asked.warmup if asked.warmup is not None else 0 if asked.finite else DEFAULT_WARMUP
    draw = {"seed": seed, "context_tokens": profile.model.context_tokens}
    source: Trace | Iterator[Trace]
    if asked.finite and aggregate:
        source = workload.finite(num_requests=warmup + counted, rate_per_s=rate, **draw)
    elif asked.finite:
        source = workload.trace(num_requests=warmup + counted, rate_per_s=rate, **draw)
    else:
        source = workload.steady(num_requests=warmup + counted, rate_per_s=rate, **draw)
    shown_rate = rate if rate is not None else workload.arrivals.native_rate_per_s
    label = f"{counted} requests at {shown_rate:g}/s, {process} arrivals, {text} lengths"
    label += f", after {warmup} of warm-up" if warmup else ""
    label += "; a finite run, so a transient" if asked.finite else ""
    return Traffic(
        source,
        Window(warmup=warmup) if asked.finite else Window(warmup=warmup, counted=counted),
        label,
        {
            "kind": "open_loop",
            "rate_per_s": shown_rate,
            "arrivals": process,
            "workload": text,
            "finite": asked.finite,
            "warmup": warmup,
            "requests": counted,
        },
        warmup + counted if asked.finite else None,
    )
