"""Which steps a profiling run times, and in which order, so that a run that stops early still says most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dsim.gpu import Gpu
from profiles.rows import Phase, Point
from profiles.shapes import Shape

#: Tokens of a block of the KV cache; contexts are whole blocks.
BLOCK_TOKENS = 16
PHASES = tuple(phase.value for phase in Phase)

#: Prompts shorter than this are as fast as this one.
_SHORTEST = 16
#: Share of the device's peak rates that a first guess of a step's time takes.
_FIRST_EFFICIENCY = 0.4


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest steps of a grid.

    Args:
        prompt_tokens: longest prompt, cached tokens included.
        prefill_tokens: most tokens computed in one step.
        prefill_requests: most prompts in one step.
        decode_requests: largest decode batch.
        context_tokens: longest context of a decoding request.
        kv_tokens: KV tokens that fit into memory beside the weights, by TP degree.
    """

    prompt_tokens: int
    prefill_tokens: int
    prefill_requests: int
    decode_requests: int
    context_tokens: int
    kv_tokens: Mapping[int, float]

    def allow(self, point: Point) -> bool:
        """Return whether the point is within every limit."""
        prompt = point.prompt_tokens + point.cached_tokens
        decoding = decoding_requests(point)
        kv_tokens = point.requests * prompt * bool(point.prompt_tokens) + decoding * point.context_tokens
        return (
            prompt <= self.prompt_tokens
            and point.prompt_tokens * point.requests + (decoding if point.prompt_tokens else 0) <= self.prefill_tokens
            and (not point.prompt_tokens or point.requests <= self.prefill_requests)
            and decoding <= self.decode_requests
            and point.context_tokens <= self.context_tokens
            and kv_tokens <= self.kv_tokens[point.tp]
        )


def decoding_requests(point: Point) -> int:
    """Return how many requests of the step decode."""
    return point.requests if point.phase == Phase.DECODE.value else point.decode_requests


def computed_tokens(point: Point) -> int:
    """Return how many tokens go through the step's matrices."""
    return point.requests * point.prompt_tokens + decoding_requests(point)


def make_grid(
    shape: Shape, gpu: Gpu, *, tps: Sequence[int], limits: Limits, dtype_bytes: int, phases: Sequence[str] = PHASES
) -> list[list[Point]]:
    """Return the points to time in levels, most telling first: coarse over the whole range, then ever finer.

    Each level goes over all TP degrees and phases, so that a budget that ends in between leaves whole levels. The
    fourth has the prefills around the knee.
    """
    knee = knee_tokens(gpu, dtype_bytes)
    levels = zip(_prefill_levels(limits, knee), _decode_levels(limits), _mixed_levels(limits), strict=True)
    seen: set[Point] = set()
    grid = []
    for prefill, decode, mixed in levels:
        placed = [replace(point, tp=tp) for tp in tps for point in (*prefill, *decode, *mixed)]
        level = [p for p in dict.fromkeys(placed) if p not in seen and p.phase in phases and limits.allow(p)]
        seen.update(level)
        grid.append(level)
    return grid


def knee_tokens(gpu: Gpu, dtype_bytes: int) -> int:
    """Return the tokens at which computing with a matrix takes as long as reading it: about where Lm lies.

    >>> from dsim.catalog import find_gpu
    >>> knee_tokens(find_gpu("h200"), 2)
    206
    """
    return max(round(dtype_bytes * gpu.bf16_flops_per_s / (2 * gpu.hbm_bytes_per_s)), 1)


