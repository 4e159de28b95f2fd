"""KV transfers between instances over FIFO ports."""

from __future__ import annotations

from dataclasses import dataclass

from dsim.pools import Parallelism
from dsim.profile import Profile


class Port:
    """One direction of one instance's link; transfers hold it one after the other, in the order they were posted."""

    __slots__ = ("busy_s", "free_s")

    def __init__(self) -> None:
        self.free_s = 0.0
        self.busy_s = 0.0


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """Seconds of one transfer: latency + prompt tokens * seconds per token.

    Args:
        layers: of the model; a layer-wise transfer sends the last one's share after the prefill.
    """

    latency_s: float
    per_token_s: float
    layers: int

    def duration_s(self, prompt_tokens: int) -> float:
        """Seconds that the KV of `prompt_tokens` takes."""
        return self.latency_s + self.per_token_s * prompt_tokens

    def last_layer_s(self, prompt_tokens: int) -> float:
        """Seconds that the KV of the last layer takes."""
        return self.latency_s + self.per_token_s * prompt_tokens / self.layers


def transfer_times(
    profile: Profile, sender: Parallelism, receiver: Parallelism, *, crosses: bool = False
) -> TransferTimes:
    """Return what transfers from a prefill to a decode instance take.

    All layers' KV moves at once, each from its stage to its stage, so the slowest links decide.

    Args:
        profile: of the decode side.
        crosses: KV of some layer goes to another node.
    """
    links, handover = min(sender.num_gpus, receiver.num_gpus), profile.handover
    rate = links * handover.reached_bytes_per_s(profile.gpu, crosses=crosses)
    return TransferTimes(handover.latency_s, profile.model.kv_bytes_per_token / rate, layers=profile.model.layers)


def post(now_s: float, sender: Port, receiver: Port, duration_s: float) -> tuple[float, float]:
    """Queue a transfer on both ports and return its start and end."""
    start_s = max(now_s, sender.free_s, receiver.free_s)
    end_s = start_s + duration_s
    sender.free_s = receiver.free_s = end_s
    sender.busy_s += duration_s
    receiver.busy_s += duration_s
    return start_s, end_s
