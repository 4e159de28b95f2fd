"""A run that dsim simulated is validated without error in every format, and with an error under wrong settings."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.errors import InputError
from dsim.options import Options, Window
from dsim.pools import Placement, Policy, Role
from dsim.profile import BatchLimits, Profile
from dsim.result import Result
from dsim.simulate import Source, simulate
from dsim.slo import Slo
from dsim.trace import Trace
from dsim.workload import ClosedLoop, Fixed, Gamma, Poisson, Uniform, Workload
from experiments.validation import (
    Kind,
    Measured,
    Origin,
    Requests,
    TpotDefinition,
    Validation,
    aggregate,
    read_run,
    read_runs,
    replay,
    validate,
)
from experiments.validation.inputs import parse_assumption
from experiments.validation.measured import METRICS, RATES, STATISTICS, Value
from experiments.validation.settle import cases
from profiles.choice import choose_profile

SHARED = Path(__file__).parents[2] / "shared" / "data"
COLOCATED = Placement.parse("1xC:tp1", policy=Policy.CHUNKED, token_budget=2048)
DISAGGREGATED = Placement.parse("1xP:tp1 + 1xD:tp1")
#: What the runs below are simulated with, as inputs of a validation.
ENGINE: Mapping[str, tuple[Value, ...]] = {
    "policy": ("chunked",),
    "token_budget": (2048,),
    "max_seqs": (256,),
    "kv_blocks": (2500,),
}
SLO = Slo(ttft_s=0.05, tpot_s=0.012)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return choose_profile(model="llama-3.1-8b", gpu="h100", engine="vllm")


def trace(requests: int = 200, *, rate_per_s: float = 12.0) -> Trace:
    workload = Workload(Poisson(), Uniform(900, 150, 0.2))
    return workload.trace(num_requests=requests, rate_per_s=rate_per_s, seed=3, context_tokens=8192)


def simulated(
    profile: Profile,
    source: Source,
    placement: Placement = COLOCATED,
    *,
    warmup: int = 0,
    log_steps: bool = False,
    kv_blocks: int = 2500,
) -> Result:
    """Return a run under the settings of `ENGINE`."""
    used = profile.with_kv_blocks(placement, kv_blocks)
    limits = {
        role: each if role is Role.PREFILL else BatchLimits(each.tokens, 256) for role, each in used.limits.items()
    }
    return simulate(
        placement,
        source,
        profiles=dataclasses.replace(used, limits=limits),
        window=Window(warmup=warmup),
        options=Options(log_steps=log_steps),
    )


def checked(measured: Measured, profile: Profile, **given: tuple[Value, ...]) -> Validation:
    engine = {name: value for name, value in ENGINE.items() if name not in given}
    return validate(measured, profiles=profile, placement=COLOCATED, given={**engine, **given}, slo=SLO)


def assert_exact(found: Validation, *, names: int, rel: float = 0.0) -> None:
    """Every statistic that was measured is predicted, by one number, with no error."""
    assert len(found.comparisons) == names
    for one in found.comparisons:
        assert one.predicted is not None
        assert one.error == (0.0 if rel == 0 else pytest.approx(0.0, abs=rel)), one
        assert math.isclose(one.low, one.high, rel_tol=max(rel, 1e-12))


def token_gaps(result: Result) -> list[list[float]]:
    """Return the gaps between the tokens of each request, from the log of its steps."""
    times: list[list[float]] = [[first] for first in result.columns["first_token_s"].tolist()]
    for step in result.steps or ():
        for request in step.decode:
            times[request].append(step.end_s)
    return [np.diff(of_request).tolist() for of_request in times]


def vllm_result(result: Result, **more: object) -> dict[str, Any]:
    """Return what `vllm bench serve --save-detailed` would have saved of a run."""
    columns = result.columns
    output, prompt = columns["output_tokens"], columns["prompt_tokens"]
    span_s = float(columns["last_token_s"].max())
    ttft = columns["first_token_s"] - columns["arrival_s"]
    return {
        "backend": "vllm",
        "num_prompts": len(output),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": span_s,
        "completed": len(output),
        "failed": 0,
        "total_input_tokens": int(prompt.sum()),
        "total_output_tokens": int(output.sum()),
        "request_throughput": len(output) / span_s,
        "output_throughput": int(output.sum()) / span_s,
        "total_token_throughput": int(output.sum() + prompt.sum()) / span_s,
        "input_lens": prompt.tolist(),
        "output_lens": output.tolist(),
        "ttfts": ttft.tolist(),
        "itls": token_gaps(result),
        "errors": [""] * len(output),
        "mean_ttft_ms": float(ttft.mean() * 1e3),
        **more,
    }


def written(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def row(result: Result, **more: object) -> dict[str, object]:
    """Return the statistics of a run as one row, in milliseconds as most tools write them."""
    found: dict[str, object] = dict(more)
    for metric, statistics in result.summary(Slo()).items():
        if metric in METRICS:
            for name in STATISTICS:
                word = "median" if name == "p50" else name
                found[f"{word}_{metric.removesuffix('_s')}_ms"] = statistics[name] * 1e3
    return found


def test_a_run_as_csv_has_no_error(profile: Profile, tmp_path: Path) -> None:
    result = simulated(profile, trace())
    path = tmp_path / "requests.csv"
    path.write_text(result.to_frame().to_csv(index_label="request"))
    # Mean, p50, p90, p95 and p99 of TTFT, TPOT and E2E, the mean of ITL, three rates, three shares.
    found = checked(read_run(path), profile)
    assert_exact(found, names=15 + 1 + 3 + 3)
    assert 0 < found.of("attainment.both").measured < 1


def test_columns_of_other_names_and_units(profile: Profile, tmp_path: Path) -> None:
    result = simulated(profile, trace(50))
    columns = result.columns
    rows = [
        {
            "id": f"r{i}",
            "sent": 1.7e9 + columns["arrival_s"][i],
            "isl": int(columns["prompt_tokens"][i]),
            "completion_tokens": int(columns["output_tokens"][i]),
            "first": float(result.ttft_s[i] * 1e3),
            "e2e_latency_ms": float(result.e2e_s[i] * 1e3),
        }
        for i in range(50)
    ]
    path = tmp_path / "log.jsonl"
    # In the order in which they finished, as logs are.
    order = np.argsort(columns["last_token_s"])
    path.write_text("".join(json.dumps(rows[i]) + "\n" for i in order))
    from experiments.validation.readers import parse_column

    renamed = dict(parse_column(text) for text in ("arrival_s=sent", "ttft_s=first:ms"))
    measured = read_run(path, columns=renamed)
    assert measured.requests is not None
    assert measured.requests.prompt_tokens.tolist() == columns["prompt_tokens"].tolist()
    assert "counted from the first arrival" in measured.remarks[0]
    # A clock of seconds since 1970 resolves a quarter of a microsecond.
    assert_exact(checked(measured, profile), names=22, rel=1e-4)


@pytest.mark.parametrize("lists", [True, False])
def test_a_detailed_result_of_vllm(profile: Profile, tmp_path: Path, *, lists: bool) -> None:
    """With start times the arrivals are replayed; without them they are drawn anew."""
    arrivals = trace(150)
    result = simulated(profile, arrivals, log_steps=True)
    more: dict[str, object] = {"request_rate": 12.0}
    if lists:
        more["start_times"] = (5000.5 + result.columns["arrival_s"]).tolist()
    measured = read_run(written(tmp_path / "vllm.json", vllm_result(result, **more)))
    assert measured.kind is Kind.VLLM
    if lists:
        assert_exact(checked(measured, profile), names=20 + 3 + 3, rel=1e-7)
    else:
        found = checked(measured, profile, seed=(3,))
        assert any("arrivals are drawn" in remark for remark in found.remarks)
        # The same arrivals but for their stretching, so that the last request is sent at n / rate.
        assert abs(found.of("e2e_s.mean").error or 1) < 0.1
        assert abs(found.of("throughput_per_s").error or 1) < 0.1
        assert abs(found.of("ttft_s.mean").error or 1) < 0.1


def test_a_closed_loop_of_vllm_takes_the_rows_in_turn(profile: Profile, tmp_path: Path) -> None:
    """Users take the next row when they are free, whoever they are: simulate it, save it, validate it."""
    lengths = trace(60)
    count = len(lengths)
    nothing = np.zeros(count, dtype=np.int64)
    unknown = np.full(count, math.nan)
    asked = Measured(
        "here",
        Kind.REQUESTS,
        {},
        requests=Requests(lengths.prompt_tokens, lengths.output_tokens, nothing, unknown, unknown, unknown),
    )
    case: dict[str, Value] = {
        **{name: values[0] for name, values in ENGINE.items()},
        "loop": "closed",
        "users": 8,
        "num_requests": count,
        "turnaround_s": 0.0,
        "stagger_s": 0.0,
        "first_wave_counted": True,
    }
    run = replay(asked, case, profiles={Role.COLOCATED: profile}, placement=COLOCATED, options=Options(log_steps=True))
    result = run.result
    assert result.columns["prompt_tokens"].tolist() == lengths.prompt_tokens.tolist()
    # Eight are in flight until the rows run out.
    arrival, end = result.columns["arrival_s"], np.sort(result.columns["last_token_s"])
    assert arrival[:8].tolist() == [0.0] * 8
    assert arrival[8:].tolist() == end[: count - 8].tolist()
    measured = read_run(written(tmp_path / "closed.json", vllm_result(result, max_concurrency=8)))
    assert_exact(checked(measured, profile), names=26, rel=1e-7)


def test_a_result_of_vllm_without_details(profile: Profile, tmp_path: Path) -> None:
    result = simulated(profile, ClosedLoop(12, Fixed(700, 90), 60), log_steps=True)
    saved = {
        key: value
        for key, value in vllm_result(result, max_concurrency=12, **row(result)).items()
        if key not in {"input_lens", "output_lens", "ttfts", "itls", "errors"}
    }
    measured = read_run(written(tmp_path / "short.json", saved))
    assert (measured.inputs["prompt_tokens"], measured.inputs["output_tokens"]) == (700, 90)
    assert measured.inputs["num_requests"] == 60
    assert any("--save-detailed" in remark for remark in measured.remarks)
    found = checked(measured, profile, length_range=("exact",))
    assert_exact(found, names=23, rel=1e-12)
    assert {item.name for item in found.inputs} >= {"users", "turnaround_s", "first_wave_counted", "max_seqs"}


def test_results_of_sglang(profile: Profile, tmp_path: Path) -> None:
    """Its own names, the mean concurrency that it measured, and options of random lengths whatever the data set was."""
    result = simulated(profile, ClosedLoop(12, Fixed(700, 90), 60), log_steps=True)
    saved = {
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": math.inf,
        "max_concurrency": 12,
        "random_input_len": 700,
        "random_output_len": 90,
        "random_range_ratio": 1.0,
        "duration": 10.0,
        "completed": 60,
        "total_input_tokens": 42000,
        "total_output_tokens": 5400,
        "concurrency": 11.7,
        "mean_e2e_latency_ms": float(result.e2e_s.mean() * 1e3),
        "median_ttft_ms": float(np.median(result.ttft_s) * 1e3),
    }
    measured = read_run(written(tmp_path / "sglang.jsonl", saved))
    assert measured.kind is Kind.VLLM
    assert_exact(checked(measured, profile), names=2, rel=1e-12)
    measured = read_run(
        written(tmp_path / "sglang.jsonl", {**saved, "dataset_name": "sharegpt", "random_input_len": 9})
    )
    assert (measured.inputs["prompt_tokens"], measured.inputs["lengths_are"]) == (700, "mean")
    assert any("workload=LENGTHS" in remark for remark in measured.remarks)
    found = checked(measured, profile, workload=("sharegpt",), seed=(0,))
    assert {item.name for item in found.inputs}.isdisjoint({"prompt_tokens", "length_range"})
    lists = vllm_result(result, max_concurrency=12, concurrency=11.7, dataset_name="sharegpt")
    assert_exact(checked(read_run(written(tmp_path / "details.jsonl", lists)), profile), names=26, rel=1e-7)


def test_a_row_of_a_closed_loop_has_no_error(profile: Profile) -> None:
    result = simulated(profile, ClosedLoop(16, Fixed(512, 64), 80))
    measured = aggregate(
        row(result, concurrency=16, num_prompts=80, isl=512, osl=64, throughput_per_s=result.throughput_per_s)
    )
    known: dict[str, tuple[Value, ...]] = {"length_range": ("exact",), "first_wave_counted": (True,)}
    assert_exact(checked(measured, profile, **known), names=21, rel=1e-12)


def test_the_first_wave_may_be_left_out(profile: Profile) -> None:
    result = simulated(profile, ClosedLoop(16, Fixed(512, 64), 80), warmup=16)
    measured = aggregate(row(result, users=16, num_requests=80, prompt_tokens=512, output_tokens=64))
    found = checked(measured, profile, length_range=("exact",))
    ttft = found.of("ttft_s.mean")
    assert ttft.predicted is None
    assert (ttft.error_low == pytest.approx(0, abs=1e-12), ttft.error_high > 0.1) == (True, True)
    without = checked(measured, profile, length_range=("exact",), first_wave_counted=(False,))
    assert without.of("ttft_s.mean").error == pytest.approx(0, abs=1e-12)
    assert without.of("itl_s.mean").error == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("burstiness", [1.0, 4.0])
def test_a_row_of_an_open_loop_has_no_error_with_its_seed(profile: Profile, burstiness: float) -> None:
    arrivals = Poisson() if burstiness == 1 else Gamma(burstiness**-0.5)
    requests = Workload(arrivals, Uniform(800, 100, 0.8)).trace(
        num_requests=120, rate_per_s=9, seed=1, context_tokens=8192
    )
    result = simulated(profile, requests)
    measured = aggregate(
        row(
            result,
            request_rate=9,
            burstiness=burstiness,
            num_requests=120,
            prompt_tokens=800,
            output_tokens=100,
            length_range="0.8-1",
        )
    )
    assert_exact(checked(measured, profile, seed=(1,)), names=20, rel=1e-12)
    # Without it three seeds are tried, and their mean is the prediction.
    unknown = checked(measured, profile)
    assert len(unknown.replays) == 3
    ttft = unknown.of("ttft_s.mean")
    assert ttft.low < ttft.measured <= ttft.high * (1 + 1e-12)
    assert ttft.predicted == pytest.approx(np.mean([one.statistics["ttft_s.mean"] for one in unknown.replays]))


def test_a_disaggregated_run_has_no_error(profile: Profile, tmp_path: Path) -> None:
    result = simulated(profile, trace(), DISAGGREGATED)
    path = tmp_path / "requests.csv"
    path.write_text(result.to_frame().to_csv())
    found = validate(
        read_run(path),
        profiles=profile,
        placement=DISAGGREGATED,
        given={"max_seqs": (256,), "kv_blocks": (2500,)},
    )
    assert_exact(found, names=19)
    shown = {item.name: str(item) for item in found.inputs}
    assert "first token from prefill" in shown["handover"]
    assert shown["token_budget"].endswith("(from the profile; of a prefill batch)")


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_budget": (256,)},
        {"policy": ("prefill-first",), "token_budget": ()},
        {"max_seqs": (4,)},
        {"kv_blocks": (300,)},
        {"kv_blocks": ("1%",)},
    ],
)
def test_wrong_settings_show(profile: Profile, tmp_path: Path, wrong: dict[str, tuple[Value, ...]]) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(simulated(profile, trace()).to_frame().to_csv())
    given = {name: values for name, values in {**ENGINE, **wrong}.items() if values}
    found = validate(read_run(path), profiles=profile, placement=COLOCATED, given=given)
    assert max(abs(one.error or 0) for one in found.comparisons) > 0.02


def test_unknown_settings_give_a_range_that_holds_the_truth(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(simulated(profile, trace(rate_per_s=30)).to_frame().to_csv())
    found = validate(read_run(path), profiles=profile, placement=COLOCATED, given={"max_seqs": (256,)})
    assert {item.name: item.values for item in found.unknown} == {
        "token_budget": (2048, 8192),
        "kv_blocks": ("100%", "80%", "120%"),
    }
    assert len(found.replays) == 6
    one = found.of("ttft_s.mean")
    assert one.predicted is None
    assert one.error is None
    assert one.error_low < one.error_high
    assert "token_budget=2048 | 8192 (not known, all tried)" in found.inputs_line
    assert "policy=chunked (from the profile; vllm 0.24.0)" in found.inputs_line
    # The placement's own budget is not the run's: it is not asked.
    assert [one.case["token_budget"] for one in found.replays] == [2048] * 3 + [8192] * 3


def test_limits_that_never_bind_are_not_replayed_again(profile: Profile, tmp_path: Path) -> None:
    """And what stands for them is what a replay of their own gives."""
    path = tmp_path / "requests.csv"
    path.write_text(simulated(profile, trace(rate_per_s=20)).to_frame().to_csv())
    measured = read_run(path)
    given = {
        "max_seqs": (2, 40, 128, 1024),
        "kv_blocks": ("2%", "100%", "80%"),
        "policy": ("chunked",),
        "token_budget": (512,),
    }
    found = validate(measured, profiles=profile, placement=COLOCATED, given=given)
    assert len(found.replays) == 12
    runs = {id(one.result) for one in found.replays}
    assert 4 <= len(runs) < 12
    roles = dict.fromkeys(Role, profile)
    for one in found.replays:
        again = replay(measured, one.case, profiles=roles, placement=COLOCATED)
        assert again.statistics == one.statistics, one.case
    assert found.without_effect == ()
    wide = validate(
        measured,
        profiles=profile,
        placement=COLOCATED,
        given={**given, "max_seqs": (128, 1024), "kv_blocks": ("100%", "80%")},
    )
    assert wide.without_effect == ("max_seqs", "kv_blocks")
    assert all(one.predicted is not None for one in wide.comparisons)


def test_the_shortest_kv_of_a_disaggregated_run_is_replayed(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(simulated(profile, trace(60), DISAGGREGATED).to_frame().to_csv())
    found = validate(
        read_run(path),
        profiles=profile,
        placement=DISAGGREGATED,
        given={"kv_blocks": ("100%", "80%"), "max_seqs": (256,)},
    )
    assert len({id(one.result) for one in found.replays}) == 2


def test_a_request_has_three_times_per_token() -> None:
    """The example of the text: 10 tokens, the first after 0.5 s, then one every 0.1 s."""
    times = {"ttft_s": np.array([0.5, 0.5]), "e2e_s": np.array([1.4, 0.5]), "output_tokens": np.array([10, 1])}
    assert TpotDefinition.VLLM.of(**times)[0] == pytest.approx(0.100)
    assert TpotDefinition.GUIDELLM.of(**times)[0] == pytest.approx(0.140)
    assert TpotDefinition.SIMDISTSERVE.of(**times)[0] == pytest.approx(0.090)
    assert np.isnan([TpotDefinition.VLLM.of(**times)[1], TpotDefinition.SIMDISTSERVE.of(**times)[1]]).all()


@pytest.mark.parametrize(("definition", "tpot"), [("vllm", 0.1), ("guidellm", 0.14), ("simdistserve", 0.09)])
def test_times_per_token_are_converted(tmp_path: Path, definition: str, tpot: float) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(f"arrival_s,prompt_tokens,output_tokens,ttft_s,tpot_s\n0,100,10,0.5,{tpot}\n1,100,1,0.5,\n")
    requests = read_run(path, tpot_definition=TpotDefinition(definition)).requests
    assert requests is not None
    assert requests.tpot_s[0] == pytest.approx(0.1)
    assert math.isnan(requests.tpot_s[1])
    assert requests.e2e_s.tolist() == pytest.approx([1.4, 0.5])


def test_rows_of_another_definition_are_predicted_in_it(profile: Profile) -> None:
    result = simulated(profile, ClosedLoop(8, Fixed(512, 64), 40))
    per_token = float((result.e2e_s / 64).mean())
    known: dict[str, tuple[Value, ...]] = {"length_range": ("exact",), "first_wave_counted": (True,)}
    said = {"users": 8, "num_requests": 40, "prompt_tokens": 512, "output_tokens": 64, "mean_tpot_ms": per_token * 1e3}
    right = checked(aggregate(said, tpot_definition=TpotDefinition.GUIDELLM), profile, **known)
    assert right.of("tpot_s.mean").error == pytest.approx(0, abs=1e-12)
    assert "guidellm" in right.remarks[0]
    assert (checked(aggregate(said), profile, **known).of("tpot_s.mean").error or 0) < -0.02


def test_attainment_is_compared_in_points() -> None:
    from experiments.validation import compare

    one, two = compare(
        {"attainment.both": 0.9, "throughput_per_s": 2.0},
        [{"attainment.both": 0.85, "throughput_per_s": 1.0}, {"attainment.both": 0.95, "throughput_per_s": 3.0}],
        one_number=False,
    )
    assert (one.name, one.error) == ("throughput_per_s", None)
    assert [one.error_low, one.error_high] == [-0.5, 0.5]
    assert [two.error_low, two.error_high] == pytest.approx([-0.05, 0.05])


def test_nothing_measured_compares_with_nothing() -> None:
    from experiments.validation import compare

    (one,) = compare({"itl_s.p50": 0.0, "ttft_s.mean": 1.0}, [{"itl_s.p50": 0.0}], one_number=True)
    assert one.error == 0
    (two,) = compare({"itl_s.p50": 0.0}, [{"itl_s.p50": 0.1}], one_number=True)
    assert two.error == math.inf


def test_lengths_known_by_their_mean_keep_it() -> None:
    from experiments.validation.replay import source_of

    said: dict[str, Value] = {
        "loop": "burst",
        "num_requests": 4000,
        "prompt_tokens": 900,
        "output_tokens": 90,
        "length_range": "0.8-1",
        "seed": 0,
    }
    measured = Measured("here", Kind.AGGREGATE, {})
    for lengths_are, mean in (("mean", 900), ("nominal", 810)):
        source, _ = source_of({**said, "lengths_are": lengths_are}, measured, context_tokens=8192)
        assert isinstance(source, Trace)
        assert source.prompt_tokens.mean() == pytest.approx(mean, rel=0.005)
        assert source.prompt_tokens.max() / source.prompt_tokens.min() == pytest.approx(1.25, rel=0.01)


def test_what_matters_is_tried_once() -> None:
    """Policies without chunks have no budget; where nothing is drawn the seed changes nothing."""
    from experiments.validation import Input

    inputs = (
        Input("loop", ("closed",), Origin.GIVEN),
        Input("length_range", ("exact", "0.8-1"), Origin.UNKNOWN),
        Input("seed", (4, 5), Origin.UNKNOWN),
        Input("policy", ("chunked", "prefill-first"), Origin.UNKNOWN),
        Input("token_budget", (1, 2), Origin.UNKNOWN),
    )
    found = [tuple(case.values())[1:] for case in cases(inputs)]
    engines = [("chunked", 1), ("chunked", 2), ("prefill-first", None)]
    assert found == [
        (lengths, seed, *engine) for lengths, seed in (("exact", 4), ("0.8-1", 4), ("0.8-1", 5)) for engine in engines
    ]


ROW = {"mean_ttft_ms": 20.0, "prompt_tokens": 512, "output_tokens": 64}


@pytest.mark.parametrize(
    ("row", "given", "words"),
    [
        (
            ROW,
            (),
            "row: does not say when requests were sent; add --assume rate_per_s=RATE, users=N, or loop=burst",
        ),
        (ROW, ("loop=burst",), "row: num_requests is not in the file; add --assume num_requests=N"),
        (ROW, ("loop=open",), "row: rate_per_s is not in the file; add --assume rate_per_s=RATE"),
        (ROW, ("loop=closed",), "row: users is not in the file; add --assume users=N"),
        (ROW, ("loop=replay",), "--assume: loop='replay' needs arrivals, which the file does not have"),
        (ROW, ("loop=open,closed",), "--assume: loop takes one value; compare loops in runs of their own"),
        (
            {"mean_ttft_ms": 1.0, "qps": 2},
            (),
            "row: prompt_tokens is not in the file; add --assume prompt_tokens=TOKENS",
        ),
        ({**ROW, "qps": 2}, ("users=4",), "--assume: users='4' does not bear on this run (open loop, 1xC:tp1pp1)"),
        ({**ROW, "users": 2}, ("stagger_s=1", "seed=1", "length_range=exact"), "--assume: seed='1' does not bear on"),
        (
            {**ROW, "users": 40, "num_requests": 40},
            ("first_wave_counted=false", "length_range=exact"),
            "--assume: first_wave_counted='false' leaves nothing of 40 requests of 40 users; give more num_requests",
        ),
        (
            {**ROW, "qps": 2},
            (f"seed={','.join(map(str, range(20)))}",),
            "--assume: would take 1440 replays, more than 1000, to try all",
        ),
        (
            {**ROW, "qps": 2, "policy": "orca"},
            ("token_budget=9",),
            "--assume: token_budget='9' does not bear on this run",
        ),
        ({**ROW, "qps": 2}, ("handover=direct",), "--assume: handover='direct' is what the profile says; give --"),
    ],
)
def test_what_cannot_be_settled(profile: Profile, row: dict[str, object], given: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError) as caught:
        validate(
            aggregate(row), profiles=profile, placement=COLOCATED, given=dict(parse_assumption(text) for text in given)
        )
    assert words in str(caught.value)


def test_attainment_needs_its_limits(profile: Profile) -> None:
    said = aggregate({**ROW, "users": 4, "num_requests": 20, "attainment": 0.9})
    given: dict[str, tuple[Value, ...]] = {"length_range": ("exact",), "first_wave_counted": (True,), **ENGINE}
    without = validate(said, profiles=profile, placement=COLOCATED, given=given)
    assert any("add --slo" in remark for remark in without.remarks)
    found = validate(said, profiles=profile, placement=COLOCATED, given=given, slo=Slo(ttft_s=1))
    assert found.of("attainment.both").error == pytest.approx(0.1)
    assert found.remarks == ()


def test_what_the_file_says_is_not_tried(profile: Profile) -> None:
    said = {
        **ROW,
        "users": 4,
        "num_requests": 20,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks": 900,
    }
    found = validate(aggregate(said), profiles=profile, placement=COLOCATED, given={"length_range": ("exact",)})
    origins = {item.name: item.origin for item in found.inputs}
    assert [origins[name] for name in ("users", "max_seqs", "token_budget", "kv_blocks")] == [Origin.FILE] * 4
    assert [item.name for item in found.unknown] == ["first_wave_counted"]
    # What is given wins.
    found = validate(
        aggregate(said), profiles=profile, placement=COLOCATED, given={"length_range": ("exact",), "max_seqs": (2,)}
    )
    assert {item.name: item.values for item in found.inputs}["max_seqs"] == (2,)


def test_a_limit_of_the_client_that_a_replay_lacks_is_remarked(profile: Profile) -> None:
    said = {**ROW, "request_rate": 40, "max_concurrency": 3, "num_requests": 60, "burstiness": math.inf}
    found = validate(
        aggregate({**said, "burstiness": "inf"}),
        profiles=profile,
        placement=COLOCATED,
        given={"length_range": ("exact",)},
    )
    assert any("the client held at most 3 requests in flight" in remark for remark in found.remarks)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the measurements in ../shared/data")
def test_the_run_on_an_rtx_pro_6000_is_read() -> None:
    measured = read_run(SHARED / "truth/vllm_rtxpro6000_llama31_8b_requests.csv", context_tokens=131072)
    assert measured.kind is Kind.REQUESTS
    requests = measured.requests
    assert requests is not None
    assert len(requests) == 300
    assert requests.arrival_s is not None
    # The first row: 2358 tokens, first token after 169.5 ms, 531 tokens in 15.7 s.
    assert (requests.prompt_tokens[0], requests.output_tokens[0]) == (2358, 531)
    assert requests.ttft_s[0] == pytest.approx(0.169525)
    assert requests.tpot_s[0] == pytest.approx((15.713402 - 0.169525) / 530)
    assert requests.e2e_s[0] == pytest.approx(15.713402)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the measurements in ../shared/data")
def test_other_published_rows_are_read() -> None:
    run = read_run(SHARED / "distserve/runs/c21d11-300-3rps.csv")
    assert run.requests is not None
    assert (len(run.requests), run.requests.ttft_s[0], run.requests.e2e_s[0]) == (300, 0.071498, 0.164616)
    rows = read_runs(SHARED / "truth/silybench_qwen3_8b_h100.csv")
    assert len(rows) == 55
    assert rows[0].statistics["ttft_s.p95"] == pytest.approx(0.06134449)
    assert rows[0].statistics["e2e_s.p95"] == pytest.approx(14.420405)
    assert rows[0].statistics["throughput_per_s"] == 0.0695142
    assert rows[1].inputs == {"users": 4, "num_requests": 50, "prompt_tokens": 2048, "output_tokens": 2048}
    rows = read_runs(SHARED / "truth/trtllm014_online_qps.csv")
    assert rows[0].statistics["itl_s.mean"] == 0.008
    assert rows[0].inputs == {"rate_per_s": 2.0, "prompt_tokens": 467, "output_tokens": 256}


def test_every_statistic_has_a_name() -> None:
    from experiments.validation.report import NAMED

    assert len(set(NAMED)) == len(METRICS) * len(STATISTICS) + len(RATES) + 3
    assert all(name in NAMED for name in (f"{m}.{s}" for m, s in itertools.product(METRICS, STATISTICS)))


def test_host_constants_fitted_to_half_of_the_requests(profile: Profile, tmp_path: Path) -> None:
    """An engine whose host takes longer than the profile says: one half tells how long, the other is predicted."""
    from experiments.validation import fit_host
    from experiments.validation.fit import CONSTANTS, with_host

    slow = with_host(profile, {"step_s": 0.004, "sequence_s": 3e-5, "token_s": 0.0, "request_s": 0.03})
    path = tmp_path / "requests.csv"
    path.write_text(simulated(slow, trace(80)).to_frame().to_csv())
    found = checked(read_run(path), profile)
    fit = fit_host(found)
    assert set(fit.constants) == set(CONSTANTS)
    assert all(value >= 0 for value in fit.constants.values())
    before = {one.name: abs(one.error or 0) for one in found.comparisons}
    for half in (fit.fitted, fit.held_out):
        after = {one.name: abs(one.error or 0) for one in half}
        for name in ("ttft_s.mean", "tpot_s.mean", "e2e_s.mean"):
            assert before[name] > 0.1
            assert after[name] < 0.03
    # Halves differ: the fit has not seen the other one.
    assert fit.fitted[0].measured != fit.held_out[0].measured
    assert fit.constants["step_s"] == pytest.approx(0.004, rel=0.3)


def test_what_cannot_be_fitted(profile: Profile, tmp_path: Path) -> None:
    from experiments.validation import fit_host

    row = aggregate({**ROW, "users": 4, "num_requests": 20})
    known: dict[str, tuple[Value, ...]] = {"length_range": ("exact",), "first_wave_counted": (True,)}
    with pytest.raises(InputError, match="--fit-host: needs the requests of a run, not statistics of them"):
        fit_host(checked(row, profile, **known))
    path = tmp_path / "requests.csv"
    path.write_text(simulated(profile, trace(10)).to_frame().to_csv())
    with pytest.raises(InputError, match="--fit-host: 10 needs at least 20 requests"):
        fit_host(checked(read_run(path), profile))
    path.write_text(simulated(profile, trace(100, rate_per_s=60)).to_frame().to_csv())
    with pytest.raises(InputError, match="does not know token_budget; add --assume token_budget=VALUE"):
        fit_host(checked(read_run(path), profile, token_budget=(512, 2048)))
    saved = vllm_result(simulated(profile, trace(30), log_steps=True), request_rate=12.0)
    with pytest.raises(InputError, match="needs the arrivals of the requests, which were drawn"):
        fit_host(checked(read_run(written(tmp_path / "vllm.json", saved)), profile, seed=(1,)))
