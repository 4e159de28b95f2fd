"""The per-layer table model: a step is the sum of its kernels, each looked up in times of one layer."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InputError
from dsim.latency import Chunk, ValidRange

Floats = NDArray[np.float64]


_N = TypeVar("_N", float, Floats)


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """One kind of kernel beside attention.

    Args:
        name: what it is called where it was timed.
        times: how often it runs in a step.
        by: what its time depends on: `tokens` or `sequences` of the step.
        amounts: those that were timed, rising.
        kernel_s: seconds of one run at each of them.
    """

    name: str
    times: int
    by: str
    amounts: tuple[int, ...]
    kernel_s: tuple[float, ...]

    def __post_init__(self) -> None:
        where = f"kernel {self.name}"
        if self.by not in ("tokens", "sequences"):
            raise InputError(where, "must be tokens or sequences", name="by", value=self.by)
        if self.times < 1:
            raise InputError(where, "must be >= 1", name="times", value=self.times)
        _check_axis(where, self.by, self.amounts, at_least=1)
        _check_times(where, self.kernel_s, len(self.amounts))


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Times of one layer's attention for one chunk: a full grid of decoding requests and their mean contexts.

    Args:
        tokens: prompt tokens computed; 0 where none are.
        cached_tokens: those before them.
        requests: that decode in the same step, rising; (0,) where none does.
        request_context_tokens: mean context of those, rising; (0,) where there are none.
        kernel_s: seconds, a row for each of `requests`.
    """

    tokens: int
    cached_tokens: int
    requests: tuple[int, ...]
    request_context_tokens: tuple[int, ...]
    kernel_s: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        where = f"attention of {self.tokens} tokens after {self.cached_tokens}"
        for name in ("tokens", "cached_tokens"):
            if getattr(self, name) < 0:
                raise InputError(where, "must be >= 0", name=name, value=getattr(self, name))
        _check_axis(where, "requests", self.requests, at_least=0)
        _check_axis(where, "request_context_tokens", self.request_context_tokens, at_least=0)
        if 0 in self.requests and (len(self.requests) > 1 or self.request_context_tokens != (0,)):
            raise InputError(where, "must stand alone, with contexts [0]", name="requests", value=0)
        if self.requests == (0,) and not self.tokens:
            raise InputError(where, "has neither a chunk nor requests", name="requests", value=0)
        if not self.tokens and self.cached_tokens:
            raise InputError(where, "must be 0 where no tokens are computed", name="cached_tokens")
        if len(self.kernel_s) != len(self.requests):
            raise InputError(
                where, f"has {len(self.kernel_s)}, must have one row for each of requests", name="kernel_s"
            )
        for row in self.kernel_s:
            _check_times(where, row, len(self.request_context_tokens))


class _Line:
    """Seconds by an amount: linear, held below the first point.

    Beyond the last point the slope is that from half of it to it: points that stand close say little about it.
    """

    def __init__(self, amounts: Sequence[int], seconds: Sequence[float]) -> None:
        self._amounts, self._seconds = list(amounts), list(seconds)
        self._arrays = np.array(amounts, dtype=np.float64), np.array(seconds, dtype=np.float64)
        half = max(amounts[-1] / 2, float(amounts[0]))
        self._last, self._slope_s = float(amounts[-1]), 0.0
        if self._last > half:
            self._slope_s = (self._seconds[-1] - self.at(half)) / (self._last - half)

    def at(self, amount: float) -> float:
        """Return seconds at one amount."""
        if amount >= self._last:
            return self._seconds[-1] + self._slope_s * (amount - self._last)
        low, high, share = _place(self._amounts, amount)
        return _between(self._seconds[low], self._seconds[high], share)

    def along(self, amounts: Floats) -> Floats:
        """Return seconds at rising amounts."""
        found: Floats = np.interp(amounts, *self._arrays)
        if amounts[-1] > self._last:
            found = found + self._slope_s * np.maximum(amounts - self._last, 0.0)
        return found


#: Rows by number of requests, rising.
_Rows = tuple[list[int], list[_Line]]


