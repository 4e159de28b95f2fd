"""Fit of the transfer model latency + bytes / bandwidth to measured transfers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsim.errors import InputError

#: Sizes in tables of transfers are written in these units. "MB" and "GB" are binary there: the 4.5 GB of 32,768 tokens
#: of Qwen3-8B are 32,768 times 147,456 bytes, which is 4.5 * 2**30.
_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


@dataclass(frozen=True, slots=True)
class TransferFit:
    """A fitted transfer model.

    Args:
        latency_s: constant of a transfer.
        bandwidth_bytes_per_s: rate reached beyond it, all links together.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def seconds(self, kv_bytes: float) -> float:
        """Return how long a transfer of so many bytes takes."""
        return self.latency_s + kv_bytes / self.bandwidth_bytes_per_s

    def mean_error(self, rows: Sequence[tuple[float, float]]) -> float:
        """Return the mean relative error over (bytes, seconds) rows."""
        return float(np.mean([abs(self.seconds(kv_bytes) / seconds - 1) for kv_bytes, seconds in rows]))


def fit_transfers(rows: Sequence[tuple[float, float]]) -> TransferFit:
    """Return the fit with the least squared relative error to (bytes, seconds) rows; its latency is never negative.

    >>> fit = fit_transfers([(1e6, 0.002), (2e6, 0.003), (9e6, 0.010)])
    >>> round(fit.latency_s, 6), round(fit.bandwidth_bytes_per_s)
    (0.001, 1000000000)

    Raises:
        InputError: fewer than two different sizes, or times that do not grow with them.
    """
    size_bytes, taken_s = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    if len(set(size_bytes.tolist())) < 2 or float(min(size_bytes.min(), taken_s.min())) <= 0:
        raise InputError("transfers", "must be at least two sizes > 0 with times > 0", name="rows", value=len(rows))
    weighted = np.stack([1 / taken_s, size_bytes / taken_s], axis=1)
    latency_s, per_byte_s = np.linalg.lstsq(weighted, np.ones(len(rows)), rcond=None)[0].tolist()
    if latency_s < 0:
        latency_s, share = 0.0, size_bytes / taken_s
        per_byte_s = float(share.sum() / (share**2).sum())
    if per_byte_s <= 0:
        raise InputError("transfers", "must take longer the larger they are", name="rows", value=len(rows))
    return TransferFit(latency_s, 1 / per_byte_s)


def read_transfers(path: Path) -> list[tuple[float, float]]:
    """Return the (bytes, seconds) rows of a table with the columns kv_size, kv_size_unit and kv_transfer_ms."""
    with path.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    try:
        return [
            (float(row["kv_size"]) * _UNITS[row["kv_size_unit"]], float(row["kv_transfer_ms"]) / 1000) for row in table
        ]
    except (KeyError, ValueError) as error:
        raise InputError(
            str(path), "must have numbers as kv_size and kv_transfer_ms, and kv_size_unit B, KB, MB or GB"
        ) from error
