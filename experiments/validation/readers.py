"""Reads measured runs: a CSV or JSONL of requests, the result of `vllm bench serve`, or rows of statistics."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from dsim.errors import InputError, nearest
from dsim.workload.records import Reader, Record
from experiments.validation.inputs import parse_value
from experiments.validation.measured import (
    ATTAINMENTS,
    METRICS,
    RATES,
    STATISTICS,
    Integers,
    Kind,
    Measured,
    Requests,
    Times,
    TpotDefinition,
    Value,
)

#: Seconds of the units that a column may be in.
UNITS: Final[Mapping[str, float]] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
#: No latency is longer: larger numbers are in another unit.
_MAX_LATENCY_S: Final = 1e5
#: Arrivals beyond it are counted from the first one: dates, or a clock that did not start with the run.
_SHIFT_S: Final = 1e6
_TOKEN_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "prompt_tokens": ("prompt_tokens", "input_tokens", "input_len", "prompt_len", "isl", "ContextTokens"),
    "output_tokens": ("output_tokens", "output_len", "completion_tokens", "osl", "GeneratedTokens"),
    "cached_prompt_tokens": ("cached_prompt_tokens",),
}
_TIME_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "arrival_s": ("arrival", "arrival_time", "start_time", "send_time"),
    "ttft_s": ("ttft", "time_to_first_token"),
    "tpot_s": ("tpot", "time_per_output_token"),
    "e2e_s": ("e2e", "e2el", "e2e_latency", "request_latency"),
    "first_token_s": ("first_token", "first_token_time"),
    "last_token_s": ("last_token", "last_token_time", "end_time"),
}
#: Columns of a file of requests.
COLUMNS: Final = (*_TOKEN_NAMES, *_TIME_NAMES)
_INSTANTS: Final = ("arrival_s", "first_token_s", "last_token_s")

_STATISTIC_WORDS: Final = {"mean": "mean", "avg": "mean", "median": "p50", **{name: name for name in STATISTICS}}
_METRIC_WORDS: Final = {
    "ttft": "ttft_s",
    "tpot": "tpot_s",
    "itl": "itl_s",
    "e2e": "e2e_s",
    "e2el": "e2e_s",
    "e2e_latency": "e2e_s",
}
_WORD = "|".join(sorted(_STATISTIC_WORDS, key=len, reverse=True))
_METRIC = "|".join(sorted(_METRIC_WORDS, key=len, reverse=True))
_STATISTIC: Final = (
    re.compile(rf"(?P<word>{_WORD})_(?P<metric>{_METRIC})_(?P<unit>s|ms)"),
    re.compile(rf"(?P<metric>{_METRIC})_(?P<word>{_WORD})_(?P<unit>s|ms)"),
    re.compile(rf"(?P<metric>{_METRIC})_(?P<unit>s|ms)[._](?P<word>{_WORD})"),
)
_RATE_NAMES: Final[Mapping[str, str]] = {
    "throughput_per_s": "throughput_per_s",
    "request_throughput": "throughput_per_s",
    "tput_req_s": "throughput_per_s",
    "output_tokens_per_s": "output_tokens_per_s",
    "output_throughput": "output_tokens_per_s",
    "output_tok_s": "output_tokens_per_s",
    "total_tokens_per_s": "total_tokens_per_s",
    "total_token_throughput": "total_tokens_per_s",
    "total_tok_s": "total_tokens_per_s",
    "attainment": "attainment.both",
    **{name: name for name in ATTAINMENTS},
}
#: Names of inputs in rows of statistics and in results of benchmark clients; the first that is there counts.
_INPUT_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "rate_per_s": ("rate_per_s", "request_rate", "qps"),
    "users": ("users", "max_concurrency", "concurrency"),
    "burstiness": ("burstiness",),
    "num_requests": ("num_requests", "num_prompts", "completed"),
    "prompt_tokens": ("prompt_tokens", "input_len", "random_input_len", "isl"),
    "output_tokens": ("output_tokens", "output_len", "random_output_len", "osl"),
    "turnaround_s": ("turnaround_s",),
    "length_range": ("length_range",),
    "policy": ("policy",),
    "token_budget": ("token_budget", "max_num_batched_tokens"),
    "max_seqs": ("max_seqs", "max_num_seqs"),
    "kv_blocks": ("kv_blocks", "num_gpu_blocks"),
}
_RANDOM_LENGTHS: Final = ("random_input_len", "random_output_len", "random_range_ratio")
_VLLM_LISTS: Final = ("input_lens", "output_lens", "ttfts", "itls")


@dataclass(frozen=True, slots=True)
class Mapped:
    """A column of another name: which one, and the unit of its times."""

    column: str
    unit: str = "s"


Columns = Mapping[str, Mapped]


def parse_column(text: str, option: str = "--column") -> tuple[str, Mapped]:
    """Return the name that a column stands for, and the column.

    >>> parse_column("ttft_s=first token:ms")
    ('ttft_s', Mapped(column='first token', unit='ms'))

    Raises:
        InputError: it is no assignment, or of no known name or unit.
    """
    name, equals, column = text.partition("=")
    name, column = name.strip(), column.strip()
    if not equals or not column:
        raise InputError(option, "is no assignment", value=text, hint="write NAME=COLUMN, as in ttft_s=first:ms")
    known = (*COLUMNS, *(f"{metric}.{word}" for metric in METRICS for word in STATISTICS), *RATES, *ATTAINMENTS)
    if name not in (*known, *_INPUT_NAMES):
        raise InputError(option, "is not a known name", value=name, hint=nearest(name, (*known, *_INPUT_NAMES)))
    before, colon, unit = column.rpartition(":")
    if colon and unit in UNITS:
        if not name.partition(".")[0].endswith("_s") or name in (*RATES, "rate_per_s"):
            raise InputError(option, "is not a time and takes no unit", name=name, value=text, hint="leave :UNIT out")
        return name, Mapped(before, unit)
    if colon and before and " " not in unit and len(unit) < 4:
        raise InputError(option, "has an unknown unit", name=name, value=unit, hint=nearest(unit, UNITS))
    return name, Mapped(column)


def read_run(
    path: str | Path,
    *,
    kind: Kind | None = None,
    columns: Columns | None = None,
    row: int | None = None,
    tpot_definition: TpotDefinition = TpotDefinition.VLLM,
    context_tokens: int | None = None,
) -> Measured:
    """Return the measured run in a file.

    Args:
        kind: what the file holds; None: what its keys say.
        columns: columns of other names, by what they stand for.
        row: which row of statistics, counted from 1, where the file has several.
        tpot_definition: what the file calls time per output token.
        context_tokens: most tokens of a request, if given.

    Raises:
        InputError: the file cannot be read, or says something impossible, with its line.
    """
    runs = read_runs(
        path, kind=kind, columns=columns, tpot_definition=tpot_definition, context_tokens=context_tokens, row=row
    )
    if len(runs) > 1:
        hint = f"add --row N, from 1 to {len(runs)}"
        raise InputError(str(path), f"has {len(runs)} rows of statistics", hint=hint)
    return runs[0]


def read_runs(
    path: str | Path,
    *,
    kind: Kind | None = None,
    columns: Columns | None = None,
    row: int | None = None,
    tpot_definition: TpotDefinition = TpotDefinition.VLLM,
    context_tokens: int | None = None,
) -> list[Measured]:
    """Return every measured run in a file: one for each row of statistics; see `read_run`."""
    reader = Reader(str(path))
    columns = {} if columns is None else columns
    lines, records = _records(reader)
    kind = _kind(records[0], columns) if kind is None else kind
    if kind is Kind.REQUESTS:
        if row is not None:
            raise InputError("--row", "chooses one of several rows of statistics", value=row, hint="leave it out")
        return [_Requests(reader, columns, tpot_definition, context_tokens).read(lines, records)]
    if row is not None and not 1 <= row <= len(records):
        raise InputError("--row", f"must be between 1 and {len(records)}", value=row)
    chosen = range(len(records)) if row is None else range(row - 1, row)
    found = []
    for index in chosen:
        reader.line = lines[index]
        record = records[index]
        if kind is Kind.VLLM and "ttfts" in record:
            found.append(_Vllm(reader, record, context_tokens).read())
        else:
            named = f"{path}:{lines[index]}" if len(records) > 1 else str(path)
            found.append(_aggregate(reader, record, columns, kind=kind, definition=tpot_definition, source=named))
    return found


def aggregate(
    record: Mapping[str, object],
    *,
    source: str = "row",
    columns: Columns | None = None,
    tpot_definition: TpotDefinition = TpotDefinition.VLLM,
) -> Measured:
    """Return the measured run that one row of statistics describes.

    Raises:
        InputError: it has no statistics, or a value that cannot be.
    """
    reader = Reader(source)
    columns = {} if columns is None else columns
    return _aggregate(reader, dict(record), columns, kind=Kind.AGGREGATE, definition=tpot_definition, source=source)


def _records(reader: Reader) -> tuple[list[int], list[Record]]:
    """Return the records of the file and their lines; a JSON file may be one object over several lines."""
    text = reader.text()
    lines: list[int] = []
    records: list[Record] = []
    if text.lstrip()[:1] == "{":
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            return [1], [whole]
    elif text.lstrip()[:1] == "[":
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError) as problem:
            reason = (
                f"{problem.msg} in line {problem.lineno}" if isinstance(problem, json.JSONDecodeError) else "too deep"
            )
            raise InputError(reader.path, f"is not JSON ({reason})", hint="is the file complete?") from None
        if not isinstance(whole, list) or not whole or not all(isinstance(item, dict) for item in whole):
            raise InputError(reader.path, "is not a list of objects", hint="one object for each request or run")
        return [1] * len(whole), whole
    for record in reader.records(text):
        lines.append(reader.line)
        records.append(record)
    if not records:
        raise InputError(reader.path, "has no rows", hint="one request, or one run, a line")
    return lines, records


def _kind(record: Record, columns: Columns) -> Kind:
    """Return what the keys of the first record say that the file holds."""
    names = set(record)
    if "ttfts" in names or {"duration", "completed"} <= names:
        return Kind.VLLM
    flat = dict(_flat(record))
    if any(_statistic(name) for name in flat) or any("." in name or name in RATES for name in columns):
        return Kind.AGGREGATE
    return Kind.REQUESTS


def _flat(record: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of nested objects by dotted name."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _statistic(name: str) -> tuple[str, float] | None:
    """Return the dotted name of a statistic and the seconds' divisor; None for another column."""
    for pattern in _STATISTIC:
        match = pattern.fullmatch(name.strip().lower())
        if match is not None:
            return f"{_METRIC_WORDS[match['metric']]}.{_STATISTIC_WORDS[match['word']]}", UNITS[match["unit"]]
    return None


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in {"", "null", "none", "n/a", "-"})


