"""How long prompts and outputs are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InputError
from dsim.workload.streams import stream

MAX_TOKENS: Final = 100_000_000
"""Longest prompt or output that is taken for meant."""

MEAN_SAMPLE: Final = 2**18
"""Pairs drawn to find a mean that has no closed form."""

_GIVE_UP_AFTER: Final = 200_000
"""Pairs drawn in vain before a distribution is said not to fit the context."""

Integers = NDArray[np.int64]


class Tokens(NamedTuple):
    """Token counts of some requests, each shape (n,)."""

    prompt: Integers
    output: Integers
    cached: Integers


class MeanTokens(NamedTuple):
    """Mean token counts of a request; `cached` is the part of the prompt that is not computed again."""

    prompt: float
    output: float
    cached: float = 0.0


class Lengths(Protocol):
    """A joint distribution of prompt and output tokens."""

    def draw(self, rng: np.random.Generator, count: int, *, context_tokens: int) -> Tokens:
        """Return `count` independent requests with prompt + output <= `context_tokens`.

        Raises:
            InputError: if a length that was given as such does not fit, or a distribution practically never does.
        """
        ...

    def mean_tokens(self, *, context_tokens: int) -> MeanTokens:
        """Return the mean lengths of what `draw` returns."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every request has the same lengths."""

    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        _check_tokens("fixed", prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)

    def draw(self, rng: np.random.Generator, count: int, *, context_tokens: int) -> Tokens:
        """Return `count` equal requests; see `Lengths.draw`."""
        del rng
        self._check_context(context_tokens)
        prompt = np.full(count, self.prompt_tokens, dtype=np.int64)
        output = np.full(count, self.output_tokens, dtype=np.int64)
        return Tokens(prompt, output, np.zeros(count, dtype=np.int64))

    def mean_tokens(self, *, context_tokens: int) -> MeanTokens:
        """Return the lengths themselves."""
        self._check_context(context_tokens)
        return MeanTokens(float(self.prompt_tokens), float(self.output_tokens))

    def _check_context(self, context_tokens: int) -> None:
        total = self.prompt_tokens + self.output_tokens
        if total > context_tokens:
            raise InputError(
                "fixed lengths",
                f"must be at most the model's context of {context_tokens}",
                name="prompt_tokens + output_tokens",
                value=total,
                hint="shorten one of them, or take a model with a longer context",
            )


