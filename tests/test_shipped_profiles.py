"""The shipped profiles: the published numbers, unchanged, with what is wrong with them listed."""

from __future__ import annotations

import csv
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dsim.catalog import models
from dsim.contract import decode_bound_s, find_violations, prefill_bound_s
from dsim.errors import InfeasiblePlacementError, InputError
from dsim.latency import AffineLatency
from dsim.options import Options, PrefillBatching
from dsim.pools import Parallelism, Placement, Role
from dsim.profile import FirstToken, Preemption, Profile
from dsim.profile_file import load_profile
from dsim.simulate import simulate
from dsim.trace import Trace
from profiles.shipped import find_profile, shipped_profiles

SHARED = Path(__file__).parents[2] / "shared" / "data" / "distserve"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the published files beside the repository")
NAMES = [
    "opt-13b-a100-80g-distserve",
    "opt-13b-a100-80g-vllm",
    "opt-66b-a100-80g-distserve",
    "opt-66b-a100-80g-vllm",
]

OPT_175B = ["opt-175b-a100-80g-distserve", "opt-175b-a100-80g-vllm"]
SPLITWISE = ["llama-2-70b-a100-80g-vllm-2023", "llama-2-70b-h100-sxm-vllm-2023"]


def raw(name: str) -> Any:  # noqa: ANN401
    """The file as texts: no number has gone through a float."""
    path = dict(shipped_profiles())[name]
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506


@pytest.fixture(params=NAMES)
def profile(request: pytest.FixtureRequest) -> Profile:
    return load_profile(dict(shipped_profiles())[request.param])


def affine(profile: Profile, tp: int) -> AffineLatency:
    latency = profile.latency_at(tp)
    assert isinstance(latency, AffineLatency)
    return latency


def test_what_is_shipped() -> None:
    names = [name for name, _ in shipped_profiles()]
    assert [name for name in names if name.startswith("opt-")] == sorted([*NAMES, *OPT_175B])
    assert set(SPLITWISE) <= set(names)


def test_files_are_called_as_their_profiles(profile: Profile) -> None:
    model, engine = profile.model.name, profile.engine
    found = find_profile(model.removeprefix("opt-").upper(), "a100_sxm", engine=engine)
    assert found == profile
    assert f"{model}-a100-80g-{engine}" == profile.name


def test_every_file_cites_its_source_and_gives_its_reasons(profile: Profile) -> None:
    for word in ("LLMServe/DistServe", "Apache-2.0", "arXiv 2401.09670"):
        assert word in profile.source
    for section in (
        *("profile", "valid_range", "limits.prefill", "limits.decode", "limits.colocated", "host.prefill"),
        *("host.decode", "host.colocated", "handover", "preemption", "kv"),
    ):
        assert len(profile.reasons[section]) > 10


@needs_shared
@pytest.mark.parametrize("name", NAMES)
def test_coefficients_are_the_published_digits(name: str) -> None:
    """Milliseconds as printed, shifted by three places in decimal."""
    model, engine = name[: len("opt-13b")], name.rsplit("-", 1)[1]
    path = SHARED / f"profiler-a100-80g.{engine}.json"
    published = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)[f"facebook/{model}"]
    ours = raw(name)
    decode_keys = ("constant_s", "per_context_token_s", "per_request_s")
    for tp, entry in ours["latency"].items():
        decode = entry["decode"]
        found = {
            "prefill": [entry["prefill"][k] for k in ("constant_s", "per_token_s", "per_token_squared_s")],
            "decoding_smallbs": [decode["small"][k] for k in decode_keys],
            "decoding_largebs": [decode["large"][k] for k in decode_keys],
        }
        for key, numbers in found.items():
            assert [Decimal(n) for n in numbers] == [n / 1000 for n in published[tp][key]]
        assert int(decode["threshold_requests"]) == published[tp]["decoding_large_small_bs_threshold"]
    left_out = published.keys() - ours["latency"].keys()
    assert left_out == ours.get("refused", {}).keys()
    for tp in left_out:
        negative = min(n for key in ("prefill", "decoding_smallbs", "decoding_largebs") for n in published[tp][key])
        assert negative < 0
        assert str(negative / 1000) in ours["refused"][tp]


