"""Times whole steps of one rank: a few layers scaled to all of them, plus embedding, final norm and head."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
from collections.abc import Callable, Sequence

import torch

from profiles.grid import BLOCK_TOKENS, computed_tokens, decoding_requests
from profiles.profiler.device import CaptureError, Device, translated_errors
from profiles.profiler.layer import RankModel
from profiles.rows import Phase, Point
from profiles.session import OutOfMemoryError, StepFailedError, Timing
from profiles.shapes import DTYPE_BYTES, Shape

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Timings of layers and of ends at least, in each visit. On a busy CPU those of one visit agree, those of different
#: ones do not, so that more visits say more than longer ones.
_SAMPLES = {"cpu": 2, "cuda": 5}
#: Runs of a visit that are no timings: warm-up, capture, replay, and the first that only says how long one takes.
_OTHER_RUNS = {"cpu": 2, "cuda": 4}
#: What a visit takes beside its runs: allocating caches, capturing.
_VISIT_S = {"cpu": 0.002, "cuda": 0.1}
#: Seconds to fill an element of weights or caches.
_FILL_S = {"cpu": 2e-9, "cuda": 1e-11}
#: Layer copies at least: a GPU idles some microseconds between two replays of a graph, which more layers share.
_FEWEST_COPIES = {"cpu": 2, "cuda": 4}
#: Weights, KV and activations between two uses of the same copy are at least so many caches full.
_CACHES_BETWEEN = 3
#: Share of the free memory that a step may plan to take.
_MOST_OF_MEMORY = 0.9


class TorchTimer:
    """Times steps with torch.

    The rank's weights are built when a point with another TP degree comes. A step's time is layers / copies × the time
    of a chain of layer copies, plus that of embedding, final norm and head.

    Args:
        dtype: `bf16`, `fp16` or `fp32`.
    """

    def __init__(self, shape: Shape, device: Device, *, dtype: str) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self._element_bytes = DTYPE_BYTES[dtype]
        self._model: RankModel | None = None
        self._groups_natively = True

    def time(self, point: Point, *, seconds: float) -> Timing:
        """Time the step for about `seconds`.

        Raises:
            OutOfMemoryError: the device has too little memory.
            StepFailedError: torch cannot run the step.
        """
        try:
            return self._timed(point, seconds=seconds)
        except (OutOfMemoryError, StepFailedError) as caught:
            error = type(caught)(str(caught))
        # The traceback of what was caught held the step's tensors until here.
        gc.collect()
        with contextlib.suppress(RuntimeError):
            self.device.release()
        raise error

    def visit_s(self, point: Point, step_s: float) -> float:
        """Return how long the shortest visit of a point takes if its step takes `step_s`."""
        copies, layers = self.copies(point), self.shape.model.layers
        runs = _OTHER_RUNS[self._kind] + _SAMPLES[self._kind]
        kv = self._kv_tokens(point) * self.shape.kv_bytes_per_token(point.tp, self._element_bytes) * copies / layers
        filling_s = kv / self._element_bytes * _FILL_S[self._kind]
        return runs * step_s * copies / layers + filling_s + _VISIT_S[self._kind]

    def setup_s(self, tps: Sequence[int], step_s: Callable[[Point], float]) -> float:
        """Return how long `probe` takes at least, if its steps take `step_s`."""
        tp = tps[-1]
        share = self.most_copies(tp) / self.shape.model.layers
        return self._rank_elements(tp) * _FILL_S[self._kind] + share * sum(step_s(point) for point in _probes(tp))

    def copies(self, point: Point) -> int:
        """Return how many layer copies the point is timed with.

        As many as keep a copy's weights and KV cache out of the device's caches until its next turn, never more than
        the model has layers. Activations pass through the caches too: with many tokens fewer copies are enough.
        """
        layers = self.shape.model.layers
        tokens = max(computed_tokens(point), 1)
        one = self.shape.layer_matrix_parameters(point.tp, tokens) * self._element_bytes
        one += self._kv_tokens(point) * self.shape.kv_bytes_per_token(point.tp, self._element_bytes) / layers
        one += self._activation_bytes(point)
        enough = max(_FEWEST_COPIES[self._kind], math.ceil(_CACHES_BETWEEN * self.device.cache_bytes / one))
        return min(layers, enough)

    def most_copies(self, tp: int) -> int:
        """Return how many layer copies a rank is built with."""
        return self.copies(Point(Phase.DECODE.value, tp, 1, context_tokens=float(BLOCK_TOKENS)))

    def probe(self, tps: Sequence[int]) -> None:
        """Run one small step of each kind, to find which kernels this torch has and to pay for its start.

        Raises:
            OutOfMemoryError: the device cannot even hold the layers and the head.
            StepFailedError: torch cannot run the model.
        """
        try:
            self._probe(tps[-1])
        except CaptureError:
            self.device.run_eagerly()
            self._probe(tps[-1])

    def _probe(self, tp: int) -> None:
        prompt, decode = _probes(tp)
        for native in (True, False):
            self._groups_natively = native
            try:
                self._run_once(prompt)
                break
            except CaptureError:
                raise
            except StepFailedError:
                if not native:
                    raise
        self._run_once(decode)

    def _run_once(self, point: Point) -> None:
        copies = self.copies(point)
        with torch.inference_mode(), translated_errors():
            self._refuse_too_large(point, copies)
            model = self._rank_model(point.tp)
            step = model.step(point, copies=copies)
            self.device.prepared(lambda: model.run_layers(step, copies))
            self.device.prepared(lambda: model.run_ends(step))
        self.device.release()

    def settings(self) -> dict[str, str | int | float]:
        """Return what was timed and how, for the head of a rows file."""
        experts = self.shape.experts
        return {
            "step": "layers / copies x chain of layer copies + embedding, final norm and head; no sampling",
            "kernels": "torch: linear, scaled_dot_product_attention (flash); element-wise operations not fused",
            "grouped_queries": "native" if self._groups_natively else "expanded",
            "kv_cache": f"contiguous per request, whole blocks of {BLOCK_TOKENS} tokens",
            "experts": "none" if experts is None else "even random routing, batched matrix products",
            "qk_norm": "yes" if self.shape.qk_norm else "no",
            "copies": f"weights, KV and activations of {_CACHES_BETWEEN} caches between two uses of one",
            "statistic": "median",
            "samples_at_least": _SAMPLES[self._kind],
            **self.device.settings(),
        }

    @property
    def _kind(self) -> str:
        return self.device.torch_name.partition(":")[0]

    def _timed(self, point: Point, *, seconds: float) -> Timing:
        copies = self.copies(point)
        with torch.inference_mode(), translated_errors():
            self._refuse_too_large(point, copies)
            chain_s, ends_s = self._samples_s(point, copies, seconds=seconds)
        self.device.release()
        scale = self.shape.model.layers / copies
        samples = min(len(chain_s), len(ends_s))
        return Timing(
            step_s=scale * statistics.median(chain_s) + statistics.median(ends_s),
            spread_s=math.hypot(scale * spread_s(chain_s), spread_s(ends_s)) if samples > 1 else None,
            samples=samples,
        )

    def _samples_s(self, point: Point, copies: int, *, seconds: float) -> tuple[list[float], list[float]]:
        """Return seconds of the chain of layers, and of embedding, norm and head."""
        model, at_least = self._rank_model(point.tp), _SAMPLES[self._kind]
        step = model.step(point, copies=copies)
        layers = self.device.prepared(lambda: model.run_layers(step, copies))
        chain_s = self.device.samples_s(layers, seconds=0.8 * seconds, at_least=at_least)
        # A graph keeps its activations; the other one's are needed no more.
        del layers
        ends = self.device.prepared(lambda: model.run_ends(step))
        return chain_s, self.device.samples_s(ends, seconds=0.2 * seconds, at_least=at_least)

    def _rank_model(self, tp: int) -> RankModel:
        model = self._model
        if model is None or model.rank.tp != tp:
            self._model = None
            self.device.release()
            model = RankModel(
                self.shape, tp, dtype=_DTYPES[self.dtype], device=self.device.torch_name, copies=self.most_copies(tp)
            )
            self._model = model
        model.groups_natively = self._groups_natively
        return model

    def _refuse_too_large(self, point: Point, copies: int) -> None:
        """Refuse beforehand what cannot fit: the CPU's allocator gives memory it does not have, until nothing runs."""
        kv_bytes = self._kv_tokens(point) * self.shape.kv_bytes_per_token(point.tp, self._element_bytes)
        needed = kv_bytes * copies / self.shape.model.layers + self._activation_bytes(point)
        if self._model is None or self._model.rank.tp != point.tp:
            needed += self._rank_elements(point.tp) * self._element_bytes
        free = self.device.free_bytes()
        if needed > _MOST_OF_MEMORY * free:
            raise OutOfMemoryError(f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")

    def _activation_bytes(self, point: Point) -> float:
        """Return the bytes of a layer's activations."""
        model, rank = self.shape.model, self.shape.rank(point.tp)
        widest = max(2 * rank.ffn_size, rank.shared_ffn_size, (rank.heads + 2 * rank.kv_heads) * model.head_dim)
        if self.shape.experts is not None:
            widest = max(widest, 2 * self.shape.experts.per_token * (rank.expert_ffn_size + model.hidden_size))
        return computed_tokens(point) * (4 * model.hidden_size + 2 * widest) * self._element_bytes

    def _rank_elements(self, tp: int) -> float:
        """Return the weights that a rank is built with."""
        head = 2 * self.shape.rank(tp).vocabulary * self.shape.model.hidden_size
        return self.most_copies(tp) * self.shape.layer_matrix_parameters(tp, math.inf) + head

    @staticmethod
    def _kv_tokens(point: Point) -> float:
        prompts = point.requests * (point.prompt_tokens + point.cached_tokens) if point.prompt_tokens else 0
        return prompts + decoding_requests(point) * point.context_tokens


def _probes(tp: int) -> tuple[Point, Point]:
    return Point(Phase.PREFILL.value, tp, 2, 64, 64), Point(Phase.DECODE.value, tp, 2, context_tokens=64.0)


def spread_s(samples_s: Sequence[float]) -> float:
    """Return half of the samples' 16-84 % range, linear between them."""
    ordered = sorted(samples_s)

    def quantile(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return (quantile(0.84) - quantile(0.16)) / 2