def _finite(reader: Reader, name: str, value: object) -> float:
    number = reader.number(name, value)
    if not abs(number) <= 1e300:
        reader.fail("must be a finite number", name=name, value=value)
    return float(number)


def _latency(reader: Reader, name: str, value: object, divisor: float, *, zero: bool = False) -> float:
    """Return seconds of a latency."""
    seconds = _finite(reader, name, value) / divisor
    if seconds < 0 or (seconds == 0 and not zero):
        hint = "drop requests that failed" if seconds == 0 else "check which columns are which"
        reader.fail("must be > 0", name=name, value=value, hint=hint)
    if seconds > _MAX_LATENCY_S:
        reader.fail(f"must be at most {_MAX_LATENCY_S:g} s", name=name, value=value, hint="check its unit")
    return seconds


@dataclass(slots=True)
class _Requests:
    """Reads a file of requests."""

    reader: Reader
    columns: Columns
    definition: TpotDefinition
    context_tokens: int | None
    rows: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in COLUMNS})

    def read(self, lines: Sequence[int], records: Sequence[Record]) -> Measured:
        where = self._places(records[0])
        latencies = {"ttft_s", "tpot_s", "e2e_s", "first_token_s", "last_token_s"} & set(where)
        if not latencies:
            hint = "give one of ttft_s, tpot_s, e2e_s, or first_token_s with arrival_s; or --column ttft_s=NAME:ms"
            raise InputError(self.reader.path, "has no latencies", hint=hint)
        for line, record in zip(lines, records, strict=True):
            self.reader.line = line
            self._add(record, where)
        return self._measured(lines, where)

    def _places(self, first: Record) -> dict[str, tuple[str, float]]:
        """Return the column of each quantity and the divisor that makes it seconds."""
        self.reader.line = 1
        found: dict[str, tuple[str, float]] = {}
        for name, mapped in self.columns.items():
            if name not in COLUMNS:
                raise InputError("--column", "is not of a file of requests", name=name, hint=nearest(name, COLUMNS))
            if mapped.column not in first:
                hint = nearest(mapped.column, list(first)[:12])
                raise InputError("--column", f"is not in {self.reader.path}", name=name, value=mapped.column, hint=hint)
            found[name] = (mapped.column, UNITS[mapped.unit] if name in _TIME_NAMES else 1.0)
        taken = {column for column, _ in found.values()}
        for name, words in _TOKEN_NAMES.items():
            column = next((word for word in words if word in first and word not in taken), None)
            if name not in found and column is not None:
                found[name] = (column, 1.0)
        for name, words in _TIME_NAMES.items():
            choices = [(f"{word}_{unit}", scale) for word in words for unit, scale in UNITS.items()]
            choice = next(
                ((column, scale) for column, scale in choices if column in first and column not in taken), None
            )
            if name not in found and choice is not None:
                found[name] = choice
            bare = next((word for word in words if word in first and word not in taken), None)
            if name not in found and bare is not None:
                hint = f"add --column {name}={bare}:ms, or :s"
                raise InputError(self.reader.path, "has no unit in its name", name=f"column {bare}", hint=hint)
        for name in ("prompt_tokens", "output_tokens"):
            if name not in found:
                hint = f"add --column {name}=NAME; found {', '.join(list(first)[:8])}"
                raise InputError(self.reader.path, "is missing", name=name, hint=hint)
        return found

    def _add(self, record: Record, where: Mapping[str, tuple[str, float]]) -> None:
        reader, values = self.reader, dict.fromkeys(COLUMNS, math.nan)
        for name in ("prompt_tokens", "output_tokens", "cached_prompt_tokens"):
            if name in where:
                column = where[name][0]
                least = 0 if name.startswith("cached") else 1
                values[name] = reader.tokens(column, reader.value(record, column), least)
        cached = values["cached_prompt_tokens"] = (
            0.0 if "cached_prompt_tokens" not in where else values["cached_prompt_tokens"]
        )
        if cached >= values["prompt_tokens"]:
            reader.fail(
                f"must be below the {values['prompt_tokens']:g} prompt tokens",
                name=where["cached_prompt_tokens"][0],
                value=int(cached),
            )
        total = int(values["prompt_tokens"] + values["output_tokens"])
        if self.context_tokens is not None and total > self.context_tokens:
            rule = f"must be at most the model's context of {self.context_tokens}"
            reader.fail(rule, name="prompt + output tokens", value=total, hint="drop this row")
        for name in _TIME_NAMES:
            if name not in where:
                continue
            column, divisor = where[name]
            value = reader.value(record, column)
            if name == "arrival_s" or not _is_empty(value):
                values[name] = self._time(name, column, value, divisor)
        self._check(values, where)
        for name, value in values.items():
            self.rows[name].append(value)

    def _time(self, name: str, column: str, value: object, divisor: float) -> float:
        if name in _INSTANTS:
            seconds = _finite(self.reader, column, value) / divisor
            if seconds < 0:
                self.reader.fail("must be >= 0", name=column, value=value)
            return seconds
        return _latency(self.reader, column, value, divisor)

    def _check(self, values: Mapping[str, float], where: Mapping[str, tuple[str, float]]) -> None:
        """Refuse instants and latencies in an order that cannot be; NaN compares as neither."""
        for earlier, later in (
            ("arrival_s", "first_token_s"),
            ("first_token_s", "last_token_s"),
            ("ttft_s", "e2e_s"),
            ("arrival_s", "last_token_s"),
        ):
            if values[later] < values[earlier] - 1e-6:
                rule = (
                    f"must not be before {where[earlier][0]}"
                    if later in _INSTANTS
                    else f"must be at least {where[earlier][0]}"
                )
                self.reader.fail(rule, name=where[later][0], value=values[later], hint="check the units of both")

    def _measured(self, lines: Sequence[int], where: Mapping[str, tuple[str, float]]) -> Measured:
        columns = {name: np.array(values, dtype=np.float64) for name, values in self.rows.items()}
        remarks = []
        arrival = columns["arrival_s"]
        order = np.argsort(arrival, kind="stable")
        if "arrival_s" in where and arrival.min() > _SHIFT_S:
            start = arrival.min()
            remarks.append(f"times are counted from the first arrival, {start:.3f} s")
            for name in _INSTANTS:
                columns[name] = columns[name] - start
        columns = {name: values[order] for name, values in columns.items()}
        output = columns["output_tokens"].astype(np.int64)
        ttft, e2e = columns["ttft_s"], columns["e2e_s"]
        ttft = np.where(np.isnan(ttft), columns["first_token_s"] - columns["arrival_s"], ttft)
        e2e = np.where(np.isnan(e2e), columns["last_token_s"] - columns["arrival_s"], e2e)
        tpot = self._tpot(columns, ttft, e2e, output)
        e2e = np.where(np.isnan(e2e), ttft + np.where(output > 1, tpot, 0.0) * (output - 1), e2e)
        requests = Requests(
            prompt_tokens=columns["prompt_tokens"].astype(np.int64),
            output_tokens=output,
            cached_prompt_tokens=columns["cached_prompt_tokens"].astype(np.int64),
            ttft_s=ttft,
            tpot_s=tpot,
            e2e_s=e2e,
            arrival_s=columns["arrival_s"] if "arrival_s" in where else None,
        )
        if self.definition is not TpotDefinition.VLLM and "tpot_s" in where:
            remarks.append(f"TPOT of {self.definition.value}'s definition, converted to (E2E - TTFT) / (n - 1)")
        return Measured(self.reader.path, Kind.REQUESTS, requests.statistics(), {}, requests, remarks=tuple(remarks))

    def _tpot(self, columns: Mapping[str, Times], ttft: Times, e2e: Times, output: Integers) -> Times:
        """Return TPOT over n - 1: as the file says it, else from the first and the last token."""
        given, tokens = columns["tpot_s"], output.astype(np.float64)
        later = np.where(output > 1, tokens - 1, np.nan)
        if self.definition is TpotDefinition.SIMDISTSERVE:
            given = given * tokens / later
        elif self.definition is TpotDefinition.GUIDELLM:
            given = (given * tokens - ttft) / later
        derived = (columns["last_token_s"] - columns["first_token_s"]) / later
        derived = np.where(np.isnan(derived), (e2e - ttft) / later, derived)
        given = np.where(output > 1, given, np.nan)
        tpot: Times = np.where(np.isnan(given), derived, given)
        return tpot


