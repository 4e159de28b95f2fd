"""Profile files: the documented form, defaults, and one line with place, value and remedy for everything else."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dsim.catalog
import dsim.profile_file
from dsim.contract import ViolationKind, decode_bound_s, find_violations, prefill_bound_s
from dsim.errors import InfeasiblePlacementError, InputError
from dsim.latency import AffineDecode, AffineLatency, AffinePrefill, Chunk, HostOverhead, ValidRange
from dsim.pools import Parallelism, Role
from dsim.profile import BatchLimits, FirstToken, Handover, PointToPoint, Preemption, Profile
from dsim.profile_file import load_profile, parse_profile

DOCS = Path(__file__).parents[1] / "docs" / "profiles.md"

#: Every key of the form once, one on each line.
FULL = """\
dsim_profile: 1
model:
  name: tiny
  hugging_face: me/tiny
  aliases: [t]
  layers: 4
  hidden_size: 256
  attention_heads: 8
  kv_heads: 4
  head_dim: 32
  ffn_size: 512
  vocabulary: 1000
  context_tokens: 1024
  gated_mlp: false
  learned_positions: true
  biases: true
  tied_embeddings: true
  dtype_bytes: 2
  source: made up
gpu:
  name: slow
  vendor: me
  architecture: none
  aliases: [s]
  memory_bytes: 8.0e+9
  hbm_bytes_per_s: 1.0e+11
  bf16_flops_per_s: 1.0e+13
  fp8_flops_per_s: 2.0e+13
  fp4_flops_per_s: 4.0e+13
  nvlink_bytes_per_s: 5.0e+10
  intra_node_link: wire
  network_bytes_per_s: 1.0e+10
  pcie_bytes_per_s: 2.0e+10
  gpus_per_node: 4
  scale_up_domain_gpus: 4
  tdp_w: 100
  price:
    typical_usd_per_h: 1.0
    low_usd_per_h: 0.5
    high_usd_per_h: 2.0
    source: made up
  source: made up
  notes: none
engine:
  name: mine
  version: "1"
  reason: made up
source: made up
valid_range:
  chunk_tokens: 1024
  prefill_tokens: 2048
  decode_requests: 64
  context_tokens: 65536
  reason: made up
latency:
  2:
    prefill:
      constant_s: 0.01
      per_token_s: 1.0e-4
      per_token_squared_s: 1.0e-8
    decode:
      threshold_requests: 9
      small:
        constant_s: 0.012
        per_context_token_s: 1.0e-6
        per_request_s: 1.0e-4
      large:
        constant_s: 0.013
        per_context_token_s: 1.1e-6
        per_request_s: 1.2e-4
refused:
  4: measured on a hot machine
limits:
  prefill:
    tokens: 1500
    requests: 16
    reason: made up
  decode:
    requests: 48
    reason: made up
  colocated:
    tokens: 512
    requests: 32
    reason: made up
  reason: made up
host:
  prefill:
    step_s: 0.001
    sequence_s: 1.0e-5
    token_s: 1.0e-7
    mixed_s: 0.002
    reason: made up
    pipelined:
      step_s: 0.003
      sequence_s: 2.0e-5
      token_s: 2.0e-7
      mixed_s: 0.004
      reason: made up
  request_s: 0.01
  reason: made up
handover:
  first_token_from: decode
  stalls_decode: true
  latency_s: 0.002
  bandwidth_bytes_per_s: 4.0e+10
  watermark: 0.1
  mode: direct
  hop_s: 0.01
  post_s: 0.007
  post_block_s: 2.4e-6
  step_s: 0.0005
  reason: made up
p2p:
  latency_s: 2.0e-5
  bandwidth_bytes_per_s: 1.0e+11
  across_nodes: {latency_s: 4.0e-5, bandwidth_bytes_per_s: 2.0e+10}
  reason: made up
preemption:
  method: swap
  swap_bytes_per_s: 1.5e+10
  reason: made up
kv:
  bytes_per_gpu: 7.0e+9
  block_tokens: 32
  admission_watermark: 0.02
  reason: made up
  capacity_tokens:
    tp2pp1: 1000000
