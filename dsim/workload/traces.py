"""Reads traces and length tables: our CSV and JSONL, Azure's CSV, Mooncake's JSONL."""

from __future__ import annotations

import datetime
import itertools
import re
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from dsim.errors import InputError
from dsim.trace import Trace
from dsim.workload.arrivals import Replayed
from dsim.workload.lengths import Empirical
from dsim.workload.records import Reader, Record

MOONCAKE_BLOCK: Final = 512
"""Prompt tokens that one of Mooncake's hash_ids stands for."""

_TIMESTAMP: Final = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def read_trace(path: str | Path, *, context_tokens: int | None = None, prefix_hits: bool = True) -> Trace:
    """Return the requests of a trace file.

    The format follows from the columns (extra ones are ignored): CSV or JSONL with `arrival_s`, `prompt_tokens`,
    `output_tokens` and perhaps `cached_prompt_tokens`; Azure's CSV with `TIMESTAMP`, `ContextTokens` and
    `GeneratedTokens`, whose first request arrives at 0; Mooncake's JSONL with `timestamp` (ms), `input_length`,
    `output_length` and `hash_ids`.

    Args:
        context_tokens: prompt + output tokens at most, if given.
        prefix_hits: for Mooncake's traces, count the prompt's leading blocks that an earlier request had too as
            cached: what a prefix cache without end would hit.

    Raises:
        InputError: if the file cannot be read or a row breaks a rule, with its line.
    """
    rows = _read(path, prefix_hits=prefix_hits, context_tokens=context_tokens, need_arrivals=True)
    return Trace(
        np.array(rows.arrival_s, dtype=np.float64),
        np.array(rows.prompt, dtype=np.int64),
        np.array(rows.output, dtype=np.int64),
        np.array(rows.cached, dtype=np.int64),
    )


def read_lengths(path: str | Path, *, prefix_hits: bool = True) -> Empirical:
    """Return the lengths in a file of any format that `read_trace` reads; the arrival column may be missing.

    Raises:
        InputError: as `read_trace` does.
    """
    rows = _read(path, prefix_hits=prefix_hits, context_tokens=None, need_arrivals=False)
    return Empirical(
        prompt_tokens=np.array(rows.prompt, dtype=np.int64),
        output_tokens=np.array(rows.output, dtype=np.int64),
        cached_prompt_tokens=np.array(rows.cached, dtype=np.int64),
        source=rows.path,
        lines=np.array(rows.lines, dtype=np.int64),
    )


def rescale(trace: Trace, *, rate_per_s: float) -> Trace:
    """Return the trace with its times, counted from the first arrival, stretched to a mean rate.

    Raises:
        InputError: if the trace has no rate (fewer than 2 different times), or the rate is out of range.
    """
    scaled = Replayed(trace.arrival_s - trace.arrival_s[:1]).times(np.random.default_rng(0), rate_per_s=rate_per_s)
    chunks: list[np.ndarray] = []
    while sum(map(len, chunks)) < len(trace):
        chunks.append(next(scaled))
    arrival_s = np.concatenate(chunks)[: len(trace)]
    return Trace(arrival_s, trace.prompt_tokens, trace.output_tokens, trace.cached_prompt_tokens)


class _Rows(Reader):
    """The rows read so far, and the place in the file for messages."""

    def __init__(self, path: str, context_tokens: int | None) -> None:
        super().__init__(path)
        self.context_tokens = context_tokens
        self.arrival_s: list[float] = []
        self.prompt: list[int] = []
        self.output: list[int] = []
        self.cached: list[int] = []
        self.lines: list[int] = []

    def add(self, arrival_s: float, prompt: int, output: int, cached: int = 0) -> None:
        if cached >= prompt:
            self.fail(
                f"must be below prompt_tokens={prompt}",
                name="cached_prompt_tokens",
                value=cached,
                hint="at least one prompt token is computed",
            )
        if self.context_tokens is not None and prompt + output > self.context_tokens:
            self.fail(
                f"must be at most the model's context of {self.context_tokens}",
                name="prompt + output tokens",
                value=prompt + output,
                hint="drop this row, or take a model with a longer context",
            )
        self.arrival_s.append(arrival_s)
        self.prompt.append(prompt)
        self.output.append(output)
        self.cached.append(cached)
        self.lines.append(self.line)

    def check_order(self, name: str) -> None:
        """Check that arrivals do not decrease."""
        for line, (earlier, later) in zip(self.lines[1:], itertools.pairwise(self.arrival_s), strict=True):
            if later < earlier:
                self.line = line
                self.fail("must not be earlier than the row before", name=name, hint="sort the rows by it")