@dataclass(slots=True)
class _Vllm:
    """Reads a result of `vllm bench serve --save-detailed`, or of SGLang's `bench_serving --output-details`."""

    reader: Reader
    record: Record
    context_tokens: int | None

    def read(self) -> Measured:
        lists = {name: self._list(name) for name in _VLLM_LISTS}
        count = len(lists["ttfts"])
        for name, values in lists.items():
            if len(values) != count:
                self.reader.fail(f"must have {count} items, as ttfts has", name=name, value=len(values))
        errors = self._list("errors") if self.record.get("errors") is not None else [""] * count
        starts = self._list("start_times") if self.record.get("start_times") is not None else None
        for name, items in (("errors", errors), ("start_times", starts)):
            if items is not None and len(items) != count:
                self.reader.fail(f"must have {count} items, as ttfts has", name=name, value=len(items))
        failed = [bool(errors[i]) or lists["output_lens"][i] in (0, None) for i in range(count)]
        kept = [i for i in range(count) if not failed[i]]
        if not kept:
            self.reader.fail("has no request that succeeded", name="output_lens")
        rows = [self._row(lists, i) for i in kept]
        arrival = (
            None if starts is None else np.array([_finite(self.reader, f"start_times[{i}]", starts[i]) for i in kept])
        )
        inputs, remarks = _vllm_inputs(self.reader, self.record)
        return self._measured(rows, arrival, inputs, [*remarks, *self._remarks(rows, sum(failed))])

    def _list(self, name: str) -> list[Any]:
        values = self.record.get(name)
        if not isinstance(values, list):
            self.reader.fail("must be a list", name=name, hint="was the result saved with --save-detailed?")
        return values

    def _row(self, lists: Mapping[str, list[Any]], i: int) -> tuple[int, int, float, list[float]]:
        reader = self.reader
        prompt = reader.tokens(f"input_lens[{i}]", lists["input_lens"][i])
        output = reader.tokens(f"output_lens[{i}]", lists["output_lens"][i])
        if self.context_tokens is not None and prompt + output > self.context_tokens:
            rule = f"must be at most the model's context of {self.context_tokens}"
            reader.fail(rule, name=f"input_lens[{i}] + output_lens[{i}]", value=prompt + output)
        gaps = lists["itls"][i]
        if not isinstance(gaps, list):
            reader.fail("must be a list of gaps", name=f"itls[{i}]", value=json.dumps(gaps))
        ttft = _latency(reader, f"ttfts[{i}]", lists["ttfts"][i], 1.0, zero=True)
        return (
            prompt,
            output,
            ttft,
            [_latency(reader, f"itls[{i}][{k}]", gap, 1.0, zero=True) for k, gap in enumerate(gaps)],
        )

    def _remarks(self, rows: Sequence[tuple[int, int, float, list[float]]], failed: int) -> list[str]:
        found = []
        if failed:
            found.append(f"{failed} requests failed and are neither replayed nor compared")
        bundled = sum(1 for _, output, _, gaps in rows if len(gaps) < output - 1)
        if bundled:
            found.append(
                f"{bundled} requests have fewer gaps than tokens: tokens came bundled, so ITL is that of bundles"
            )
        return found

    def _measured(
        self,
        rows: Sequence[tuple[int, int, float, list[float]]],
        arrival: np.ndarray[Any, np.dtype[np.float64]] | None,
        inputs: dict[str, Value],
        remarks: list[str],
    ) -> Measured:
        order = np.arange(len(rows)) if arrival is None else np.argsort(arrival, kind="stable")
        rows = [rows[i] for i in order]
        output = np.array([row[1] for row in rows], dtype=np.int64)
        ttft = np.array([row[2] for row in rows])
        decode = np.array([math.fsum(row[3]) for row in rows])
        if not ttft.any():
            self.reader.fail("are all 0", name="ttfts", hint="measure an endpoint that streams its tokens")
        gaps = np.concatenate([np.array(row[3], dtype=np.float64) for row in rows])
        requests = Requests(
            prompt_tokens=np.array([row[0] for row in rows], dtype=np.int64),
            output_tokens=output,
            cached_prompt_tokens=np.zeros(len(rows), dtype=np.int64),
            ttft_s=ttft,
            tpot_s=decode / np.where(output > 1, output - 1.0, math.nan),
            e2e_s=ttft + decode,
            arrival_s=None if arrival is None else arrival[order] - arrival.min(),
            gaps_s=gaps if len(gaps) else None,
        )
        statistics = requests.statistics()
        for name, rate in _statistics(self.reader, self.record, {})[0].items():
            if name in RATES and name not in statistics:
                statistics[name] = rate
        return Measured(self.reader.path, Kind.VLLM, statistics, inputs, requests, remarks=tuple(remarks))


