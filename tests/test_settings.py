"""Settings: strict about keys and values, errors at the file's own lines, ids that depend on content alone."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest

from dsim.errors import InputError
from dsim.pools import Role
from dsim.yamlfile import parse_yaml
from experiments.base import parse_setting
from experiments.keys import KEYS
from experiments.settings import Measure, Setting
from placement.search import Mode
from profiles.shipped import shipped_profiles

BASE = """\
model: 13b
placement: 1xP:tp2pp1 + 1xD:tp1pp1
slo: {ttft: 0.25, tpot: 0.1}
rate: 4
"""


def setting(text: str, folder: Path = Path()) -> Setting:
    return parse_setting(parse_yaml(text.encode(), file="base.yaml"), folder=folder)


def changed(**keys: str) -> str:
    """Return BASE with keys replaced, added, or (an empty text) left out."""
    lines = [line for line in BASE.splitlines() if line.partition(":")[0] not in keys]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in keys.items() if value)]) + "\n"


def test_defaults_are_those_of_the_command_line() -> None:
    found = setting(BASE)
    assert found.measure is Measure.SIMULATE
    assert (found.traffic.requests, found.traffic.warmup, found.traffic.finite) == (10_000, 1_000, False)
    assert {profile.name for profile in found.used.values()} == {"opt-13b-a100-80g-distserve"}
    assert (found.num_gpus, found.traffic.rate_per_s, found.attainment) == (3, 4.0, 0.9)


def test_every_key_is_in_the_table_and_of_one_meaning() -> None:
    names = [key.name for key in KEYS]
    assert len(set(names)) == len(names)
    assert all(key.meaning and key.form and key.default and key.unit for key in KEYS)
    with pytest.raises(InputError, match="is not a known key"):
        setting(changed(nonsense="1"))


# What is changed, and words of the line that refuses it.
MALFORMED = [
    ({"measure": "simulat"}, "base.yaml:5: measure='simulat' is not known; did you mean 'simulate'?"),
    ({"modell": "13b"}, "base.yaml:5: 'modell' is not a known key; did you mean 'model'?"),
    ({"model": ""}, "base.yaml:1: model is needed; as in model 13b"),
    ({"model": "12b"}, "base.yaml:4: model='12b' is not a known model"),
    (
        {"engine": "vlm"},
        "base.yaml:5: engine='vlm' has no latency profile for opt-13b on a100-80g; did you mean 'vllm'",
    ),
    ({"evidence": "hearsay"}, "base.yaml:5: evidence='hearsay' is not known"),
    ({"evidence": "kernels"}, "base.yaml:5: evidence='kernels' has no profile of opt-13b on a100-80g"),
    (
        {"evidence": "roofline", "profile_set": "{block_tokens: 32}"},
        "changes a profile file, and step times of opt-13b",
    ),
    ({"profile": "none.yaml"}, "base.yaml:5: profile='none.yaml' does not exist; check the path"),
    ({"placement": ""}, "base.yaml:1: placement is missing; add this key"),
    ({"placement": "1xQ:tp1"}, "base.yaml:4: placement='1xQ:tp1' is not a pool; write"),
    ({"placement": "1xP:tp3pp1 + 1xD:tp1pp1"}, "cannot run: prefill tp3pp1: tp=3 does not divide the 40 attention"),
    ({"policy": "orca"}, "base.yaml:5: policy='orca' belongs to colocated placements"),
    ({"placement": "1xC:tp1pp1", "token_budget": "512"}, "token_budget=512 belongs to policy chunked"),
    ({"placement": "1xC:tp1pp1", "phase": "decode"}, "phase='decode' belongs to disaggregated placements"),
    ({"phase": "prefil"}, "phase='prefil' is not known; did you mean 'prefill'?"),
    ({"rate": ""}, "base.yaml:1: rate is missing; add rate, rate_per_gpu or a trace"),
    ({"rate": "0"}, "base.yaml:4: rate=0 must be between 1e-9 and 1e9 requests per second"),
    ({"rate": "6/m"}, "rate='6/m' has an unknown unit '/m'"),
    ({"rate_per_gpu": "1"}, "base.yaml:5: rate_per_gpu=1 does not go with rate; leave one of the two out"),
    ({"requests": "0"}, "requests=0 must be >= 1"),
    ({"warmup": "-1"}, "warmup=-1 must be >= 0"),
    ({"finite": "1"}, "finite=1 must be true or false"),
    ({"workload": "sharegtp"}, "workload='sharegtp' is unknown; did you mean 'sharegpt'?"),
    (
        {"workload": "fixed:5000,64"},
        "workload='fixed:5000,64' is wrong: prompt_tokens + output_tokens=5064 must be at most the model's context",
    ),
    ({"arrivals": "poison"}, "arrivals='poison' is unknown; did you mean 'poisson'?"),
    ({"slo": "{ttft: 250}"}, "base.yaml:4: slo.ttft=250 reads as 250 s, longer than any sensible target"),
    ({"slo": "{tftt: 0.2}"}, "base.yaml:4: 'tftt' is not a known key in slo; did you mean 'ttft'?"),
    ({"slo": "{}"}, "slo={...} needs a limit"),
    ({"slo": "{ttft: -1}"}, "slo.ttft=-1 must be > 0"),
    ({"slo_scale": "0"}, "slo_scale=0 must be >= 1e-06"),
    ({"attainment": "90"}, "attainment=90 must be < 1"),
    ({"attainment": "90ms"}, "attainment='90ms' has an unknown unit 'ms'"),
    ({"prefill_batching": "Lm"}, "prefill_batching='Lm' is not known; expected one of engine, lm"),
    ({"kv_blocks": "0"}, "kv_blocks=0 must be >= 1"),
    ({"quantiles": "[ttft]"}, "quantiles[0]='ttft' is not known; expected some of ttft_s"),
    (
        {"profile_set": "{handover.bandwith: 1}"},
        "base.yaml:5: profile_set is wrong: 'bandwith' is not a known key in handover",
    ),
    (
        {"profile_set": "{handover.bandwidth_bytes_per_s: 25}"},
        "base.yaml:5: profile_set.handover.bandwidth_bytes_per_s=25 must be >= 1000000",
    ),
    (
        {"profile_set": "{preemption: {method: dropp}}"},
        "base.yaml:5: profile_set.preemption.method='dropp' is not known",
    ),
    ({"profile_set": "{source.name: x}"}, "goes through source, which is no mapping"),
    ({"measure": "goodput", "slo": ""}, "slo is missing; add this key"),
    ({"measure": "search", "search": "{gpu: 4}"}, "'gpu' is not a known key in search; did you mean 'gpus'?"),
    ({"measure": "search", "search": "{gpus: 180}"}, "base.yaml:6: search.gpus=180 must be <= 128 GPUs in all"),
    ({"measure": "search", "search": "{gpus: 1025, affinity: low}"}, "search.gpus=1025 must be <= 1024 GPUs in all"),
    ({"measure": "search", "search": "{gpus: 8, nodes: 1}"}, "search.nodes=1 does not go with gpus"),
    ({"measure": "search", "search": "{policies: [vllm]}"}, "search.policies[0]='vllm' is not known"),
    ({"measure": "search", "search": "{requests: 5}"}, "search.requests=5 must be >= 10"),
    ({"measure": "step"}, "step is missing; add this key"),
    ({"measure": "step", "step": "{phase: prefill}"}, "base.yaml:6: step.prompt_tokens is missing"),
    (
        {"measure": "step", "step": "{phase: decode, tp: 8, context_tokens: 9}"},
        "step.tp=8 has no coefficients in profile opt-13b-a100-80g-distserve; it has 1, 2, 4",
    ),
    (
        {"measure": "step", "step": "{phase: decode, batch: 256, context_tokens: 9}"},
        "step.batch=256 leaves the profile's valid range: 256 is above 192",
    ),
    (
        {"measure": "step", "step": "{phase: prefill, prompt_tokens: 4096}", "extrapolate": "true"},
        "step.prompt_tokens=4096 is longer than the context of opt-13b, 2048 tokens",
    ),
    (
        {"measure": "step", "step": "{phase: prefill, prompt_tokens: 2040, batch: 5}"},
        "step.batch=5 leaves the profile's valid range: 10200 is above",
    ),
    (
        {"measure": "step", "step": "{phase: decode, pp: 3, context_tokens: 9}"},
        "step.pp=3 does not divide the 40 layers of opt-13b",
    ),
    ({"measure": "queueing"}, "queueing is missing; add this key"),
    ({"measure": "queueing", "queueing": "{formula: speedup, prefill_s: 0.2}"}, "queueing.tp_speedup is missing"),
    ({"measure": "queueing", "queueing": "{formula: md2, prefill_s: 0.2}"}, "queueing.formula='md2' is not known"),
    ({"measure": "queueing", "queueing": "{formula: md1, prefill_s: 0}"}, "queueing.prefill_s=0 must be > 0"),
    ({"colocated_engine": "vlm"}, "colocated_engine='vlm' has no latency profile"),
    ({"trace": "none.csv", "rate": ""}, "base.yaml:4: trace='none.csv' does not exist; check the path"),
    ({"trace": "none.csv"}, "base.yaml:4: rate=4 does not go with trace"),
    ({"seed": "-1"}, "seed=-1 must be >= 0"),
    ({"slo": "ttft=400"}, "base.yaml:4: slo='ttft=400' is wrong: ttft='400' reads as 400 s"),
    ({"placement": "1xP:tp1pp1 + 1xQ:tp1"}, "placement='1xP:tp1pp1 + 1xQ:tp1' is wrong: '1xQ:tp1' is not a pool"),
    ({"measure": "search", "search": "{policies: []}"}, "search.policies=[...] must not be empty; list at least one"),
    ({"measure": "search", "search": "{token_budgets: []}"}, "search.token_budgets=[...] must not be empty"),
    ({"measure": "search", "search": "{token_budgets: [512, 512]}"}, "search.token_budgets[1]=512 stands twice; keep"),
    (
        {"profile_set": "{handover.latency_s: 0, handover: {latency_s: 1}}"},
        "base.yaml:5: profile_set.handover.latency_s stands twice, dotted and nested; it also stands on line 5",
    ),
    ({"profile_set": "{nope: 1}"}, "base.yaml:5: profile_set is wrong: 'nope' is not a known key; expected one of"),
]


@pytest.mark.parametrize(("keys", "words"), MALFORMED)
def test_what_is_wrong_is_said_on_one_line_with_its_place(keys: dict[str, str], words: str) -> None:
    with pytest.raises(InputError) as error:
        setting(changed(**keys))
    text = str(error.value)
    assert words in text
    assert "\n" not in text
    assert "--" not in text.replace("a + b", "")
    assert re.search(r"; \S", text)


def test_units_say_the_same_in_any_form() -> None:
    first = setting(changed(rate="90/min", slo="{ttft: 250ms, tpot: 0.1}", attainment="90%"))
    second = setting(changed(rate="1.5", slo="ttft=0.25,tpot=100ms", attainment="0.9"))
    assert first.identity() == second.identity()
    assert setting(changed(rate="", rate_per_gpu="0.5")).traffic.rate_per_s == 1.5


def test_slo_scale_multiplies_every_limit() -> None:
    scaled = setting(changed(slo_scale="2"))
    assert scaled.slo is not None
    assert (scaled.slo.ttft_s, scaled.slo.tpot_s, scaled.slo.e2e_s) == (0.5, 0.2, float("inf"))


def test_rates_per_gpu_of_one_phase_are_per_gpu_of_its_pool() -> None:
    assert setting(changed(rate="", rate_per_gpu="1", phase="prefill")).traffic.rate_per_s == 2.0
    assert setting(changed(rate="", rate_per_gpu="1", phase="decode")).traffic.rate_per_s == 1.0


def test_identity_is_plain_and_names_no_file(tmp_path: Path) -> None:
    name, path = next(item for item in shipped_profiles() if item[0].startswith("opt-13b"))
    copy = tmp_path / "mine.yaml"
    copy.write_bytes(path.read_bytes())
    shipped = setting(changed(engine=name.rpartition("-")[2]))
    own = setting(changed(model="", profile="mine.yaml"), tmp_path)
    assert own.identity() == shipped.identity()
    assert "mine" not in json.dumps(own.identity())


def test_identity_leaves_out_what_the_measure_does_not_use() -> None:
    assert setting(BASE + "search: {gpus: 4}\n").identity() == setting(BASE).identity()
    goodput = changed(measure="goodput")
    assert setting(goodput).identity() == setting(goodput.replace("rate: 4", "rate: 5")).identity()
    assert setting(BASE).identity() != setting(changed(rate="5")).identity()
    assert setting(BASE).identity() != setting(changed(profile_set="{handover.latency_s: 0}")).identity()


def test_changed_profiles_are_read_again() -> None:
    found = setting(changed(profile_set="{handover.latency_s: 0.5, limits: {prefill: {requests: 3}}}"))
    used = found.used[Role.DECODE]
    assert used.handover.latency_s == 0.5
    assert found.used[Role.PREFILL].limits[Role.PREFILL].requests == 3
    assert used.sha256 != setting(BASE).used[Role.DECODE].sha256


def test_a_search_takes_vllm_for_colocated_placements_as_the_command_does() -> None:
    found = setting(changed(measure="search"))
    assert {role.name: profile.engine for role, profile in found.used.items()} == {
        "PREFILL": "distserve",
        "DECODE": "distserve",
        "COLOCATED": "vllm",
    }
    assert found.search is not None
    assert found.search.mode is Mode.BOTH
    only = setting(changed(measure="search", search="{mode: colocated}"))
    assert set(only.used) == {Role.COLOCATED}
    assert setting(changed(placement="1xC:tp1pp1")).used[Role.COLOCATED].engine == "distserve"


def test_settings_can_be_sent_to_another_process() -> None:
    found = setting(changed(measure="goodput"))
    assert pickle.loads(pickle.dumps(found)).identity() == found.identity()  # noqa: S301


def test_a_trace_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,2\n1,10,2\n")
    (tmp_path / "b.csv").write_bytes((tmp_path / "a.csv").read_bytes())
    first, second = (setting(changed(rate="", trace=name), tmp_path) for name in ("a.csv", "b.csv"))
    assert first.identity() == second.identity()
    assert first.traffic.requests == 2
    with pytest.raises(InputError, match="asks for more requests than the trace has; it has 2"):
        setting(changed(rate="", trace="a.csv", requests="3"), tmp_path)


def test_evidence_is_chosen_as_on_the_command_line() -> None:
    names = {
        profile.name
        for evidence in ("measured", "roofline")
        for profile in setting(changed(evidence=evidence)).used.values()
    }
    assert names == {"opt-13b-a100-80g-distserve", "opt-13b-a100-80g-vllm-roofline"}


def test_goodputs_of_other_precision_or_length_have_other_identities() -> None:
    base = "measure: goodput\nmodel: 13b\nplacement: 1xC:tp1pp1\nslo: {ttft: 0.4, tpot: 0.1}\n"
    texts = ["", "search: {precision: 0.1}\n", "search: {requests: 300}\n", "kv_blocks: 300\n"]
    settings = [parse_setting(parse_yaml((base + text).encode(), file="a"), folder=Path()) for text in texts]
    found = {json.dumps(setting.identity(), sort_keys=True) for setting in settings}
    assert len(found) == len(texts)


def test_errors_in_files_name_the_key_and_the_line_within(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,x,1\n", encoding="utf-8")
    (tmp_path / "one.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,1\n", encoding="utf-8")
    (tmp_path / "long.csv").write_text("prompt_tokens,output_tokens\n10,5\n3000,9\n", encoding="utf-8")
    (tmp_path / "bad.yaml").write_text("dsim_profile: 1\nmodel: [\n", encoding="utf-8")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for keys, words in (
        (
            {"trace": "bad.csv", "rate": ""},
            "4: trace='bad.csv' is wrong on line 2: prompt_tokens='x' must be a number; ",
        ),
        ({"workload": "bad.csv"}, "5: workload='bad.csv' is wrong on line 2: prompt_tokens='x' must be a number; "),
        ({"arrivals": "one.csv"}, "5: arrivals='one.csv' is wrong: 1 must hold at least 2 arrivals to be replayed; "),
        ({"workload": "long.csv"}, "5: workload='long.csv' is wrong on line 3: "),
        ({"profile": "bad.yaml", "model": ""}, "4: profile='bad.yaml' is wrong on line 3: is not YAML: "),
        ({"model": "config.json"}, "4: model='config.json' "),
    ):
        with pytest.raises(InputError) as error:
            setting(changed(**keys), tmp_path)
        assert str(error.value).startswith(f"base.yaml:{words}"), str(error.value)


def test_files_are_known_by_their_content_whatever_they_are_called(tmp_path: Path) -> None:
    (tmp_path / "lengths").mkdir()
    for name, length in (("lengths/a.txt", 100), ("b.csv", 100), ("lengths/c.txt", 200), ("sharegpt", 200)):
        (tmp_path / name).write_text(f"prompt_tokens,output_tokens\n{length},9\n", encoding="utf-8")
    first, second, third = (
        setting(changed(workload=name), tmp_path) for name in ("lengths/a.txt", "b.csv", "lengths/c.txt")
    )
    assert first.identity() == second.identity() != third.identity()
    # A name that dsim has is no file.
    assert setting(changed(workload="sharegpt"), tmp_path).identity() == setting(BASE).identity()
