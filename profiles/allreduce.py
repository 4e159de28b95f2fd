"""What the all-reduces of a tensor parallel step take: from measured times, or from latency and bandwidth."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from dsim.gpu import Gpu
from profiles.grid import computed_tokens
from profiles.rows import Point
from profiles.shapes import Shape

#: Sizes to time, bytes: one decoding request of a small model up to a long prefill of a large one.
TIMED_BYTES = tuple(2**i for i in range(12, 30, 2))


@dataclass(frozen=True, slots=True)
class AllReduceModel:
    """latency + bytes moved / bandwidth, for all-reduces that cannot be timed.

    Args:
        latency_s: of an all-reduce of a few bytes.
        bandwidth_bytes_per_s: one direction of one GPU's link, as reached.

    Source:
        A ring moves 2 (n - 1) / n of the message over each link. 5 µs and 70 % of the link's rate fit vLLM's all-reduce
        kernels under CUDA graphs on A100, H100 and H200 nodes (2, 4 and 8 GPUs, 4 KB to 512 MB; custom_allreduce_perf
        of aiconfigurator-core 0.12.0, Apache-2.0) with a mean error of 15 %, 75 % at worst (8 GPUs, about 1 MB). Beyond
        a node, 40 µs are an assumption.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    @classmethod
    def modelled(cls, gpu: Gpu, tp: int) -> AllReduceModel:
        """Return the default for `tp` GPUs of this kind: within a node over its links, else over the network."""
        within = tp <= max(gpu.gpus_per_node, gpu.scale_up_domain_gpus)
        link = gpu.nvlink_bytes_per_s if within else gpu.network_bytes_per_s
        return cls(5e-6 if within else 40e-6, 0.7 * link)

    def seconds(self, num_bytes: float, tp: int) -> float:
        """Return the seconds of one all-reduce of `num_bytes` over `tp` GPUs.

        >>> AllReduceModel(1e-5, 100e9).seconds(1e6, 2)
        2e-05
        """
        return self.latency_s + 2 * (tp - 1) / tp * num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class AllReduces:
    """The all-reduces of every TP degree: timed where there were GPUs enough, else modelled.

    Args:
        timed: seconds by bytes, by TP degree.
        models: of the degrees that were not timed.
    """

    shape: Shape
    dtype_bytes: int
    timed: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    models: Mapping[int, AllReduceModel] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`measured`, `modelled` (if any degree is) or `none`."""
        if self.models:
            return "modelled"
        return "measured" if self.timed else "none"

    def settings(self) -> dict[str, object]:
        """Return where each degree's times come from, for the head of a rows file; timed ones begin with `measured`."""
        settings: dict[str, object] = {
            f"all_reduce_tp{tp}": f"modelled: {model.latency_s:g} s + 2 (n - 1) / n x bytes / "
            f"{model.bandwidth_bytes_per_s:g} bytes per s"
            for tp, model in self.models.items()
        }
        for tp, seconds in self.timed.items():
            sizes = [f"{size} bytes {took_s:.3g} s" for size, took_s in seconds.items()]
            settings[f"all_reduce_tp{tp}"] = ["measured", *sizes]
        return settings

    def step_s(self, point: Point) -> float:
        """Return the seconds of a step's collectives.

        Two all-reduces a layer, one after the vocabulary-parallel embedding, and the all-gather of the logits, which
        moves half of what an all-reduce of as many bytes does.
        """
        if point.tp == 1:
            return 0.0
        model = self.shape.model
        hidden = computed_tokens(point) * model.hidden_size * self.dtype_bytes
        logits = (point.requests + point.decode_requests) * model.vocabulary * self.dtype_bytes
        return (2 * model.layers + 1) * self._seconds(point.tp, hidden) + self._seconds(point.tp, logits / 2)

    def _seconds(self, tp: int, num_bytes: float) -> float:
        if tp in self.timed:
            return interpolated(self.timed[tp], num_bytes)
        return self.models[tp].seconds(num_bytes, tp)


def interpolated(seconds: Mapping[int, float], num_bytes: float) -> float:
    """Return the time at `num_bytes`, linear between timed sizes and beyond the last; flat below the first.

    >>> interpolated({1000: 1.0, 3000: 3.0}, 2000), interpolated({1000: 1.0, 3000: 3.0}, 10)
    (2.0, 1.0)
    """
    sizes = sorted(seconds)
    if num_bytes <= sizes[0] or len(sizes) == 1:
        return seconds[sizes[0]] * max(num_bytes / sizes[0], 1.0)
    high = min(max(bisect_left(sizes, num_bytes), 1), len(sizes) - 1)
    low = high - 1
    share = (num_bytes - sizes[low]) / (sizes[high] - sizes[low])
    value = seconds[sizes[low]] + share * (seconds[sizes[high]] - seconds[sizes[low]])
    return value if math.isfinite(value) and value > 0 else seconds[sizes[high]]