@dataclass(frozen=True, eq=False)
class LayerLatency:
    """A latency model that looks up every kernel of a step; chunks and decodes of one step are looked up together.

    Times are linear between points and come out as they are at the points. Below the first point of an axis its time
    holds. Beyond the last one it goes on as from half of that one to it, and attention of a longer chunk is that of
    chunks after each other. Attention is looked up axis after axis: chunk, cached tokens, requests, context; the points
    of one axis need not be the same everywhere.

    Args:
        kernels: all but attention.
        attention_layers: how often attention runs in a step.
        attention: without points that stand twice; some without a chunk, some with one, and with one some without
            requests and some with.
        valid_range: at most `range_of`.
    """

    kernels: tuple[KernelTimes, ...]
    attention_layers: int
    attention: tuple[AttentionTimes, ...]
    valid_range: ValidRange

    def __post_init__(self) -> None:
        self.range_of(self.kernels, self.attention)
        self._lookup  # noqa: B018 what stands twice is told now, not at the first step

    @classmethod
    def whole(
        cls, *, kernels: Sequence[KernelTimes], attention_layers: int, attention: Sequence[AttentionTimes]
    ) -> LayerLatency:
        """Return the model that is valid as far as its points reach."""
        return cls(tuple(kernels), attention_layers, tuple(attention), cls.range_of(kernels, attention))

    @functools.cached_property
    def _lookup(self) -> _Lookup:
        return _Lookup(self.kernels, self.attention)

    @staticmethod
    def range_of(kernels: Sequence[KernelTimes], attention: Sequence[AttentionTimes]) -> ValidRange:
        """Return where nothing is extrapolated."""
        most = {
            by: min((kernel.amounts[-1] for kernel in kernels if kernel.by == by), default=math.inf)
            for by in ("tokens", "sequences")
        }
        decodes = [block for block in attention if not block.tokens]
        chunks = [block for block in attention if block.tokens]
        missing = {
            "decoding requests alone": not decodes,
            "a chunk without decoding requests": all(block.requests != (0,) for block in chunks),
            "a chunk with decoding requests": all(block.requests == (0,) for block in chunks),
        }
        for what, lacks in missing.items():
            if lacks:
                raise InputError("attention", f"has no times of {what}")
        requests = min(max(block.requests[-1] for block in decodes), most["tokens"], most["sequences"])
        context = max(block.request_context_tokens[-1] for block in decodes)
        cached = max(block.cached_tokens for block in chunks)
        chunk = max(block.tokens for block in chunks)
        return ValidRange(
            chunk_tokens=min(max(cached, chunk), context),
            prefill_tokens=min(most["tokens"], chunk),
            decode_requests=requests,
            context_tokens=requests * context,
        )

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a prefill step."""
        return self.mixed_s(chunks, 0, 0)

    def decode_s(self, requests: int, context_tokens: int) -> float:
        """Seconds of a decode step."""
        return float(self.decode_run_s(requests, context_tokens, 1)[0])

    def mixed_s(self, chunks: Sequence[Chunk], requests: int, context_tokens: int) -> float:
        """Seconds of a step of both.

        Several chunks are taken as one of all their tokens after as many cached ones as make the work the same.
        """
        if not chunks:
            return self.decode_s(requests, context_tokens)
        tokens = sum(t for t, _ in chunks)
        cached = float(chunks[0][1])
        if len(chunks) > 1:
            cached = max(sum(t * (t + 2 * s) for t, s in chunks) / (2 * tokens) - tokens / 2, 0.0)
        look = self._lookup
        attention_s = 0.0
        left = tokens
        while left > look.longest_chunk:
            left -= look.longest_chunk
            attention_s += look.alone_s(look.longest_chunk, cached + left)
        if requests:
            attention_s += look.beside_s(left, cached, requests, context_tokens / requests)
        else:
            attention_s += look.alone_s(left, cached)
        return look.rest_s(tokens + requests, len(chunks) + requests) + self.attention_layers * attention_s

    def decode_line(self, requests: int) -> tuple[float, float] | None:
        """None: a table bends at each of its points."""
        return None

    def decode_run_s(self, requests: int, context_tokens: int, steps: int) -> Floats:
        """Seconds of each of `steps` consecutive decode steps, shape (steps,)."""
        contexts = context_tokens / requests + np.arange(steps, dtype=np.float64)
        look = self._lookup
        return look.rest_s(requests, requests) + self.attention_layers * look.decode_s(requests, contexts)


class _Lookup:
    """The points of a model, sorted for looking up."""

    def __init__(self, kernels: Sequence[KernelTimes], attention: Sequence[AttentionTimes]) -> None:
        self._by_tokens = _summed([k for k in kernels if k.by == "tokens"])
        self._by_sequences = _summed([k for k in kernels if k.by == "sequences"])
        alone, beside = _trees(attention)
        self._alone_chunks = sorted(alone)
        self._alone = [_Line(*_sorted(alone[chunk])) for chunk in self._alone_chunks]
        self.longest_chunk = self._alone_chunks[-1]
        self._beside = [(list(tree), list(tree.values())) for _, tree in beside]
        self._beside_chunks = [chunk for chunk, _ in beside]
        self._decode: _Rows = self._beside[0][1][0]

    def rest_s(self, tokens: int, sequences: int) -> float:
        """Return seconds of all kernels but attention."""
        return self._by_tokens.at(tokens) + self._by_sequences.at(sequences)

    def decode_s(self, requests: int, contexts: Floats) -> Floats:
        """Return seconds of one layer's attention of decodes alone, by their rising mean contexts."""
        known, lines = self._decode
        low, high, share = _place(known, requests)
        below = lines[low].along(contexts)
        return below if low == high else _between(below, lines[high].along(contexts), share)

    def alone_s(self, chunk: int, cached: float) -> float:
        """Return seconds of one layer's attention of a chunk without decodes."""
        low, high, share = _place(self._alone_chunks, chunk)
        below = self._alone[low].at(cached)
        return below if low == high else _between(below, self._alone[high].at(cached), share)

    def beside_s(self, chunk: int, cached: float, requests: int, context: float) -> float:
        """Return seconds of one layer's attention of a chunk and of decodes."""
        low, high, share = _place(self._beside_chunks, chunk)
        below = self._chunk_s(low, cached, requests, context)
        return below if low == high else _between(below, self._chunk_s(high, cached, requests, context), share)

    def _chunk_s(self, index: int, cached: float, requests: int, context: float) -> float:
        known, rows = self._beside[index]
        low, high, share = _place(known, cached)
        below = _rows_s(rows[low], requests, context)
        return below if low == high else _between(below, _rows_s(rows[high], requests, context), share)


