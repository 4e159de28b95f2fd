"""The table latency model: whole steps as they were measured, linear in between and exact at every measured point."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InputError
from dsim.latency import Chunk, ValidRange


def interpolated_s(knots: Sequence[int], seconds: Sequence[float], amount: float) -> float:
    """Return seconds of an amount between knots: linear, of the first knot below it, continued beyond the last.

    >>> [interpolated_s((2, 4), (1.0, 3.0), amount) for amount in (1, 2, 3, 5)]
    [1.0, 1.0, 2.0, 4.0]
    """
    if amount <= knots[0] or len(knots) == 1:
        return seconds[0]
    i = min(bisect_right(knots, amount), len(knots) - 1)
    share = (amount - knots[i - 1]) / (knots[i] - knots[i - 1])
    # Written so that a knot's own time comes out to the last digit.
    return seconds[i - 1] + share * (seconds[i] - seconds[i - 1]) if share != 1 else seconds[i]


@dataclass(frozen=True, slots=True)
class PrefillTable:
    """Prefill steps of one prompt.

    Args:
        tokens: computed ones, rising.
        cached_tokens: those before them, rising from 0.
        step_s: seconds, one row for each number of cached tokens.
    """

    tokens: tuple[int, ...]
    step_s: tuple[tuple[float, ...], ...]
    cached_tokens: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        _check_knots("prefill table", "tokens", self.tokens)
        _check_knots("prefill table", "cached_tokens", self.cached_tokens, at_least=0)
        if self.cached_tokens[0] != 0:
            raise InputError("prefill table", "must begin with 0", name="cached_tokens", value=self.cached_tokens[0])
        _check_size("prefill table", "step_s", self.step_s, len(self.cached_tokens), "row for each of cached_tokens")
        for row in self.step_s:
            _check_size("prefill table", "step_s", row, len(self.tokens), "time for each of tokens")
            _check_times("prefill table", row)

    @property
    def longest_tokens(self) -> int:
        """The longest prompt within the table, cached tokens included."""
        return self.tokens[-1] + self.cached_tokens[-1]

    def prompt_s(self, tokens: int, cached: int) -> float:
        """Return seconds of one prompt's step.

        Without rows for cached tokens the step takes what the longer prompt takes longer than the cached one, and the
        shortest step beside: the difference of two squares, as attention does.
        """
        whole_s = interpolated_s(self.tokens, self.step_s[0], tokens)
        if not cached:
            return whole_s
        if len(self.cached_tokens) > 1:
            column = [interpolated_s(self.tokens, row, tokens) for row in self.step_s]
            return interpolated_s(self.cached_tokens, column, cached)
        row = self.step_s[0]
        longer_s = interpolated_s(self.tokens, row, tokens + cached) - interpolated_s(self.tokens, row, cached)
        return max(whole_s, row[0] + longer_s)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Decode steps of one batch size.

    Args:
        requests: of the batch.
        request_context_tokens: mean context of a request, rising.
        step_s: seconds at each of them.
    """

    requests: int
    request_context_tokens: tuple[int, ...]
    step_s: tuple[float, ...]

    def __post_init__(self) -> None:
        where = f"decode table, {self.requests} requests"
        _check_knots(where, "request_context_tokens", self.request_context_tokens)
        what = "time for each of request_context_tokens"
        _check_size(where, "step_s", self.step_s, len(self.request_context_tokens), what)
        _check_times(where, self.step_s)


