"""Rows of the documented form (docs/profile_rows.md) from composed step times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dsim.gpu import Gpu
from profiles.export import MEMORY_SHARE
from profiles.kernels.steps import ALL_REDUCE, KernelSteps, Part
from profiles.rows import Phase, Point, Row

#: Lengths and batches at which attention was timed, and between them batches at which products were.
_PROMPTS: Final = (1, 16, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_PROMPTS_A_STEP: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BATCHES: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 768, 1024)
_CONTEXTS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_CACHED: Final = ((512, 1536), (512, 7680), (2048, 2048), (2048, 6144), (2048, 14336), (8192, 8192))


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the rows go.

    Args:
        prefill_tokens: of one step.
        decode_requests: of one step.
    """

    prefill_tokens: int = 16384
    decode_requests: int = 1024


def composed_rows(steps: KernelSteps, gpu: Gpu, reach: Reach) -> list[Row]:
    """Return rows of one degree: no longer than the model's context, no more of it than memory has room for."""
    return [*_prefill_rows(steps, reach), *_decode_rows(steps, gpu, reach)]


def _prefill_rows(steps: KernelSteps, reach: Reach) -> Iterator[Row]:
    longest = steps.model.context_tokens
    for tokens in _PROMPTS:
        for n in _PROMPTS_A_STEP:
            if n * tokens > reach.prefill_tokens or tokens > longest or (tokens == 1 and n > 1):
                break
            yield _row(Point(Phase.PREFILL.value, steps.tp, n, tokens), steps.prefill_parts([(tokens, 0)] * n))
    for tokens, cached in _CACHED:
        if tokens <= reach.prefill_tokens and tokens + cached <= longest:
            point = Point(Phase.PREFILL.value, steps.tp, 1, tokens, cached)
            yield _row(point, steps.prefill_parts([(tokens, cached)]))


def _decode_rows(steps: KernelSteps, gpu: Gpu, reach: Reach) -> Iterator[Row]:
    most = kv_tokens(steps, gpu)
    for context in _CONTEXTS:
        for batch in _BATCHES:
            if context > steps.model.context_tokens or batch * context > most or batch > reach.decode_requests:
                break
            yield _decode_row(steps, batch, context)
    # All that any engine could keep, however much of the memory it takes, so that no full cache leaves the range.
    full = math.ceil(kv_tokens(steps, gpu, share=1.0))
    longest = min(steps.model.context_tokens, _CONTEXTS[-1])
    batch = next((b for b in _BATCHES if b * longest >= full), _BATCHES[-1])
    batch = min(batch, reach.decode_requests)
    yield _decode_row(steps, batch, min(math.ceil(full / batch), longest))


def _decode_row(steps: KernelSteps, batch: int, context: int) -> Row:
    point = Point(Phase.DECODE.value, steps.tp, batch, context_tokens=context)
    return _row(point, steps.decode_parts(batch, batch * context))


def _row(point: Point, parts: Sequence[Part]) -> Row:
    comm_s = sum(part.seconds for part in parts if part.name == ALL_REDUCE)
    return Row(point, sum(part.seconds for part in parts), comm_s=comm_s)


def kv_tokens(steps: KernelSteps, gpu: Gpu, *, share: float = MEMORY_SHARE) -> float:
    """Return the tokens that the KV cache of this degree has room for, 0 or less where the weights do not fit.

    Args:
        share: of the memory, for weights and KV.
    """
    model = steps.model
    free_bytes = share * gpu.memory_bytes * steps.tp - model.weight_bytes
    return free_bytes / (model.kv_bytes_per_token * model.kv_copies(steps.tp))
