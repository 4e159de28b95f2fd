"""Fits the length presets that ship in `dsim/workload/presets.json`: lengths in, compact quantile tables out."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dsim.workload.lengths import Integers
from dsim.workload.presets import TableLengths

Floats = NDArray[np.float64]

FIGURE_7: Final = {"sharegpt": (755.5, 200.3), "humaneval": (171.3, 98.2), "longbench": (1738.3, 90.7)}
"""Mean prompt and output tokens. Source: DistServe (arXiv 2401.09670v3), figure 7."""

PROMPT_LEVELS: Final = np.array(
    [0, 0.01, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1]
)
SHARE_LEVELS: Final = np.array([0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 0.95, 0.98, 1])


@dataclass(frozen=True, slots=True)
class Fit:
    """How one preset is fitted.

    Args:
        total_tokens: prompt + output at most.
        band_edges: prompt levels between the bands that have output tables of their own.
        output_mean: the upper half of the shares is stretched until outputs have this mean.
        output_median: then the middle of the shares is lowered until outputs have this median (None: as fitted).
        source: which data, for the shipped file.
        licence: on what terms.
        note: what was matched and what was assumed.
    """

    total_tokens: int
    band_edges: Floats
    output_mean: float
    output_median: float | None
    source: str
    licence: str
    note: str


FITS: Final = {
    "sharegpt": Fit(
        total_tokens=2047,
        band_edges=np.linspace(0, 1, 9),
        # One standard error (5.7) above the sample's 186.3 towards figure 7's 200.3.
        output_mean=192.3,
        output_median=77,
        source="ShareGPT as DistServe serves it (OPT tokenizer, prompt + output < 2048): the lengths of 1600 requests "
        "of one of its published runs; means in arXiv 2401.09670v3, figure 7",
        licence="a quantile table fitted by us; no row of the data is reproduced",
        note="Prompts, the shape of outputs and their dependence follow the sample. Its output mean, 186.3 with a "
        "standard error of 5.7, is below the 200.3 of figure 7: the upper half of outputs is stretched by 4 %, "
        "so that the mean lies about one standard error above the sample's and 4 % below figure 7's.",
    ),
    "humaneval": Fit(
        total_tokens=2047,
        band_edges=np.linspace(0, 1, 5),
        output_mean=98.2,
        output_median=None,
        source="HumanEval (openai/human-eval): prompt and canonical solution of its 164 problems, GPT-2 byte-pair "
        "encoding as in OPT's tokenizer, start token included",
        licence="data MIT; a quantile table fitted by us",
        note="Counted so, the data have the means of arXiv 2401.09670v3, figure 7 (171.3 and 98.2) to every digit.",
    ),
    "longbench": Fit(
        total_tokens=2040,
        band_edges=np.array([0, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1]),
        output_mean=90.7,
        output_median=None,
        source="no lengths are published: a model of LongBench as DistServe cuts it for OPT's context, with the means "
        "of arXiv 2401.09670v3, figure 7",
        licence="our own assumption; nothing is reproduced",
        note="Assumed: 79 % of answers are short (lognormal, mean 13, cv 1), 21 % are summaries or long answers (the "
        "share of such tasks; lognormal, cv 0.8, mean from figure 7). A prompt is the first min(2040 - answer, a "
        "number uniform from 1900 to 2048) tokens of its document, as in DistServe's published preparation; documents "
        "shorter than that, uniform from 200 to 1900, are as frequent as the mean prompt of figure 7 demands.",
    ),
}


def fit(name: str, prompt: Floats, output: Floats) -> TableLengths:
    """Return the table fitted to a sample.

    Args:
        name: a key of `FITS`.
        prompt: shape (n,), prompt tokens.
        output: shape (n,), output tokens.
    """
    how = FITS[name]
    rank = np.empty(len(prompt))
    rank[np.argsort(prompt, kind="stable")] = (np.arange(len(prompt)) + 0.5) / len(prompt)
    band = np.searchsorted(how.band_edges, rank, side="right") - 1
    share = output / (how.total_tokens - prompt)
    shares = np.array([quantiles(share[band == b], SHARE_LEVELS) for b in range(len(how.band_edges) - 1)])
    knots = np.clip(quantiles(prompt, PROMPT_LEVELS), 1, how.total_tokens - 1)

    def table(dip: float) -> TableLengths:
        def bent(stretch: float) -> TableLengths:
            bend = stretch * np.clip(10 * SHARE_LEVELS - 5, 0, 1) - dip * np.clip(1 - 4 * abs(SHARE_LEVELS - 0.5), 0, 1)
            return TableLengths(
                name=name,
                source=how.source,
                total_tokens=how.total_tokens,
                prompt_levels=PROMPT_LEVELS,
                prompt_tokens=knots.round(1),
                band_edges=how.band_edges,
                share_levels=SHARE_LEVELS,
                shares=np.clip(np.maximum.accumulate(shares * (1 + bend), axis=1), 0, 1).round(4),
            )

        return bent(_largest(lambda stretch: at_levels(bent(stretch))[1].mean() <= how.output_mean, -0.2, 0.2))

    if how.output_median is None:
        return table(0.0)
    median = how.output_median
    return table(_largest(lambda dip: np.mean(at_levels(table(dip))[1] > median) >= 0.5, 0.0, 0.3))


def _largest(holds: Callable[[float], bool | np.bool_], low: float, high: float) -> float:
    """Return the largest number up to which `holds` is true, by bisection."""
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def quantiles(sample: Floats, levels: Floats) -> Floats:
    """Return the knots of a piecewise linear quantile function, by least squares, which keeps the mean."""
    ordered = np.sort(sample)
    at = (np.arange(len(ordered)) + 0.5) / len(ordered)
    hats = np.stack([np.interp(at, levels, knot) for knot in np.eye(len(levels))], axis=1)
    knots = np.linalg.lstsq(hats, ordered, rcond=None)[0]
    return np.asarray(np.maximum.accumulate(np.clip(knots, 0, None)), dtype=np.float64)


def at_levels(table: TableLengths, points: int = 500) -> tuple[Integers, Integers]:
    """Return prompt and output tokens at the midpoints of points x points levels: the table without chance."""
    at = (np.arange(points) + 0.5) / points
    return table.at(np.repeat(at, points), np.tile(at, points))


def longbench_model(count: int = 200_000) -> tuple[Floats, Floats]:
    """Return prompt and output tokens of the assumptions stated in `FITS`."""
    rng = np.random.default_rng(0)
    prompt_mean, output_mean = FIGURE_7["longbench"]

    def lognormal(mean: float, cv: float) -> Floats:
        variance = np.log1p(cv * cv)
        return rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), count)

    is_long = rng.random(count) < 0.21
    long_answers = lognormal((output_mean - 0.79 * 13) / 0.21, 0.8)
    output = np.clip(np.rint(np.where(is_long, long_answers, lognormal(13, 1))), 1, 1900)
    cut = np.minimum(2040 - output, rng.integers(1900, 2048, count, endpoint=True)).astype(np.float64)
    document = np.minimum(rng.integers(200, 1900, count, endpoint=True), cut)
    is_short = rng.random(count) < (cut.mean() - prompt_mean) / (cut.mean() - document.mean())
    return np.where(is_short, document, cut), output


def main(argv: Sequence[str] | None = None) -> None:
    """Write the presets file from CSV files with columns prompt_tokens and output_tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sharegpt", type=Path, required=True, help="CSV of lengths")
    parser.add_argument("--humaneval", type=Path, required=True, help="CSV of lengths")
    parser.add_argument("--output", type=Path, required=True, help="the presets file")
    options = parser.parse_args(argv)
    samples = {name: _read(getattr(options, name)) for name in ("sharegpt", "humaneval")}
    samples["longbench"] = longbench_model()
    entries = {name: _entry(fit(name, *sample)) for name, sample in samples.items()}
    options.output.write_text(_shown(entries), encoding="utf-8")


def _read(path: Path) -> tuple[Floats, Floats]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = [(float(row["prompt_tokens"]), float(row["output_tokens"])) for row in csv.DictReader(file)]
    prompt, output = np.array(rows).T
    return prompt, output


def _entry(table: TableLengths) -> dict[str, Any]:
    how = FITS[table.name]
    return {
        "source": how.source,
        "licence": how.licence,
        "note": how.note,
        "total_tokens": table.total_tokens,
        "prompt_levels": table.prompt_levels.tolist(),
        "prompt_tokens": table.prompt_tokens.tolist(),
        "band_edges": table.band_edges.tolist(),
        "share_levels": table.share_levels.tolist(),
        "shares": table.shares.tolist(),
    }


def _shown(entries: dict[str, dict[str, Any]]) -> str:
    """Return JSON with one table row a line."""
    parts = []
    for name, entry in entries.items():
        lines = []
        for key, value in entry.items():
            text = json.dumps(value)
            if key == "shares":
                text = "[\n" + ",\n".join(f"      {json.dumps(row)}" for row in value) + "\n    ]"
            lines.append(f'    "{key}": {text}')
        parts.append(f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
