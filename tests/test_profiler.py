"""The profiler with torch, on the CPU: what a rank computes, how it is timed, and whole runs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import multiprocessing
import re
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[profile]'")

import profiles.session
from dsim.catalog import find_gpu
from dsim.errors import InputError
from dsim.model import Experts, Model
from profiles import profiling
from profiles.allreduce import AllReduces, interpolated
from profiles.profiler import TorchTimer, collective, open_device
from profiles.profiler.collective import time_all_reduces
from profiles.profiler.device import Cpu, Cuda, _sampled, translated_errors
from profiles.profiler.layer import RankModel, Step, Tensor
from profiles.profiler.timer import spread_s
from profiles.rows import Point, Status, read_rows
from profiles.scripts import h200
from profiles.session import OutOfMemoryError, Silence, StepFailedError
from profiles.shapes import Shape, shape_of
from tests.cli import Cli

TINY = shape_of("tiny")


def small(*, gated: bool = True, learned: bool = False, kv_heads: int = 2, head_dim: int = 16) -> Model:
    return Model(
        name="small",
        hugging_face="small",
        layers=3,
        hidden_size=64,
        attention_heads=4,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=128,
        vocabulary=512,
        context_tokens=128,
        gated_mlp=gated,
        learned_positions=learned,
        biases=learned,
        tied_embeddings=learned,
        source="made up",
        dtype_bytes=4,
    )


SHAPES = {
    "grouped": Shape(small()),
    "multi-head": Shape(small(kv_heads=4)),
    "one KV head": Shape(small(kv_heads=1)),
    "wide heads": Shape(small(head_dim=32)),
    "opt": Shape(small(gated=False, learned=True, kv_heads=4)),
    "qk-norm": Shape(small(), qk_norm=True),
}
MOE = Shape(replace(small(), experts=Experts(experts=8, per_token=2, ffn_size=32, shared_ffn_size=16)))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def rank(shape: Shape, tp: int = 1, copies: int = 2) -> RankModel:
    return RankModel(shape, tp, dtype=torch.float32, device="cpu", copies=copies)


def prompt(requests: int, tokens: int, cached: int = 0) -> Point:
    return Point("prefill", 1, requests, tokens, cached)


def outputs(model: RankModel, step: Step) -> Tensor:
    return model.run_layers(step, 2)


@pytest.mark.parametrize("native", [True, False], ids=["grouped kernel", "expanded"])
@pytest.mark.parametrize("name", SHAPES)
class TestOneForwardPassInPieces:
    """Whichever way a prompt is cut into steps, its last tokens' activations are the same."""

    def whole(self, name: str, *, native: bool) -> tuple[RankModel, Step, Tensor]:
        model = rank(SHAPES[name])
        model.groups_natively = native
        step = model.step(prompt(2, 24), copies=2)
        return model, step, outputs(model, step)

    def test_a_chunk_after_cached_tokens(self, name: str, *, native: bool) -> None:
        model, whole, expected = self.whole(name, native=native)
        chunk = model.step(prompt(2, 8, 16), copies=2)
        for there, kv in zip(whole.prompt_kv, chunk.prompt_kv, strict=True):
            kv[:, :, :, :16].copy_(there[:, :, :, :16])
        chunk.hidden.copy_(whole.hidden.view(2, 24, -1)[:, 16:].reshape(16, -1))
        torch.testing.assert_close(outputs(model, chunk), expected.view(2, 24, -1)[:, 16:].reshape(16, -1))

    def test_a_decode_step(self, name: str, *, native: bool) -> None:
        model, whole, expected = self.whole(name, native=native)
        decode = model.step(Point("decode", 1, 2, context_tokens=24.0), copies=2)
        for there, kv in zip(whole.prompt_kv, decode.decode_kv, strict=True):
            kv[:, :, :, :23].copy_(there[:, :, :, :23])
        decode.hidden.copy_(whole.hidden.view(2, 24, -1)[:, 23])
        torch.testing.assert_close(outputs(model, decode), expected.view(2, 24, -1)[:, 23])

    def test_a_mixed_step(self, name: str, *, native: bool) -> None:
        model, whole, expected = self.whole(name, native=native)
        mixed = model.step(Point("mixed", 1, 2, 24, 0, 24.0, 2), copies=2)
        for there, kv in zip(whole.prompt_kv, mixed.decode_kv, strict=True):
            kv[:, :, :, :23].copy_(there[:, :, :, :23])
        last = whole.hidden.view(2, 24, -1)[:, 23]
        mixed.hidden.copy_(torch.cat([whole.hidden, last]))
        torch.testing.assert_close(outputs(model, mixed), torch.cat([expected, expected.view(2, 24, -1)[:, 23]]))


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("opt", "qk-norm")])
def test_attention_is_softmax_over_rotated_queries_and_keys(name: str) -> None:
    """Against RoFormer's formula (arXiv 2104.09864, section 3.4.2), in complex numbers, and softmax attention."""
    model = rank(SHAPES[name])
    step = model.step(prompt(1, 9), copies=1)
    layer, shape = model.layers[0], SHAPES[name].model
    heads = (step.hidden @ layer.qkv.T).view(9, -1, shape.head_dim).double()
    q, k, v = heads.split([shape.attention_heads, shape.kv_heads, shape.kv_heads], dim=1)

    def rotated(x: Tensor) -> Tensor:
        half = shape.head_dim // 2
        frequency = torch.tensor([10_000.0 ** (-i / half) for i in range(half)], dtype=torch.float64)
        turn = torch.polar(torch.ones(9, half, dtype=torch.float64), torch.arange(9)[:, None] * frequency)
        turned = torch.complex(x[..., :half], x[..., half:]) * turn[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    group = shape.attention_heads // shape.kv_heads
    q, k, v = rotated(q), rotated(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(shape.head_dim)
    scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -math.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(9, -1)
    found = model._attention(layer, step, 0, step.hidden)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cached", [1, 16, 40])
@pytest.mark.parametrize("tokens", [2, 8])
def test_the_gpus_mask_of_cached_prompts_is_the_cpus(cached: int, tokens: int) -> None:
    results = []
    for device in ("cpu", "cpu:0"):
        model = RankModel(SHAPES["grouped"], 1, dtype=torch.float32, device=device, copies=2)
        model.groups_natively = False
        step = model.step(prompt(2, tokens, cached), copies=2)
        results.append((step.mask, outputs(model, step)))
    (own, expected), (made_by_torch, found) = results
    assert type(made_by_torch) is not type(own)
    torch.testing.assert_close(found, expected)


def test_large_tensors_are_as_random_as_small_ones() -> None:
    model = rank(SHAPES["grouped"])
    weights = model._weight(1000, 256)
    assert weights.std() == pytest.approx(0.02, rel=0.02)
    assert abs(float(weights.mean())) < 3e-4
    assert len(torch.unique(weights, dim=0)) == 1000
    assert bool(torch.isfinite(weights).all())


@pytest.mark.parametrize("name", SHAPES)
def test_attention_looks_back_only(name: str) -> None:
    model = rank(SHAPES[name])
    step = model.step(prompt(1, 12), copies=2)
    before = outputs(model, step).clone()
    step.hidden[8:].normal_()
    after = outputs(model, step)
    torch.testing.assert_close(after[:8], before[:8])
    assert not torch.allclose(after[8:], before[8:])


def tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from tensors(item)


@pytest.mark.parametrize("name", [*SHAPES, "moe", "tiny"])
def test_a_rank_holds_as_many_weights_as_the_model_has(name: str) -> None:
    shape = {**SHAPES, "moe": MOE, "tiny": TINY}[name]
    model = rank(shape, copies=1)
    layer = model.layers[0]
    matrices = sum(t.numel() for slot in layer.__slots__ for t in tensors(getattr(layer, slot)) if t.dim() > 1)
    assert matrices == shape.layer_matrix_parameters(1, math.inf)
    everything = sum(t.numel() for slot in layer.__slots__ for t in tensors(getattr(layer, slot)))
    if name not in ("moe", "qk-norm", "opt"):
        ends = (1 if shape.model.tied_embeddings else 2) * shape.model.vocabulary * shape.model.hidden_size
        assert shape.model.layers * everything + ends + shape.model.hidden_size == shape.model.parameters


def test_each_degree_holds_its_share() -> None:
    for tp in (1, 2, 4):
        layer = rank(TINY, tp, copies=1).layers[0]
        matrices = [layer.qkv, layer.out, layer.up, layer.down]
        assert sum(t.numel() for t in matrices if t is not None) == TINY.layer_matrix_parameters(tp, 1)


def test_ends_give_the_last_tokens_logits() -> None:
    model = rank(SHAPES["grouped"])
    assert model.run_ends(model.step(prompt(3, 8), copies=1)).shape == (3, 512)
    assert model.run_ends(model.step(Point("mixed", 1, 1, 8, 0, 16.0, 5), copies=1)).shape == (6, 512)
    shared = rank(SHAPES["grouped"], tp=2)
    assert shared.run_ends(shared.step(Point("decode", 2, 4, context_tokens=16.0), copies=1)).shape == (4, 256)


def test_experts_share_the_tokens_evenly() -> None:
    model = rank(MOE)
    step = model.step(prompt(1, 64), copies=2)
    assert step.routing is not None
    assert step.routing.experts == 8
    counts = torch.bincount(step.routing.tokens, minlength=64)
    assert counts.tolist() == [2] * 64
    out = outputs(model, step)
    assert out.shape == (64, 64)
    assert bool(torch.isfinite(out).all())
    few = model.step(Point("decode", 1, 1, context_tokens=16.0), copies=2)
    assert few.routing is not None
    assert few.routing.experts == 2


def test_caches_are_whole_blocks() -> None:
    step = rank(SHAPES["grouped"]).step(Point("decode", 1, 3, context_tokens=17.0), copies=2)
    assert [tuple(kv.shape) for kv in step.decode_kv] == [(2, 3, 2, 32, 16)] * 2


@pytest.fixture
def timer() -> TorchTimer:
    return TorchTimer(TINY, open_device("cpu"), dtype="fp32")


def test_copies_keep_weights_out_of_the_caches(timer: TorchTimer) -> None:
    layers = TINY.model.layers
    decode = Point("decode", 1, 1, context_tokens=64.0)
    bytes_of_one = TINY.layer_matrix_parameters(1, 1) * 4
    copies = timer.copies(decode)
    assert copies == layers or copies * bytes_of_one >= 3 * timer.device.cache_bytes
    assert timer.most_copies(1) >= copies
    # Long prompts' activations pass through the caches too; nothing jumps where there are more of them.
    numbers = [timer.copies(prompt(1, tokens)) for tokens in range(16, 4096, 16)]
    assert numbers == sorted(numbers, reverse=True)
    assert all(a - b <= 1 for a, b in itertools.pairwise(numbers))
    hidden, ffn = TINY.model.hidden_size, TINY.model.ffn_size
    one = bytes_of_one + 512 * (4 * hidden + 4 * ffn) * 4 + 512 * TINY.kv_bytes_per_token(1, 4) / layers
    enough = math.ceil(3 * timer.device.cache_bytes / one)
    assert timer.copies(prompt(1, 512)) == min(layers, max(2, enough))
    large = TorchTimer(shape_of("llama-3.1-8b"), open_device("cpu"), dtype="bf16")
    activations = 2 * (4 * 4096 + 4 * 14336)
    one = 218_103_808 * 2 + 64 * 4096 + activations
    assert large.copies(decode) == max(2, math.ceil(3 * timer.device.cache_bytes / one))


def test_a_timing_is_layers_and_ends(timer: TorchTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([[0.4, 0.2, 0.3, 0.9, 0.8], [0.05, 0.05, 0.06, 0.05, 0.05], [0.4], [0.05]])
    monkeypatch.setattr(Cpu, "samples_s", lambda *_, **__: next(given))
    monkeypatch.setattr(TorchTimer, "copies", lambda *_: 2)
    timing = timer.time(prompt(1, 600), seconds=0.1)
    # Two of twelve layers were run.
    assert timing.step_s == pytest.approx(6 * 0.4 + 0.05)
    assert timing.spread_s == pytest.approx(
        math.hypot(6 * spread_s([0.2, 0.3, 0.4, 0.8, 0.9]), spread_s([0.05] * 4 + [0.06]))
    )
    assert timing.samples == 5
    alone = timer.time(prompt(1, 600), seconds=0.1)
    assert alone.step_s == pytest.approx(6 * 0.4 + 0.05)
    assert (alone.spread_s, alone.samples) == (None, 1)


@dataclass
class FakeRuns:
    """Runs that each take `run_s` of a clock that also advances by itself, as other programs' shares do."""

    run_s: float
    others_s: float = 0.0
    now_s: float = 100.0
    runs: list[int] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s

    def timed(self, times: int) -> float:
        self.runs.append(times)
        self.now_s += times * (self.run_s + self.others_s)
        return times * self.run_s

    def sampled(self, *, seconds: float, at_least: int = 5) -> list[float]:
        return _sampled(self.timed, seconds=seconds, at_least=at_least, timing_s=4e-3, clock=self.clock)


class TestSamples:
    """Against a clock that stands still but for the runs: seconds of one run, as many as asked for."""

    @pytest.mark.parametrize("run_s", [1e-6, 3e-4, 1e-3, 5e-3, 0.04, 0.05, 2.0])
    @pytest.mark.parametrize("others_s", [0.0, 0.01])
    def test_samples_are_seconds_of_single_runs(self, run_s: float, others_s: float) -> None:
        runs = FakeRuns(run_s, others_s)
        samples = runs.sampled(seconds=0.0)
        assert samples == pytest.approx([run_s] * len(samples), rel=1e-9)
        assert len(samples) == (3 if run_s >= 0.05 else 5)

    def test_short_runs_are_timed_several_at_once(self) -> None:
        runs = FakeRuns(1e-3)
        assert len(runs.sampled(seconds=0.0)) == 5
        # The first only says how long one takes.
        assert runs.runs == [1, 4, 4, 4, 4, 4]

    def test_a_long_run_counts_from_the_first_on(self) -> None:
        runs = FakeRuns(0.3)
        assert len(runs.sampled(seconds=0.0)) == 3
        assert runs.runs == [1, 1, 1]
        assert FakeRuns(0.3).sampled(seconds=0.0, at_least=2) == [0.3]

    def test_time_left_is_used_by_the_clock_on_the_wall(self) -> None:
        assert len(FakeRuns(1 / 128).sampled(seconds=20 / 128)) == 20
        assert len(FakeRuns(1 / 128, others_s=1 / 128).sampled(seconds=20 / 128)) == 10
        assert len(FakeRuns(1 / 128).sampled(seconds=100.0)) == 30

    def test_the_cpu_takes_the_threads_clock_for_one_thread_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clocks = {"thread_time": 0.0, "perf_counter": 0.0}

        def run() -> None:
            clocks["thread_time"] += 0.06
            clocks["perf_counter"] += 0.18

        monkeypatch.setattr(time, "thread_time", lambda: clocks["thread_time"])
        monkeypatch.setattr(time, "perf_counter", lambda: clocks["perf_counter"])
        one, two = Cpu(1), Cpu(2)
        assert one.samples_s(run, seconds=0.0, at_least=4) == pytest.approx([0.06, 0.06])
        assert two.samples_s(run, seconds=0.0, at_least=4) == pytest.approx([0.18, 0.18])
        assert (one.settings()["clock"], two.settings()["clock"]) == ("thread", "wall")


def test_spread_is_half_of_the_middle_two_thirds() -> None:
    assert spread_s([float(n) for n in range(101)]) == pytest.approx(34)
    assert spread_s([1.0]) == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_kind_of_step_is_timed(dtype: str) -> None:
    timer = TorchTimer(TINY, open_device("cpu"), dtype=dtype)
    timer.probe((1, 2))
    for point in (
        prompt(1, 1),
        prompt(2, 32),
        prompt(1, 16, 32),
        Point("decode", 2, 3, context_tokens=17.0),
        Point("decode", 2, 1, context_tokens=1.0),
        Point("mixed", 2, 1, 16, 16, 32.0, 2),
    ):
        timing = timer.time(point, seconds=0.0)
        assert timing.step_s > 0
        assert timing.samples >= 1


def test_experts_are_timed() -> None:
    timer = TorchTimer(MOE, open_device("cpu"), dtype="fp32")
    assert timer.time(prompt(2, 16), seconds=0.0).step_s > 0
    assert timer.settings()["experts"] == "even random routing, batched matrix products"


def test_work_takes_time(timer: TorchTimer) -> None:
    def typical_s(point: Point) -> float:
        return statistics.median(timer.time(point, seconds=0.02).step_s for _ in range(3))

    assert typical_s(prompt(1, 512)) > 2 * typical_s(prompt(1, 16))
    assert typical_s(Point("decode", 1, 16, context_tokens=2048.0)) > typical_s(
        Point("decode", 1, 1, context_tokens=64.0)
    )


def test_what_cannot_fit_is_not_tried(timer: TorchTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "free_bytes", lambda _: 10**8)
    with pytest.raises(OutOfMemoryError, match=r"needs .* GiB, 0\.1 GiB are free"):
        timer.time(Point("decode", 1, 1024, context_tokens=2048.0), seconds=0.0)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (MemoryError(), OutOfMemoryError),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), OutOfMemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemoryError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OutOfMemoryError),
        (RuntimeError("no kernel\nmore"), StepFailedError),
        (TypeError("scaled_dot_product_attention() got an unexpected keyword argument"), StepFailedError),
        (ValueError("head_dim must be a multiple of 8"), StepFailedError),
    ],
)
def test_torchs_errors_are_translated(raised: Exception, expected: type[Exception]) -> None:
    with pytest.raises(expected), translated_errors():
        raise raised


