"""Length presets: our own compact quantile tables, fitted to published data sets."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InputError, nearest
from dsim.workload.lengths import Integers, MeanTokens, Tokens, redraw_until_fits, sampled_mean

PRESETS: Final = ("sharegpt", "humaneval", "longbench")

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TableLengths:
    """Prompts from a quantile table; outputs from quantile tables of their share of the room that the prompt leaves.

    The room is `total_tokens` minus the prompt, so that no pair exceeds `total_tokens`, and the table that an output is
    drawn from depends on the band of prompt quantiles its prompt lies in: both keep prompt and output as dependent as
    in the data. Between the knots of a table lengths are uniform. A pair that exceeds a shorter context is drawn again.

    Args:
        name: the preset's name.
        source: which data the table was fitted to.
        total_tokens: prompt + output at most.
        prompt_levels: shape (p,), quantile levels from 0 to 1.
        prompt_tokens: shape (p,), prompt length at each.
        band_edges: shape (b + 1,), prompt levels between the bands, from 0 to 1.
        share_levels: shape (s,), quantile levels from 0 to 1.
        shares: shape (b, s), output / room at each level, by band.
    """

    name: str
    source: str
    total_tokens: int
    prompt_levels: Table
    prompt_tokens: Table
    band_edges: Table
    share_levels: Table
    shares: Table

    def __post_init__(self) -> None:
        for name in ("prompt_levels", "band_edges", "share_levels"):
            levels = getattr(self, name)
            if levels[0] != 0 or levels[-1] != 1 or np.any(np.diff(levels) <= 0):
                raise InputError(self.name, "must increase from 0 to 1", name=name)
        if self.shares.shape != (len(self.band_edges) - 1, len(self.share_levels)):
            raise InputError(self.name, "must have a row for each band, a column for each level", name="shares")
        if self.prompt_tokens.shape != self.prompt_levels.shape or np.any(np.diff(self.prompt_tokens) < 0):
            raise InputError(self.name, "must be non-decreasing, one for each level", name="prompt_tokens")
        if not 1 <= self.prompt_tokens[0] <= self.prompt_tokens[-1] < self.total_tokens:
            raise InputError(self.name, f"must be >= 1 and below {self.total_tokens}", name="prompt_tokens")
        if np.any(np.diff(self.shares) < 0) or self.shares.min() < 0 or self.shares.max() > 1:
            raise InputError(self.name, "must be non-decreasing in a band, between 0 and 1", name="shares")

    def draw(self, rng: np.random.Generator, count: int, *, context_tokens: int) -> Tokens:
        """Return `count` independent requests; see `Lengths.draw`."""
        return redraw_until_fits(
            lambda n: self.at(rng.random(n), rng.random(n)), count, context_tokens=context_tokens, what=self.name
        )

    def at(self, prompt_level: Table, share_level: Table) -> tuple[Integers, Integers]:
        """Return the prompt and output lengths at these levels, each 0 <= level < 1."""
        prompt = np.rint(np.interp(prompt_level, self.prompt_levels, self.prompt_tokens)).astype(np.int64)
        band = np.searchsorted(self.band_edges, prompt_level, side="right") - 1
        knot = np.searchsorted(self.share_levels, share_level, side="right") - 1
        low, high = self.share_levels[knot], self.share_levels[knot + 1]
        weight = (share_level - low) / (high - low)
        share = (1 - weight) * self.shares[band, knot] + weight * self.shares[band, knot + 1]
        output = np.rint(share * (self.total_tokens - prompt)).astype(np.int64)
        return prompt, np.maximum(output, 1)

    def mean_tokens(self, *, context_tokens: int) -> MeanTokens:
        """Return the means of a fixed sample."""
        return sampled_mean(self, context_tokens)


@functools.lru_cache(maxsize=len(PRESETS))
def preset(name: str) -> TableLengths:
    """Return a shipped preset: `sharegpt`, `humaneval` or `longbench`.

    Raises:
        InputError: if there is no such preset.
    """
    if name not in PRESETS:
        raise InputError("preset", "is unknown", value=name, hint=nearest(name, PRESETS))
    text = resources.files(__package__).joinpath("presets.json").read_text(encoding="utf-8")
    entry: dict[str, Any] = json.loads(text)[name]
    tables = ("prompt_levels", "prompt_tokens", "band_edges", "share_levels", "shares")
    return TableLengths(
        name=name,
        source=str(entry["source"]),
        total_tokens=int(entry["total_tokens"]),
        **{table: np.array(entry[table], dtype=np.float64) for table in tables},
    )
