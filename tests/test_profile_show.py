"""What `dsim profile show`, `compare` and the plots say, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dsim.cli.profile_show import compared
from dsim.contract import decode_bound, prefill_bound
from dsim.profile import Profile
from dsim.profile_file import parse_profile
from experiments.profile_plots import near_context, profile_figures, residuals
from profiles.rows import Phase, Point, Row
from profiles.shipped import find_profile
from profiles.timed import timed
from tests.cli import Cli

#: 2 layers of 12 h^2 weights, h = 1024: 25,165,824 of them; 2 * 2 * 1024 * 2 = 8192 bytes of KV a token.
TEXT = """
dsim_profile: 1
model:
  {name: small, layers: 2, hidden_size: 1024, attention_heads: 8, ffn_size: 4096, vocabulary: 1024,
   context_tokens: 4096, gated_mlp: false, source: made up}
gpu:
  {name: round, memory_bytes: 80e9, hbm_bytes_per_s: 1e12, bf16_flops_per_s: 1e14, pcie_bytes_per_s: 1e10,
   network_bytes_per_s: 1e10, tdp_w: 300, source: made up}
engine: {name: mine, version: '1'}
source: made up
valid_range: {chunk_tokens: 4096, prefill_tokens: 4096, decode_requests: 64, context_tokens: 65536}
latency:
  1:
    prefill: {constant_s: 0.001, per_token_s: 1.0e-6, per_token_squared_s: 0}
    decode: {small: {constant_s: 0.001, per_context_token_s: 1.0e-8, per_request_s: 1.0e-5}}
host:
  prefill: {step_s: 0.002, token_s: 1.0e-6}
  decode: {step_s: 0.003, sequence_s: 1.0e-4}
kv: {bytes_per_gpu: 70.0e+9}
"""


def profile(text: str = TEXT) -> Profile:
    return parse_profile(text.encode(), file="my.yaml")


def test_bounds_have_two_sides() -> None:
    found = profile()
    weights, head, flops = 2 * 12 * 1024**2, 1024 * 1024, 1e14
    bound = prefill_bound([(128, 0)], model=found.model, gpu=found.gpu, tp=2)
    assert bound.compute_s == pytest.approx((2 * weights * 128 + 4 * 2 * 1024 * 128 * 128 / 2) / flops / 2)
    assert bound.memory_s == pytest.approx(2 * weights / 1e12 / 2)
    assert bound.step_s == max(bound.compute_s, bound.memory_s) == bound.compute_s
    bound = decode_bound(64, 64 * 512, model=found.model, gpu=found.gpu, tp=1)
    assert bound.compute_s == pytest.approx(2 * (weights + head) * 64 / flops)
    assert bound.memory_s == pytest.approx((2 * (weights + head) + 64 * 512 * 8192) / 1e12)


def test_steps_count_host_work_and_name_the_bound_they_are_a_share_of(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(TEXT)
    shown = json.loads(cli("profile", "show", str(path), "--format", "json").out)
    steps = {(row["phase"], row["size"]): row for row in shown["steps"]}
    prefill, decode = steps["prefill", 128], steps["decode", 64]
    assert prefill["kernel_s"] == pytest.approx(0.001128)
    assert prefill["host_s"] == pytest.approx(0.002128)
    assert prefill["step_s"] == pytest.approx(0.003256)
    assert prefill["tokens_per_s"] == pytest.approx(128 / 0.003256)
    # FLOP/s also where reading the weights takes longer than the FLOPs.
    compute_s = (2 * 25165824 * 128 + 4 * 2 * 1024 * 128**2 / 2) / 1e14
    assert prefill["efficiency"] == pytest.approx(compute_s / 0.003256)
    assert decode["step_s"] == pytest.approx(0.001 + 1e-8 * 64 * 512 + 64e-5 + 0.003 + 64e-4)
    memory_s = (2 * (25165824 + 1024**2) + 64 * 512 * 8192) / 1e12
    assert decode["efficiency"] == pytest.approx(memory_s / decode["step_s"])
    table = cli("profile", "show", str(path)).out
    assert f"{compute_s / 0.003256:.0%} of FLOP/s" in table
    assert f"{memory_s / decode['step_s']:.0%} of HBM bandwidth" in table


def test_the_share_of_flops_is_that_of_the_compute_bound_alone(cli: Cli) -> None:
    """128 tokens of Llama-2-70B: 2 * 68.4e9 * 128 FLOPs over 2 H100, 8.9 ms of 48; reading the weights takes 20 ms."""
    shown = json.loads(cli("profile", "show", "llama-2-70b-h100-sxm-vllm-2023", "--format", "json").out)
    (step,) = [row for row in shown["steps"] if (row["tp"], row["phase"], row["size"]) == (2, "prefill", 128)]
    assert step["efficiency"] == pytest.approx(2 * 68.4e9 * 128 / 2 / 989e12 / step["step_s"], rel=0.02)
    assert step["efficiency"] == pytest.approx(0.18, abs=0.01)


def test_a_comparison_divides_the_second_by_the_first() -> None:
    slow = profile(TEXT.replace("per_request_s: 1.0e-5", "per_request_s: 1.0e-3"))
    rows = {(row["phase"], row["size"]): row for row in compared(profile(), slow)}
    row = rows["decode", 64]
    a_s = 0.001 + 1e-8 * 64 * 512 + 64e-5 + 0.003 + 64e-4
    assert row["a_s"] == pytest.approx(a_s)
    assert row["b_s"] == pytest.approx(a_s + 64 * 0.99e-3)
    assert row["b_over_a"] == pytest.approx(1 + 64 * 0.99e-3 / a_s)
    assert rows["prefill", 128]["b_over_a"] == 1


FIT = """
fit:
  rows: rows.csv
  rows_sha256: abc
  saturation_tokens:
    1: {METHOD}