def _summed(kernels: Sequence[KernelTimes]) -> _Line:
    """Return the kernels' times together: lines between points add up to lines between all their points."""
    amounts = sorted({amount for kernel in kernels for amount in kernel.amounts}) or [1]
    lines = [(kernel.times, _Line(kernel.amounts, kernel.kernel_s)) for kernel in kernels]
    return _Line(amounts, [sum(times * line.at(amount) for times, line in lines) for amount in amounts])


_Tree = dict[int, _Rows]


def _trees(attention: Sequence[AttentionTimes]) -> tuple[dict[int, dict[int, float]], list[tuple[int, _Tree]]]:
    """Return times of chunks without decodes by chunk and cached tokens, and of decodes by those, both rising."""
    alone: dict[int, dict[int, float]] = {}
    points: dict[int, dict[int, dict[int, dict[int, float]]]] = {}
    for block in attention:
        for requests, times in zip(block.requests, block.kernel_s, strict=True):
            place = f"attention of {block.tokens} tokens after {block.cached_tokens}"
            if not requests:
                row = alone.setdefault(block.tokens, {})
                _once(place, row, block.cached_tokens)
                row[block.cached_tokens] = times[0]
                continue
            tree = points.setdefault(block.tokens, {}).setdefault(block.cached_tokens, {})
            of_requests = tree.setdefault(requests, {})
            for context, seconds in zip(block.request_context_tokens, times, strict=True):
                _once(f"{place}, {requests} requests", of_requests, context)
                of_requests[context] = seconds
    beside = [
        (chunk, {cached: _rows(tree) for cached, tree in sorted(by_cached.items())})
        for chunk, by_cached in sorted(points.items())
    ]
    return alone, beside


def _once(place: str, known: Mapping[int, float], key: int) -> None:
    if key in known:
        raise InputError(place, f"stands twice, at {key}")


def _rows(tree: Mapping[int, Mapping[int, float]]) -> _Rows:
    return sorted(tree), [_Line(*_sorted(tree[requests])) for requests in sorted(tree)]


def _sorted(points: Mapping[int, float]) -> tuple[list[int], list[float]]:
    keys = sorted(points)
    return keys, [points[key] for key in keys]


def _place(axis: Sequence[int], value: float) -> tuple[int, int, float]:
    """Return two neighbours and the share of the second; the same one twice below the first, or where one is all.

    >>> _place([2, 4, 8], 5), _place([2, 4], 1), _place([2, 4], 4), _place([2, 4], 6)
    ((1, 2, 0.25), (0, 0, 0.0), (1, 1, 0.0), (0, 1, 2.0))
    """
    at = bisect_right(axis, value) - 1
    if at < 0 or len(axis) == 1:
        return 0, 0, 0.0
    if axis[at] == value:
        return at, at, 0.0
    low = min(at, len(axis) - 2)
    return low, low + 1, (value - axis[low]) / (axis[low + 1] - axis[low])


def _between(below: _N, above: _N, share: float) -> _N:
    return below + share * (above - below) if share else below


def _rows_s(rows: _Rows, requests: int, context: float) -> float:
    known, lines = rows
    low, high, share = _place(known, requests)
    below = lines[low].at(context)
    return below if low == high else _between(below, lines[high].at(context), share)


def _check_axis(where: str, name: str, values: Sequence[int], *, at_least: int) -> None:
    if not values:
        raise InputError(where, "must not be empty", name=name)
    if values[0] < at_least:
        raise InputError(where, f"must be >= {at_least}", name=name, value=values[0])
    for before, after in pairwise(values):
        if after <= before:
            raise InputError(where, f"must be above {before}, the value before", name=name, value=after)


def _check_times(where: str, seconds: Sequence[float], size: int) -> None:
    if len(seconds) != size:
        raise InputError(where, f"has {len(seconds)}, must have {size}, one for each point", name="kernel_s")
    for time_s in seconds:
        if not (math.isfinite(time_s) and time_s > 0):
            raise InputError(where, "must be finite and > 0", name="kernel_s", value=time_s)
