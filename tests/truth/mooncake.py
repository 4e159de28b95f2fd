"""Mooncake's KV transfers: Qwen3-8B from 8 H800 to 8 H800 over eight 200 Gbit/s ports, one request at a time.

Source: kvcache-ai/Mooncake (Apache-2.0). A latency and a rate are fitted to every other row, the rest is tested.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from dsim.catalog import find_model
from tests.truth.common import Pair, rows, signed, table

FILE = "mooncake_kv_transfer.csv"
SETTINGS = (
    "client: one request at a time, so no transfer waits for another; engine: vLLM 0.11 with Mooncake's connector, "
    "BF16, TP 8 on both sides, 1P1D"
)


@functools.cache
def transfers() -> tuple[tuple[int, float, float], ...]:
    """Return prompt tokens, KV bytes as the catalog's shape gives them, and seconds, of every row."""
    model = find_model("qwen3-8b")
    found = []
    for row in rows(FILE):
        tokens = int(row["prompt_tokens"])
        found.append((tokens, float(tokens * model.kv_bytes_per_token), float(row["kv_transfer_ms"]) / 1e3))
    return tuple(found)


def fit(found: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Return latency in seconds and bytes per second, by least squares on relative errors."""
    moved, seconds = (np.array([row[i] for row in found]) for i in (1, 2))
    (latency_s, per_byte_s), _ = nnls(np.stack([1 / seconds, moved / seconds], axis=1), np.ones(len(found)))
    return float(latency_s), 1 / float(per_byte_s)


@functools.cache
def not_fitted() -> tuple[tuple[int, Pair], ...]:
    """Return prompt tokens and predicted and measured seconds of every row, by the fit to the rows around it."""
    found = transfers()
    tested = []
    for start in (0, 1):
        latency_s, bytes_per_s = fit(found[1 - start :: 2])
        tested += [(tokens, Pair(latency_s + moved / bytes_per_s, s)) for tokens, moved, s in found[start::2]]
    return tuple(sorted(tested))


def report() -> str:
    """Return every row."""
    lines = [
        [f"{tokens:,}", f"{1e3 * pair.measured:.2f}", f"{1e3 * pair.predicted:.2f}", signed(pair.error)]
        for tokens, pair in not_fitted()
    ]
    latency_s, bytes_per_s = fit(transfers())
    return (
        f"Settings: {SETTINGS}. Fitted to all rows: {1e3 * latency_s:.2f} ms and {bytes_per_s / 1e9:.0f} GB/s of the "
        f"200 GB/s of the ports.\n\n{table(['prompt tokens', 'measured, ms', 'predicted, ms', 'error'], lines)}"
    )
