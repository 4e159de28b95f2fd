"""Kernel tables: reading, interpolation, composition; on made-up tables whose sums can be done by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.catalog import find_gpu, find_model
from dsim.errors import InputError
from dsim.latency import AffineLatency
from dsim.pools import Parallelism, Role
from dsim.profile import BatchLimits
from dsim.profile_file import load_profile, parse_profile
from profiles.estimate import ENGINES, engine_limits, point_to_point
from profiles.kernels.build import Question, build, expected_error
from profiles.kernels.hosts import HOSTS, NOTHING
from profiles.kernels.package import KernelPackage, Table, check_engine, open_package
from profiles.kernels.rows import Reach
from profiles.kernels.steps import ALL_REDUCE, SMALL_KERNEL_S, WAIT_S, find_steps
from profiles.kernels.tables import Curve, ExpertSizes, Heads, find_all_reduce, find_attention, find_experts, find_gemms
from profiles.memory import RULES, kv_capacities
from profiles.scripts.kernels import jobs
from profiles.shapes import shape_of
from profiles.shipped import shipped_profiles

SYSTEM = "h100_sxm"
MS = 1e-3
GEMM = "gemm_perf.parquet"


def product_s(m: float, n: float, k: float) -> float:
    """What a made-up product takes: a microsecond, 500 TFLOP/s, and 1 TB/s for its weights."""
    return 1e-6 + 4e-15 * m * n * k + 2e-12 * n * k


class MadeUp:
    """A package directory with empty files, whose contents are put beside them."""

    def __init__(self, root: Path) -> None:
        self.package = KernelPackage(root, SYSTEM, "1.0")
        (root / SYSTEM).mkdir(parents=True)

    def add(
        self, op: str, engine: str, version: str, file: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
    ) -> None:
        path = f"{SYSTEM}/{op}/{engine}/{version}/{file}"
        (self.package.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.package.root / path).touch()
        arrays: Mapping[str, np.ndarray] = {name: np.array([row[i] for row in rows]) for i, name in enumerate(columns)}
        self.package._read[path] = Table(path, "0" * 64, engine, version, arrays)

    def add_gemms(self, engine: str = "vllm", *, version: str = "0.24.0", scale: float = 1.0) -> None:
        sizes = (64, 4096, 16384, 65536)
        rows = [
            ("bfloat16", "k1", m, n, k, scale * product_s(m, n, k) / MS)
            for m in (1, 128, 8192)
            for n in sizes
            for k in sizes
            if n * k < 65536**2
        ]
        self.add("gemm", engine, version, GEMM, ("gemm_dtype", "kernel_source", "m", "n", "k", "latency"), rows)

    def add_attention(self, engine: str, heads: Sequence[tuple[int, int]], *, scale: float = 1.0) -> None:
        columns = (
            "kernel_source batch_size isl step num_heads num_key_value_heads head_dim attn_dtype kv_cache_dtype latency"
        )
        for file, decode in (("context", False), ("generation", True)):
            rows = [
                (
                    "k",
                    batch,
                    1 if decode else length,
                    length - 1 if decode else 0,
                    h,
                    kv,
                    128,
                    "bfloat16",
                    "bfloat16",
                    scale * (0.01 + 1e-6 * batch * length * kv),
                )
                for batch in (1, 8, 64)
                for length in (1, 1024, 16384)
                if batch * length <= 131072
                for h, kv in heads
            ]
            self.add("attention", engine, "0.24.0", f"{file}_attention_perf.parquet", columns.split(), rows)

    def add_all_reduce(self, engine: str = "vllm") -> None:
        rows = [
            (f"custom_{source}", gpus, elements, base + 1e-8 * elements)
            for source, base in (("graph", 0.004), ("eager", 0.02))
            for gpus in (2, 4)
            for elements in (128, 2**20, 2**26)
        ]
        self.add(
            "comm",
            engine,
            "0.24.0",
            "custom_allreduce_perf.parquet",
            ("kernel_source", "num_gpus", "message_size", "latency"),
            rows,
        )


@pytest.fixture
def made_up(tmp_path: Path) -> MadeUp:
    return MadeUp(tmp_path / "data")


@pytest.fixture
def whole(made_up: MadeUp) -> MadeUp:
    made_up.add_gemms()
    made_up.add_attention("vllm", [(32, 8), (16, 4), (8, 2)])
    made_up.add_all_reduce()
    return made_up


class TestCurve:
    @given(
        st.lists(
            st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1.0)), min_size=1, max_size=20, unique_by=lambda p: p[0]
        )
    )
    def test_never_falls(self, points: list[tuple[int, float]]) -> None:
        curve = Curve.fitted([p[0] for p in points], [p[1] for p in points])
        sizes = np.linspace(1, 2e6, 100)
        seconds = [curve.at(size) for size in sizes]
        assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(seconds))
        assert min(p[1] for p in points) * (1 - 1e-9) <= seconds[0]

    def test_keeps_points_that_do_not_fall(self) -> None:
        curve = Curve.fitted([1, 2, 8], [1.0, 3.0, 4.0])
        assert [curve.at(size) for size in (1, 2, 5, 8)] == pytest.approx([1.0, 3.0, 3.5, 4.0])

    def test_beyond_the_last_size(self) -> None:
        assert Curve.fitted([1, 4], [1.0, 2.0]).at(8) == pytest.approx(4.0)
        assert Curve.fitted([1, 4], [1.0, 2.0], power=2).at(8) == pytest.approx(8.0)


class TestGemms:
    def test_between_sizes(self, made_up: MadeUp) -> None:
        made_up.add_gemms()
        gemms = find_gemms(made_up.package, "vllm", dtype="bfloat16", tokens=8192)
        for m, n, k in ((1, 64, 64), (128, 4096, 14336), (64, 14336, 4096), (8192, 28672, 8192)):
            assert gemms.seconds(m, n, k) == pytest.approx(product_s(m, n, k)), (m, n, k)

    def test_a_wide_head_is_several_products(self, made_up: MadeUp) -> None:
        made_up.add_gemms()
        gemms = find_gemms(made_up.package, "vllm", dtype="bfloat16", tokens=8192)
        assert gemms.seconds(8, 128256, 4096) == pytest.approx(2 * product_s(8, 64128, 4096))

    def test_one_kernel_source_never_a_mean(self, made_up: MadeUp) -> None:
        columns = ("gemm_dtype", "kernel_source", "m", "n", "k", "latency")
        rows = [("bfloat16", "most", m, 64, 64, 1.0) for m in (1, 2, 4)] + [("bfloat16", "few", 1, 64, 64, 9.0)]
        made_up.add("gemm", "vllm", "0.24.0", GEMM, columns, rows)
        assert find_gemms(made_up.package, "vllm", dtype="bfloat16", tokens=1).seconds(1, 64, 64) == pytest.approx(MS)

    def test_unknown_type(self, made_up: MadeUp) -> None:
        made_up.add_gemms()
        with pytest.raises(InputError, match="no fp8 matrix products"):
            find_gemms(made_up.package, "vllm", dtype="fp8", tokens=1)

    def test_another_engine_where_only_it_was_timed_that_far(self, made_up: MadeUp) -> None:
        made_up.add_gemms()
        made_up.add_gemms("sglang", scale=2.0)
        path = f"{SYSTEM}/gemm/vllm/0.24.0/{GEMM}"
        table = made_up.package._read[path]
        made_up.package._read[path] = table.only(table.numbers("m") < 8192)
        assert find_gemms(made_up.package, "vllm", dtype="bfloat16", tokens=128).source.kernels == "vllm 0.24.0"
        assert find_gemms(made_up.package, "vllm", dtype="bfloat16", tokens=8192).source.kernels == "sglang 0.24.0"


class TestAttention:
    def test_between_heads(self, made_up: MadeUp) -> None:
        made_up.add_attention("vllm", [(16, 16), (24, 24)])
        attention = find_attention(made_up.package, "vllm", decode=True, heads=Heads(20, 20, 128))
        assert attention.source.kernels == "vllm 0.24.0, interpolated between 16/16 and 24/24 heads"
        assert attention.seconds(8, 1024) == pytest.approx(1e-5 + 1e-9 * 8 * 1024 * 20)

    def test_another_engine(self, made_up: MadeUp) -> None:
        made_up.add_attention("vllm", [(8, 8)])
        made_up.add_attention("sglang", [(40, 40)], scale=3.0)
        made_up.add_attention("trtllm", [(40, 40)])
        attention = find_attention(made_up.package, "vllm", decode=True, heads=Heads(40, 40, 128))
        assert attention.source.kernels == "trtllm 0.24.0"

    def test_no_engine(self, made_up: MadeUp) -> None:
        made_up.add_attention("vllm", [(8, 8)])
        with pytest.raises(InputError, match="no attention times for 40 heads"):
            find_attention(made_up.package, "vllm", decode=False, heads=Heads(40, 40, 128))

    def test_batches_that_were_timed_at_short_lengths_only(self, made_up: MadeUp) -> None:
        made_up.add_attention("vllm", [(8, 8)])
        attention = find_attention(made_up.package, "vllm", decode=True, heads=Heads(8, 8, 128))
        # 64 x 16384 was not timed, 8 x 16384 was.
        assert attention.seconds(64, 16384) == pytest.approx(8 * (1e-5 + 1e-9 * 8 * 16384 * 8))
        assert attention.seconds(4.5, 1024) == pytest.approx(1e-5 + 1e-9 * 4.5 * 1024 * 8)
        assert attention.seconds(1, 32768) == pytest.approx(2 * attention.seconds(1, 16384))


class TestAllReduce:
    def test_sizes_are_elements(self, made_up: MadeUp) -> None:
        made_up.add_all_reduce()
        found = find_all_reduce(made_up.package, "vllm", 2)
        assert found.seconds(2**20, captured=True) == pytest.approx(4e-6 + 1e-11 * 2**20)

    def test_eager_only_where_messages_outweigh_launches(self, made_up: MadeUp) -> None:
        made_up.add_all_reduce()
        found = find_all_reduce(made_up.package, "vllm", 2)
        assert found.seconds(4096, captured=False) == found.seconds(4096, captured=True)
        assert found.seconds(2**24, captured=False) == pytest.approx(2e-5 + 1e-11 * 2**24)

    def test_more_gpus_than_timed(self, made_up: MadeUp) -> None:
        made_up.add_all_reduce()
        with pytest.raises(InputError, match="no all-reduce times of 8 GPUs"):
            find_all_reduce(made_up.package, "vllm", 8)


def test_experts_and_how_tokens_spread(made_up: MadeUp) -> None:
    columns = ["kernel_source", "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts"]
    columns += ["moe_tp_size", "moe_ep_size", "distribution", "latency"]
    rows = [
        ("k", "bfloat16", tokens, 2048, 768, 8, 128, 1, 1, spread, base + 1e-3 * tokens)
        for spread, base in (("balanced", 1.0), ("power_law_1.2", 2.0))
        for tokens in (1, 64)
    ]
    made_up.add("moe", "vllm", "0.24.0", "moe_perf.parquet", columns, rows)
    sizes = ExpertSizes(2048, 768, 8, 128, 1)
    curve, source = find_experts(made_up.package, "vllm", sizes, dtype="bfloat16")
    assert curve.at(1) == pytest.approx(2.001 * MS)
    assert source.kernels == "vllm 0.24.0, tokens spread as power_law_1.2"
    with pytest.raises(InputError, match="no times for 128 experts"):
        find_experts(made_up.package, "vllm", ExpertSizes(2048, 768, 8, 128, 2), dtype="bfloat16")


class TestSteps:
    def test_a_decode_step_is_the_sum_of_its_kernels(self, whole: MadeUp) -> None:
        gpu, shape = find_gpu("h100"), shape_of("llama-3.1-8b")
        steps, kernels = find_steps(whole.package, "vllm", shape, gpu, 2)
        parts = {part.name: part.seconds for part in steps.decode_parts(8, 8 * 1024)}
        products = [(4096 // 2 + 2 * 512, 4096), (4096, 2048), (14336, 4096), (4096, 7168)]
        assert parts["products"] == pytest.approx(32 * sum(product_s(8, n, k) for n, k in products))
        assert parts["attention"] == pytest.approx(32 * (1e-5 + 1e-9 * 8 * 1024 * 4))
        assert parts[ALL_REDUCE] == pytest.approx(65 * (4e-6 + 1e-11 * 8 * 4096 + WAIT_S))
        assert parts["element-wise"] == pytest.approx(32 * 5 * SMALL_KERNEL_S)
        assert parts["head"] == pytest.approx(product_s(8, 64128, 4096))
        assert steps.decode_s(8, 8 * 1024) == pytest.approx(sum(parts.values()))
        assert str(kernels) == (
            "products vllm 0.24.0; prefill attention vllm 0.24.0; decode attention vllm 0.24.0; all-reduce vllm 0.24.0"
        )
        assert len(kernels.tables) == 4

    def test_chunks_of_a_prompt_are_the_prompt_and_rereading(self, whole: MadeUp) -> None:
        steps, _ = find_steps(whole.package, "vllm", shape_of("llama-3.1-8b"), find_gpu("h100"), 1)
        attention = {
            chunks: {part.name: part.seconds for part in steps.prefill_parts([chunks])}["attention"]
            for chunks in ((1024, 0), (1024, 1024), (2048, 0))
        }
        reread_s = 32 * 1024 * 4096 / (0.8 * find_gpu("h100").hbm_bytes_per_s)
        added = attention[1024, 1024] - reread_s
        assert added == pytest.approx(max(attention[2048, 0] - attention[1024, 0], attention[1024, 0]))

    @pytest.mark.parametrize(
        ("model", "tp", "rule"),
        [
            ("llama-3.1-8b", 3, "must divide"),
            ("qwen3-32b-fp8", 1, "quantised"),
            ("llama-3.1-8b", 4, "all-reduce|heads"),
        ],
    )
    def test_what_cannot_be_composed(self, made_up: MadeUp, model: str, tp: int, rule: str) -> None:
        made_up.add_gemms()
        made_up.add_attention("vllm", [(8, 2)])
        with pytest.raises(InputError, match=rule):
            find_steps(made_up.package, "vllm", shape_of(model), find_gpu("h100"), tp)


class TestBuild:
    def test_profile_and_rows(self, whole: MadeUp) -> None:
        notes: list[str] = []
        question = Question(shape_of("llama-3.1-8b"), find_gpu("h100"), "vllm", (1, 2, 8), Reach(2048, 64))
        built = build(whole.package, question, note=notes.append)
        profile = parse_profile(built.profile.encode(), file="p.yaml")
        assert sorted(profile.latency) == [1, 2]
        assert [note.split(":")[0] for note in notes] == ["tp 8 is left out"]
        assert profile.request_s == HOSTS["vllm"].request_s
        assert f"{SYSTEM}/gemm/vllm/0.24.0/{GEMM} sha256 {'0' * 64}" in " ".join(profile.source.split())
        steps, _ = find_steps(whole.package, "vllm", shape_of("llama-3.1-8b"), find_gpu("h100"), 1)
        latency = profile.latency[1]
        assert latency.decode_s(32, 32 * 1024) == pytest.approx(steps.decode_s(32, 32 * 1024), rel=0.05)
        assert latency.prefill_s([(1024, 0)]) == pytest.approx(steps.prefill_s([(1024, 0)]), rel=0.05)
        again = build(whole.package, question, note=notes.append)
        assert again == built

    def test_without_host_work(self, whole: MadeUp) -> None:
        question = Question(shape_of("llama-3.1-8b"), find_gpu("h100"), "vllm", (1,), Reach(2048, 64), NOTHING)
        built = build(whole.package, question, note=lambda _: None)
        assert parse_profile(built.profile.encode(), file="p.yaml").request_s == 0

    def test_nothing_left(self, whole: MadeUp) -> None:
        question = Question(shape_of("llama-3.1-8b"), find_gpu("h100"), "vllm", (8,))
        with pytest.raises(InputError, match="no a"):
            build(whole.package, question, note=lambda _: None)

    def test_unknown_engine(self, whole: MadeUp) -> None:
        with pytest.raises(InputError, match=r"'vlm' has no kernel tables for h100_sxm; did you mean 'vllm'"):
            check_engine(whole.package, "vlm")


class TestPackage:
    def test_versions_newest_first(self, made_up: MadeUp) -> None:
        for version in ("0.9.1", "0.24.0", "0.24.0rc2", "0.14.0"):
            made_up.add_gemms(version=version)
        assert made_up.package.versions("gemm", "vllm", GEMM) == ["0.24.0", "0.24.0rc2", "0.14.0", "0.9.1"]

    def test_missing_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(InputError, match=r"needs aiconfigurator-core.*pip install 'dsim\[kernels\]'"):
            open_package("h100-sxm")

    def test_unknown_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / SYSTEM).mkdir()
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        with pytest.raises(InputError, match=r"'mi300x' has no kernel tables in aiconfigurator-core.*h100-sxm"):
            open_package("mi300x", root=tmp_path)

    def test_rows_of_no_size_and_unreadable_files(self, tmp_path: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `kernels`")
        parquet = pytest.importorskip("pyarrow.parquet")
        file = tmp_path / SYSTEM / "gemm" / "vllm" / "0.24.0" / GEMM
        file.parent.mkdir(parents=True)
        columns = {"gemm_dtype": ["bfloat16"] * 3, "kernel_source": ["k"] * 3, "n": [64] * 3, "k": [64] * 3}
        parquet.write_table(pyarrow.table({**columns, "m": [0, 1, 2], "latency": [1.0, 2.0, float("nan")]}), file)
        package = open_package("h100-sxm", root=tmp_path)
        assert package.table("gemm", "vllm", "0.24.0", GEMM).columns["m"].tolist() == [1]
        file.write_bytes(b"no parquet")
        with pytest.raises(InputError, match="cannot be read"):
            open_package("h100-sxm", root=tmp_path).table("gemm", "vllm", "0.24.0", GEMM)


class TestShipped:
    NAMES = tuple(f"{model}-{gpu}-{engine}" for model, gpu, engine in jobs())

    def test_all_are_there(self) -> None:
        assert set(self.NAMES) <= {name for name, _ in shipped_profiles()}

    def test_errors_are_not_claimed_where_nothing_was_measured(self) -> None:
        errors = {gpu: expected_error(find_model("llama-3.1-8b"), find_gpu(gpu)) for gpu in ("h100", "b200", "l40s")}
        assert errors["h100"] == "4 to 8 % beside measured steps (docs/validation.md)"
        assert errors["b200"] == errors["h100"] + ", none of them on b200-sxm"
        assert errors["l40s"] == errors["h100"] + ", none of them on l40s"
        assert expected_error(find_model("mixtral-8x7b"), find_gpu("h100")).startswith("unknown")

    @pytest.mark.parametrize("name", NAMES)
    def test_what_they_say(self, name: str) -> None:
        profile = load_profile(dict(shipped_profiles())[name])
        assert profile.name == name
        assert profile.violations == ()
        assert "aiconfigurator-core" in profile.source
        assert "sha256" in profile.source
        assert profile.expected_error == expected_error(profile.model, profile.gpu)
        # The engine's own limits and KV cache, as an estimate for it would have them.
        limits = engine_limits(ENGINES[profile.engine], profile.gpu)
        requests = min(limits.requests, 1024)
        assert profile.limits[Role.COLOCATED] == BatchLimits(tokens=limits.tokens, requests=requests)
        found = kv_capacities(profile.model, profile.gpu, profile.engine, profile.latency, limits=limits)
        assert profile.kv_capacity_tokens == {at: tokens for at, tokens in found.items() if tokens > 0}
        assert profile.block_tokens == RULES[profile.engine].block_tokens
        assert profile.p2p.latency_s == pytest.approx(point_to_point(profile.gpu).latency_s, rel=1e-3)
        for tp, latency in profile.latency.items():
            assert isinstance(latency, AffineLatency)
            # However full the cache, a step is within the range.
            range_ = latency.valid_range
            most = min(range_.decode_requests * profile.model.context_tokens, range_.context_tokens)
            cached = profile.kv_tokens(Parallelism(tp, 1))
            assert most >= min(cached, range_.decode_requests * profile.model.context_tokens)
        assert profile.fit is not None
        for error in profile.fit.errors:
            if error.region == "all":
                assert error.mean < 0.045, error
