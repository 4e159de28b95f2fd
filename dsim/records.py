"""Steps and KV changes of a run, as logged on request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One launched batch, as logged on request.

    Args:
        role: letter of the pool.
        instance: index in the pool.
        part: micro-batch or engine loop.
        launch_s: instant of the launch; host and swap time follow it.
        end_s: when the batch leaves the last stage.
        prefill: request numbers prefilled, in order.
        decode: request numbers decoded, in order of joining.
    """

    role: str
    instance: int
    part: int
    launch_s: float
    end_s: float
    prefill: tuple[int, ...]
    decode: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvRecord:
    """One change of the KV blocks taken on an instance, as logged on request.

    Args:
        role: letter of the pool.
        instance: index in the pool.
        part: engine loop; 0 where the instance has one cache.
        at_s: instant; several changes of one instant stand in their order.
        blocks: taken from then on.
    """

    role: str
    instance: int
    part: int
    at_s: float
    blocks: int
