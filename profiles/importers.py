"""Brings timings of other tools into the form of docs/profile_rows.md: Dynamo's profiler and `vllm bench`."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InputError
from profiles.rows import Phase, Point, Row

Floats = NDArray[np.float64]

#: Seconds of the units in which Dynamo's times are written.
UNITS: Final[Mapping[str, float]] = {"ms": 1e-3, "s": 1.0}
_PREFILL_KEYS = ("prefill_isl", "prefill_ttft")
_DECODE_KEYS = ("x_kv_usage", "y_context_length", "z_itl", "max_kv_tokens")
_LARGEST_BYTES = 50_000_000
_RUN = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,6})\+([1-9]\d{0,6})=(.+)")


def read_dynamo(path: Path, *, tp: int, unit: str = "ms") -> list[Row]:
    """Return the rows in one `raw_data.npz` (or .json) of Dynamo's profiler: of its prefill or of its decode sweep.

    Decode points are given by the share of the KV cache in use and the context of a request; their batch is the one
    that comes nearest.

    Args:
        tp: tensor parallel degree of the engine that was swept; the file does not say.
        unit: of the file's times, `ms` or `s`.

    Raises:
        InputError: the file cannot be read, lacks an array, or holds values that cannot be.
    """
    if unit not in UNITS:
        raise InputError("--unit", "must be ms or s", value=unit)
    arrays = _arrays(path)
    if all(key in arrays for key in _PREFILL_KEYS):
        return list(_dynamo_prefill(path, arrays, tp, UNITS[unit]))
    if all(key in arrays for key in _DECODE_KEYS):
        return list(_dynamo_decode(path, arrays, tp, UNITS[unit]))
    hint = f"expected {', '.join(_PREFILL_KEYS)} or {', '.join(_DECODE_KEYS)}"
    raise InputError(str(path), f"holds {', '.join(sorted(arrays)) or 'nothing'}", hint=hint)


def find_dynamo(directory: Path) -> list[Path]:
    """Return the files of a results directory of Dynamo's profiler.

    Raises:
        InputError: there are none.
    """
    names = (
        "selected_prefill_interpolation/raw_data.npz",
        "selected_decode_interpolation/raw_data.npz",
        "prefill_raw_data.json",
        "decode_raw_data.json",
    )
    found = [directory / name for name in names if (directory / name).is_file()]
    if not found:
        raise InputError(str(directory), "holds no results of Dynamo's profiler", hint=f"expected {names[0]}")
    return found


def _dynamo_prefill(path: Path, arrays: Mapping[str, Floats], tp: int, unit_s: float) -> Iterator[Row]:
    lengths, times = arrays["prefill_isl"], arrays["prefill_ttft"]
    _check_lengths(path, arrays, _PREFILL_KEYS)
    for length, time in _unique(path, zip(lengths.tolist(), times.tolist(), strict=True)):
        _check(path, "prefill_isl", length, at_least=1)
        _check(path, "prefill_ttft", time, above=0)
        yield Row(Point(Phase.PREFILL.value, tp, 1, round(length)), time * unit_s)


def _dynamo_decode(path: Path, arrays: Mapping[str, Floats], tp: int, unit_s: float) -> Iterator[Row]:
    _check_lengths(path, arrays, _DECODE_KEYS[:3])
    most = arrays["max_kv_tokens"]
    if len(most) != 1:
        raise InputError(str(path), "must be one number", name="max_kv_tokens", value=len(most))
    capacity = _check(path, "max_kv_tokens", float(most[0]), at_least=1)
    seen: dict[Point, int] = {}
    for usage, context, time in zip(*(arrays[key].tolist() for key in _DECODE_KEYS[:3]), strict=True):
        _check(path, "x_kv_usage", usage, above=0)
        if usage > 1:
            raise InputError(str(path), "must be <= 1, a share", name="x_kv_usage", value=usage)
        _check(path, "y_context_length", context, at_least=1)
        _check(path, "z_itl", time, above=0)
        batch = max(round(usage * capacity / context), 1)
        # What was attended to is what the cache held.
        point = Point(Phase.DECODE.value, tp, batch, context_tokens=round(usage * capacity / batch, 1))
        seen[point] = seen.get(point, -1) + 1
        yield Row(point, time * unit_s, seen[point])


def _unique(path: Path, pairs: Iterator[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    seen: set[float] = set()
    for length, time in pairs:
        if length in seen:
            raise InputError(str(path), "stands twice", name="prefill_isl", value=length)
        seen.add(length)
        yield length, time


def _arrays(path: Path) -> dict[str, Floats]:
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise InputError(str(path), "is too large for a file of Dynamo's profiler")
        if path.suffix == ".json":
            loaded = _json(path)
            names = (*_PREFILL_KEYS, *_DECODE_KEYS)
            return {name: _numbers(path, name, loaded[name]) for name in names if name in loaded}
        with np.load(path, allow_pickle=False) as file:
            return {name: _numbers(path, name, file[name]) for name in file.files}
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror or error}") from None
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(str(path), f"is no .npz file of plain numbers: {error}") from None


def _numbers(path: Path, name: str, value: object) -> Floats:
    try:
        return np.atleast_1d(np.asarray(value, dtype=np.float64)).ravel()
    except (TypeError, ValueError):
        raise InputError(str(path), "must be numbers", name=name) from None


def _check_lengths(path: Path, arrays: Mapping[str, Floats], names: Sequence[str]) -> None:
    lengths = {name: len(arrays[name]) for name in names}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        shown = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise InputError(str(path), f"holds arrays of different lengths or none: {shown}", hint="is it complete?")


def _check(path: Path, name: str, value: float, *, at_least: float | None = None, above: float | None = None) -> float:
    if not math.isfinite(value):
        raise InputError(str(path), "must be a finite number", name=name, value=value)
    if at_least is not None and value < at_least:
        raise InputError(str(path), f"must be >= {at_least:g}", name=name, value=value)
    if above is not None and value <= above:
        raise InputError(str(path), f"must be > {above:g}", name=name, value=value)
    return value


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One run of `vllm bench`, whose JSON does not say what was run.

    Args:
        requests: of the one batch (latency) or in all (throughput).
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    path: Path

    @classmethod
    def parse(cls, text: str, option: str = "--vllm-latency") -> BenchRun:
        """Return the run written as `8x32+128=latency.json`: requests, prompt and output tokens, file.

        >>> BenchRun.parse("8x32+128=a.json")
        BenchRun(requests=8, prompt_tokens=32, output_tokens=128, path=PosixPath('a.json'))

        Raises:
            InputError: the text is not of this form.
        """
        match = _RUN.fullmatch(text)
        if match is None:
            hint = "write REQUESTSxPROMPT+OUTPUT=FILE, as in 8x32+128=latency.json"
            raise InputError(option, "is no run", value=text, hint=hint)
        return cls(int(match[1]), int(match[2]), int(match[3]), Path(match[4]))


def read_vllm_latency(runs: Sequence[BenchRun], *, tp: int) -> list[Row]:
    """Return the rows in the JSON files of `vllm bench latency --output-json`.

    A run with one output token is a prefill step. Others are a prefill step and decode steps; the mean decode step is
    their difference to the run with one output token (or the shortest output) of the same batch and prompts.

    Raises:
        InputError: a file is not of this form, or a run has no shorter one to subtract.
    """
    groups: dict[tuple[int, int], dict[int, tuple[BenchRun, float]]] = {}
    for run in runs:
        group = groups.setdefault((run.requests, run.prompt_tokens), {})
        if run.output_tokens in group:
            rule = f"is the second run of {run.requests} x {run.prompt_tokens} + {run.output_tokens} tokens"
            raise InputError(str(run.path), rule, hint="keep one")
        group[run.output_tokens] = run, _median_latency_s(run.path)
    rows = []
    for (batch, prompt), group in groups.items():
        outputs = sorted(group)
        shortest, base_s = outputs[0], group[outputs[0]][1]
        if shortest == 1:
            rows.append(Row(Point(Phase.PREFILL.value, tp, batch, prompt), base_s))
        elif len(outputs) == 1:
            rule = f"has no run of {batch} x {prompt} tokens with a shorter output beside it"
            raise InputError(str(group[shortest][0].path), rule, hint="time one with --output-len 1")
        for output in outputs[1:]:
            run, latency_s = group[output]
            step_s = (latency_s - base_s) / (output - shortest)
            if step_s <= 0:
                rule = f"takes no longer than {group[shortest][0].path}, whose output is shorter"
                raise InputError(str(run.path), rule, hint="were the runs swapped?")
            context = prompt + (shortest + output) / 2
            rows.append(Row(Point(Phase.DECODE.value, tp, batch, context_tokens=context), step_s))
    return rows


def read_vllm_throughput(runs: Sequence[BenchRun], *, tp: int, step_tokens: int) -> list[Row]:
    """Return the rows in the JSON files of `vllm bench throughput --output-json`, with one output token each.

    All requests are there at once, so every step but the last is full: a step of `step_tokens` takes its share of the
    whole time. Runs with longer outputs mix steps of all kinds and are refused.

    Args:
        step_tokens: the engine's `--max-num-batched-tokens`.

    Raises:
        InputError: a file is not of this form, or its run says nothing about a step.
    """
    rows = []
    for run in runs:
        data = _json(run.path)
        elapsed_s = _json_number(run.path, data, "elapsed_time")
        requests = _json_number(run.path, data, "num_requests")
        if requests != run.requests:
            rule = f"is not the {run.requests} requests of --run"
            raise InputError(str(run.path), rule, name="num_requests", value=requests)
        if run.output_tokens != 1:
            rule = "mixes steps of all kinds, of which only their sum is known"
            raise InputError(
                str(run.path), rule, name="output_tokens", value=run.output_tokens, hint="use --output-len 1"
            )
        whole = step_tokens // run.prompt_tokens
        total = run.requests * run.prompt_tokens
        if whole < 1 or total < 4 * whole * run.prompt_tokens:
            rule = f"is too little for steps of {step_tokens} tokens"
            raise InputError(
                str(run.path), rule, name="prompt tokens", value=total, hint="time four full steps or more"
            )
        point = Point(Phase.PREFILL.value, tp, whole, run.prompt_tokens)
        rows.append(Row(point, elapsed_s * whole * run.prompt_tokens / total))
    return rows


def _median_latency_s(path: Path) -> float:
    data = _json(path)
    if "latencies" not in data:
        return _json_number(path, data, "avg_latency")
    latencies = _numbers(path, "latencies", data["latencies"])
    if not len(latencies):
        raise InputError(str(path), "is empty", name="latencies")
    for value in latencies.tolist():
        _check(path, "latencies", value, above=0)
    return float(np.median(latencies))


def _json(path: Path) -> dict[str, object]:
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise InputError(str(path), "is not JSON") from None
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror}") from None
    if not isinstance(data, dict):
        raise InputError(str(path), "must be a JSON object")
    return data


def _json_number(path: Path, data: Mapping[str, object], name: str) -> float:
    value = data.get(name)
    if value is None:
        raise InputError(str(path), "is missing", name=name, hint="is it the file of --output-json?")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(str(path), "must be a number", name=name, value=value)
    return _check(path, name, float(value), above=0)