def _aggregate(
    reader: Reader,
    record: Record,
    columns: Columns,
    *,
    kind: Kind,
    definition: TpotDefinition,
    source: str,
) -> Measured:
    """Return the run that one row of statistics describes."""
    flat = dict(_flat(record))
    statistics, used = _statistics(reader, flat, columns)
    if not statistics:
        hint = "as in mean_ttft_ms, tpot_p99_ms, throughput_per_s; or --column ttft_s.mean=NAME:ms"
        raise InputError(source, "has no statistics with known names", hint=hint)
    if kind is Kind.VLLM:
        inputs, remarks = _vllm_inputs(reader, record)
    else:
        inputs, remarks = _inputs(reader, flat, columns, used)
    if definition is not TpotDefinition.VLLM and any(name.startswith("tpot_s") for name in statistics):
        remarks.append(f"TPOT is {definition.value}'s, of measured and predicted runs alike")
    if kind is Kind.VLLM and "ttfts" not in record:
        remarks.append("saved without --save-detailed: lengths and arrivals of the requests are not known")
    return Measured(source, kind, statistics, inputs, None, definition, tuple(remarks))


def _statistics(reader: Reader, record: Mapping[str, object], columns: Columns) -> tuple[dict[str, float], set[str]]:
    """Return the statistics of a row by dotted name, and the columns that they are from."""
    named: dict[str, tuple[str, float]] = {}
    for name, mapped in columns.items():
        if mapped.column not in record:
            hint = nearest(mapped.column, list(record)[:12])
            raise InputError("--column", f"is not in {reader.path}", name=name, value=mapped.column, hint=hint)
        if name.partition(".")[0] in METRICS and "." in name:
            named[mapped.column] = (name, UNITS[mapped.unit])
        elif name in (*RATES, *ATTAINMENTS):
            named[mapped.column] = (name, 1.0)
    found: dict[str, float] = {}
    used = set(named)
    for column, value in record.items():
        statistic = named.get(column) or _statistic(column)
        rate = _RATE_NAMES.get(column)
        if statistic is None and rate is not None:
            statistic = (rate, 1.0)
        if statistic is None or _is_empty(value):
            continue
        name, divisor = statistic
        if name in found:
            reader.fail("is there twice", name=name, value=column, hint="keep one of the columns")
        used.add(column)
        if name in ATTAINMENTS:
            found[name] = _finite(reader, column, value)
            if not 0 <= found[name] <= 1:
                reader.fail("must be between 0 and 1", name=column, value=value, hint="give a share")
        elif name in RATES:
            found[name] = _finite(reader, column, value)
            if found[name] <= 0:
                reader.fail("must be > 0", name=column, value=value)
        else:
            found[name] = _latency(reader, column, value, divisor)
    for metric in METRICS:
        levels = [(word, found[f"{metric}.{word}"]) for word in STATISTICS[1:] if f"{metric}.{word}" in found]
        for (low, below), (high, above) in itertools.pairwise(levels):
            if above < below:
                reader.fail(f"must be at least {low}", name=f"{metric}.{high}", value=above, hint="check the columns")
    return found, used


