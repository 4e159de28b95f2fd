"""Traces: the requests of one run, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of arrival.

    Args:
        arrival_s: shape (n,), non-decreasing.
        prompt_tokens: shape (n,), >= 1.
        output_tokens: shape (n,), >= 1, the first token included.
        cached_prompt_tokens: shape (n,), prompt tokens that are not computed again, 0 <= cached < prompt.
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    cached_prompt_tokens: NDArray[np.int64]

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        for name in ("prompt_tokens", "output_tokens", "cached_prompt_tokens"):
            if len(getattr(self, name)) != n:
                raise InputError("trace", "must be as long as arrival_s", name=name, value=len(getattr(self, name)))
        if n == 0:
            return
        if not np.all(np.isfinite(self.arrival_s)) or np.any(np.diff(self.arrival_s) < 0) or self.arrival_s[0] < 0:
            raise InputError("trace", "must be finite, >= 0 and non-decreasing", name="arrival_s")
        for name in ("prompt_tokens", "output_tokens"):
            if np.min(getattr(self, name)) < 1:
                raise InputError("trace", "must be >= 1", name=name, value=int(np.min(getattr(self, name))))
        if np.min(self.cached_prompt_tokens) < 0 or np.any(self.cached_prompt_tokens >= self.prompt_tokens):
            raise InputError("trace", "must be >= 0 and below prompt_tokens", name="cached_prompt_tokens")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def after(self, rows: int) -> Trace:
        """Return the requests after the first ones; time starts with the last of those that are left out."""
        start_s = self.arrival_s[rows - 1] if rows > 0 else 0.0
        return Trace(
            self.arrival_s[rows:] - start_s,
            self.prompt_tokens[rows:],
            self.output_tokens[rows:],
            self.cached_prompt_tokens[rows:],
        )

    def first(self, rows: int) -> Trace:
        """Return the first requests."""
        return self.part(0, rows)

    def part(self, start: int, stop: int) -> Trace:
        """Return the requests from row `start` on, `stop` not included."""
        rows = slice(start, stop)
        return Trace(
            self.arrival_s[rows], self.prompt_tokens[rows], self.output_tokens[rows], self.cached_prompt_tokens[rows]
        )
