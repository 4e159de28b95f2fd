"""The affine floor of an analytic model is nowhere above it, and close enough to be of use."""

from __future__ import annotations

import random

import pytest

from dsim.analytic import AnalyticLatency, analytic_latency
from dsim.catalog import find_gpu, find_model
from dsim.latency import ValidRange
from placement.floor import affine_floor

CASES = [
    ("llama-3.1-8b", "h100", 1),
    ("llama-3.1-70b", "h100", 8),
    ("deepseek-v3", "h200", 8),
    ("gpt-oss-120b", "b200", 1),
    ("qwen3-235b-a22b-fp8", "h100", 4),
    ("mixtral-8x7b", "a100-80g", 2),
    ("opt-66b", "a100-80g", 4),
    ("qwen3-4b", "l40s", 2),
]


def latency(name: str, gpu: str, tp: int) -> AnalyticLatency:
    model = find_model(name)
    return analytic_latency(
        model, find_gpu(gpu), tp, valid_range=ValidRange(chunk_tokens=model.context_tokens, decode_requests=512)
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_no_step_of_the_floor_takes_longer(case: tuple[str, str, int]) -> None:
    model = latency(*case)
    floor = affine_floor(model)
    decode, prefill = floor.small, floor.prefill
    for requests in range(1, 513):
        for context in (requests, 700 * requests):
            assert floor.decode_s(requests, context) <= model.decode_s(requests, context)
    drawn = random.Random(1)
    for tokens in (*range(1, 1100, 3), *(drawn.randint(1, 120_000) for _ in range(300))):
        assert floor.prefill_s([(tokens, 0)]) <= model.prefill_s([(tokens, 0)])
    for _ in range(300):
        chunks = [
            (int(10 ** drawn.uniform(0, 3.5)), drawn.choice([0, 0, 50, 3000])) for _ in range(drawn.randint(1, 6))
        ]
        assert floor.prefill_s(chunks) <= model.prefill_s(chunks)
        requests = drawn.randint(1, 512)
        # What bounds say of a mixed step: decoding, and each further token at the least slope.
        tokens, pairs = sum(t for t, _ in chunks), sum(t * (t + 2 * s) for t, s in chunks)
        added = prefill.least_per_token_s * tokens + prefill.per_token_squared_s * pairs
        added += decode.per_context_token_s * sum(s for _, s in chunks)
        assert floor.decode_s(requests, 900 * requests) + added <= model.mixed_s(chunks, requests, 900 * requests)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_floor_is_close(case: tuple[str, str, int]) -> None:
    model = latency(*case)
    floor = affine_floor(model)
    assert len(floor.prefill.bends) <= 8
    assert list(floor.prefill.bends) == sorted(floor.prefill.bends)
    # The experts that few tokens need make a curve that no convex line follows.
    share = 0.75 if model.model.experts is None else 0.3
    for tokens in (512, 2048, 8192):
        assert floor.prefill_s([(tokens, 0)]) > share * model.prefill_s([(tokens, 0)])
    for requests in (1, 8, 64, 256):
        assert floor.decode_s(requests, 800 * requests) > share * model.decode_s(requests, 800 * requests)