def test_a_missing_gpu_is_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InputError, match="torch sees no CUDA GPU; use --device cpu"):
        open_device("cuda")


def test_all_reduces_between_processes_are_timed() -> None:
    timed = time_all_reduces(2, (4096, 1 << 20), backend="gloo")
    assert timed.keys() == {4096, 1 << 20}
    assert all(0 < seconds < 1 for seconds in timed.values())
    point = Point("prefill", 2, 1, 16)
    reduces = AllReduces(TINY, 4, {2: timed})
    gather_s = interpolated(timed, TINY.model.vocabulary * 4 / 2)
    assert reduces.step_s(point) == pytest.approx(25 * interpolated(timed, 16 * 256 * 4) + gather_s)


def test_all_reduces_that_fail_are_one_line() -> None:
    with pytest.raises(StepFailedError, match=r"^all-reduces: .+") as caught:
        time_all_reduces(2, (4096,), backend="carrier pigeon")
    assert "\n" not in str(caught.value)


def test_all_reduces_that_never_end_are_given_up() -> None:
    with pytest.raises(StepFailedError, match="all-reduces: no answer within 0 s"):
        time_all_reduces(2, (4096,), backend="gloo", timeout_s=0.0)
    assert not multiprocessing.active_children()


def test_all_reduces_that_fail_are_modelled_and_the_head_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def failing(tp: int, *_: object, **__: object) -> dict[int, float]:
        asked.append(tp)
        if tp == 2:
            raise StepFailedError("all-reduces: unhandled system error")
        return {4096: 1e-5, 1 << 20: 2e-5}

    monkeypatch.setattr(collective, "available", lambda *_: True)
    monkeypatch.setattr(collective, "time_all_reduces", failing)
    monkeypatch.setattr(
        profiling, "make_grid", lambda *_, tps, **__: [[Point("decode", tp, 1, context_tokens=16.0) for tp in tps]]
    )
    out = tmp_path / "rows.csv"
    question = profiling.Question(TINY, find_gpu("cpu"), "cpu", (2, 4), "fp32", rounds=1)
    timed: dict[int, Mapping[int, float]] = {}
    profiling.profile(question, out, budget_s=300, progress=Silence(), timed_all_reduces=timed)
    head = read_rows(out).metadata
    assert head.all_reduce == "modelled"
    assert head.settings["all_reduce_tp2"].startswith("modelled: 5e-06 s")
    assert head.settings["all_reduce_tp2_not_timed"] == "all-reduces: unhandled system error"
    assert head.settings["all_reduce_tp4"].startswith("measured, 4096 bytes 1e-05 s")
    # A later job of the same machine need not time them again.
    profiling.profile(
        replace(question, tps=(4,)), tmp_path / "b.csv", budget_s=300, progress=Silence(), timed_all_reduces=timed
    )
    assert asked == [2, 4]