"""


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("{low: 286, best: 307, high: 330, method: knee}", "Lm at TP 1: 307 tokens (286 - 330), knee"),
        ("{low: 380, best: 608, method: knee}", "Lm at TP 1: 608 tokens (380 or more), knee"),
        ("{best: 608, high: 900, method: share}", "Lm at TP 1: 608 tokens (up to 900), 80 % of the best rate: no knee"),
        ("{low: 512, method: not-reached}", "Lm at TP 1: 512 tokens or more: not reached by the rows"),
    ],
)
def test_ends_of_lm_that_are_open_say_so(cli: Cli, tmp_path: Path, entry: str, line: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(TEXT + FIT.replace("{METHOD}", entry))
    assert line in cli("profile", "show", str(path)).out
    assert cli("profile", "show", str(path), "--plot", str(tmp_path / "plots")).code == 0
    shown = json.loads(cli("profile", "show", str(path), "--format", "json").out)
    assert set(shown["fit"]["saturation_tokens"]["1"]) == {"low", "best", "high"}


def test_residuals_count_the_host_work_that_the_steps_contain() -> None:
    found = profile()
    points = [Point("prefill", 1, 1, 128), Point("decode", 1, 64, context_tokens=512)]
    whole_s = [0.003256, 0.001 + 1e-8 * 64 * 512 + 64e-5 + 0.003 + 64e-4]
    kernels_s = [0.001128, 0.001 + 1e-8 * 64 * 512 + 64e-5]
    for seconds, includes_host in ((whole_s, True), (kernels_s, False)):
        rows = [Row(point, step_s) for point, step_s in zip(points, seconds, strict=True)]
        for phase in (Phase.PREFILL, Phase.DECODE):
            off = residuals(found, timed(rows, phase, 1), 1, includes_host=includes_host)
            assert np.abs(off).max() < 1e-9


def test_points_of_other_contexts_are_not_drawn_at_a_line() -> None:
    rows = [Row(Point("decode", 1, b, context_tokens=c), 0.01) for b in (1, 2) for c in (128, 400, 512, 700, 2048)]
    contexts = {point.context_tokens for point in near_context(timed(rows, Phase.DECODE, 1)).points}
    assert contexts == {400, 512, 700}


def test_lines_of_degrees_are_told_apart_without_colour_and_the_legend_covers_none() -> None:
    profile = find_profile("13b", "a100-80g", engine="distserve")
    figures = profile_figures(profile)
    assert sorted(figures) == ["decode_throughput", "prefill_throughput", "tp_speed_up"]
    for name, figure in figures.items():
        (axes,) = figure.axes
        looks = [(line.get_linestyle(), line.get_marker()) for line in axes.get_lines()]
        assert len(set(looks)) == len(looks) > 2, name
        figure.draw_without_rendering()
        assert not figure.legends[0].get_window_extent().overlaps(axes.get_window_extent())
        assert axes.get_ylabel() in {"decode throughput (tokens/s)", "prefill throughput (tokens/s)", "speed-up K"}
