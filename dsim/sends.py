"""Sends between pipeline stages: what they add to the steps of a latency model."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dsim.latency import AffineDecode, AffineLatency, AffinePrefill, Bends, Chunk, LatencyModel, ValidRange


@dataclass(frozen=True, slots=True)
class Sends:
    """Seconds that all sends of a step take: fixed + per token computed in it."""

    fixed_s: float
    token_s: float

    def step_s(self, tokens: int) -> float:
        """Seconds of a step that computes so many tokens."""
        return self.fixed_s + self.token_s * tokens


@dataclass(frozen=True, slots=True)
class SendingLatency:
    """A latency model whose every step also sends activations from stage to stage."""

    model: LatencyModel
    sends: Sends

    @property
    def valid_range(self) -> ValidRange:
        """That of the model."""
        return self.model.valid_range

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a prefill step."""
        return self.model.prefill_s(chunks) + self.sends.step_s(sum(t for t, _ in chunks))

    def decode_s(self, requests: int, context_tokens: int) -> float:
        """Seconds of a decode step."""
        return self.model.decode_s(requests, context_tokens) + self.sends.step_s(requests)

    def mixed_s(self, chunks: Sequence[Chunk], requests: int, context_tokens: int) -> float:
        """Seconds of a mixed step, whose tokens are sent together."""
        tokens = requests + sum(t for t, _ in chunks)
        return self.model.mixed_s(chunks, requests, context_tokens) + self.sends.step_s(tokens)

    def decode_line(self, requests: int) -> tuple[float, float] | None:
        """(a, b) of a decode step of `requests` where the model has them."""
        line = self.model.decode_line(requests)
        return None if line is None else (line[0] + self.sends.step_s(requests), line[1])

    def decode_run_s(self, requests: int, context_tokens: int, steps: int) -> NDArray[np.float64]:
        """Seconds of each of `steps` consecutive decode steps, shape (steps,)."""
        return self.model.decode_run_s(requests, context_tokens, steps) + self.sends.step_s(requests)


def with_sends(latency: LatencyModel, sends: Sends) -> LatencyModel:
    """Return the latency model with sends in every step: an affine one of an affine one, whose form has room for them.

    The same object for the same arguments, as what is known about a model is kept by object.
    """
    return _kept(cast(Hashable, latency), sends)


@functools.lru_cache(maxsize=1024)
def _kept(latency: Hashable, sends: Sends) -> LatencyModel:
    if isinstance(latency, AffineLatency):
        return affine_with_sends(latency, sends)
    return SendingLatency(cast(LatencyModel, latency), sends)


def affine_with_sends(latency: AffineLatency, sends: Sends) -> AffineLatency:
    """Return an affine model with sends: they are affine in the tokens of a prefill and in the requests of a decode.

    A mixed step sends once: its two constants are counted less the smaller one.
    """
    return replace(
        latency,
        prefill=_prefill(latency.prefill, sends),
        small=_decode(latency.small, sends),
        large=_decode(latency.large, sends),
    )


def _prefill(prefill: AffinePrefill, sends: Sends) -> AffinePrefill:
    return replace(
        prefill,
        constant_s=prefill.constant_s + sends.fixed_s,
        per_token_s=prefill.per_token_s + sends.token_s,
        bends=_bends(prefill.bends, sends),
    )


def _decode(decode: AffineDecode, sends: Sends) -> AffineDecode:
    return replace(
        decode,
        constant_s=decode.constant_s + sends.fixed_s,
        per_request_s=decode.per_request_s + sends.token_s,
        bends=_bends(decode.bends, sends),
    )


def _bends(bends: Bends, sends: Sends) -> Bends:
    return tuple((start, slope_s + sends.token_s) for start, slope_s in bends)