@dataclass(frozen=True, slots=True)
class TableLatency:
    """Measured steps.

    A step smaller than all measured ones takes the time of the smallest; the simulator asks for none that is larger,
    unless extrapolation is allowed, and then the last two points are continued.

    Args:
        decode: rows in rising order of requests.
        valid_range: at most the table's own, unless its owner allows extrapolation.
    """

    prefill: PrefillTable
    decode: tuple[DecodeRow, ...]
    valid_range: ValidRange

    def __post_init__(self) -> None:
        _check_knots("decode table", "requests", [row.requests for row in self.decode])

    @staticmethod
    def range_of(prefill: PrefillTable, decode: Sequence[DecodeRow]) -> ValidRange:
        """Return where nothing is extrapolated.

        Rows that end early do so because memory ends: they limit the total context.
        """
        longest = max(row.request_context_tokens[-1] for row in decode)
        totals = [row.requests * row.request_context_tokens[-1] for row in decode]
        short = [total for row, total in zip(decode, totals, strict=True) if row.request_context_tokens[-1] < longest]
        return ValidRange(
            chunk_tokens=min(longest, prefill.longest_tokens),
            prefill_tokens=prefill.tokens[-1],
            decode_requests=decode[-1].requests,
            context_tokens=min(short, default=max(totals)),
        )

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a prefill step: of several prompts the shorter of two times that both are too long.

        All of them after each other; or as one prompt of all their tokens, whose attention has more pairs, with what
        their cached tokens cost.
        """
        alone_s = [self.prefill.prompt_s(t, s) for t, s in chunks]
        if len(chunks) == 1:
            return alone_s[0]
        table = self.prefill
        as_one_s = interpolated_s(table.tokens, table.step_s[0], sum(t for t, _ in chunks))
        for (t, _), step_s in zip(chunks, alone_s, strict=True):
            as_one_s += step_s - interpolated_s(table.tokens, table.step_s[0], t)
        return min(sum(alone_s), as_one_s)

    def decode_s(self, requests: int, context_tokens: int) -> float:
        """Seconds of a decode step."""
        return float(self.decode_run_s(requests, context_tokens, 1)[0])

    def mixed_s(self, chunks: Sequence[Chunk], requests: int, context_tokens: int) -> float:
        """Seconds of a mixed step: both parts less the smallest step, which they share, never less than either."""
        if not requests:
            return self.prefill_s(chunks)
        decode_s = self.decode_s(requests, context_tokens)
        if not chunks:
            return decode_s
        prefill_s = self.prefill_s(chunks)
        shared_s = min(self.prefill.step_s[0][0], self.decode[0].step_s[0])
        return max(prefill_s + decode_s - shared_s, prefill_s, decode_s)

    def decode_line(self, requests: int) -> tuple[float, float] | None:
        """None: a table bends at each of its points."""
        return None

    def decode_run_s(self, requests: int, context_tokens: int, steps: int) -> NDArray[np.float64]:
        """Seconds of each of `steps` consecutive decode steps, shape (steps,)."""
        contexts = context_tokens / requests + np.arange(steps, dtype=np.float64)
        rows = self.decode
        sizes = [row.requests for row in rows]
        if requests <= sizes[0] or len(rows) == 1:
            return _row_s(rows[0], contexts)
        i = min(bisect_right(sizes, requests), len(rows) - 1)
        below, above = rows[i - 1], rows[i]
        share = (requests - below.requests) / (above.requests - below.requests)
        if share in {0.0, 1.0}:
            return _row_s(above if share else below, contexts)
        low_s, high_s = _row_s(below, contexts), _row_s(above, contexts)
        seconds: NDArray[np.float64] = low_s + share * (high_s - low_s)
        return seconds


def _row_s(row: DecodeRow, contexts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return seconds of steps of one batch size at mean contexts, as `interpolated_s` has them."""
    knots, seconds = row.request_context_tokens, row.step_s
    found = np.interp(contexts, knots, seconds)
    if len(knots) > 1 and contexts[-1] > knots[-1]:
        slope_s = (seconds[-1] - seconds[-2]) / (knots[-1] - knots[-2])
        found = np.where(contexts > knots[-1], seconds[-1] + slope_s * (contexts - knots[-1]), found)
    return found


def _check_knots(where: str, name: str, knots: Sequence[int], *, at_least: int = 1) -> None:
    if not knots:
        raise InputError(where, "must not be empty", name=name)
    if knots[0] < at_least:
        raise InputError(where, f"must be >= {at_least}", name=name, value=knots[0])
    for before, after in pairwise(knots):
        if after <= before:
            raise InputError(where, f"must be above {before}, the value before", name=name, value=after)


def _check_size(where: str, name: str, values: Sequence[object], size: int, what: str) -> None:
    if len(values) != size:
        raise InputError(where, f"has {len(values)}, must have one {what} ({size})", name=name)


def _check_times(where: str, seconds: Sequence[float]) -> None:
    for time_s in seconds:
        if not (math.isfinite(time_s) and time_s > 0):
            raise InputError(where, "must be finite and > 0", name="step_s", value=time_s)
