"""The profiler with torch, on the CPU: what a rank computes, how it is timed, and whole runs."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'dsim[profile]'")

from dsim.errors import InputError
from dsim.model import Experts, Model
from profiles.allreduce import AllReduces, interpolated
from profiles.profiler import TorchTimer, open_device
from profiles.profiler.collective import time_all_reduces
from profiles.profiler.device import Cpu, Cuda, translated_errors
from profiles.profiler.layer import RankModel, Step, Tensor
from profiles.profiler.timer import spread_s
from profiles.rows import Point, Status, read_rows
from profiles.session import OutOfMemoryError, StepFailedError
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
    assert timer.copies(prompt(1, 2048)) == 2
    assert timer.most_copies(1) >= copies
    large = TorchTimer(shape_of("llama-3.1-8b"), open_device("cpu"), dtype="bf16")
    assert large.copies(decode) == max(2, math.ceil(3 * timer.device.cache_bytes / (218_103_808 * 2 + 64 * 4096)))


def test_a_timing_is_layers_and_ends(timer: TorchTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([[0.4, 0.2, 0.3, 0.9, 0.8], [0.05] * 5])
    monkeypatch.setattr(Cpu, "samples_s", lambda *_, **__: next(given))
    timing = timer.time(prompt(1, 600), seconds=0.1)
    # Two of twelve layers were run; the faster half of the samples is 0.2, 0.3, 0.4.
    assert timing.step_s == pytest.approx(6 * 0.3 + 0.05)
    assert timing.spread_s == pytest.approx(6 * spread_s([0.2, 0.3, 0.4, 0.8, 0.9]))
    assert timing.samples == 5


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
        assert timing.samples >= 3


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
        (RuntimeError("no kernel\nmore"), StepFailedError),
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
    assert reduces.step_s(point) == pytest.approx(25 * interpolated(timed, 16 * 256 * 4))


class PretendedGraph:
    """Captures nothing, replays nothing."""

    def replay(self) -> None:
        pass


class PretendedEvent:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: PretendedEvent) -> float:
        return 1000 * (end.at_s - self.at_s)


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
    monkeypatch.setattr(Cuda, "_heat_up", lambda _: None)
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
        assert device.typical_s([3.0, 1.0, 2.0]) == 2.0
        with pytest.raises(InputError, match="torch sees 1 GPUs"):
            open_device("cuda:1")

    def test_a_step_that_cannot_be_captured_runs_eagerly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = open_device("cuda")
        runs = []

        def refusing(_: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        def run() -> None:
            runs.append(1)

        assert device.prepared(run) != run
        monkeypatch.setattr(torch.cuda, "graph", refusing)
        assert device.prepared(run) == run
        assert device.settings()["cuda_graphs"] == "no"
        assert len(device.samples_s(run, seconds=0.0, at_least=5)) == 5

    def test_a_whole_run(self, cli: Cli, tmp_path: Path) -> None:
        out = tmp_path / "rows.csv"
        run = cli("profile", "run", "-m", "tiny", "--largest-prefill", "64", "--largest-context", "64", "--rounds", "1",
                  "--largest-batch", "4", "--budget", "8s", "--tp", "1,2", "--out", str(out), "-q")  # fmt: skip
        assert run.code == 0, run.err
        # Replays that do nothing take no time, which the rows' own check of units notices.
        text = out.read_text()
        assert "# gpu: h200-sxm\n" in text
        assert "# device: NVIDIA H200\n" in text
        assert "cuda_graphs: 'yes'" in text


class TestWholeRuns:
    def test_run_then_resume(self, cli: Cli, tmp_path: Path) -> None:
        out = tmp_path / "rows.csv"
        asked = ("profile", "run", "--model", "tiny", "--device", "cpu", "--tp", "1,2", "--out", str(out), "-q")
        run = cli(*asked, "--budget", "4s")
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
        again = cli(*asked, "--budget", "3s", "--resume")
        assert again.code == 0
        second = read_rows(out).rows
        assert second[: len(first.rows)] == first.rows
        assert len(second) > len(first.rows)
        other = cli.refused(*asked, "--resume", "--dtype", "bf16")
        assert other.startswith(f"{out}: model was timed with") or "dtype was timed with fp32" in other

    def test_run_fit_simulate_as_in_the_readme(self, cli: Cli, tmp_path: Path) -> None:
        rows, profile = str(tmp_path / "rows.csv"), str(tmp_path / "my.yaml")
        run = cli(
            "profile", "run", "--device", "cpu", "--model", "dsim-tiny-14m", "--budget", "10s", "--out", rows, "-q"
        )
        assert run.code == 0
        fit = cli("profile", "fit", rows, "-o", profile)
        assert fit.code == 0, fit.err
        simulated = cli(
            *("simulate", "--profile", profile, "--placement", "1xP:tp1pp1 + 1xD:tp1pp1", "--rate", "0.1"),
            *(
                "--workload",
                "fixed:256,32",
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
                  "--budget", "2s", "--phases", "decode")  # fmt: skip
        assert run.code == 0
        model = read_rows(out).metadata.model
        assert model is not None
        assert (model.name, model.head_dim, model.dtype_bytes) == ("nano", 32, 4)

    def test_memory_that_runs_out_is_a_row(self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Cpu, "free_bytes", lambda _: 9 * 10**7)
        out = tmp_path / "rows.csv"
        run = cli("profile", "run", "-m", "tiny", "--device", "cpu", "--out", str(out), "--budget", "4s",
                  "--phases", "decode")  # fmt: skip
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
        error = cli.refused("profile", "run", "-m", "tiny", "--device", "cpu", "--out", str(out), code=1)
        assert error.startswith("needs 0.1 GiB")
        assert not out.exists()

    def test_the_h200_script_needs_torch_numpy_and_yaml_only(self, tmp_path: Path) -> None:
        code = (
            "import sys\n"
            "for name in ('simpy', 'typer', 'click', 'rich', 'pandas', 'scipy', 'matplotlib'):\n"
            "    sys.modules[name] = None\n"
            "from profiles.scripts.h200 import main\n"
            "sys.exit(main(sys.argv[1:]))\n"
        )
        jobs = ["--job", "tiny:1,2", "--job", "dsim-tiny-14m:4", "--device", "cpu", "--budget", "8", "--overwrite"]
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, "-o", str(tmp_path), *jobs],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert len(run.stdout.splitlines()) == 2
        assert {row.point.tp for row in read_rows(tmp_path / "dsim-tiny-14m.csv").rows} == {4}