@needs_shared
def test_capacities_are_the_published_ones(profile: Profile) -> None:
    with (SHARED / "max_num_tokens.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == profile.model.hugging_face]
    published = {Parallelism(int(r["tp"]), int(r["pp"])): int(r["max_num_tokens"]) for r in rows}
    assert profile.kv_capacity_tokens == published
    assert all(profile.kv_tokens(parallelism) == tokens for parallelism, tokens in published.items())


def test_memory_formula_reproduces_every_capacity(profile: Profile) -> None:
    assert profile.kv_bytes_per_gpu is not None
    for parallelism, tokens in profile.kv_capacity_tokens.items():
        free_bytes = profile.kv_bytes_per_gpu * parallelism.num_gpus - profile.model.weight_bytes
        assert free_bytes / profile.model.kv_bytes_per_token == pytest.approx(tokens, rel=0.01)


def test_degrees_not_listed_come_from_the_formula() -> None:
    profile = find_profile("66b", "a100-80g", engine="distserve")
    assert Parallelism(1, 3) not in profile.kv_capacity_tokens
    # Three GPUs hold as much however they are arranged.
    assert profile.kv_tokens(Parallelism(1, 3)) == pytest.approx(profile.kv_tokens(Parallelism(3, 1)), rel=0.01)
    assert profile.kv_tokens(Parallelism(1, 1)) < 0


#: What the published coefficients do where the batch passes 94 -> 95, with 1, 946 (ShareGPT's mean prompt and output)
#: and 2048 context tokens a request, percent. Worked out from the published digits, apart from the code under test.
FALLS = {
    ("opt-13b-a100-80g-distserve", 1): (-5.7, -6.3, -6.4),
    ("opt-13b-a100-80g-distserve", 2): (-2.3, -5.5, -6.4),
    ("opt-13b-a100-80g-distserve", 4): (11.2, 0.6, -2.8),
    ("opt-13b-a100-80g-vllm", 1): (8.3, -7.6, -11.3),
    ("opt-13b-a100-80g-vllm", 2): (-12.6, 32.2, 54.7),
    ("opt-13b-a100-80g-vllm", 4): (-4.0, 45.7, 84.9),
    ("opt-66b-a100-80g-distserve", 2): (-5.7, -30.9, -38.3),
    ("opt-66b-a100-80g-distserve", 3): (-5.1, -6.3, -6.7),
    ("opt-66b-a100-80g-distserve", 4): (7.1, -1.6, -4.6),
    ("opt-66b-a100-80g-distserve", 8): (9.4, 33.8, 44.9),
    ("opt-66b-a100-80g-vllm", 3): (2.4, 3.7, 4.2),
    ("opt-66b-a100-80g-vllm", 4): (13.4, -14.4, -23.5),
    ("opt-66b-a100-80g-vllm", 8): (12.6, 55.4, 76.1),
}


@pytest.mark.parametrize(("name", "tp"), FALLS)
def test_steps_from_batch_94_to_95(name: str, tp: int) -> None:
    latency = affine(load_profile(dict(shipped_profiles())[name]), tp)
    for context, percent in zip((1, 946, 2048), FALLS[name, tp], strict=True):
        change = latency.decode_s(95, 95 * context) / latency.decode_s(94, 94 * context) - 1
        assert 100 * change == pytest.approx(percent, abs=0.06)


def test_what_is_listed_is_what_the_numbers_show(profile: Profile) -> None:
    """A fall anywhere in the valid range is listed with its worst place, and nothing else is."""
    listed = raw(profile.name).get("violations", [])
    found = [
        violation
        for tp in sorted(profile.latency)
        for violation in find_violations(profile.latency[tp], model=profile.model, gpu=profile.gpu, tp=tp)
    ]
    assert [(int(v["tp"]), v["kind"], v["note"]) for v in listed] == [(v.tp, v.kind.value, v.detail) for v in found]
    assert profile.violations == tuple(map(str, found))
    falling = {tp for (name, tp), percents in FALLS.items() if name == profile.name and min(percents) < 0}
    assert {v.tp for v in found} == falling
    for violation in found:
        worst = min(FALLS[profile.name, violation.tp])
        assert 100 * violation.share == pytest.approx(-worst, abs=0.06)
        assert re.fullmatch(
            r"decode falls by \d+\.\d% where the batch passes 94 -> 95 at \d+ context tokens a request",
            violation.detail,
        )


def test_no_step_beats_the_datasheet(profile: Profile) -> None:
    assert not any("datasheet" in violation for violation in profile.violations)


#: Freezes: milliseconds of 1024 and 8192 prompt tokens, and of 1 and 32 decoding requests of 576 tokens, and Lm.
LLAMA = {
    ("llama-2-70b-a100-80g-vllm-2023", 2): (369.256565, 3005.28518, 54.8484641, 73.3606182, 359),
    ("llama-2-70b-a100-80g-vllm-2023", 4): (218.766831, 2274.69096, 44.0367891, 52.558536, 485),
    ("llama-2-70b-a100-80g-vllm-2023", 8): (153.156409, 1590.35375, 44.3089496, 56.5522951, 289),
    ("llama-2-70b-h100-sxm-vllm-2023", 2): (157.311893, 1342.92787, 37.3128113, 51.014605, 307),
    ("llama-2-70b-h100-sxm-vllm-2023", 4): (104.501194, 957.031223, 29.3137304, 36.9198406, 628),
    ("llama-2-70b-h100-sxm-vllm-2023", 8): (77.178617, 853.032109, 29.891663, 38.6766133, 608),
}


@pytest.mark.parametrize(("name", "tp"), LLAMA)
def test_fitted_profiles_are_frozen(name: str, tp: int) -> None:
    found = load_profile(dict(shipped_profiles())[name])
    latency = affine(found, tp)
    steps = [latency.prefill_s([(tokens, 0)]) for tokens in (1024, 8192)]
    steps += [latency.decode_s(batch, 576 * batch) for batch in (1, 32)]
    *milliseconds, lm = LLAMA[name, tp]
    assert [1e3 * step_s for step_s in steps] == pytest.approx(milliseconds, rel=1e-6)
    assert found.saturation_tokens_at[tp] == lm
    assert found.violations == ()


def test_lm_batches_are_those_of_the_degree_that_prefills() -> None:
    """At TP 2 of H100 Lm is 307 tokens, at TP 8 608: prompts of 100 tokens go by three and by six."""
    found = load_profile(dict(shipped_profiles())["llama-2-70b-h100-sxm-vllm-2023"])
    options = Options(prefill_token_limit=found.prefill_token_limit(PrefillBatching.LM), log_steps=True, check=True)
    trace = Trace(np.zeros(24), np.full(24, 100), np.full(24, 2), np.zeros(24, dtype=np.int64))
    for tp, most in ((2, 3), (8, 6)):
        placement = Placement.parse(f"1xP:tp{tp}pp1 + 1xD:tp8pp1")
        result = simulate(placement, trace, profiles=dict.fromkeys(Role, found), options=options)
        assert result.steps is not None
        assert max(len(step.prefill) for step in result.steps) == most


def test_valid_range_and_limits(profile: Profile) -> None:
    for tp in profile.latency:
        valid = affine(profile, tp).valid_range
        assert (valid.chunk_tokens, valid.prefill_tokens, valid.decode_requests) == (2048, 8192, 192)
        assert valid.chunk_tokens >= profile.model.context_tokens
    for limits in profile.limits.values():
        assert limits.tokens <= 8192 or limits is profile.limits[Role.DECODE]
        assert limits.requests <= 192
    assert profile.saturation_tokens == 512


def test_engines_differ_where_they_should() -> None:
    distserve = find_profile("13b", "a100-80g", engine="distserve")
    vllm = find_profile("13b", "a100-80g", engine="vllm")
    assert distserve.limits[Role.PREFILL].tokens == 8192
    assert vllm.limits[Role.PREFILL].tokens == 2048
    assert distserve.handover.stalls_decode
    assert not vllm.handover.stalls_decode
    assert distserve.handover.first_token_from is FirstToken.PREFILL
    assert (distserve.preemption, distserve.swap_bytes_per_s) == (Preemption.SWAP, 25e9)
    assert vllm.preemption is Preemption.RECOMPUTE
    for profile in (distserve, vllm):
        assert profile.handover.latency_s == 0.001
        assert profile.handover.watermark == 0.05


def test_the_refused_degree_says_why() -> None:
    profile = find_profile("66b", "a100-80g", engine="vllm")
    with pytest.raises(InfeasiblePlacementError, match="negative quadratic prefill term"):
        profile.latency_at(2)
    with pytest.raises(InfeasiblePlacementError, match=r"no coefficients for tp=6 \(it has tp 3, 4, 8\)"):
        profile.latency_at(6)


@pytest.mark.parametrize(
    ("model", "gpu", "engine", "expected"),
    [
        (
            *("qwen3-14b", "a100-80g", "distserve"),
            "--model: 'qwen3-14b' has no latency profile; there are profiles for ",
        ),
        (
            *("llama-3.1-405b", "h100", "vllm"),
            "--model: 'llama-3.1-405b' has no latency profile; there are profiles for ",
        ),
        (
            *("13b", "h100", "vllm"),
            "--gpu: 'h100-sxm' has no latency profile for opt-13b; "
            "there is one on a100-80g; or give --profile FILE (docs/profiles.md)",
        ),
        (
            *("13b", "a100-80g", "vlm"),
            "--engine: 'vlm' has no latency profile for opt-13b on a100-80g; did you mean 'vllm'? "
            "or give --profile FILE",
        ),
        (*("13c", "a100-80g", "vllm"), "--model: '13c' is not a known model"),
        (*("13b", "a100", "vllm"), "--gpu: 'a100' names no GPU by itself; write one of a100-40g, a100-80g"),
    ],
)
def test_what_is_not_shipped(model: str, gpu: str, engine: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        find_profile(model, gpu, engine=engine)
    assert str(caught.value).startswith(expected)


def test_every_other_model_is_refused_with_what_exists() -> None:
    known = {load_profile(path).model.name for _, path in shipped_profiles()}
    for model in models():
        if model.name in known:
            continue
        with pytest.raises(InputError, match=f"there are profiles for {', '.join(sorted(known))};"):
            find_profile(model.name, "a100-80g", engine="vllm")


#: Fits as their authors printed them: decode falls where the batch passes a threshold.
PRINTED = frozenset(name for name in NAMES if any(name == key for key, _ in FALLS))


@pytest.mark.parametrize("name", [name for name, _ in shipped_profiles()])
class TestEveryFile:
    """The contract of latency models, for every file that is shipped, between the points of `find_violations` too."""

    def test_bound_monotone_and_sensitive(self, name: str) -> None:
        """Reading a file looks for every violation and keeps all of them."""
        violations = load_profile(dict(shipped_profiles())[name]).violations
        assert all("decode falls" in violation for violation in violations)
        assert bool(violations) == (name in PRINTED)

    def test_at_random_places(self, name: str) -> None:
        profile = load_profile(dict(shipped_profiles())[name])
        model, gpu = profile.model, profile.gpu
        rng = np.random.default_rng(1)
        for tp, latency in profile.latency.items():
            valid = latency.valid_range
            longest = int(min(valid.chunk_tokens, model.context_tokens))
            for _ in range(25):
                chunk = int(rng.integers(1, int(min(longest, valid.prefill_tokens))))
                cached = int(rng.integers(0, longest - chunk)) if longest > chunk else 0
                step_s = latency.prefill_s([(chunk, cached)])
                assert step_s >= prefill_bound_s([(chunk, cached)], model=model, gpu=gpu, tp=tp)
                assert latency.prefill_s([(chunk + 1, cached)]) >= step_s
                assert latency.prefill_s([(chunk, cached + 1)]) >= step_s
                if 2 * chunk <= valid.prefill_tokens:
                    assert latency.prefill_s([(chunk, cached)] * 2) >= step_s
                requests = int(np.exp(rng.uniform(0, np.log(min(valid.decode_requests, 1024)))))
                context = int(rng.integers(1, max(int(min(longest, valid.context_tokens / requests)), 2)))
                decode_s = latency.decode_s(requests, requests * context)
                assert decode_s >= decode_bound_s(requests, requests * context, model=model, gpu=gpu, tp=tp)
                assert latency.decode_s(requests, requests * (context + 1)) >= decode_s
                if name not in PRINTED:
                    assert latency.decode_s(requests + 1, (requests + 1) * context) >= decode_s
                mixed_s = latency.mixed_s([(chunk, cached)], requests, requests * context)
                assert mixed_s >= max(step_s, decode_s)

    def test_every_input_counts(self, name: str) -> None:
        for latency in load_profile(dict(shipped_profiles())[name]).latency.values():
            decode_s = latency.decode_s(8, 8 * 512)
            assert latency.decode_s(8, 8 * 1024) > decode_s
            assert latency.decode_s(64, 64 * 512) > decode_s
            assert latency.prefill_s([(1024, 0)]) > latency.prefill_s([(512, 0)])
            assert latency.prefill_s([(512, 512)]) > latency.prefill_s([(512, 0)])
            assert latency.prefill_s([(512, 0)] * 2) > latency.prefill_s([(512, 0)])
