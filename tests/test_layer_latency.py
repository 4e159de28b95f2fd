"""Step times looked up in tables of one layer's kernels: the model, its form in profile files, and the importer."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.errors import InputError
from dsim.latency import LatencyModel, ValidRange
from dsim.layer_latency import AttentionTimes, KernelTimes, LayerLatency
from dsim.options import Options
from dsim.pools import Placement
from dsim.profile import Profile
from dsim.profile_file import load_profile, parse_profile
from dsim.simulate import simulate
from dsim.workload import Workload
from dsim.workload.parse import parse_arrivals, parse_workload
from profiles.kernels.layers import read_layers
from profiles.shapes import shape_of
from tests.cli import Cli

#: By chunk and cached tokens: contexts of the decoding requests beside it. No two alike, as real tables are.
RAGGED = {
    (0, 0): ((1, 4, 16), (16, 64, 256)),
    (16, 0): ((1, 4), (16, 256)),
    (16, 64): ((1, 4), (16, 128, 256)),
    (24, 0): ((4,), (64, 256)),
    (64, 0): ((1, 16), (16, 256)),
    (64, 32): ((1, 16), (16, 64)),
    (64, 128): ((1, 16), (32, 256)),
}


def attention_s(chunk: int, cached: int, requests: int, context: int) -> float:
    """Made-up times that rise in everything, and are no product of anything."""
    return 1e-6 * (
        5 + chunk + chunk * cached / 50 + requests * context / 10 + requests * chunk / 30 + requests * requests
    )


BLOCKS = [
    AttentionTimes(c, s, ns, cs, tuple(tuple(attention_s(c, s, n, d) for d in cs) for n in ns))
    for (c, s), (ns, cs) in RAGGED.items()
]
BLOCKS += [AttentionTimes(c, s, (0,), (0,), ((attention_s(c, s, 0, 0),),)) for c, s in [*RAGGED, (64, 64)] if c]
KERNELS = [
    KernelTimes("dense", 2, "tokens", (1, 3, 64, 100), (5e-6, 6e-6, 9e-6, 4e-5)),
    KernelTimes("wide", 1, "tokens", (2, 80), (1e-6, 2e-5)),
    KernelTimes("head", 1, "sequences", (1, 8, 16), (5e-5, 6e-5, 9e-5)),
]
LAYERS = 3
LATENCY = LayerLatency.whole(kernels=KERNELS, attention_layers=LAYERS, attention=BLOCKS)


def kernel_s(kernel: KernelTimes, amount: float) -> float:
    most = kernel.amounts[-1]
    if amount > most:
        return kernel.kernel_s[-1] + (amount / most - 1) * 2 * (kernel.kernel_s[-1] - kernel_s(kernel, most / 2))
    return float(np.interp(amount, kernel.amounts, kernel.kernel_s))


def rest_s(tokens: int, sequences: int) -> float:
    amounts = {"tokens": tokens, "sequences": sequences}
    return sum(kernel.times * kernel_s(kernel, amounts[kernel.by]) for kernel in KERNELS)


def step_s(chunk: int, cached: int, requests: int, context: float) -> float:
    if not requests:
        return LATENCY.prefill_s([(chunk, cached)])
    if not chunk:
        return LATENCY.decode_s(requests, round(requests * context))
    return LATENCY.mixed_s([(chunk, cached)], requests, round(requests * context))


def test_every_point_comes_out_as_it_was_timed() -> None:
    assert isinstance(LATENCY, LatencyModel)
    for block in BLOCKS:
        for requests, row in zip(block.requests, block.kernel_s, strict=True):
            for context, seconds in zip(block.request_context_tokens, row, strict=True):
                sequences = (1 if block.tokens else 0) + requests
                wanted = rest_s(block.tokens + requests, sequences) + LAYERS * seconds
                found = step_s(block.tokens, block.cached_tokens, requests, context)
                assert found == pytest.approx(wanted, rel=1e-15), block


def test_kernels_add_up_to_the_last_digit() -> None:
    one = KernelTimes("only", 7, "tokens", (1, 2, 3), (1.1e-6, 2.3e-6, 3.7e-6))
    alone = LayerLatency.whole(kernels=[one], attention_layers=1, attention=BLOCKS)
    for tokens, seconds in zip(one.amounts, one.kernel_s, strict=True):
        other_s = LayerLatency.whole(kernels=[], attention_layers=1, attention=BLOCKS).decode_s(tokens, 16 * tokens)
        assert alone.decode_s(tokens, 16 * tokens) == 7 * seconds + other_s


def test_between_points_times_are_linear_axis_by_axis() -> None:
    at = attention_s
    # 40 cached tokens lie between 0 and 64 for a chunk of 16: contexts are looked up in each.
    low = (at(16, 0, 4, 16) * (256 - 136) + at(16, 0, 4, 256) * (136 - 16)) / 240
    high = (at(16, 64, 4, 128) * (256 - 136) + at(16, 64, 4, 256) * (136 - 128)) / 128
    wanted = low + 40 / 64 * (high - low)
    assert step_s(16, 40, 4, 136) == pytest.approx(rest_s(20, 5) + LAYERS * wanted)
    # Half-way between no chunk, which nothing is cached before, and one of 16.
    wanted = (at(0, 0, 4, 64) + (at(16, 0, 4, 16) * 192 + at(16, 0, 4, 256) * 48) / 240) / 2
    assert step_s(8, 0, 4, 64) == pytest.approx(rest_s(12, 5) + LAYERS * wanted)
    # Without decodes only rows without decodes count: 64 cached tokens were timed so, and only so.
    assert step_s(64, 64, 0, 0) == pytest.approx(rest_s(64, 1) + LAYERS * at(64, 64, 0, 0))
    wanted = at(64, 32, 1, 64) + (64 - 32) / (128 - 32) * ((at(64, 128, 1, 32) + at(64, 128, 1, 256)) / 2)
    assert step_s(64, 64, 1, 64) > rest_s(65, 2) + LAYERS * at(64, 32, 1, 64)


def test_held_below_the_first_point_and_continued_beyond_the_last() -> None:
    assert LATENCY.decode_s(1, 3) == LATENCY.decode_s(1, 16)
    assert step_s(3, 0, 0, 0) - rest_s(3, 1) == pytest.approx(step_s(16, 0, 0, 0) - rest_s(16, 1))
    # In context attention is a line here, so it makes no difference from where the slope is taken.
    slope_s = (attention_s(0, 0, 1, 256) - attention_s(0, 0, 1, 64)) / 192
    wanted = rest_s(1, 1) + LAYERS * (attention_s(0, 0, 1, 256) + 100 * slope_s)
    assert LATENCY.decode_s(1, 356) == pytest.approx(wanted)


def test_a_prompt_beyond_the_tables_goes_on_as_they_do_at_large() -> None:
    """The last two points stand close and differ by noise: not the slope between them decides."""
    noisy = KernelTimes("products", 1, "tokens", (1, 1024, 2032, 2048), (1e-3, 1e-3, 1.98e-3, 1.981e-3))
    blocks = [
        AttentionTimes(0, 0, (1,), (1, 4096), ((1e-6, 2e-6),)),
        *(AttentionTimes(c, s, (0,), (0,), ((1e-9 * c * (s + c / 2),),)) for c in (64, 2048) for s in (0, 8192)),
        AttentionTimes(64, 0, (1,), (1, 4096), ((1e-6, 2e-6),)),
        AttentionTimes(2048, 0, (1,), (1, 4096), ((1e-9 * 2048 * 1024 + 1e-6, 1e-9 * 2048 * 1024 + 2e-6),)),
    ]
    latency = LayerLatency.whole(kernels=[noisy], attention_layers=1, attention=blocks)
    # Products: 981 µs more for each 1024 tokens. Attention: chunks of 2048 after each other.
    attention_s = 1e-9 * 6144 * 6144 / 2
    assert latency.prefill_s([(6144, 0)]) == pytest.approx(1.981e-3 + 4 * 0.981e-3 + attention_s)
    assert latency.prefill_s([(6144, 2048)]) == pytest.approx(
        1.981e-3 + 4 * 0.981e-3 + attention_s + 1e-9 * 6144 * 2048
    )
    rest_s = latency.mixed_s([(2048, 0)], 1, 4096) - latency.prefill_s([(2048, 0)])
    assert latency.mixed_s([(6144, 0)], 1, 4096) - latency.prefill_s([(6144, 0)]) == pytest.approx(rest_s)
    steps = [latency.prefill_s([(tokens, 0)]) for tokens in range(1900, 6200)]
    assert np.all(np.diff(steps) >= 0)


def test_several_chunks_are_one_of_as_much_work() -> None:
    # 16 tokens after 48: 16 * 16 / 2 + 16 * 48 pairs of query and key; 32 after 40 - 16 / 2 are twice as many.
    apart = LATENCY.prefill_s([(16, 48), (16, 48)])
    assert apart == pytest.approx(rest_s(32, 2) - rest_s(32, 1) + LATENCY.prefill_s([(32, 40)]))
    # Two prompts of their own have fewer pairs than one of both: no tokens less than none are cached.
    assert LATENCY.prefill_s([(16, 0), (16, 0)]) == pytest.approx(
        rest_s(32, 2) - rest_s(32, 1) + LATENCY.prefill_s([(32, 0)])
    )


def test_the_range_is_that_of_the_points() -> None:
    # 256 tokens of context, batches of 16, 100 tokens of the kernels and 64 of attention, 128 cached.
    assert LATENCY.valid_range == ValidRange(128, 64, 16, 16 * 256)
    few = KernelTimes("few", 1, "sequences", (1, 5), (1e-6, 2e-6))
    assert LayerLatency.range_of([*KERNELS, few], BLOCKS).decode_requests == 5


@given(st.integers(1, 20), st.integers(1, 300), st.integers(1, 40))
def test_a_run_is_its_steps(requests: int, context: int, steps: int) -> None:
    run = LATENCY.decode_run_s(requests, requests * context, steps)
    assert run.shape == (steps,)
    single = [LATENCY.decode_s(requests, requests * (context + i)) for i in range(steps)]
    assert run == pytest.approx(single, rel=1e-12)
    assert np.all(np.diff(run) >= 0)
    assert LATENCY.decode_line(requests) is None
    assert LATENCY.mixed_s((), requests, requests * context) == LATENCY.decode_s(requests, requests * context)


@given(st.integers(1, 64), st.integers(0, 128), st.integers(0, 16), st.integers(1, 256))
def test_more_work_never_takes_less(chunk: int, cached: int, requests: int, context: int) -> None:
    """Where the tables rise, so do steps between their points, all else the same."""
    now = step_s(chunk, cached, requests, context)
    assert step_s(chunk, cached + 1, requests, context) >= now
    assert step_s(chunk, cached, requests, context + 1) >= now
    if requests:
        assert step_s(chunk, cached, requests + 1, context) >= now


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KernelTimes("a", 1, "token", (1,), (1e-6,)), "kernel a: by='token' must be tokens or sequences"),
        (lambda: KernelTimes("a", 0, "tokens", (1,), (1e-6,)), "kernel a: times=0 must be >= 1"),
        (lambda: KernelTimes("a", 1, "tokens", (2, 1), (1e-6, 1e-6)), "kernel a: tokens=1 must be above 2"),
        (lambda: KernelTimes("a", 1, "tokens", (), ()), "kernel a: tokens must not be empty"),
        (lambda: KernelTimes("a", 1, "tokens", (1, 2), (1e-6,)), "kernel a: kernel_s has 1, must have 2"),
        (lambda: KernelTimes("a", 1, "tokens", (1,), (0.0,)), "kernel a: kernel_s=0.0 must be finite and > 0"),
        (lambda: AttentionTimes(-1, 0, (1,), (1,), ((1e-6,),)), "attention of -1 tokens after 0: tokens=-1 must"),
        (
            lambda: AttentionTimes(1, 0, (0, 1), (0,), ((1e-6,),)),
            "attention of 1 tokens after 0: requests=0 must stand",
        ),
        (lambda: AttentionTimes(0, 0, (0,), (0,), ((1e-6,),)), "attention of 0 tokens after 0: requests=0 has neither"),
        (
            lambda: AttentionTimes(0, 4, (1,), (4,), ((1e-6,),)),
            "attention of 0 tokens after 4: cached_tokens must be 0",
        ),
        (lambda: AttentionTimes(1, 0, (1, 2), (4,), ((1e-6,),)), "attention of 1 tokens after 0: kernel_s has 1, must"),
        (lambda: make_with([*BLOCKS, BLOCKS[0]]), "attention of 0 tokens after 0, 1 requests: stands twice, at 16"),
        (
            lambda: make_with([b for b in BLOCKS if b.tokens]),
            "attention: has no times of decoding requests alone",
        ),
        (lambda: make_with([b for b in BLOCKS if not b.tokens]), "attention: has no times of a chunk"),
        (lambda: make_with(BLOCKS[:7]), "attention: has no times of a chunk without"),
        (lambda: make_with([BLOCKS[0], *BLOCKS[7:]]), "attention: has no times of a chunk with"),
    ],
)
def test_what_is_no_table(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(message)


def make_with(blocks: Sequence[AttentionTimes]) -> LayerLatency:
    return LayerLatency.whole(kernels=KERNELS, attention_layers=1, attention=blocks)


PROFILE = """\
dsim_profile: 1
model: llama-3.1-8b
gpu: h100-sxm
engine: {name: mine, version: "1"}
source: made up
valid_range: {chunk_tokens: 256, prefill_tokens: 64, decode_requests: 8}
latency:
  1:
    layer_tables:
      kernels:
        - {name: products, times: 32, tokens: [1, 64], kernel_s: [0.0003, 0.0004]}
        - {name: head, sequences: [1, 8], kernel_s: [0.0005, 0.0006]}
      attention_layers: 32
      attention:
        - {tokens: 0, cached_tokens: 0, requests: [1, 8], request_context_tokens: [1, 512],
           kernel_s: [[0.00001, 0.00002], [0.00002, 0.00009]]}
        - {tokens: 64, cached_tokens: 0, requests: [0], request_context_tokens: [0], kernel_s: [[0.00005]]}
        - {tokens: 64, cached_tokens: 256, requests: [0], request_context_tokens: [0], kernel_s: [[0.00009]]}
        - {tokens: 64, cached_tokens: 256, requests: [1, 8], request_context_tokens: [1, 512],
           kernel_s: [[0.0001, 0.00011], [0.00012, 0.0002]]}