class PretendedGraph:
    """Captures nothing; a replay takes a fixed time of the device, in which the caller goes on."""

    MILLISECONDS = 0.25
    queued_ms = 0.0

    def replay(self) -> None:
        PretendedGraph.queued_ms += self.MILLISECONDS


class PretendedEvent:
    """An event of CUDA: it is reached when the device comes to it, and its time known only after waiting for that."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms: float | None = None
        self.reached = False

    def record(self) -> None:
        self.at_ms = PretendedGraph.queued_ms

    def synchronize(self) -> None:
        assert self.at_ms is not None
        self.reached = True

    def elapsed_time(self, end: PretendedEvent) -> float:
        # As CUDA does: "device not ready" for events that were not reached.
        if self.at_ms is None or end.at_ms is None or not end.reached:
            raise RuntimeError("CUDA error: device not ready")
        return end.at_ms - self.at_ms


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for everything of torch.cuda that is used; tensors stay on the CPU."""
    cuda = torch.cuda
    stream = SimpleNamespace(wait_stream=lambda _: None)
    properties = SimpleNamespace(
        L2_cache_size=50 * 2**20, total_memory=141 * 2**30, multi_processor_count=132, major=9, minor=0, uuid="1-2"
    )
    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda _: None,
        "get_device_properties": lambda _: properties,
        "get_device_name": lambda _: "NVIDIA H200",
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda _: (140 * 2**30, 141 * 2**30),
        "memory_reserved": lambda _: 0,
        "memory_allocated": lambda _: 0,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "graph": lambda _: contextlib.nullcontext(),
        "CUDAGraph": PretendedGraph,
        "Event": PretendedEvent,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(cuda, name, stand_in)
    monkeypatch.setattr(Cuda, "torch_name", "cpu")
    # Seconds of a GPU's work are minutes of a CPU's.
    monkeypatch.setattr(Cuda, "_heat_up", lambda *_, **__: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.mark.usefixtures("pretended_gpu")
class TestTheGpusCode:
    """That the GPU's code runs at all; what it does there, only a GPU can tell."""

    def test_device(self) -> None:
        device = open_device("cuda")
        assert device.facts() == {
            "device": "NVIDIA H200",
            "driver": "NVIDIA unknown",
            "torch": f"{torch.__version__} CUDA {torch.version.cuda}",
        }
        assert device.free_bytes() == 140 * 2**30
        assert device.settings()["cuda_graphs"] == "yes"
        with pytest.raises(InputError, match="torch sees 1 GPUs"):
            open_device("cuda:1")

    def test_a_replay_is_timed_in_seconds_between_events_that_were_waited_for(self) -> None:
        device = open_device("cuda")
        replay = device.prepared(lambda: None)
        samples = device.samples_s(replay, seconds=0.0, at_least=5)
        assert samples == pytest.approx([PretendedGraph.MILLISECONDS / 1000] * 5, rel=1e-9)

    def test_clocks_are_read_while_it_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = open_device("cuda")
        working: list[bool] = []

        def heat_up(_: object, until: Callable[[], bool] = lambda: True) -> None:
            working.append(True)
            while not until():
                time.sleep(0.001)
            working.append(False)

        def asked(_: object, query: str) -> str:
            while not working:
                time.sleep(0.001)
            assert working[-1]
            return ", ".join(f"{name} x" for name in query.split(","))

        monkeypatch.setattr(Cuda, "_heat_up", heat_up)
        monkeypatch.setattr(Cuda, "_asked", asked)
        settings = device.settings()
        assert working == [True, False]
        assert (settings["sm_clock"], settings["temperature_c"]) == ("clocks.sm x", "temperature.gpu x")

    def refuse_graphs(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        def refusing(_: object) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(torch.cuda, "graph", refusing)

    def test_steps_that_cannot_be_captured_all_run_eagerly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = open_device("cuda")
        self.refuse_graphs(monkeypatch, "operation not permitted when stream is capturing")
        timer = TorchTimer(TINY, device, dtype="fp32")
        timer.probe((1,))
        assert timer.settings()["cuda_graphs"] == "no"

        def run() -> None:
            pass

        assert device.prepared(run) == run

    def test_a_later_step_that_cannot_be_captured_fails_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        timer = TorchTimer(TINY, open_device("cuda"), dtype="fp32")
        timer.probe((1,))
        with monkeypatch.context() as patch:
            self.refuse_graphs(patch, "CUDA error: operation failed due to a previous error during capture")
            with pytest.raises(StepFailedError, match="during capture"):
                timer.time(prompt(1, 16), seconds=0.0)
        assert timer.settings()["cuda_graphs"] == "yes"
        assert timer.time(prompt(1, 16), seconds=0.0).step_s > 0

    def test_an_illegal_access_is_no_matter_of_graphs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        timer = TorchTimer(TINY, open_device("cuda"), dtype="fp32")
        self.refuse_graphs(monkeypatch, "CUDA error: an illegal memory access was encountered")
        with pytest.raises(StepFailedError, match="illegal memory access"):
            timer.probe((1,))
        assert timer.settings()["cuda_graphs"] == "yes"

    def test_memory_is_given_back_when_the_steps_tensors_are_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        timer = TorchTimer(TINY, open_device("cuda"), dtype="fp32")
        timer.probe((1,))
        steps: list[weakref.ref[Tensor]] = []
        alive: list[bool] = []

        def full(_: object, step: Step, __: int) -> None:
            steps.append(weakref.ref(step.hidden))
            raise torch.OutOfMemoryError("CUDA out of memory")

        def release(_: object) -> None:
            alive.append(any(step() is not None for step in steps))
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(RankModel, "run_layers", full)
        monkeypatch.setattr(Cuda, "release", release)
        with pytest.raises(OutOfMemoryError, match="CUDA out of memory"):
            timer.time(prompt(1, 16), seconds=0.0)
        assert alive == [False]

    @pytest.mark.parametrize(
        ("own", "name"),
        [
            ("NVIDIA H200", "h200-sxm"),
            ("NVIDIA H200 NVL", "h200-sxm"),
            ("NVIDIA A100-PCIE-40GB", "a100-40g"),
            ("NVIDIA A100-SXM4-80GB", "a100-80g"),
            ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ],
    )
    def test_gpus_are_known_by_what_they_call_themselves(
        self, own: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: own)
        assert profiling.gpu_of(None, device="cuda").name == name

    def test_a_slice_of_a_gpu_is_not_taken_for_the_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200 MIG 1g.18gb")
        with pytest.raises(InputError, match=r"--gpu: is needed: 'NVIDIA H200 MIG 1g\.18gb' is a slice of a GPU"):
            profiling.gpu_of(None, device="cuda")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA X1")
        with pytest.raises(InputError, match="is needed: the catalog has no 'NVIDIA X1'"):
            profiling.gpu_of(None, device="cuda")

    def test_a_whole_run(self, cli: Cli, tmp_path: Path) -> None:
        out = tmp_path / "rows.csv"
        run = cli("profile", "run", "-m", "tiny", "--largest-prefill", "64", "--largest-context", "64", "--rounds", "1",
                  "--largest-batch", "4", "--budget", "300s", "--tp", "1,2", "--out", str(out), "-q")  # fmt: skip
        assert run.code == 0, run.err
        layers = TINY.model.layers
        for row in (line.split(",") for line in out.read_text().splitlines() if line.endswith(",ok")):
            # A chain of all twelve layers and the ends are one replay each, whatever the step; all-reduces come on top.
            assert float(row[8]) - float(row[9]) == pytest.approx(2 * PretendedGraph.MILLISECONDS / 1000, rel=1e-3)
            assert layers == 12
        text = out.read_text()
        assert "# gpu: h200-sxm\n" in text
        assert "# device: NVIDIA H200\n" in text
        assert "cuda_graphs: 'yes'" in text


#: A grid so small that no budget matters, however busy the machine is.
SMALL_GRID = ("--largest-prefill", "64", "--largest-batch", "4", "--largest-context", "64", "--budget", "300s")


@pytest.fixture
def _short_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare time of the budget makes no visit longer."""
    monkeypatch.setattr(profiles.session, "_SLICE_S", 0.0)


@pytest.mark.usefixtures("_short_visits")
class TestWholeRuns:
    def test_run_then_resume(self, cli: Cli, tmp_path: Path) -> None:
        out = tmp_path / "rows.csv"
        asked = ("profile", "run", "--model", "tiny", "--device", "cpu", "--tp", "1,2", "--out", str(out), "-q")
        run = cli(*asked, *SMALL_GRID, "--rounds", "1")
        assert (run.code, run.err) == (0, "")
        assert run.out.startswith(f"{out}: ")
        first = read_rows(out)
        assert first.metadata.model == TINY.model
        assert (first.metadata.dtype, first.metadata.all_reduce, first.metadata.torch) == (
            "fp32",
            "modelled",
            torch.__version__,
        )
        assert first.metadata.settings["threads"] == "1"
        assert {row.status for row in first.rows} == {Status.OK}
        assert {row.point.tp for row in first.rows} == {1, 2}
        again = cli(*asked, *SMALL_GRID, "--rounds", "2", "--resume")
        assert again.code == 0
        second = read_rows(out).rows
        assert second[: len(first.rows)] == first.rows
        assert len(second) == 2 * len(first.rows)
        other = cli.refused(*asked, "--resume", "--dtype", "bf16")
        assert other.startswith(f"{out}: model was timed with") or "dtype was timed with fp32" in other

    def test_run_fit_simulate_as_in_the_readme(self, cli: Cli, tmp_path: Path) -> None:
        rows, profile = str(tmp_path / "rows.csv"), str(tmp_path / "my.yaml")
        run = cli(
            *("profile", "run", "--device", "cpu", "--model", "dsim-tiny-14m", "--out", rows, "-q", "--rounds", "5"),
            *("--phases", "prefill,decode", "--largest-prefill", "128", "--largest-batch", "8"),
            *("--largest-context", "512", "--budget", "300s"),
        )
        assert run.code == 0
        fit = cli("profile", "fit", rows, "-o", profile)
        assert fit.code == 0, fit.err
        simulated = cli(
            *("simulate", "--profile", profile, "--placement", "1xP:tp1pp1 + 1xD:tp1pp1", "--rate", "0.1"),
            *(
                "--workload",
                "fixed:128,16",
                "--slo",
                "ttft=10,tpot=1",
                "-n",
                "50",
                "--warmup",
                "5",
                "--format",
                "json",
            ),
        )
        assert simulated.code == 0, simulated.err

    def test_a_config_file(self, cli: Cli, tmp_path: Path) -> None:
        config = {
            "model_type": "qwen3",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 96,
            "vocab_size": 500,
            "max_position_embeddings": 256,
            "torch_dtype": "bfloat16",
            "_name_or_path": "somebody/nano",
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        out = tmp_path / "rows.csv"
        run = cli("profile", "run", "--model", str(tmp_path / "config.json"), "--device", "cpu", "--out", str(out),
                  *SMALL_GRID, "--phases", "decode")  # fmt: skip
        assert run.code == 0
        model = read_rows(out).metadata.model
        assert model is not None
        assert (model.name, model.head_dim, model.dtype_bytes) == ("nano", 32, 4)

    def test_memory_that_runs_out_is_a_row(self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Cpu, "free_bytes", lambda _: 9 * 10**7)
        out = tmp_path / "rows.csv"
        run = cli("profile", "run", "-m", "tiny", "--device", "cpu", "--out", str(out), "--budget", "300s",
                  "--rounds", "1", "--phases", "decode", "--largest-batch", "512", "--largest-context", "1024",
                  "-q")  # fmt: skip
        assert run.code == 0
        assert "ran out of memory or failed" in run.out
        assert {row.status for row in read_rows(out).rows} >= {Status.OK, Status.OOM}

    def test_an_interrupt_says_how_to_go_on(self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(TorchTimer, "probe", lambda *_: None)
        monkeypatch.setattr(TorchTimer, "time", interrupted)
        out = tmp_path / "rows.csv"
        run = cli("profile", "run", "-m", "tiny", "--device", "cpu", "--out", str(out), "--budget", "4s")
        assert run.code == 130
        assert run.err.splitlines()[-1] == f"stopped; the same command with --resume goes on with {out}"
        assert out.exists()

    def test_a_device_too_small_for_the_model(self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Cpu, "free_bytes", lambda _: 10**6)
        out = tmp_path / "rows.csv"
        error = cli.refused("profile", "run", "-m", "tiny", "--device", "cpu", "--out", str(out), "-q", code=1)
        assert error.startswith("needs 0.1 GiB")
        assert not out.exists()

    def test_a_model_too_large_for_the_budget_is_refused_at_once(self, cli: Cli, tmp_path: Path) -> None:
        out = tmp_path / "rows.csv"
        started_s = time.thread_time()
        error = cli.refused("profile", "run", "-m", "llama-3.1-70b", "--device", "cpu", "--budget", "2s", "--out",
                            str(out), "-q", code=1)  # fmt: skip
        assert time.thread_time() - started_s < 2
        assert re.search(r"making weights of llama-3.1-70b and a first step take about \d+ s, [12] s are left", error)
        assert not out.exists()

    def test_experts_are_in_the_head(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(profiling, "make_grid", lambda *_, **__: [[Point("decode", 1, 1, context_tokens=16.0)]])
        question = profiling.Question(MOE, find_gpu("cpu"), "cpu", (1,), "fp32", rounds=1)
        profiling.profile(question, tmp_path / "rows.csv", budget_s=300, progress=Silence())
        model = read_rows(tmp_path / "rows.csv").metadata.model
        assert model is not None
        assert model.experts == MOE.experts

    def test_what_is_prepared_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shown: list[tuple[str, bool]] = []
        probed: list[bool] = []

        class Note:
            def update(self, *, elapsed_s: float, budget_s: float, rows: int, text: str) -> None:
                del elapsed_s, budget_s, rows
                shown.append((text, bool(probed)))

        monkeypatch.setattr(TorchTimer, "probe", lambda *_: probed.append(True))
        monkeypatch.setattr(profiling, "make_grid", lambda *_, **__: [[Point("decode", 1, 1, context_tokens=16.0)]])
        question = profiling.Question(TINY, find_gpu("cpu"), "cpu", (1,), "fp32", rounds=1)
        profiling.profile(question, tmp_path / "rows.csv", budget_s=300, progress=Note())
        assert shown[0] == ("preparing", False)
        assert shown[-1] == ("done", True)

    @pytest.mark.parametrize("budget", ["nan", "inf", "0", "-5", "x"])
    def test_the_h200_script_checks_its_budget(
        self, budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            h200.main(["-o", str(tmp_path / "rows"), f"--budget={budget}", "--device", "cpu"])
        assert caught.value.code == 2
        assert "--budget" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_the_h200_script_can_be_interrupted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(profiling, "profile", interrupted)
        assert h200.main(["-o", str(tmp_path), "--device", "cpu", "--job", "tiny:1"]) == 130
        assert capsys.readouterr().err == "\nstopped; the same command with --resume goes on\n"

    def test_the_h200_script_needs_torch_numpy_and_yaml_only(self, tmp_path: Path) -> None:
        code = (
            "import sys\n"
            "for name in ('simpy', 'typer', 'click', 'rich', 'pandas', 'scipy', 'matplotlib'):\n"
            "    sys.modules[name] = None\n"
            "from profiles import profiling, session\n"
            "session._SLICE_S = 0.0\n"
            "make_grid = profiling.make_grid\n"
            "profiling.make_grid = lambda *a, **k: [\n"
            "    [p for p in make_grid(*a, **k)[0] if p.prompt_tokens <= 64 and p.context_tokens <= 64]\n"
            "]\n"
            "from profiles.scripts.h200 import main\n"
            "sys.exit(main(sys.argv[1:]))\n"
        )
        jobs = ["--job", "tiny:1,2", "--job", "dsim-tiny-14m:4", "--device", "cpu", "--budget", "300", "--overwrite"]
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, "-o", str(tmp_path), *jobs],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert len(run.stdout.splitlines()) == 2
        assert {row.point.tp for row in read_rows(tmp_path / "dsim-tiny-14m.csv").rows} == {4}