@dataclass(frozen=True, slots=True)
class Uniform:
    """Prompt and output independent and uniform over whole numbers from `low` to `high` times nominal, both included.

    What benchmark clients call a length range: `Uniform(512, 64, low=0.8)` draws prompts of 410 to 512 tokens. A pair
    that exceeds the context is drawn again.
    """

    prompt_tokens: int
    output_tokens: int
    low: float
    high: float = 1.0

    def __post_init__(self) -> None:
        _check_tokens("uniform", prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)
        for name in ("low", "high"):
            if not 0 <= getattr(self, name) <= 10:
                raise InputError("uniform", "must be between 0 and 10", name=name, value=getattr(self, name))
        if self.low > self.high:
            raise InputError("uniform", f"must be at most high={self.high}", name="low", value=self.low)

    def range_of(self, nominal: int) -> tuple[int, int]:
        """Return the smallest and the largest length drawn for a nominal one."""
        return max(1, round(self.low * nominal)), max(1, round(self.high * nominal))

    def draw(self, rng: np.random.Generator, count: int, *, context_tokens: int) -> Tokens:
        """Return `count` independent requests; see `Lengths.draw`."""

        def pairs(n: int) -> tuple[Integers, Integers]:
            prompt = rng.integers(*self.range_of(self.prompt_tokens), n, endpoint=True)
            return prompt, rng.integers(*self.range_of(self.output_tokens), n, endpoint=True)

        return redraw_until_fits(pairs, count, context_tokens=context_tokens, what="uniform lengths")

    def mean_tokens(self, *, context_tokens: int) -> MeanTokens:
        """Return the exact means, or those of a sample if the context cuts the range."""
        prompt, output = self.range_of(self.prompt_tokens), self.range_of(self.output_tokens)
        if prompt[1] + output[1] <= context_tokens:
            return MeanTokens(sum(prompt) / 2, sum(output) / 2)
        return sampled_mean(self, context_tokens)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Prompt and output independent and lognormal, rounded, at least 1.

    Means and cv (standard deviation / mean) are those before the context cuts the tail: a pair that exceeds the context
    is drawn again, which lowers both. `mean_tokens` says what is left.
    """

    prompt_mean: float
    prompt_cv: float
    output_mean: float
    output_cv: float

    def __post_init__(self) -> None:
        for name in ("prompt_mean", "output_mean"):
            if not 1 <= getattr(self, name) <= MAX_TOKENS:
                raise InputError(
                    "lognormal", f"must be between 1 and {MAX_TOKENS}", name=name, value=getattr(self, name)
                )
        for name in ("prompt_cv", "output_cv"):
            if not 0 <= getattr(self, name) <= 100:
                raise InputError("lognormal", "must be between 0 and 100", name=name, value=getattr(self, name))

    def draw(self, rng: np.random.Generator, count: int, *, context_tokens: int) -> Tokens:
        """Return `count` independent requests; see `Lengths.draw`."""

        def one(mean: float, cv: float, n: int) -> Integers:
            variance = math.log1p(cv * cv)
            lengths = rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), n)
            return np.rint(np.clip(lengths, 1, MAX_TOKENS)).astype(np.int64)

        def pairs(n: int) -> tuple[Integers, Integers]:
            return one(self.prompt_mean, self.prompt_cv, n), one(self.output_mean, self.output_cv, n)

        return redraw_until_fits(pairs, count, context_tokens=context_tokens, what="lognormal lengths")

    def mean_tokens(self, *, context_tokens: int) -> MeanTokens:
        """Return the means of a fixed sample of `MEAN_SAMPLE` requests."""
        return sampled_mean(self, context_tokens)


def cv_from_median(*, mean: float, median: float) -> float:
    """Return the cv of the lognormal with this mean and median, median <= mean.

    >>> round(cv_from_median(mean=186, median=77), 2)
    2.2
    """
    if not 0 < median <= mean:
        raise InputError("lognormal", f"must be > 0 and at most the mean of {mean}", name="median", value=median)
    return math.sqrt((mean / median) ** 2 - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Empirical:
    """Rows of a table, drawn whole and with replacement, so that prompt and output stay together.

    Args:
        prompt_tokens: shape (n,), n >= 1.
        output_tokens: shape (n,).
        cached_prompt_tokens: shape (n,), 0 <= cached < prompt; zeros where nothing is cached.
        source: where the rows come from, for messages.
        lines: shape (n,), the line of each row there.
    """

    prompt_tokens: Integers
    output_tokens: Integers
    cached_prompt_tokens: Integers
    source: str = "lengths"
    lines: Integers | None = None

    def __post_init__(self) -> None:
        n = len(self.prompt_tokens)
        if n == 0:
            raise InputError(self.source, "must hold at least one row")
        for name in ("output_tokens", "cached_prompt_tokens"):
            if len(getattr(self, name)) != n:
                raise InputError(self.source, f"must have {n} rows", name=name, value=len(getattr(self, name)))
        if min(int(self.prompt_tokens.min()), int(self.output_tokens.min())) < 1:
            raise InputError(self.source, "must all be >= 1", name="prompt_tokens and output_tokens")
        if self.cached_prompt_tokens.min() < 0 or np.any(self.cached_prompt_tokens >= self.prompt_tokens):
            raise InputError(self.source, "must be >= 0 and below prompt_tokens", name="cached_prompt_tokens")

    def draw(self, rng: np.random.Generator, count: int, *, context_tokens: int) -> Tokens:
        """Return `count` rows; see `Lengths.draw`."""
        self._check_context(context_tokens)
        rows = rng.integers(0, len(self.prompt_tokens), count)
        return Tokens(self.prompt_tokens[rows], self.output_tokens[rows], self.cached_prompt_tokens[rows])

    def mean_tokens(self, *, context_tokens: int) -> MeanTokens:
        """Return the means of the rows."""
        self._check_context(context_tokens)
        columns = (self.prompt_tokens, self.output_tokens, self.cached_prompt_tokens)
        return MeanTokens(*(float(column.mean()) for column in columns))

    def _check_context(self, context_tokens: int) -> None:
        total = self.prompt_tokens + self.output_tokens
        longest = int(np.argmax(total))
        if total[longest] > context_tokens:
            line = "" if self.lines is None else f":{self.lines[longest]}"
            raise InputError(
                f"{self.source}{line}",
                f"must be at most the model's context of {context_tokens}",
                name="prompt_tokens + output_tokens",
                value=int(total[longest]),
                hint="drop such rows, or take a model with a longer context",
            )


def redraw_until_fits(
    pairs: Callable[[int], tuple[Integers, Integers]], count: int, *, context_tokens: int, what: str
) -> Tokens:
    """Return `count` pairs from `pairs(n)`, drawing those with prompt + output > `context_tokens` again.

    Raises:
        InputError: if almost no pair fits.
    """
    prompt, output = pairs(count)
    over = np.flatnonzero(prompt + output > context_tokens)
    in_vain = 0
    while over.size:
        new_prompt, new_output = pairs(over.size)
        fits = new_prompt + new_output <= context_tokens
        in_vain = 0 if fits.any() else in_vain + over.size
        if in_vain > _GIVE_UP_AFTER:
            raise InputError(
                what,
                f"practically never fit the model's context of {context_tokens}",
                hint="shorten them, or take a model with a longer context",
            )
        prompt[over[fits]], output[over[fits]] = new_prompt[fits], new_output[fits]
        over = over[~fits]
    return Tokens(prompt, output, np.zeros(count, dtype=np.int64))


@functools.lru_cache(maxsize=64)
def sampled_mean(lengths: Lengths, context_tokens: int) -> MeanTokens:
    """Return the mean lengths of `MEAN_SAMPLE` requests drawn with a fixed seed."""
    tokens = lengths.draw(stream(0, "mean-tokens"), MEAN_SAMPLE, context_tokens=context_tokens)
    return MeanTokens(float(tokens.prompt.mean()), float(tokens.output.mean()), float(tokens.cached.mean()))


def _check_tokens(where: str, **tokens: int) -> None:
    for name, value in tokens.items():
        if not 1 <= value <= MAX_TOKENS:
            raise InputError(where, f"must be between 1 and {MAX_TOKENS}", name=name, value=value)