def _inputs(
    reader: Reader, record: Mapping[str, object], columns: Columns, used: set[str]
) -> tuple[dict[str, Value], list[str]]:
    """Return what a row says of client and engine."""
    found: dict[str, Value] = {}
    for name, words in _INPUT_NAMES.items():
        mapped = columns.get(name)
        choices = words if mapped is None else (mapped.column,)
        column = next((word for word in choices if not _is_empty(record.get(word)) and word not in used), None)
        if column is not None:
            value = _input(reader, name, column, record[column], "s" if mapped is None else mapped.unit)
            if value is not None:
                found[name] = value
    ratio = record.get("random_range_ratio")
    if not _is_empty(ratio) and "length_range" not in found:
        low = _finite(reader, "random_range_ratio", ratio)
        if not 0 <= low <= 1:
            reader.fail("must be between 0 and 1", name="random_range_ratio", value=ratio)
        found["length_range"] = "exact" if low == 1 else f"{low:g}-1"
    if "rate_per_s" in found and "users" in found:
        found["concurrency_limit"] = found.pop("users")
    return found, []


def _input(reader: Reader, name: str, column: str, value: object, unit: str) -> Value:
    """Return the value of an input; None for a rate without limit."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        reader.fail("must be a number or a text", name=column, value=json.dumps(value))
    text = value.strip() if isinstance(value, str) else repr(value)
    if name == "rate_per_s" and text.lower() in {"inf", "infinity"}:
        return None
    if isinstance(value, float) and value.is_integer():
        text = str(int(value))
    elif re.fullmatch(r"\d+\.0+", text):
        text = text.partition(".")[0]
    if name == "turnaround_s" and unit != "s":
        text += unit
    try:
        return parse_value(name, text, f"{reader.path}:{reader.line}")
    except InputError as error:
        raise InputError(error.where, error.rule, name=column, value=error.value, hint=error.hint) from None


def _vllm_inputs(reader: Reader, record: Record) -> tuple[dict[str, Value], list[str]]:
    """Return what the result of a benchmark client says of itself.

    Source:
        vllm/benchmarks/serve.py of vLLM 0.9 to 0.13 and benchmarks/benchmark_serving.py of vLLM 0.6 to 0.10: all
        requests are sent by a semaphore of `max_concurrency`; gaps are gamma-distributed with shape `burstiness`.
        python/sglang/bench_serving.py of SGLang 0.4 and 0.5: the same, `concurrency` being the mean that was measured,
        and the options of random lengths are there whatever the data set was.
    """
    dataset = str(record.get("dataset_name") or "random")
    foreign = {"concurrency"} if dataset.startswith("random") else {"concurrency", *_RANDOM_LENGTHS}
    found, remarks = _inputs(reader, {key: value for key, value in record.items() if key not in foreign}, {}, set())
    if not dataset.startswith("random") and "ttfts" not in record:
        remarks.append(f"lengths are those of {dataset}: give them by --assume workload=LENGTHS, such as sharegpt")
    if record.get("ramp_up_strategy") is not None and record.get("start_times") is None:
        hint = "measure at one rate, or with a version that saves start_times"
        reader.fail(
            "cannot be replayed without start_times",
            name="ramp_up_strategy",
            value=record["ramp_up_strategy"],
            hint=hint,
        )
    users = found.get("users")
    if users is not None:
        found["loop"] = "closed"
        found["first_wave_counted"] = True
    elif record.get("start_times") is not None and "ttfts" in record:
        found["loop"] = "replay"
    else:
        found["loop"] = "open" if "rate_per_s" in found else "burst"
        if "rate_per_s" in found:
            remarks.append("when each request was sent was not saved: arrivals are drawn at the configured rate")
    failed = record.get("failed")
    if isinstance(failed, int) and failed:
        remarks.append(f"{failed} requests failed")
    if "ttfts" not in record and not _is_empty(record.get("completed")):
        completed = _input(reader, "num_requests", "completed", record["completed"], "s")
        assert isinstance(completed, int)
        found["num_requests"] = completed
        for name, key in (("prompt_tokens", "total_input_tokens"), ("output_tokens", "total_output_tokens")):
            if name not in found and not _is_empty(record.get(key)):
                mean = _finite(reader, key, record[key]) / completed
                if mean < 0.5:
                    reader.fail(f"must be at least completed={completed}", name=key, value=record[key])
                found[name], found["lengths_are"] = round(mean), "mean"
    return found, remarks