def _read(path: str | Path, *, prefix_hits: bool, context_tokens: int | None, need_arrivals: bool) -> _Rows:
    rows = _Rows(str(path), context_tokens)
    records = rows.records(rows.text())
    first = next(records, None)
    if first is None:
        raise InputError(rows.path, "has no rows", hint="one request a line")
    layout: _Layout
    if {"ContextTokens", "GeneratedTokens"} <= first.keys():
        layout = _Azure()
    elif {"input_length", "output_length"} <= first.keys():
        layout = _Mooncake(prefix_hits=prefix_hits)
    else:
        layout = _Own()
    for record in itertools.chain([first], records):
        layout.add(rows, record, need_arrivals=need_arrivals)
    if need_arrivals:
        rows.check_order(layout.arrival)
    return rows


class _Layout(Protocol):
    """What the columns of a format mean."""

    arrival: str

    def add(self, rows: _Rows, record: Record, *, need_arrivals: bool) -> None:
        """Add one record to the rows."""
        ...


class _Own:
    arrival = "arrival_s"

    def add(self, rows: _Rows, record: Record, *, need_arrivals: bool) -> None:
        rows.add(
            rows.seconds(self.arrival, rows.value(record, self.arrival)) if need_arrivals else 0.0,
            rows.tokens("prompt_tokens", rows.value(record, "prompt_tokens")),
            rows.tokens("output_tokens", rows.value(record, "output_tokens")),
            rows.tokens("cached_prompt_tokens", record.get("cached_prompt_tokens", 0), least=0),
        )


class _Azure:
    arrival = "TIMESTAMP"

    def __init__(self) -> None:
        self.first_ns: int | None = None

    def add(self, rows: _Rows, record: Record, *, need_arrivals: bool) -> None:
        arrival_s = 0.0
        if need_arrivals:
            time_ns = self._nanoseconds(rows, rows.value(record, self.arrival))
            self.first_ns = time_ns if self.first_ns is None else self.first_ns
            arrival_s = (time_ns - self.first_ns) / 1e9
        rows.add(
            arrival_s,
            rows.tokens("ContextTokens", rows.value(record, "ContextTokens")),
            rows.tokens("GeneratedTokens", rows.value(record, "GeneratedTokens")),
        )

    def _nanoseconds(self, rows: _Rows, value: object) -> int:
        """Return the nanoseconds since 1970 of a timestamp, whose 7 fractional digits `datetime` would cut to 6."""
        match = _TIMESTAMP.fullmatch(value.strip()) if isinstance(value, str) else None
        hint = "as in 2023-11-16 18:15:46.6805900"
        if match is None:
            rows.fail("must be a date and time", name=self.arrival, value=value, hint=hint)
        seconds, fraction, zone = match.groups()
        try:
            moment = datetime.datetime.fromisoformat(seconds + (zone or "Z"))
        except ValueError:
            rows.fail("must be a date and time", name=self.arrival, value=value, hint=hint)
        since = moment - _EPOCH
        return (since.days * 86_400 + since.seconds) * 10**9 + int((fraction or "0").ljust(9, "0"))


class _Mooncake:
    arrival = "timestamp"

    def __init__(self, *, prefix_hits: bool) -> None:
        self.prefix_hits = prefix_hits
        self.seen: set[int] = set()

    def add(self, rows: _Rows, record: Record, *, need_arrivals: bool) -> None:
        prompt = rows.tokens("input_length", rows.value(record, "input_length"))
        rows.add(
            rows.seconds(self.arrival, rows.value(record, self.arrival), unit_s=1e-3) if need_arrivals else 0.0,
            prompt,
            rows.tokens("output_length", rows.value(record, "output_length")),
            # The last prompt token is computed even if its block is cached: it yields the first output token.
            min(MOONCAKE_BLOCK * self._hits(rows, record), prompt - 1) if self.prefix_hits else 0,
        )

    def _hits(self, rows: _Rows, record: Record) -> int:
        blocks = record.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
            rows.fail("must be a list of whole numbers", name="hash_ids", value=blocks)
        hits = next((i for i, block in enumerate(blocks) if block not in self.seen), len(blocks))
        self.seen.update(blocks)
        return hits