def _prefill_levels(limits: Limits, knee: int) -> list[list[Point]]:
    longest = min(limits.prompt_tokens, limits.prefill_tokens)
    lengths = powers(_SHORTEST, longest)

    def batch(tokens: int, requests: int = 1, cached: int = 0) -> Point:
        return Point(Phase.PREFILL.value, 1, requests, tokens, cached)

    coarse = [batch(tokens) for tokens in thinned(lengths, 4)]
    octaves = [batch(tokens) for tokens in lengths]
    batches = [batch(tokens, n) for n in (4, 16, 2, 8, 32) for tokens in thinned(lengths, 2)[1:]]
    cached = [
        batch(tokens, 1, cached)
        for tokens in (256, 1024, 64, 2048)
        for cached in (512, 2048, 8192, 1024, 4096, 16384, 32768)
    ]
    near = sorted({round(knee * 2 ** (i / 4)) for i in range(-4, 13)})
    around = [batch(tokens) for tokens in near if _SHORTEST <= tokens <= longest]
    halves = [batch(3 * tokens // 2) for tokens in lengths]
    return [coarse, octaves, batches[: len(batches) * 2 // 5] + cached[:7], around, batches + halves, cached]


def _decode_levels(limits: Limits) -> list[list[Point]]:
    batches = powers(1, limits.decode_requests)
    contexts = powers(BLOCK_TOKENS * 4, limits.context_tokens)

    def grid(requests: Sequence[int], lengths: Sequence[int]) -> list[Point]:
        return [Point(Phase.DECODE.value, 1, n, context_tokens=float(c)) for c in lengths for n in requests]

    # From one row to two matrix products change kernels, most of all on CPUs.
    coarse = sorted({*thinned(batches, 4), *batches[:2]})
    finer = sorted({round(n * 1.5) for n in batches if n >= 2})
    return [
        # Corners and the middle.
        grid(thinned(batches, 16), thinned(contexts, 8)),
        grid(coarse, thinned(contexts, 4)),
        grid(batches, thinned(contexts, 8)),
        grid(coarse, contexts),
        grid(batches, contexts),
        grid(finer, thinned(contexts, 4)),
    ]


def _mixed_levels(limits: Limits) -> list[list[Point]]:
    def grid(chunks: Sequence[int], batches: Sequence[int], contexts: Sequence[int]) -> list[Point]:
        return [
            Point(Phase.MIXED.value, 1, 1, t, 0, float(c), n)
            for t in chunks
            for n in batches
            for c in contexts
            if n <= limits.decode_requests
        ]

    return [
        [],
        grid((512,), (8, 64), (1024,)),
        grid((256, 1024), (32,), (512, 2048)),
        [],
        grid((256, 512, 1024), (8, 64), (512, 2048)),
        grid((128, 2048), (16, 128), (1024, 4096)),
    ]


def powers(first: int, last: int) -> list[int]:
    """Return `first` times 1, 2, 4, ... below `last`, and `last`.

    >>> powers(16, 100)
    [16, 32, 64, 100]
    """
    if last <= first:
        return [last] if last >= 1 else []
    steps = [first * 2**i for i in range(math.ceil(math.log2(last / first)))]
    return [*(n for n in steps if n < last), last]


def thinned(numbers: Sequence[int], ratio: int) -> list[int]:
    """Return the numbers at least `ratio` times apart, the first and the last among them.

    >>> thinned([1, 2, 4, 8, 16, 32, 48], 4)
    [1, 4, 16, 48]
    """
    kept: list[int] = []
    for number in numbers:
        if not kept or number >= kept[-1] * ratio:
            kept.append(number)
    if numbers and kept[-1] != numbers[-1]:
        # The range counts more than the spacing, but two neighbours at its end would say the same.
        if len(kept) > 1 and numbers[-1] < kept[-1] * math.sqrt(ratio):
            kept.pop()
        kept.append(numbers[-1])
    return kept


@dataclass(slots=True)
class CostModel:
    """Guesses how long a step will take: a roofline whose efficiency is learnt from the steps timed so far.

    Args:
        flops_per_s: peak, a first guess.
        bytes_per_s: peak memory bandwidth, a first guess.
    """

    shape: Shape
    dtype_bytes: int
    flops_per_s: float
    bytes_per_s: float
    _slowness: dict[str, float] = field(default_factory=dict)

    def step_s(self, point: Point) -> float:
        """Return the guess for one step, in seconds."""
        factor = self._slowness.get(point.phase)
        if factor is None:
            factor = max(self._slowness.values(), default=1 / _FIRST_EFFICIENCY)
        return self._roofline_s(point) * factor

    def learn(self, point: Point, step_s: float) -> None:
        """Take a timed step into account; small steps are mostly overhead and say little about large ones."""
        seen = step_s / self._roofline_s(point)
        before = self._slowness.get(point.phase)
        self._slowness[point.phase] = seen if before is None else math.sqrt(seen * before)

    def _roofline_s(self, point: Point) -> float:
        model, tp = self.shape.model, point.tp
        tokens = computed_tokens(point)
        kv_tokens = decoding_requests(point) * point.context_tokens
        pairs = kv_tokens + point.requests * point.prompt_tokens * (point.prompt_tokens / 2 + point.cached_tokens)
        kv_tokens += point.requests * point.cached_tokens
        head = model.hidden_size * self.shape.rank(tp).vocabulary
        rows = point.requests + point.decode_requests
        flops = model.layers * self.shape.layer_flops_per_token(tp) * tokens + 2 * head * rows
        flops += 4 * model.layers * self.shape.rank(tp).heads * model.head_dim * pairs
        weights = model.layers * self.shape.layer_matrix_parameters(tp, tokens) + head
        read = weights * self.dtype_bytes + kv_tokens * self.shape.kv_bytes_per_token(tp, self.dtype_bytes)
        return max(flops / self.flops_per_s, read / self.bytes_per_s)


def dominated(point: Point, failed: Iterable[Point]) -> bool:
    """Return whether the step needs at least the memory of one that ran out of it."""
    return any(_memory_key(other) <= _memory_key(point) for other in failed if _same_kind(other, point))


def _same_kind(a: Point, b: Point) -> bool:
    return (a.phase, a.tp) == (b.phase, b.tp)


@dataclass(frozen=True, slots=True)
class _MemoryKey:
    sizes: tuple[float, ...]

    def __le__(self, other: _MemoryKey) -> bool:
        return all(a <= b for a, b in zip(self.sizes, other.sizes, strict=True))


def _memory_key(point: Point) -> _MemoryKey:
    return _MemoryKey(
        (
            point.requests,
            point.prompt_tokens,
            point.prompt_tokens + point.cached_tokens,
            point.decode_requests,
            point.context_tokens,
        )
    )


def listed(points: Iterable[Point]) -> Iterator[dict[str, int | float | str]]:
    """Yield the points as flat records, for `--dry-run`."""
    for point in points:
        yield {
            "phase": point.phase,
            "tp": point.tp,
            "requests": point.requests,
            "prompt_tokens": point.prompt_tokens,
            "cached_tokens": point.cached_tokens,
            "context_tokens": int(point.context_tokens),
            "decode_requests": point.decode_requests,
        }