kv: {capacity_tokens: {tp1pp1: 40000}}
"""


def test_profile_files() -> None:
    profile = parse_profile(PROFILE.encode(), file="p")
    latency = profile.latency_at(1)
    assert isinstance(latency, LayerLatency)
    assert latency.valid_range == ValidRange(256, 64, 8, 8 * 512)
    assert latency.prefill_s([(64, 256)]) == pytest.approx(32 * (0.0004 + 0.00009) + 0.0005)
    own = PROFILE.replace(
        "    layer_tables:",
        "    valid_range: {chunk_tokens: 9, prefill_tokens: 9, decode_requests: 9}\n    layer_tables:",
    )
    with pytest.raises(InputError, match=r"layer_tables must reach valid_range.decode_requests=9, and ends at 8"):
        parse_profile(own.encode(), file="p")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tokens: [1, 64]", "tokens: [64, 1]", "p:11: @.kernels[0].tokens=1 must be above 64"),
        ("[0.0003, 0.0004]", "[0.3, 400]", "p:11: @.kernels[0].kernel_s[1]=400 must be <= 1"),
        ("tokens: [1, 64], k", "k", "p:11: @.kernels[0]={...} must have either tokens or sequences"),
        ("name: head", "name: products", "p:12: @.kernels[1] is the second kernel of the name products"),
        ("attention_layers: 32\n", "attention_layers: 0\n", "p:13: @.attention_layers=0 must be >= 1"),
        ("requests: [1, 8]", "requests: [8, 1]", "p:15: @.attention[0].requests=1 must be above 8"),
        (
            *("cached_tokens: 256, requests: [0]", "cached_tokens: 0, requests: [0]"),
            "p:14: @.attention: attention of 64 tokens after 0 stands twice, at 0",
        ),
        ("layer_tables:\n", "layer_tables:\n      colour: red\n", "p:10: 'colour' is not a known key in @"),
        ("decode_requests: 8}", "decode_requests: 9}", "p:9: @ must reach valid_range.decode_req"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_line(old: str, new: str, message: str) -> None:
    assert old in PROFILE
    with pytest.raises(InputError) as caught:
        parse_profile(PROFILE.replace(old, new, 1).encode(), file="p")
    assert str(caught.value).startswith(message.replace("@", "latency.1.layer_tables"))


class TestImport:
    """LLMServingSim's tables: dense.csv, per_sequence.csv and attention.csv."""

    LAYER = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
    ONCE = ("embedding", "final_layernorm")

    def write(self, directory: Path, **changes: Sequence[Sequence[object]]) -> Path:
        """Write tables whose times are so long that no datasheet is beaten; `changes` are rows in place of them."""
        tables: dict[str, tuple[Sequence[str], Sequence[Sequence[object]]]] = {
            "dense": (
                ("layer", "tokens", "time_us"),
                [(name, n, 150 + n / 2) for name in (*self.LAYER, *self.ONCE) for n in (1, 64, 256)],
            ),
            "per_sequence": (
                ("layer", "sequences", "time_us"),
                [(name, n, 800 + n) for name in ("lm_head", "sampler") for n in (1, 16)],
            ),
            "attention": (
                ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"),
                [
                    (c, k, n, d, 50 + c * (1 + k / 64) + n * d / 16)
                    for c in (0, 16, 256)
                    for k in ((0, 16, 2048) if c else (0,))
                    for n in (0, 1, 16)
                    for d in ((16, 2048) if n else (0,))
                    if c or n
                ],
            ),
        }
        for name, (columns, rows) in tables.items():
            with (directory / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([columns, *changes.get(name, rows)])
        return directory

    def imported(self, cli: Cli, directory: Path, *arguments: str) -> Profile:
        path = directory / "p.yaml"
        words = ("-m", "llama-3.1-8b", "--gpu", "h100", "-o", str(path), "--overwrite", *arguments)
        run = cli("profile", "from-layers", str(directory), *words)
        assert run.code == 0, run.err
        return load_profile(path)

    def test_a_step_is_the_sum_of_its_kernels(self, cli: Cli, tmp_path: Path) -> None:
        profile = self.imported(cli, self.write(tmp_path))
        latency = profile.latency_at(1)

        def rest_s(tokens: int, sequences: int) -> float:
            return 1e-6 * ((32 * 8 + 2) * (150 + tokens / 2) + 2 * (800 + sequences))

        assert latency.decode_s(16, 16 * 2048) == pytest.approx(rest_s(16, 16) + 32e-6 * (50 + 16 * 2048 / 16))
        assert latency.prefill_s([(256, 16)]) == pytest.approx(rest_s(256, 1) + 32e-6 * (50 + 256 * 1.25))
        mixed = rest_s(32, 17) + 32e-6 * (50 + 16 + 16 * 40 / 16)
        assert latency.mixed_s([(16, 0)], 16, 16 * 40) == pytest.approx(mixed)
        assert latency.valid_range == ValidRange(2048, 256, 16, 16 * 2048)
        assert profile.violations == ()
        assert "attention.csv sha256" in profile.source

    def test_with_the_engine_s_defaults_and_host_work(self, cli: Cli, tmp_path: Path) -> None:
        profile = self.imported(cli, self.write(tmp_path), "--engine-version", "0.19")
        assert (profile.engine, profile.engine_version) == ("vllm", "0.19")
        assert {limits.requests for limits in profile.limits.values()} == {16}
        assert all(host.step_s > 0 for host in profile.host.values())
        bare = self.imported(cli, tmp_path, "--no-host", "--engine", "my-engine")
        assert all(host.step_s == 0 for host in bare.host.values())
        assert bare.request_s == 0

    def test_it_simulates(self, cli: Cli, tmp_path: Path) -> None:
        profile = self.imported(cli, self.write(tmp_path))
        workload = Workload(parse_arrivals("poisson"), parse_workload("fixed:200,40"))
        trace = workload.trace(num_requests=100, seed=1, context_tokens=1024, rate_per_s=3.0)
        for placement in ("1xC:tp1pp1", "1xP:tp1pp1 + 1xD:tp1pp1"):
            result = simulate(Placement.parse(placement), trace, profiles=profile, options=Options(check=True))
            assert np.isfinite(result.column("last_token_s")).all()

    def test_falling_times_are_listed(self, cli: Cli, tmp_path: Path) -> None:
        rows = [(name, n, 400 - n / 2) for name in (*self.LAYER, *self.ONCE) for n in (1, 64, 256)]
        profile = self.imported(cli, self.write(tmp_path, dense=rows))
        assert any("decode falls" in violation for violation in profile.violations)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"dense": [("qkv_proj", 1, 5)]}, "dense.csv: layer='layernorm' has no times of this kernel"),
            ({"dense": [("qkv_pro", 1, 5)]}, "dense.csv:2: layer='qkv_pro' is no kernel of this model at this degree"),
            ({"dense": [("qkv_proj", 1, 5), ("qkv_proj", 1, 6)]}, "dense.csv:3: tokens=1 stands twice for qkv_proj"),
            ({"dense": [("qkv_proj", 1.5, 5)]}, "dense.csv:2: tokens='1.5' must be a whole number >= 1"),
            ({"dense": [("qkv_proj", 1, -5)]}, "dense.csv:2: time_us='-5' must be > 0 and <= 1000000"),
            ({"dense": [("qkv_proj", 1, "nan")]}, "dense.csv:2: time_us='nan' must be > 0"),
            ({"dense": [("qkv_proj", 1, "fast")]}, "dense.csv:2: time_us='fast' must be a number"),
            ({"per_sequence": [("lm_head", 1, 5)]}, "per_sequence.csv: layer='sampler' has no times"),
            ({"attention": [(0, 0, 1, 16, 5)]}, "attention.csv: attention: has no times of a chunk"),
            ({"attention": [(16, 0, 0, 0, 5)]}, "attention.csv: attention: has no times of decoding requests alone"),
            ({"attention": [(16, 0, 0, 0, 5)] * 2}, "attention.csv:3: prefill_chunk, kv_prefill, n_decode, kv_decode"),
            ({"attention": [(16, 0, 0, 16, 5)]}, "attention.csv: attention of 16 tokens after 0: requests=0 must"),
        ],
    )  # fmt: skip
    def test_refused_tables(
        self, cli: Cli, tmp_path: Path, changes: dict[str, Sequence[Sequence[object]]], message: str
    ) -> None:
        self.write(tmp_path, **changes)
        out = str(tmp_path / "p.yaml")
        line = cli.refused("profile", "from-layers", str(tmp_path), "-m", "llama-3.1-8b", "--gpu", "h100", "-o", out)
        assert message in line

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("-m", "mixtral-8x7b"), "has experts"),
            (("-m", "qwen3-8b"), "layer='qk_norm' has no times"),
            (("--gpu", "h1000"), "h1000"),
        ],
    )
    def test_refused_questions(self, cli: Cli, tmp_path: Path, arguments: tuple[str, str], message: str) -> None:
        given = {"-m": "llama-3.1-8b", "--gpu": "h100", "-o": str(tmp_path / "p.yaml")}
        given[arguments[0]] = arguments[1]
        words = [word for pair in given.items() for word in pair]
        assert message in cli.refused("profile", "from-layers", str(self.write(tmp_path)), *words)

    def test_refused_directories(self, cli: Cli, tmp_path: Path) -> None:
        words = ("-m", "llama-3.1-8b", "--gpu", "h100", "-o", str(tmp_path / "p.yaml"))
        here = str(self.write(tmp_path))
        assert "is no directory" in cli.refused("profile", "from-layers", f"{here}/nowhere", *words)
        assert "is the second directory of tp 1" in cli.refused("profile", "from-layers", here, here, *words)
        assert "ranks of several GPUs" in cli.refused("profile", "from-layers", f"2={here}", *words)
        assert "must divide" in cli.refused("profile", "from-layers", f"3={here}", *words)
        (tmp_path / "attention.csv").write_text("a,b\n")
        assert "column prefill_chunk is missing" in cli.refused("profile", "from-layers", here, *words)

    def test_several_degrees(self, cli: Cli, tmp_path: Path) -> None:
        one, two = tmp_path / "1", tmp_path / "2"
        one.mkdir()
        two.mkdir()
        reduce = [(name, n, 80 + n / 4) for name in (*self.LAYER, *self.ONCE, "all_reduce") for n in (1, 256)]
        self.write(one)
        self.write(two, dense=reduce)
        out = tmp_path / "p.yaml"
        words = ("-m", "llama-3.1-8b", "--gpu", "h100", "-o", str(out))
        run = cli("profile", "from-layers", str(one), f"2={two}", *words)
        assert run.code == 0, run.err
        profile = load_profile(out)
        found = profile.latency_at(2).decode_s(1, 16)
        assert found == pytest.approx(1e-6 * ((32 * 10 + 2) * 80.25 + 2 * 801 + 32 * 51))

    def test_points_of_a_file_are_read_to_the_last_digit(self, tmp_path: Path) -> None:
        rows = [(name, n, f"1{n}.23457") for name in (*self.LAYER, *self.ONCE) for n in (1, 2)]
        tables = read_layers(self.write(tmp_path, dense=rows), shape=shape_of("llama-3.1-8b"))
        assert {kernel.kernel_s for kernel in tables.kernels if kernel.by == "tokens"} == {(11.23457e-6, 12.23457e-6)}
