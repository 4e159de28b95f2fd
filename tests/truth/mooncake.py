"""Mooncake's KV transfers: Qwen3-8B from 8 H800 to 8 H800 over eight 200 Gbit/s ports, one request at a time.

Source: kvcache-ai/Mooncake (Apache-2.0). A latency and a rate are fitted to every other row, the rest is tested.
"""

from __future__ import annotations

import functools

from profiles.transfers import fit_transfers, read_transfers
from tests.truth.common import TRUTH, Pair, rows, signed, table

FILE = "mooncake_kv_transfer.csv"
SETTINGS = (
    "client: one request at a time, so no transfer waits for another; engine: vLLM 0.11 with Mooncake's connector, "
    "BF16, TP 8 on both sides, 1P1D"
)


@functools.cache
def transfers() -> tuple[tuple[float, float], ...]:
    """Return bytes and seconds of every row."""
    return tuple(read_transfers(TRUTH / FILE))


@functools.cache
def not_fitted() -> tuple[Pair, ...]:
    """Return every row in order, predicted by the fit to the rows around it."""
    found = transfers()
    tested: dict[int, Pair] = {}
    for start in (0, 1):
        fit = fit_transfers(found[1 - start :: 2])
        for i in range(start, len(found), 2):
            kv_bytes, seconds = found[i]
            tested[i] = Pair(fit.seconds(kv_bytes), seconds)
    return tuple(tested[i] for i in sorted(tested))


def report() -> str:
    """Return every row."""
    lines = [
        [
            f"{int(row['prompt_tokens']):,}",
            f"{kv_bytes / 1e6:,.0f}",
            f"{1e3 * pair.measured:.2f}",
            f"{1e3 * pair.predicted:.2f}",
            signed(pair.error),
        ]
        for row, (kv_bytes, _), pair in zip(rows(FILE), transfers(), not_fitted(), strict=True)
    ]
    fit = fit_transfers(transfers())
    head = ["prompt tokens", "KV, MB", "measured, ms", "predicted, ms", "error"]
    return (
        f"Settings: {SETTINGS}. Fitted to all rows, as `sglang-mooncake` has it: {1e3 * fit.latency_s:.2f} ms and "
        f"{fit.bandwidth_bytes_per_s / 1e9:.0f} GB/s of the 200 GB/s of the ports.\n\n{table(head, lines)}"
    )
