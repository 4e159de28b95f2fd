"""Step times from tables of one layer's kernels: as exact as the tables, chunks and decodes of one step together."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InputError
from dsim.latency import Chunk, ValidRange
from profiles.kernels.tables import Curve, Floats

#: What a layer consists of beside attention, and how often.
_LAYER: Final[Mapping[str, int]] = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
_ONCE: Final = ("embedding", "final_layernorm")
_PER_SEQUENCE: Final = ("lm_head", "sampler")
_US: Final = 1e-6


class AttentionGrid:
    """Times of one layer's attention by chunk, cached tokens before it, decoding requests, and their mean context.

    Linear between the points of a full grid: sizes that are no powers of two were timed with some of the others only,
    and are left out. Where the largest batches were not timed with chunks, the last slope goes on.
    """

    def __init__(self, points: Mapping[tuple[int, int, int, int], float]) -> None:
        self._axes = tuple(_dense_axis(points, axis) for axis in range(4))
        chunk, cached, requests, context = self._axes
        self._seconds = np.full([len(axis) for axis in self._axes], np.nan)
        index = [{int(value): i for i, value in enumerate(axis)} for axis in self._axes]
        for key, seconds in points.items():
            place = tuple(index[axis].get(key[axis]) for axis in range(4))
            if None not in place:
                self._seconds[place] = seconds
        # No chunk means no cached tokens, no decodes no context: along those axes nothing changes.
        for j in range(1, len(cached)):
            self._seconds[0, j] = self._seconds[0, 0]
        for m in range(1, len(context)):
            self._seconds[:, :, 0, m] = self._seconds[:, :, 0, 0]
        self._seconds[:, :, 1:, 0] = self._seconds[:, :, 1:, 1]
        self._seconds[0, :, 0] = 0.0
        for m in range(3, len(requests)):
            step = (requests[m] - requests[m - 1]) / (requests[m - 1] - requests[m - 2])
            last, before = self._seconds[:, :, m - 1], self._seconds[:, :, m - 2]
            hole = np.isnan(self._seconds[:, :, m])
            self._seconds[:, :, m][hole] = (last + (last - before) * step)[hole]
        if np.isnan(self._seconds).any():
            raise InputError("attention.csv", "has holes other than at large batches", hint="is it complete?")
        self.largest = (float(chunk[-1]), float(cached[-1]), float(requests[-1]), float(context[-1]))

    def seconds(self, chunk: float, cached: float, requests: float, context: float | Floats) -> Floats:
        """Return the seconds, shape of `context`; beyond the last context the last slope goes on."""
        block = self._seconds
        for value, axis in zip((chunk, cached, requests), self._axes[:3], strict=True):
            low, share = _place(axis, value)
            block = (1 - share) * block[low] + share * block[low + 1]
        axis, at = self._axes[3], np.asarray(context, dtype=np.float64)
        low_ = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, len(axis) - 2)
        share_ = (at - axis[low_]) / (axis[low_ + 1] - axis[low_])
        result: Floats = (1 - share_) * block[low_] + share_ * block[low_ + 1]
        return result


def _dense_axis(points: Mapping[tuple[int, int, int, int], float], axis: int) -> NDArray[np.float64]:
    counts: dict[int, int] = {}
    for key in points:
        counts[key[axis]] = counts.get(key[axis], 0) + 1
    kept = [value for value in counts if value & (value - 1) == 0]
    return np.array(sorted({0, *kept}), dtype=np.float64)


def _place(axis: Floats, value: float) -> tuple[int, float]:
    low = min(max(int(np.searchsorted(axis, value, side="right")) - 1, 0), len(axis) - 2)
    return low, float((value - axis[low]) / (axis[low + 1] - axis[low]))


class LayerLatency:
    """A latency model that asks the tables for every step.

    Args:
        layers: of the model.
        dense: times of a kernel by tokens, by name.
        per_sequence: likewise by sequences.
    """

    def __init__(
        self,
        layers: int,
        *,
        dense: Mapping[str, Curve],
        per_sequence: Mapping[str, Curve],
        attention: AttentionGrid,
    ) -> None:
        self._layers = layers
        self._dense = dense
        self._per_sequence = per_sequence
        self._attention = attention
        tokens = min(curve.largest for curve in dense.values())
        chunk, cached, requests, context = attention.largest
        self.valid_range = ValidRange(
            chunk_tokens=cached, prefill_tokens=min(tokens, chunk), decode_requests=requests, context_tokens=math.inf
        )
        self._longest = context

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a prefill step."""
        return self.mixed_s(chunks, 0, 0)

    def decode_s(self, requests: int, context_tokens: int) -> float:
        """Seconds of a decode step."""
        return self.mixed_s((), requests, context_tokens)

    def mixed_s(self, chunks: Sequence[Chunk], requests: int, context_tokens: int) -> float:
        """Seconds of a step of both.

        Several chunks are taken as one of all their tokens after as many cached ones as make the work the same.
        """
        tokens = sum(t for t, _ in chunks)
        pairs = sum(t * t / 2 + t * s for t, s in chunks)
        cached = max(pairs / tokens - tokens / 2, 0.0) if tokens else 0.0
        mean = context_tokens / requests if requests else 0.0
        attention_s = float(self._attention.seconds(tokens, cached, requests, mean))
        return self._rest_s(tokens + requests, len(chunks) + requests) + self._layers * attention_s

    def decode_line(self, requests: int) -> None:
        """None: decode steps are no line in context."""
        del requests

    def decode_run_s(self, requests: int, context_tokens: int, steps: int) -> Floats:
        """Seconds of each of `steps` consecutive decode steps, shape (steps,)."""
        mean = (context_tokens + requests * np.arange(steps, dtype=np.float64)) / requests
        return self._rest_s(requests, requests) + self._layers * self._attention.seconds(0, 0, requests, mean)

    def _rest_s(self, tokens: float, sequences: float) -> float:
        layer_s = sum(times * self._dense[name].at(tokens) for name, times in _LAYER.items())
        once_s = sum(self._dense[name].at(tokens) for name in _ONCE)
        return self._layers * layer_s + once_s + sum(self._per_sequence[n].at(sequences) for n in _PER_SEQUENCE)


