"""The same question with other lengths or other step times, for sensitivity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dsim.latency import Chunk, HostOverhead, LatencyModel, ValidRange
from dsim.profile import Profile
from dsim.trace import Trace
from placement.probe import Source


@dataclass(frozen=True, slots=True)
class ScaledLatency:
    """A latency model whose every step takes `factor` times as long; its closed forms stay closed."""

    model: LatencyModel
    factor: float

    @property
    def valid_range(self) -> ValidRange:
        """That of the model."""
        return self.model.valid_range

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a prefill step."""
        return self.factor * self.model.prefill_s(chunks)

    def decode_s(self, requests: int, context_tokens: int) -> float:
        """Seconds of a decode step."""
        line = self.decode_line(requests)
        if line is not None:
            # The same rounding as a run of steps has, which the simulator takes for equal.
            return line[0] + line[1] * context_tokens
        return self.factor * self.model.decode_s(requests, context_tokens)

    def mixed_s(self, chunks: Sequence[Chunk], requests: int, context_tokens: int) -> float:
        """Seconds of a step that prefills and decodes."""
        if not chunks:
            return self.decode_s(requests, context_tokens)
        return self.factor * self.model.mixed_s(chunks, requests, context_tokens)

    def decode_line(self, requests: int) -> tuple[float, float] | None:
        """(a, b) of a decode step of a + b * context_tokens seconds, None where it is none."""
        line = self.model.decode_line(requests)
        return None if line is None else (self.factor * line[0], self.factor * line[1])

    def decode_run_s(self, requests: int, context_tokens: int, steps: int) -> NDArray[np.float64]:
        """Seconds of each of `steps` consecutive decode steps, shape (steps,)."""
        line = self.decode_line(requests)
        if line is not None:
            return line[0] + line[1] * (context_tokens + requests * np.arange(steps, dtype=np.float64))
        return self.factor * self.model.decode_run_s(requests, context_tokens, steps)


def scaled_profile(profile: Profile, factor: float) -> Profile:
    """Return the profile with all step times, kernels and the driver's work alike, times `factor`.

    The time of transfers, of swaps and of the front end stays.
    """
    return replace(
        profile,
        latency={tp: ScaledLatency(model, factor) for tp, model in profile.latency.items()},
        host={role: _scaled_host(host, factor) for role, host in profile.host.items()},
        host_pipelined={role: _scaled_host(host, factor) for role, host in profile.host_pipelined.items()},
    )


def _scaled_host(host: HostOverhead, factor: float) -> HostOverhead:
    return HostOverhead(factor * host.step_s, factor * host.sequence_s, factor * host.token_s, factor * host.mixed_s)


@dataclass(frozen=True, slots=True)
class ScaledLengths:
    """A workload whose prompts and outputs are so many times as long, rounded, at least 1, at most what fits.

    A request that no longer fits the context loses tokens of what was scaled up, of its prompt if both were.
    """

    source: Source
    prompt: float = 1.0
    output: float = 1.0

    def trace(self, *, num_requests: int, seed: int, context_tokens: int, rate_per_s: float | None = None) -> Trace:
        """Return the first requests."""
        base = self.source.trace(
            num_requests=num_requests, seed=seed, context_tokens=context_tokens, rate_per_s=rate_per_s
        )
        prompt, output = _times(base.prompt_tokens, self.prompt), _times(base.output_tokens, self.output)
        if self.prompt > 1:
            prompt = np.minimum(prompt, np.maximum(context_tokens - output, 1))
        output = np.minimum(output, context_tokens - prompt)
        cached = np.where(
            base.cached_prompt_tokens > 0,
            np.minimum(np.rint(base.cached_prompt_tokens * self.prompt).astype(np.int64), prompt - 1),
            0,
        )
        return Trace(base.arrival_s, prompt, output, cached)

    def cut(self, *, context_tokens: int, num_requests: int = 10_000, seed: int = 0) -> float:
        """Return the share of requests that lose tokens because the model's context ends."""
        base = self.source.trace(num_requests=num_requests, seed=seed, context_tokens=context_tokens, rate_per_s=1.0)
        total = _times(base.prompt_tokens, self.prompt) + _times(base.output_tokens, self.output)
        return float(np.mean(total > context_tokens))


def _times(tokens: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    return tokens if factor == 1 else np.maximum(1, np.rint(tokens * factor)).astype(np.int64)