saturation_tokens: 300
violations: []
reason: made up
"""
NUMERIC = {
    *("layers", "hidden_size", "attention_heads", "kv_heads", "head_dim", "ffn_size", "vocabulary", "context_tokens"),
    *("dtype_bytes", "memory_bytes", "hbm_bytes_per_s", "bf16_flops_per_s", "fp8_flops_per_s", "fp4_flops_per_s"),
    *("nvlink_bytes_per_s", "network_bytes_per_s", "pcie_bytes_per_s", "gpus_per_node", "scale_up_domain_gpus"),
    *("tdp_w", "typical_usd_per_h", "low_usd_per_h", "high_usd_per_h", "dsim_profile", "chunk_tokens"),
    *("prefill_tokens", "decode_requests", "constant_s", "per_token_s", "per_token_squared_s", "threshold_requests"),
    *("per_context_token_s", "per_request_s", "tokens", "requests", "step_s", "sequence_s", "token_s", "mixed_s"),
    *("request_s", "latency_s", "bandwidth_bytes_per_s", "watermark", "swap_bytes_per_s", "bytes_per_gpu"),
    *("hop_s", "post_s", "post_block_s"),
    *("block_tokens", "admission_watermark", "tp2pp1", "saturation_tokens"),
}
FLAGS = {"gated_mlp", "learned_positions", "biases", "tied_embeddings", "stalls_decode"}
TEXTS = {
    *("name", "hugging_face", "vendor", "architecture", "intra_node_link", "notes", "version", "source", "reason"),
    *("4", "first_token_from", "mode", "method"),
}


def example() -> str:
    """The first YAML block of docs/profiles.md."""
    match = re.search(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


def parse(text: str) -> Profile:
    return parse_profile(text.encode(), file="p.yaml")


def message(text: str) -> str:
    with pytest.raises(InputError) as caught:
        parse(text)
    line = str(caught.value)
    assert "\n" not in line
    return line


def outcome(data: bytes) -> str:
    try:
        parse_profile(data, file="p.yaml")
    except InputError as error:
        return str(error)
    return "a profile"


def test_the_documented_example_is_complete_and_minimal() -> None:
    profile = parse(example())
    assert (profile.name, profile.engine, profile.engine_version) == ("my-7b-h100-sxm-vllm", "vllm", "0.14.0")
    assert profile.violations == ()
    assert profile.kv_tokens(Parallelism()) > 100_000
    for key in ("dsim_profile", "model", "gpu", "engine", "source", "valid_range", "latency", "kv"):
        cut = re.sub(rf"^{key}:.*\n(?:[ ].*\n)*", "", example(), flags=re.MULTILINE)
        assert message(cut) == f"p.yaml:1: {key} is missing; add this key"


def test_the_documentation_names_every_key() -> None:
    text = DOCS.read_text(encoding="utf-8")
    keys = {
        *dsim.profile_file._TOP_KEYS,
        *dsim.catalog.MODEL_KEYS,
        *dsim.catalog.GPU_KEYS,
        *(NUMERIC - {"tp2pp1"}),
        *FLAGS,
    }
    # Sections are explained as `section.key`, `key`, or in a list of keys.
    assert [key for key in sorted(keys) if not re.search(rf"[`.]{key}`", text)] == []


def test_every_key_is_read() -> None:
    profile = parse(FULL)
    valid_range = ValidRange(chunk_tokens=1024, prefill_tokens=2048, decode_requests=64, context_tokens=65536)
    assert profile == Profile(
        name="tiny-slow-mine",
        model=profile.model,
        gpu=profile.gpu,
        engine="mine",
        engine_version="1",
        source="made up",
        latency={
            2: AffineLatency(
                prefill=AffinePrefill(0.01, 1e-4, 1e-8),
                small=AffineDecode(0.012, 1e-6, 1e-4),
                large=AffineDecode(0.013, 1.1e-6, 1.2e-4),
                threshold_requests=9,
                valid_range=valid_range,
            )
        },
        host={Role.PREFILL: HostOverhead(step_s=0.001, sequence_s=1e-5, token_s=1e-7, mixed_s=0.002)},
        host_pipelined={Role.PREFILL: HostOverhead(step_s=0.003, sequence_s=2e-5, token_s=2e-7, mixed_s=0.004)},
        request_s=0.01,
        limits={
            Role.PREFILL: BatchLimits(1500, 16),
            Role.DECODE: BatchLimits(math.inf, 48),
            Role.COLOCATED: BatchLimits(512, 32),
        },
        kv_capacity_tokens={Parallelism(2, 1): 1_000_000},
        kv_bytes_per_gpu=7e9,
        refused={4: "measured on a hot machine"},
        handover=Handover(
            FirstToken.DECODE,
            stalls_decode=True,
            latency_s=0.002,
            bandwidth_bytes_per_s=4e10,
            watermark=0.1,
            hop_s=0.01,
            post_s=0.007,
            post_block_s=2.4e-6,
            step_s=0.0005,
        ),
        p2p=PointToPoint(2e-5, 1e11, node_latency_s=4e-5, node_bandwidth_bytes_per_s=2e10),
        admission_watermark=0.02,
        preemption=Preemption.SWAP,
        swap_bytes_per_s=1.5e10,
        saturation_tokens=300,
        block_tokens=32,
        violations=(),
        reasons=profile.reasons,
        sha256=hashlib.sha256(FULL.encode()).hexdigest(),
    )
    assert profile.model.hugging_face == "me/tiny"
    assert (profile.model.kv_heads, profile.model.head_dim, profile.model.biases) == (4, 32, True)
    assert profile.gpu.price_usd_per_h == (1.0, 0.5, 2.0)
    assert profile.reasons["host.prefill.pipelined"] == profile.reasons["profile"] == "made up"
    assert len(profile.reasons) == FULL.count("reason:")


def test_defaults() -> None:
    profile = parse(re.sub(r"^host:\n(?:[ ].*\n)*", "", example(), flags=re.MULTILINE))
    assert profile.limits == {
        Role.PREFILL: BatchLimits(8192, math.inf),
        Role.DECODE: BatchLimits(math.inf, 256),
        Role.COLOCATED: BatchLimits(8192, 256),
    }
    assert profile.host_of(Role.DECODE, 1) == profile.host_of(Role.PREFILL, 4) == HostOverhead()
    assert profile.handover == Handover(
        FirstToken.PREFILL, stalls_decode=False, latency_s=0.001, bandwidth_bytes_per_s=0.8 * 450e9, watermark=0.05
    )
    assert (profile.preemption, profile.swap_bytes_per_s) == (Preemption.RECOMPUTE, math.inf)
    assert (profile.block_tokens, profile.admission_watermark, profile.request_s) == (16, 0.01, 0.0)
    assert profile.saturation_tokens is None
    latency = profile.latency_at(1)
    assert isinstance(latency, AffineLatency)
    assert latency.small == latency.large
    assert profile.model.head_dim == 128


def test_refused_and_missing_degrees_say_why() -> None:
    profile = parse(FULL)
    with pytest.raises(InfeasiblePlacementError, match="measured on a hot machine"):
        profile.latency_at(4)
    with pytest.raises(InfeasiblePlacementError, match=r"no coefficients for tp=8 \(it has tp 2\)"):
        profile.latency_at(8)


#: (what is replaced in FULL, by what, part of the message; `@` stands for the line of the change)
MALFORMED = [
    ("dsim_profile: 1", "dsim_profile: 2", "@ dsim_profile=2 must be 1; this is the version of the file's form"),
    ("source: made up\nvalid", "valid", "source is missing; add this key"),
    ("\nlimits:", "\nlimts:", "@ 'limts' is not a known key; did you mean 'limits'?"),
    ("\nhost:", "\nlimits:", "@ limits stands twice; it also stands on line 73; keep one of the two"),
    ("layers: 4", "layers: 0", "@ model.layers=0 must be >= 1"),
    ("layers: 4", "layers: 4.5", "@ model.layers=4.5 must be a whole number"),
    ("layers: 4", "layer: 4", "@ 'layer' is not a known key in model; did you mean 'layers'?"),
    ("kv_heads: 4", "kv_heads: 3", "@ model.kv_heads=3 must divide attention_heads=8"),
    ("  head_dim: 32\n", "", "ok"),
    ("hidden_size: 256", "hidden_size: 250", "ok"),
    ("gated_mlp: false", "gated_mlp: 0", "@ model.gated_mlp=0 must be true or false"),
    ("dtype_bytes: 2", "dtype_bytes: 3", "@ model.dtype_bytes=3 must be 1, 2 or 4"),
    ("memory_bytes: 8.0e+9", "memory_bytes: 80", "@ gpu.memory_bytes=80 must be >= 1e+09"),
    ("hbm_bytes_per_s: 1.0e+11", "hbm_bytes_per_s: 2.0", "@ gpu.hbm_bytes_per_s=2.0 must be >= 1000000"),
    ("low_usd_per_h: 0.5", "low_usd_per_h: 3", "@ gpu.price.low_usd_per_h=3 must be <= 1"),
    ('version: "1"', "version: 0.14", "@ engine.version=0.14 must be a text; put it in quotes"),
    ("decode_requests: 64", "decode_requests: -1", "@ valid_range.decode_requests=-1 must be >= 1"),
    ("decode_requests: 64\n", "\n", "valid_range.decode_requests is missing; add this key"),
    ("\n  2:\n", "\n  3:\n", "@ latency.3 is a tensor parallel degree that does not divide the 8 heads of tiny"),
    ("\n  2:\n", "\n  two:\n", "@ 'two' is not a key of latency: must be a whole number >= 1"),
    ("\n  2:\n", "\n  4:\n", "p.yaml:72: refused.4 stands under latency as well; keep one of the two"),
    ("constant_s: 0.01\n", "constant_s: -0.01\n", "@ latency.2.prefill.constant_s=-0.01 must be >= 0"),
    ("constant_s: 0.01\n", "constant_s: .nan\n", "@ latency.2.prefill.constant_s=nan must be a finite number"),
    ("constant_s: 0.01\n", "constant_s: 18.1\n", "@ latency.2.prefill.constant_s=18.1 must be <= 10"),
    ("per_token_s: 1.0e-4", "per_token_s: fast", "@ latency.2.prefill.per_token_s='fast' must be a number"),
    ("per_token_s: 1.0e-4", "per_tok_s: 1.0e-4", "'per_tok_s' is not a known key in latency.2.prefill; did you mean"),
    ("      large:\n", "      lrge:\n", "'lrge' is not a known key in latency.2.decode; did you mean 'large'?"),
    ("      threshold_requests: 9\n", "", "latency.2.decode.threshold_requests is missing; add this key"),
    ("threshold_requests: 9", "threshold_requests: 1", "latency.2.decode.threshold_requests=1 must be >= 2"),
    (
        "tokens: 1500",
        "tokens: 4096",
        "limits.prefill.tokens=4096 must be <= valid_range.prefill_tokens=2048; the coeff",
    ),
    ("requests: 48", "requests: 65", "limits.decode.requests=65 must be <= valid_range.decode_requests=64"),
    ("requests: 48", "tokens: 48", "@ 'tokens' is not a known key in limits.decode"),
    ("step_s: 0.001", "step_s: true", "@ host.prefill.step_s=True must be a number"),
    ("first_token_from: decode", "first_token_from: decod", "='decod' is not known; did you mean 'decode'?"),
    ("stalls_decode: true", "stalls_decode: yes", "handover.stalls_decode='yes' must be true or false"),
    ("bandwidth_bytes_per_s: 4.0e+10", "bandwidth_bytes_per_s: 200", "=200 must be >= 1000000"),
    ("watermark: 0.1\n", "watermark: 5\n", "handover.watermark=5 must be <= 1"),
    (
        "mode: direct",
        "mode: pull-at-step",
        "@ handover.mode='pull-at-step' does not go with stalls_decode=true; set stalls_decode: false, or mode: direct",
    ),
    (
        "stalls_decode: true\n",
        "mode: layer-wise\n",
        "handover.mode stands twice",
    ),
    ("mode: direct", "mode: push", "handover.mode='push' is not known; expected one of direct, pull-at-step"),
    ("hop_s: 0.01", "hop_s: -1", "handover.hop_s=-1 must be >= 0"),
    ("post_s: 0.007", "post_s: 70", "handover.post_s=70 must be <= 10"),
    ("watermark: 0.1\n", "watermark: 0\n", "handover.watermark=0 must be > 0"),
    ("method: swap", "method: drop", "preemption.method='drop' is not known; expected one of swap, recompute"),
    (
        "method: swap",
        "method: recompute",
        "preemption.swap_bytes_per_s=15000000000.0 belongs to method swap and only to it",
    ),
    ("  swap_bytes_per_s: 1.5e+10\n", "", "preemption.swap_bytes_per_s is missing; add this key"),
    (
        "bytes_per_gpu: 7.0e+9",
        "bytes_per_gpu: 9.0e+9",
        "kv.bytes_per_gpu=9000000000.0 must be <= 8000000000, the memory of one",
    ),
    ("bytes_per_gpu: 7.0e+9", "bytes_per_gpu: 7", "kv.bytes_per_gpu=7 must be >= 1e+09"),
    ("tp2pp1: 1000000", "tp2: 1000000", "kv.capacity_tokens.tp2 is not a parallelism; write tp1pp1, tp2pp1 and so on"),
    (
        "tp2pp1: 1000000",
        "tp3pp1: 1000000",
        "kv.capacity_tokens.tp3pp1 does not divide the 8 heads and 4 layers of tiny",
    ),
    ("tp2pp1: 1000000", "tp1pp5: 1000000", "kv.capacity_tokens.tp1pp5 does not divide"),
    ("tp2pp1: 1000000", "tp2pp1: 9999999999", "all the memory of 2 slow; the unit is tokens, of the whole instance"),
    ("violations: []", "violations: {}", "violations={...} must be a list"),
    ("violations: []", "violations: [{tp: 2, kind: slow}]", "violations[0].kind='slow' is not known; expected one of"),
    (
        "violations: []",
        "violations: [{tp: 2, kind: decode-falls}]",
        "violations[0]={...} lists decode-falls, which the numbers do not show (or show once); remove this item",
    ),
    (
        "constant_s: 0.013\n",
        "constant_s: 0.001\n",
        "p.yaml:56: latency.2 breaks the contract of latency models: decode falls by 83.7% where the batch passes "
        "8 -> 9 at 1 context tokens a request; correct the coefficients, or list {tp: 2, kind: decode-falls} under "
        "violations",
    ),
    ("made up\nsource: made up", "made up\nsource: !!python/name:os.system x", "source uses the YAML tag"),
]


@pytest.mark.parametrize(("old", "new", "expected"), MALFORMED)
def test_malformed_files(old: str, new: str, expected: str) -> None:
    assert old in FULL
    text = FULL.replace(old, new, 1)
    if expected == "ok":
        parse(text)
        return
    line = message(text)
    changed = FULL.count("\n", 0, FULL.index(old) + len(old) - len(old.lstrip("\n"))) + 1
    assert expected.replace("@", f"p.yaml:{changed}:") in line
    assert re.match(r"p\.yaml:\d+: ", line)


def test_there_are_enough_malformed_files() -> None:
    assert len(MALFORMED) >= 25


def test_degrees_may_be_written_with_zeros_in_front() -> None:
    text = FULL.replace("\n  2:\n", "\n  02:\n")
    assert list(parse(text).latency) == [2]
    assert "latency.02 breaks the contract" in message(text.replace("constant_s: 0.013\n", "constant_s: 0.001\n"))


def test_a_step_that_takes_no_time_cannot_be_listed() -> None:
    text = re.sub(r"(small:\n.*constant_s: ).*\n(.*: ).*\n(.*: ).*\n", r"\g<1>0\n\g<2>0\n\g<3>0\n", FULL)
    line = message(text)
    assert "decode of 1 at 1 context tokens a request takes 0 s; correct the coefficients" in line
    assert "violations" not in line
    listed = text.replace("violations: []", "violations: [{tp: 2, kind: not-positive}]")
    assert "violations[0].kind='not-positive' cannot be allowed; correct the coefficients" in message(listed)


def test_a_listed_fall_is_loaded_and_shown() -> None:
    text = FULL.replace("constant_s: 0.013\n", "constant_s: 0.001\n")
    profile = parse(text.replace("violations: []", "violations: [{tp: 2, kind: decode-falls, note: known}]"))
    assert profile.violations == (
        "tp 2: decode falls by 83.7% where the batch passes 8 -> 9 at 1 context tokens a request",
    )
    twice = "violations: [{tp: 2, kind: decode-falls}, {tp: 2, kind: decode-falls}]"
    assert "violations[1]" in message(text.replace("violations: []", twice))


def test_times_below_the_datasheet_are_shown() -> None:
    profile = parse(example().replace("per_token_s: 2.2e-5", "per_token_s: 2.2e-6"))
    (shown,) = profile.violations
    assert shown.startswith("tp 1: prefill of ")
    assert "below the" in shown
    assert "that h100-sxm's datasheet allows" in shown


def _lines() -> list[tuple[int, str]]:
    return [(n, line) for n, line in enumerate(FULL.splitlines(), 1) if re.match(r" *[\w.]+: .", line)]


@pytest.mark.parametrize("junk", [".nan", "-.inf", "1e999", "-1", "true", "many", '""', "[]", "{}", "~", "[1, 2]"])
def test_junk_in_any_value_is_one_line_that_names_it(junk: str) -> None:
    lines = FULL.splitlines()
    checked = 0
    for number, line in _lines():
        key, _ = line.strip().split(": ", 1)
        if key in TEXTS and junk == "many" and key not in {"first_token_from", "mode", "method"}:
            continue
        if (junk == "true" and key in FLAGS) or (junk == "[]" and key in {"violations", "aliases"}):
            continue
        indent = line[: len(line) - len(line.lstrip())]
        text = "\n".join([*lines[: number - 1], f"{indent}{key}: {junk}", *lines[number:]])
        found = message(text)
        assert found.startswith(f"p.yaml:{number}: "), (line, found)
        checked += 1
    assert checked > 70


def test_every_line_without_which_the_file_fails_is_reported_in_one_line() -> None:
    lines = FULL.splitlines()
    outcomes = [outcome("\n".join([*lines[:n], *lines[n + 1 :]]).encode()) for n in range(len(lines))]
    assert all(re.fullmatch(r"a profile|p\.yaml:\d+: .+", text) for text in outcomes)
    assert sum(text != "a profile" for text in outcomes) > 60


@given(st.integers(0, len(FULL)))
def test_a_truncated_file_is_one_line(end: int) -> None:
    text = outcome(FULL[:end].encode())
    assert "\n" not in text
    # Only the last, optional keys may be cut off unnoticed.
    assert text != "a profile" or end > FULL.index("bytes_per_gpu")


@given(st.integers(0, len(FULL) - 1), st.binary(min_size=1, max_size=4))
def test_a_damaged_file_is_one_line_or_a_profile(at: int, junk: bytes) -> None:
    data = FULL.encode()
    assert "\n" not in outcome(data[:at] + junk + data[at + len(junk) :])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: does not exist; check the path"):
        load_profile(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="is a directory; give a file"):
        load_profile(tmp_path)
    empty = tmp_path / "empty.yaml"
    empty.write_bytes(b"")
    with pytest.raises(InputError, match=r"empty\.yaml: is empty"):
        load_profile(empty)


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(FULL, encoding="utf-8")
    assert load_profile(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert load_profile(path) == parse(FULL)


def test_names_in_a_file_are_catalog_names() -> None:
    text = re.sub(r"^model:\n(?:[ ].*\n)*", "model: opt-13c\n", example(), flags=re.MULTILINE)
    assert message(text) == "p.yaml:2: 'opt-13c' is not a known model; did you mean 'opt-13b'?"
    assert message(example().replace("h100-sxm", "h1000")).endswith("is not a known GPU; did you mean 'h100'?")
    assert "gpu=3 must be a mapping" in message(example().replace("gpu: h100-sxm", "gpu: 3"))


def test_bounds_by_hand() -> None:
    """OPT-13B on an A100-80G: 25.2 GB of layers and 0.5 GB of output head at 2.039 TB/s; 2 FLOPs a weight and token."""
    model, gpu = dsim.catalog.find_model("13b"), dsim.catalog.find_gpu("a100-80g")
    layer_bytes, head_bytes = 2 * 40 * 12 * 5120**2, 2 * 50272 * 5120
    assert decode_bound_s(1, 0, model=model, gpu=gpu, tp=1) == pytest.approx((layer_bytes + head_bytes) / 2.039e12)
    assert decode_bound_s(1, 1000, model=model, gpu=gpu, tp=2) == pytest.approx(
        (layer_bytes + head_bytes + 819_200_000) / 2.039e12 / 2
    )
    attention = 4 * 40 * 5120 * (2048**2 / 2)
    assert prefill_bound_s([(2048, 0)], model=model, gpu=gpu, tp=1) == pytest.approx(
        (layer_bytes * 2048 + attention) / 312e12
    )
    assert prefill_bound_s([(1, 0)], model=model, gpu=gpu, tp=1) == pytest.approx(layer_bytes / 2.039e12)


def test_the_contract_sees_any_model_that_falls() -> None:
    """Not only affine ones: the protocol is all that is asked."""

    class Falling(AffineLatency):
        __slots__ = ()

        def prefill_s(self, chunks: Sequence[Chunk]) -> float:
            return 10.0 / (1 + chunks[0][0])

        def decode_s(self, requests: int, context_tokens: int) -> float:
            return 10.0 - 1e-6 * context_tokens

    latency = Falling(
        prefill=AffinePrefill(0, 0, 0),
        small=AffineDecode(0, 0, 0),
        large=AffineDecode(0, 0, 0),
        threshold_requests=1,
        valid_range=ValidRange(2048, 8192, 64),
    )
    model, gpu = dsim.catalog.find_model("13b"), dsim.catalog.find_gpu("a100-80g")
    kinds = {v.kind for v in find_violations(latency, model=model, gpu=gpu, tp=1)}
    assert {ViolationKind.PREFILL_FALLS, ViolationKind.DECODE_FALLS, ViolationKind.BELOW_BOUND} == kinds
