"""Workloads: what a deployment is asked to serve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from dsim.errors import InputError
from dsim.trace import Trace
from dsim.workload.arrivals import CHUNK, Arrivals
from dsim.workload.lengths import Lengths, MeanTokens, Tokens
from dsim.workload.streams import check_seed, stream

#: Counted requests and warm-up of a generated run: attainment to about half a point, the ramp left out.
DEFAULT_REQUESTS: Final = 10_000
DEFAULT_WARMUP: Final = 1_000

_USER_CHUNK: Final = 64
#: Requests drawn at a time for a steady state, and the most that arrive after the counted ones, in multiples of those.
_BLOCK: Final = 4096
_MOST_LATER: Final = 10


@dataclass(frozen=True, slots=True)
class Workload:
    """An open loop: requests arrive whether or not earlier ones have been served.

    Arrivals come from the seed's stream `arrivals` at unit rate and are divided by the rate; lengths come from its
    stream `lengths`. So one seed gives the same requests at every rate and to every candidate.
    """

    arrivals: Arrivals
    lengths: Lengths

    def trace(self, *, num_requests: int, seed: int, context_tokens: int, rate_per_s: float | None = None) -> Trace:
        """Return the first requests.

        Args:
            num_requests: >= 1.
            seed: 0 <= seed < 2**32.
            context_tokens: prompt + output tokens at most: the model's context.
            rate_per_s: mean arrivals per second; None for the own rate of replayed arrivals.

        Raises:
            InputError: if a value is out of range, or lengths do not fit the context.
        """
        if num_requests < 1:
            raise InputError("requests", "must be >= 1", value=num_requests)
        blocks = self.blocks(rate_per_s=rate_per_s, seed=seed, context_tokens=context_tokens, block=num_requests)
        return next(blocks)

    def blocks(
        self, *, seed: int, context_tokens: int, rate_per_s: float | None = None, block: int = CHUNK
    ) -> Iterator[Trace]:
        """Yield requests endlessly, `block` at a time; the first k blocks together are `trace(num_requests=k * block)`.

        Raises:
            InputError: as `trace` does.
        """
        check_seed(seed)
        if block < 1:
            raise InputError("block", "must be >= 1", value=block)
        if context_tokens < 2:
            raise InputError("context_tokens", "must be >= 2", value=context_tokens)
        times = self.arrivals.times(stream(seed, "arrivals"), rate_per_s=rate_per_s)
        return self._blocks(times, stream(seed, "lengths"), context_tokens=context_tokens, block=block)

    def steady(
        self, *, num_requests: int, seed: int, context_tokens: int, rate_per_s: float | None = None
    ) -> Iterator[Trace]:
        """Yield the first requests and then those that go on arriving until these have finished.

        Later ones are at most ten times as many: far more than a rate that can be sustained needs, and an end to the
        others.

        Raises:
            InputError: as `trace` does, at once.
        """
        draw = {"seed": seed, "context_tokens": context_tokens}
        # Blocks are drawn when they are needed: see now whether they can be.
        self.trace(num_requests=1, rate_per_s=rate_per_s, **draw)
        blocks = self.blocks(rate_per_s=rate_per_s, block=_BLOCK, **draw)
        most = (1 + _MOST_LATER) * num_requests + _BLOCK
        return itertools.islice(blocks, -(-most // _BLOCK))

    def finite(
        self, *, num_requests: int, seed: int, context_tokens: int, rate_per_s: float | None = None
    ) -> Iterator[Trace]:
        """Yield the requests of `trace` block by block, which takes no memory for those to come.

        Raises:
            InputError: as `trace` does, at once.
        """
        draw = {"seed": seed, "context_tokens": context_tokens}
        self.trace(num_requests=1, rate_per_s=rate_per_s, **draw)
        return self._first(num_requests, self.blocks(rate_per_s=rate_per_s, block=_BLOCK, **draw))

    @staticmethod
    def _first(num_requests: int, blocks: Iterator[Trace]) -> Iterator[Trace]:
        left = num_requests
        while left > 0:
            block = next(blocks).first(left)
            left -= len(block)
            yield block

    def mean_tokens(self, *, context_tokens: int) -> MeanTokens:
        """Return the mean lengths of a request."""
        return self.lengths.mean_tokens(context_tokens=context_tokens)

    def _blocks(
        self, times: Iterator[np.ndarray], rng: np.random.Generator, *, context_tokens: int, block: int
    ) -> Iterator[Trace]:
        held: list[tuple[np.ndarray, ...]] = []
        count = 0
        for arrival_s in times:
            tokens = self.lengths.draw(rng, CHUNK, context_tokens=context_tokens)
            held.append((arrival_s, *tokens))
            count += CHUNK
            if count < block:
                continue
            columns = tuple(np.concatenate(column) for column in zip(*held, strict=True))
            for start in range(0, count - block + 1, block):
                yield Trace(*(column[start : start + block] for column in columns))
            used = count - count % block
            held = [tuple(column[used:] for column in columns)]
            count -= used


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """N users, each of whom sends the next request when the previous one is done.

    Args:
        users: >= 1.
        lengths: of every request; without cached prompt tokens.
        num_requests: sent in all, >= users; then the users stop.
        stagger_s: user u starts at u times this.
        turnaround_s: the client's time between a last token and that user's next request.
        think_time_s: mean of the time that the user takes besides, exponentially distributed: people who think. Without
            it users who were once answered together ask together again, and bunch more and more.
    """

    users: int
    lengths: Lengths
    num_requests: int
    stagger_s: float = 0.0
    turnaround_s: float = 0.0
    think_time_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.users <= 1_000_000:
            raise InputError("closed loop", "must be between 1 and 1000000", name="users", value=self.users)
        if self.num_requests < self.users:
            raise InputError(
                "closed loop",
                f"must be at least {self.users}",
                name="num_requests",
                value=self.num_requests,
                hint="each user sends at least one request",
            )
        for name in ("stagger_s", "turnaround_s", "think_time_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError("closed loop", "must be finite and >= 0", name=name, value=value)

    def start_s(self, user: int) -> float:
        """Return when a user, 0 <= user < users, sends the first request."""
        self._check_user(user)
        return user * self.stagger_s

    def user_lengths(self, user: int, *, seed: int, context_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield prompt and output tokens of a user's requests, endlessly.

        They come from the seed's stream `users` with the user's index: what a user asks does not depend on the others.

        Raises:
            InputError: if a value is out of range, or lengths do not fit the context.
        """
        self._check_user(user)
        rng = stream(seed, "users", user)
        first = self._user_chunk(rng, context_tokens)
        return self._user_lengths(first, rng, context_tokens=context_tokens)

    def user_pauses_s(self, user: int, *, seed: int) -> Iterator[float]:
        """Yield the seconds between a user's last token and next request, endlessly.

        Thinking comes from the seed's stream `thinking` with the user's index.
        """
        self._check_user(user)
        if not self.think_time_s:
            return itertools.repeat(self.turnaround_s)
        return self._user_pauses_s(stream(seed, "thinking", user))

    def mean_tokens(self, *, context_tokens: int) -> MeanTokens:
        """Return the mean lengths of a request."""
        return self.lengths.mean_tokens(context_tokens=context_tokens)

    def _user_pauses_s(self, rng: np.random.Generator) -> Iterator[float]:
        while True:
            pauses = self.turnaround_s + self.think_time_s * rng.standard_exponential(_USER_CHUNK)
            yield from pauses.tolist()

    def _user_lengths(
        self, tokens: Tokens, rng: np.random.Generator, *, context_tokens: int
    ) -> Iterator[tuple[int, int]]:
        while True:
            yield from zip(tokens.prompt.tolist(), tokens.output.tolist(), strict=True)
            tokens = self._user_chunk(rng, context_tokens)

    def _user_chunk(self, rng: np.random.Generator, context_tokens: int) -> Tokens:
        tokens = self.lengths.draw(rng, _USER_CHUNK, context_tokens=context_tokens)
        if tokens.cached.any():
            raise InputError("closed loop", "cannot carry cached_prompt_tokens", hint="drop that column")
        return tokens

    def _check_user(self, user: int) -> None:
        if not 0 <= user < self.users:
            raise InputError("closed loop", f"must be >= 0 and below {self.users}", name="user", value=user)
