"""Fits the transfer model to a table of measured transfers: python3 -m profiles.scripts.transfers FILE.csv [LINE_RATE].

The shipped share of the line rate and latency of Mooncake (dsim/catalog/handovers.yaml) are what this prints for the
table that Mooncake publishes (docs of kvcache-ai/Mooncake, Apache-2.0: vLLM 0.11.2, Qwen3-8B, 8 x H800 each side, eight
200 Gbit/s NICs, unloaded), with 200GB/s as the line rate of all links.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dsim.units import parse_bytes_per_s
from profiles.transfers import fit_transfers, read_transfers


def main(file: str, line: str = "200GB/s") -> str:
    """Return what a fit of all rows, and of every other one, says."""
    rows = read_transfers(Path(file))
    fit, line_bytes_per_s = fit_transfers(rows), parse_bytes_per_s(line, "LINE_RATE")
    lines = [
        f"latency {1e3 * fit.latency_s:.3f} ms, {fit.bandwidth_bytes_per_s / 1e9:.1f} GB/s, "
        f"{fit.bandwidth_bytes_per_s / line_bytes_per_s:.3f} of the line rate, mean error {fit.mean_error(rows):.1%}"
    ]
    for start in (0, 1):
        half = fit_transfers(rows[start::2])
        lines.append(
            f"fitted to every other row from number {start + 1}: mean error on the others "
            f"{half.mean_error(rows[1 - start :: 2]):.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(main(*sys.argv[1:]) + "\n")
