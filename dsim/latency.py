"""Latency models: how long one step of one instance takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dsim.affine import bent_s, decode_line, mixed_s, prefill_s

#: One prompt (or part of one) of a prefill step: (tokens computed now, tokens cached before them).
Chunk = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ValidRange:
    """Inputs a latency model was fitted or measured on; `math.inf` where nothing limits it.

    Args:
        chunk_tokens: longest prompt, cached tokens included.
        prefill_tokens: most tokens computed in one prefill step.
        decode_requests: largest decode batch (of one micro-batch).
        context_tokens: largest total context of a decode step.
    """

    chunk_tokens: float = math.inf
    prefill_tokens: float = math.inf
    decode_requests: float = math.inf
    context_tokens: float = math.inf


@runtime_checkable
class LatencyModel(Protocol):
    """Kernel times of one (model, GPU, engine, tp): all layers, no host overhead.

    Every method is pure. Pipeline stages each take 1/pp of the time; that division and the host overhead are
    the simulator's business.
    """

    @property
    def valid_range(self) -> ValidRange:
        """Where the model may be asked without extrapolating."""
        ...

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a prefill step over `chunks`, each (tokens, cached tokens); at least one."""
        ...

    def decode_s(self, requests: int, context_tokens: int) -> float:
        """Seconds of a decode step of `requests` >= 1 with `context_tokens` in total."""
        ...

    def mixed_s(self, chunks: Sequence[Chunk], requests: int, context_tokens: int) -> float:
        """Seconds of a step that prefills `chunks` and decodes `requests`; either part may be empty, not both."""
        ...

    def decode_line(self, requests: int) -> tuple[float, float] | None:
        """(a, b) if a decode step of `requests` takes exactly a + b * context_tokens seconds, else None."""
        ...

    def decode_run_s(self, requests: int, context_tokens: int, steps: int) -> NDArray[np.float64]:
        """Seconds of each of `steps` consecutive decode steps, shape (steps,); the context grows by `requests`."""
        ...


#: (from, slope): from this amount on, a quantity costs this much a unit.
Bends = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class AffinePrefill:
    """a + b * tokens + c * tokens squared (+ d * requests), seconds.

    Args:
        bends: from how many tokens of the step on a token costs how many seconds instead of `per_token_s`.
    """

    constant_s: float
    per_token_s: float
    per_token_squared_s: float
    per_request_s: float = 0.0
    bends: Bends = ()

    def tokens_s(self, tokens: float) -> float:
        """Seconds that the number of tokens costs, constant and squares apart."""
        return bent_s(tokens, self.per_token_s, self.bends)

    @property
    def least_per_token_s(self) -> float:
        """The most seconds a token with which b * tokens is never above `tokens_s`."""
        corners = [self.tokens_s(bend) / bend for bend, _ in self.bends]
        return min([self.per_token_s, *corners, *(slope_s for _, slope_s in self.bends[-1:])])


@dataclass(frozen=True, slots=True)
class AffineDecode:
    """a + b * context tokens + c * requests, seconds.

    Args:
        bends: from how many requests on a request costs how many seconds instead of `per_request_s`.
    """

    constant_s: float
    per_context_token_s: float
    per_request_s: float
    bends: Bends = ()

    def requests_s(self, requests: float) -> float:
        """Seconds that the number of requests costs, constant and context apart."""
        return bent_s(requests, self.per_request_s, self.bends)


@dataclass(frozen=True, slots=True)
class AffineLatency:
    """DistServe's fit: prefill affine in tokens and squared tokens, decode affine in two batch regimes.

    Args:
        small: decode coefficients for fewer than `threshold_requests` requests.
        large: decode coefficients from `threshold_requests` on.

    Source:
        Form: design section 3; DistServe (OSDI 2024) appendix A and its released profiles.
    """

    prefill: AffinePrefill
    small: AffineDecode
    large: AffineDecode
    threshold_requests: int
    valid_range: ValidRange = ValidRange()

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a prefill step: a + b*sum(t) + c*sum(t*t + 2*t*s) + b_decode*sum(s) + d*n."""
        return prefill_s(self, chunks)

    def decode_s(self, requests: int, context_tokens: int) -> float:
        """Seconds of a decode step."""
        a, b = decode_line(self, requests)
        return a + b * context_tokens

    def mixed_s(self, chunks: Sequence[Chunk], requests: int, context_tokens: int) -> float:
        """Seconds of a mixed step: both parts less the constant they share, never less than either part."""
        return mixed_s(self, chunks, requests, context_tokens)

    def decode_line(self, requests: int) -> tuple[float, float]:
        """(a, b) of a decode step of `requests`: a + b * context_tokens seconds."""
        return decode_line(self, requests)

    def decode_run_s(self, requests: int, context_tokens: int, steps: int) -> NDArray[np.float64]:
        """Seconds of each of `steps` consecutive decode steps, shape (steps,)."""
        a, b = self.decode_line(requests)
        return a + b * (context_tokens + requests * np.arange(steps, dtype=np.float64))


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """What the engine's driver adds to every launch, seconds (design section 3).

    A launch costs step + sequence * sequences + token * tokens (+ mixed when it prefills and decodes at once). The
    tokens of a prefill are those computed; of a decode step its context tokens; of a mixed step both.
    """

    step_s: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0
    mixed_s: float = 0.0

    def launch_s(self, sequences: int, tokens: int, *, mixed: bool = False) -> float:
        """Seconds of host work for one launch."""
        cost_s = self.step_s + self.sequence_s * sequences + self.token_s * tokens
        return cost_s + self.mixed_s if mixed else cost_s


LatencyByTp = Mapping[int, LatencyModel]