def read_layers(directory: Path, *, layers: int) -> LayerLatency:
    """Return the latency model of a directory with dense.csv, per_sequence.csv and attention.csv, in microseconds.

    Raises:
        InputError: a file cannot be read, or lacks a column or a kernel.
    """
    dense = _kernels(directory / "dense.csv", "tokens", (*_LAYER, *_ONCE))
    per_sequence = _kernels(directory / "per_sequence.csv", "sequences", _PER_SEQUENCE)
    file = directory / "attention.csv"
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    points = {}
    for row in _rows(file, names):
        chunk, cached, requests, context = (int(float(row[name])) for name in names[:4])
        points[chunk, cached, requests, context] = float(row["time_us"]) * _US
    return LayerLatency(layers, dense=dense, per_sequence=per_sequence, attention=AttentionGrid(points))


def _kernels(file: Path, size: str, needed: Sequence[str]) -> dict[str, Curve]:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in _rows(file, ("layer", size, "time_us")):
        points.setdefault(row["layer"], []).append((float(row[size]), float(row["time_us"]) * _US))
    for name in needed:
        if name not in points:
            raise InputError(str(file), "has no times of this kernel", name="layer", value=name)
    curves = {}
    for name, found in points.items():
        found.sort()
        curves[name] = Curve(np.array([at for at, _ in found]), np.array([seconds for _, seconds in found]))
    return curves


def _rows(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError(
                    str(file), "is missing", name=f"column {missing[0]}", hint=f"needed: {', '.join(columns)}"
                )
            return list(reader)
    except OSError as error:
        raise InputError(str(file), f"cannot be read: {error.strerror}") from None
