"""`dsim report`: what the page says is what the files say, whatever they hold."""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import itertools
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from dsim.cli import main
from dsim.pools import Role
from dsim.slo import parse_slo
from dsim.version import __version__
from experiments.report.answer import read_answer
from experiments.report.evidence import VALIDATION
from experiments.report.interactive import bundle
from experiments.report.markup import data_block, element, escaped, joined
from experiments.report.search_page import render_search
from experiments.report.sections import Report
from experiments.report.sensitivity import Case, CasePoint, Changed, RatePoint, Sensitivity
from placement.statistics import Interval
from profiles.shipped import find_profile, shipped_profiles
from tests.cli import QUICK, Cli
from tests.report_pages import Element, answer_of, parsed, reported, searched

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
#: Ends an attribute, a comment, an element and a script, and is text to JavaScript and plotly.
HOSTILE = """<script>window.hacked=1</script>"'--></script><img src=x onerror=hacked=1>&amp;<b>${7*7}</b>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return searched(tmp_path_factory.mktemp("quick") / "result")


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return reported(folder)


@pytest.fixture(scope="module")
def page(text: str) -> Element:
    return parsed(text)


# Content


def test_the_recommendation_is_one_sentence_with_the_numbers(page: Element, folder: Path) -> None:
    answer = answer_of(folder)
    best = max((answer["best"][kind] for kind in ("disaggregated", "colocated")), key=goodput)
    ratio = answer["best"]["ratio"]
    if best is answer["best"]["colocated"]:
        ratio = {"low": 1 / ratio["high"], "best": 1 / ratio["best"], "high": 1 / ratio["low"]}
    sentence = next(e for e in page.all("p") if e.attributes.get("class") == "verdict")
    assert sentence.values == [
        *(best["goodput_per_gpu_per_s"][name] for name in ("best", "low", "high")),
        *(ratio[name] for name in ("best", "low", "high")),
    ]
    assert sentence.text.count(". ") == 0
    assert sentence.text.endswith(".")
    for words in (
        "of OPT-13B on ",
        "of type a100-80g",
        "95 % interval",
        "requests/s per GPU in runs of 50 requests with 90 % of the requests ",
        "within a TTFT of 0.4 s and a TPOT of 0.1 s",
        "times what the best",
    ):
        assert words in sentence.text
    assert best["placement"] in page.identified("recommendation").text


def goodput(trial: dict[str, Any]) -> float:
    return float(trial["goodput_per_gpu_per_s"]["best"])


def test_complete_trials_are_listed_with_their_numbers(page: Element, folder: Path) -> None:
    complete = [trial for trial in answer_of(folder)["trials"] if trial["state"] == "COMPLETE"]
    rows = page.table("Placements compared by long runs, best first; the recommended one is marked")
    assert len(rows) == len(complete) > 1
    for cells, trial in zip(rows, complete, strict=True):
        assert cells[0].tag == "th"
        assert cells[0].text.startswith(trial["placement"])
        assert cells[1].text == str(trial["num_gpus"])
        interval = trial["goodput_per_gpu_per_s"]
        assert cells[2].values == [interval["best"]]
        assert cells[3].values == [interval["low"], interval["high"]]
        assert cells[5].values == [trial["total_per_s"]["best"]]
        assert cells[6].values + cells[7].values == [trial["attainment"]["ttft"], trial["attainment"]["tpot"]]
        assert cells[8].text == trial["limiting_role"]
        assert sorted(cells[9].values) == sorted(trial["utilization"].values())
        assert cells[10].values == ([] if trial["load"] is None else [trial["load"]])
    ties = [cells[4].text for cells in rows]
    assert ties[0] == "best"
    assert [tie == "with the best" for tie in ties[1:]] == [trial["tied"] for trial in complete[1:]]


def test_every_other_placement_is_counted(page: Element, folder: Path) -> None:
    trials = answer_of(folder)["trials"]
    fates = page.table("What became of the placements")
    assert sum(int(cells[1].text) for cells in fates) == len(trials)
    everything = page.table("All placements; rates are requests/s per GPU")
    assert [cells[0].text.split(" (")[0] for cells in everything] == [trial["placement"] for trial in trials]
    for cells, trial in zip(everything, trials, strict=True):
        assert cells[4].values == [b for b in (trial["bound_per_gpu_per_s"],) if b is not None]
        assert cells[5].values == [f for f in (trial["failed_at_per_gpu_per_s"],) if f is not None]
        assert cells[6].text == " ".join("; ".join(trial["reasons"]).split())


def test_infeasible_placements_say_why(tmp_path: Path) -> None:
    folder = searched(tmp_path / "r", "-m", "66b", "--gpus", "3", "--slo", "ttft=2,tpot=0.3")
    rows = parsed(reported(folder, "--no-sensitivity")).table(
        "Why placements cannot run (one may have several reasons)"
    )
    reasons = [r for t in answer_of(folder)["trials"] if t["state"] == "INFEASIBLE" for r in t["reasons"]]
    assert {cells[0].text: int(cells[1].text) for cells in rows} == {r: reasons.count(r) for r in reasons}


def test_curves_breakdown_and_utilisation_are_those_of_the_files(page: Element, folder: Path) -> None:
    with (folder / "attainment.csv").open(encoding="utf-8") as file:
        points = list(csv.DictReader(file))
    rows = page.table("Attainment by arrival rate")
    assert sorted(tuple(v for cell in cells for v in cell.values) for cells in rows) == sorted(
        (float(p["rate_per_gpu_per_s"]), *(float(p[f"attainment.{n}"]) for n in ("best", "low", "high")))
        for p in points
    )
    best = answer_of(folder)["best"]
    trials = [best[kind] for kind in ("disaggregated", "colocated")]
    parts = page.table("Mean milliseconds by part")
    assert sorted(v for cells in parts for cell in cells for v in cell.values) == sorted(
        value for trial in trials for value in trial["ttft_parts_s"].values()
    )
    busy = page.table("Busy time by role")
    assert {(cells[1].text, cells[2].values[0], cells[3].text == "limits it") for cells in busy} == {
        (role, share, role == trial["limiting_role"])
        for trial in trials
        for role, share in trial["utilization"].items()
    }


def test_figures_show_what_their_tables_say(page: Element, folder: Path) -> None:
    figures = json.loads(page.identified("figures").source)
    assert list(figures) == ["curves", "breakdown", "utilisation", "rates", "cases"]
    drawn = figures["curves"]["data"]
    rows = page.table("Attainment by arrival rate")
    assert [x for line in drawn for x in line["x"]] == [cells[1].values[0] for cells in rows]
    assert [y for line in drawn for y in line["y"]] == pytest.approx([100 * cells[2].values[0] for cells in rows])
    breakdown = {bars["name"]: bars["x"] for bars in figures["breakdown"]["data"]}
    best = answer_of(folder)["best"]
    assert set(breakdown["queue"]) == {1e3 * best[k]["ttft_parts_s"]["queue"] for k in ("disaggregated", "colocated")}
    assert list(breakdown) == ["queue", "prefill", "(KV transfer and the wait for it)", "(decode admission)"]
    # Told apart without colour.
    patterns = [bars["marker"]["pattern"]["shape"] for bars in figures["breakdown"]["data"]]
    assert len(set(patterns)) == len(patterns)


def test_intervals_of_two_placements_do_not_hide_each_other(page: Element) -> None:
    figures = json.loads(page.identified("figures").source)
    asked = [cells[1].values[0] for cells in page.table("Attainment around the recommended rate")]
    first, second = figures["rates"]["data"]
    for line in (first, second):
        assert [told[2] for told in line["customdata"]] == asked
        assert "customdata[2]" in line["hovertemplate"]
        assert line["x"] == pytest.approx(asked, rel=0.01)
    assert all(after > before for before, after in zip(first["x"], second["x"], strict=True))
    # Rows are counted from the top: the recommended placement is the upper one, as in the legend.
    upper, lower = (dots["y"] for dots in figures["cases"]["data"])
    assert all(y < other for y, other in zip(upper, lower, strict=True))
    assert figures["cases"]["layout"]["yaxis"]["range"][0] > figures["cases"]["layout"]["yaxis"]["range"][1]


def test_printed_bars_have_their_numbers(page: Element) -> None:
    drawn = page.identified("utilisation").all("svg")[0]
    inside = [float(e.text) for e in drawn.all("text") if e.attributes.get("class") == "inside"]
    busy = [100 * cells[2].values[0] for cells in page.table("Busy time by role")]
    assert inside == pytest.approx([share for share in busy if share > 15], abs=0.5)


@pytest.mark.parametrize(
    ("recommended", "other", "expected"),
    [
        ((0.86, 0.93), (0.5, 0.91), "too close to call"),
        ((0.90, 0.95), (0.91, 0.96), "both"),
        ((0.2, 0.3), (0.1, 0.2), "neither"),
        ((0.91, 0.95), (0.1, 0.2), "recommended: yes, alternative: no"),
        ((0.89, 0.95), (0.1, 0.2), "recommended: too close to call, alternative: no"),
        ((0.89, 0.95), None, "too close to call"),
    ],
)
def test_a_rate_meets_the_target_as_far_as_its_interval_tells(
    folder: Path, recommended: tuple[float, float], other: tuple[float, float] | None, expected: str
) -> None:
    answer = read_answer(folder)
    assert answer.recommended is not None
    one, two = (None if ends is None else Interval(ends[0], sum(ends) / 2, ends[1]) for ends in (recommended, other))
    assert one is not None
    found = Sensitivity(
        recommended=answer.recommended.placement,
        other=None if other is None or answer.alternative is None else answer.alternative.placement,
        rates=(RatePoint(1.0, 2.0, one, two),),
        cases=(),
        seed=0,
        replications=4,
        counted=4000,
    )
    page = parsed(render_search(report_of(folder, sensitivity=found)))
    (cells,) = page.table("Attainment around the recommended rate")
    assert cells[-1].text == expected


def test_plotly_takes_the_figures(page: Element) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    plain = json.loads(re.sub(r'"var\(--\w+\)"', '"#123456"', page.identified("figures").source))
    for figure in plain.values():
        graph_objects.Figure(figure)


def test_sensitivity_says_whether_the_recommendation_would_change(page: Element) -> None:
    rates = page.table("Attainment around the recommended rate")
    assert [cells[0].text for cells in rates] == ["−20 %", "as recommended", "+20 %"]
    first, middle, last = (cells[1].values[0] for cells in rates)
    assert first == pytest.approx(0.8 * middle)
    assert last == pytest.approx(1.2 * middle)
    cases = page.table("Goodput under changed assumptions")
    names = ["prompt lengths", "output lengths", "step times"]
    assert [cells[0].text for cells in cases] == ["as asked", *(f"{n} {s}20 %" for n in names for s in "−+")]
    for cells in cases:
        low, high = cells[6].values
        verdict = "stays" if low > 1 else "changes" if high < 1 else "too close to call"
        assert cells[-1].text == verdict
        assert low <= cells[5].values[0] <= high
    told = page.identified("sensitivity").all("p")[0].text
    verdicts = {cells[-1].text for cells in cases}
    opening = "The recommendation stays"
    if "changes" in verdicts:
        opening = "The recommendation changes"
    elif "too close to call" in verdicts:
        opening = "No change of 20 % overturns the recommendation"
    assert told.startswith(opening)


def test_assumptions_and_evidence(page: Element, folder: Path) -> None:
    assumptions = page.identified("assumptions").text
    for words in (
        "engine distserve and colocated ones on engine vllm",
        "One node of 8 GPUs",
        "a transient",
        "95 % confidence",
    ):
        assert words in assumptions
    evidence = page.identified("evidence").text
    for profile in answer_of(folder)["profiles"].values():
        assert profile["sha256"] in evidence
        assert " ".join(profile["source"].split()) in evidence
    for words in (
        "prompts up to 2,048 tokens",
        "decode falls by 6.4% where the batch passes 94 -> 95",
        "RMSE 1.2 points",
    ):
        assert words in evidence


def test_validation_figures_are_those_of_the_readme() -> None:
    cells = {cell.strip() for line in README.splitlines() if line.startswith("|") for cell in line.split("|")}
    texts = " ".join(README.split())
    names = dict(shipped_profiles())
    for name, rows in VALIDATION.items():
        assert name in names
        for _, result in rows:
            known = result in cells or re.sub(r" of published$", "", result) in texts
            assert known or "no rate reaches 90 %" in result, result
    assert "so no rate reaches 90 %" in texts
    assert "it is 1.32 of the published figure" in texts


def test_a_profile_that_is_not_the_shipped_one_has_no_validation(folder: Path) -> None:
    report = report_of(folder)
    assert "RMSE" in parsed(render_search(report)).identified("evidence").text
    foreign = parsed(render_search(dataclasses.replace(report, shipped={}))).identified("evidence").text
    assert "RMSE" not in foreign
    assert "No comparison of dsim with measured requests is known" in foreign


def report_of(folder: Path, **changes: object) -> Report:
    split, whole = (find_profile("13b", "a100-80g", engine=engine) for engine in ("distserve", "vllm"))
    report = Report(
        answer=read_answer(folder),
        model_name="OPT-13B",
        slo=parse_slo("ttft=0.4,tpot=0.1"),
        profiles={"prefill": split, "decode": split, "colocated": whole},
        shipped={profile.name: profile.sha256 for profile in (split, whole)},
    )
    return dataclasses.replace(report, **changes)  # type: ignore[arg-type]


def test_the_command_repeats_the_search(page: Element, folder: Path, cli: Cli) -> None:
    search, again = page.identified("reproduce").all("pre")[0].all("code")[0].text.split(" dsim report ")
    assert again == "RESULT -o report.html"
    words = shlex.split(search)
    assert (words[:2], words[-2:]) == (["dsim", "search"], ["-o", "RESULT"])
    plan = cli(*words[1:-2], "--dry-run", "--format", "json")
    assert plan.code == 0
    assert plan.out == cli("search", "-c", str(folder / "config.yaml"), "--dry-run", "--format", "json").out
    told = page.identified("reproduce").text
    assert __version__ in told
    assert answer_of(folder)["profiles"]["decode"]["sha256"] in told


# One offline, accessible, deterministic file


def test_the_page_may_load_nothing(page: Element, text: str) -> None:
    policy = next(e.attributes["content"] for e in page.all("meta") if "http-equiv" in e.attributes)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "http" not in policy
    scripts = [e for e in page.all("script") if e.attributes.get("type") != "application/json"]
    assert len(scripts) == 2
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.source.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    for found in page.everything():
        assert found.tag not in ("link", "iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") for name in found.attributes), found.attributes
        for name in ("src", "href", "xlink:href", "data", "srcset"):
            assert found.attributes.get(name, "#").startswith(("#", "data:"))
    assert text.count(bundle()) == 1
    own = text.replace(bundle(), "")
    assert not re.search(r"url\(|@import|https?://", own)
    assert len(own) < 600_000


def test_structure_for_those_who_do_not_see_it(page: Element) -> None:
    html = page.all("html")[0]
    assert html.attributes["lang"] == "en"
    assert len(page.all("h1")) == len(page.all("main")) == 1
    identities = [e.attributes["id"] for e in page.everything() if "id" in e.attributes]
    assert len(set(identities)) == len(identities)
    levels = [int(e.tag[1]) for e in page.everything() if re.fullmatch("h[1-6]", e.tag)]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    links = [e.attributes["href"].removeprefix("#") for e in page.all("a")]
    assert links[0] == "content"
    assert set(links) <= set(identities)
    for table in page.all("table"):
        assert table.all("caption")[0].text
        assert all(e.attributes.get("scope") in ("col", "row") for e in table.all("th"))
        widths = {sum(isinstance(c, Element) for c in row.children) for row in table.all("tr")}
        assert len(widths) == 1, table.all("caption")[0].text
    figures = page.all("figure")
    assert len(figures) == 5
    for figure in figures:
        plot, static = figure.all("div")[0], figure.all("svg")[0]
        assert plot.attributes["role"] == static.attributes["role"] == "img"
        assert plot.attributes["aria-label"] == static.attributes["aria-label"] != ""
        assert figure.all("figcaption")[0].text


def test_same_files_same_bytes(folder: Path, text: str, tmp_path: Path) -> None:
    assert reported(folder, "-j", "2", page=tmp_path / "again.html") == text


def test_the_seed_changes_the_sensitivity_only(folder: Path, page: Element, tmp_path: Path) -> None:
    other = parsed(reported(folder, "--seed", "7", page=tmp_path / "p.html"))
    assert "seed 7" in other.identified("sensitivity").text
    assert "dsim report RESULT --seed 7 -o report.html" in other.identified("reproduce").text
    assert other.identified("alternatives").text == page.identified("alternatives").text


# Whatever a search found


@pytest.mark.parametrize("kind", ["disaggregated", "colocated"])
def test_one_kind_alone(tmp_path: Path, kind: str) -> None:
    folder = searched(tmp_path / "r", "--mode", kind, "--top", "1")
    page = parsed(reported(folder, "--no-sensitivity"))
    other = "colocated" if kind == "disaggregated" else "disaggregated"
    assert f"and {other} placements were not searched." in page.identified("recommendation").text
    assert page.table("Placements compared by long runs, best first; the recommended one is marked")


def test_a_single_trial(tmp_path: Path) -> None:
    folder = searched(tmp_path / "r", "--mode", "colocated", "--gpus", "1", "--top", "1")
    page = parsed(reported(folder))
    assert len(answer_of(folder)["trials"]) == 1
    assert "There is no alternative" in page.identified("sensitivity").text
    cases = page.table("Goodput under changed assumptions")
    assert all(len(cells) == 3 for cells in cases)


def test_nothing_feasible(tmp_path: Path) -> None:
    folder = searched(tmp_path / "r", "--slo", "ttft=1ms,tpot=0.1", code=3)
    text = reported(folder)
    page = parsed(text)
    assert (
        "No placement of OPT-13B on up to 2 GPUs of type a100-80g serves any rate with 90 % of the requests within a "
        "TTFT of 0.001 s and a TPOT of 0.1 s."
    ) in page.identified("recommendation").text
    assert page.all("figure") == []
    assert "sensitivity" not in {section.attributes["id"] for section in page.all("section")}
    assert len(text) < 200_000


def test_the_steady_state_is_no_transient(tmp_path: Path) -> None:
    options = ("--mode", "colocated", "--gpus", "1", "--top", "1", "--slo", "ttft=2,tpot=0.2")
    folder = tmp_path / "r"
    arguments = [a for a in (*QUICK, "-q") if a not in ("-n", "50")]
    assert main([*arguments, *options, "-o", str(folder)]) == 0
    page = parsed(reported(folder, "--no-sensitivity"))
    assert "in the steady state" in page.identified("assumptions").text
    assert "finite runs" not in page.identified("recommendation").text
    trial = answer_of(folder)["trials"][0]
    rows = page.table("Placements compared by long runs, best first; the recommended one is marked")
    assert rows[0][10].values == [trial["load"]]


def test_extrapolation_is_told(folder: Path) -> None:
    assert "extrapolated" not in parsed(render_search(report_of(folder))).identified("recommendation").text
    beyond = dataclasses.replace(read_answer(folder), extrapolated=True)
    told = parsed(render_search(report_of(folder, answer=beyond))).identified("recommendation").text
    assert "Steps outside the valid range of the profiles were allowed" in told


# Hostile texts


def test_every_text_is_escaped(folder: Path) -> None:
    answer = read_answer(folder)
    profile = dataclasses.replace(answer.profiles["decode"], name=HOSTILE, source=HOSTILE, engine=HOSTILE)
    failed = dataclasses.replace(answer.trials[-1], state="FAILED", reasons=(HOSTILE,))
    bad = dataclasses.replace(
        answer,
        model=HOSTILE, hugging_face=HOSTILE, gpu=HOSTILE, slo=HOSTILE, workload=HOSTILE, arrivals=HOSTILE,
        version=HOSTILE,
        warnings=(HOSTILE,), profiles=dict.fromkeys(answer.profiles, profile), trials=(*answer.trials, failed),
        options={"model": HOSTILE, "slo": {"ttft": HOSTILE}, "policy": [HOSTILE]},
    )  # fmt: skip
    split = find_profile("13b", "a100-80g", engine="distserve")
    texts = {"name": HOSTILE, "source": HOSTILE, "engine": HOSTILE, "engine_version": HOSTILE, "violations": (HOSTILE,)}
    used = dataclasses.replace(split, **texts)  # type: ignore[arg-type]
    report = report_of(folder, answer=bad, model_name=HOSTILE, profiles=dict.fromkeys(("prefill", "decode"), used))
    page = parsed(render_search(report))
    assert len(page.all("script")) == 3
    assert page.all("img") == page.all("b") == []
    shown = " ".join(HOSTILE.split())
    for identity in ("recommendation", "alternatives", "assumptions", "evidence", "reproduce"):
        assert shown in page.identified(identity).text, identity
    assert shown in page.all("h1")[0].text
    assert page.all("title")[0].text.startswith(f"Placement of {shown}")
    command = page.identified("reproduce").all("pre")[0].all("code")[0].text.split(" dsim report ")[0]
    assert shlex.split(command)[2:6] == ["--model", HOSTILE, "--slo", f"ttft={HOSTILE}"]


def test_hostile_files_and_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = """<img src=x onerror=1> "'&.yaml"""
    monkeypatch.chdir(tmp_path)
    shipped = dict(shipped_profiles())["opt-13b-a100-80g-vllm"].read_text(encoding="utf-8")
    Path(name).write_text(
        re.sub(r"source: >-\n(  .*\n)+", "source: " + json.dumps(HOSTILE) + "\n", shipped), encoding="utf-8"
    )
    folder = searched(Path("""re<s>ult"'&"""), "--profile", name, "--mode", "colocated", "--gpus", "1")
    page = parsed(reported(folder, "--no-sensitivity"))
    assert HOSTILE in page.identified("evidence").text
    command = page.identified("reproduce").all("pre")[0].all("code")[0].text.split(" dsim report ")[0]
    words = shlex.split(command)
    assert words[words.index("--profile") + 1] == name
    assert page.all("img") == []


def test_markup_escapes_what_is_not_markup() -> None:
    assert joined(["<", element("b", "&", title='"')]) == '&lt;<b title="&quot;">&amp;</b>'
    assert escaped("a\x00b\u202ec") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c"
    block = data_block("x", {"a": "</script><!--&\u2028"})
    assert block.count("<") == 2
    assert json.loads(parsed(block).identified("x").source) == {"a": "</script><!--&\u2028"}


# Refusals


def test_refused_arguments(cli: Cli, folder: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert cli.refused("report", str(missing)).startswith(f"RESULT: '{missing}' does not exist; give the folder")
    assert "has neither result.json nor sweep.yaml" in cli.refused("report", str(tmp_path))
    file = tmp_path / "file"
    file.write_text("x")
    assert "is no directory" in cli.refused("report", str(file))
    page = tmp_path / "page.html"
    page.write_text("mine")
    line = cli.refused("report", str(folder), "-o", str(page))
    assert line == f"--output: '{page}' is there already; give another file, or --overwrite"
    assert page.read_text() == "mine"
    assert "is a directory" in cli.refused("report", str(folder), "-o", str(tmp_path))
    assert "--output: " in cli.refused("report", str(folder), "-o", str(file / "page.html"))
    assert cli.refused("report", str(folder), "--jobs", "0").startswith("--jobs: 0 must be >= 1")
    assert cli.refused("report", str(folder), "-o", str(tmp_path / "n.html"), "--seed", "-1").startswith(
        "--seed: -1 must be"
    )
    assert "RESULT: is needed" in cli.refused("report")


def broken(folder: Path, target: Path, change: str, value: object) -> Path:
    """Return a copy of a result with one value of result.json changed; it is deleted where the value is `...`."""
    shutil.copytree(folder, target)
    answer = answer_of(folder)
    *path, last = change.split(".")
    place: Any = answer
    for key in path:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    (target / "result.json").write_text(json.dumps(answer))
    return target


@pytest.mark.parametrize(
    ("change", "value", "expected"),
    [
        ("best", ..., "result.json: best is missing; run dsim search -o again"),
        ("trials", {}, "result.json: trials must be a list of objects"),
        ("trials.0.goodput_per_gpu_per_s.low", "2", "trials.0.goodput_per_gpu_per_s.low='2' must be a number"),
        ("trials.0.goodput_per_gpu_per_s", 3, "trials.0.goodput_per_gpu_per_s=3 must be an object"),
        ("trials.0.placement", "1xQ", "result.json: trials.0.placement: '1xQ' is not a pool"),
        ("trials.0.tied", 1, "trials.0.tied=1 must be true or false"),
        ("trials.0.reasons", [1], "trials.0.reasons=[1] must be a list of texts"),
        ("best.colocated.policy", "fifo", "best.colocated.policy='fifo' is no policy"),
        ("model", None, "model must be a text"),
        ("num_gpus", 1.5, "num_gpus=1.5 must be a whole number >= 0"),
        ("attainment_target", True, "attainment_target=True must be a number"),
        (
            "profiles.decode.sha256",
            "0" * 64,
            "profile opt-13b-a100-80g-distserve had sha256 000000000000 in the search and",
        ),
        ("question.slo", "ttft=9", "slo='ttft=9' is not what config.yaml beside it asks, 'ttft=0.4,tpot=0.1'"),
        ("workload", "sharegpt", "workload='sharegpt' is not what config.yaml beside it asks, 'fixed:512,16'"),
    ],
)
def test_results_that_are_not_as_they_were_written(
    cli: Cli, folder: Path, tmp_path: Path, change: str, value: object, expected: str
) -> None:
    target = broken(folder, tmp_path / "r", change, value)
    line = cli.refused("report", str(target), "--overwrite")
    assert expected in line
    assert line.startswith(f"{target}/result.json: ")
    assert "; " in line


def test_a_changed_profile_is_refused_with_the_remedy(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = dict(shipped_profiles())["opt-13b-a100-80g-vllm"].read_text(encoding="utf-8")
    Path("mine.yaml").write_text(shipped, encoding="utf-8")
    folder = searched(Path("r"), "--profile", "mine.yaml", "--mode", "colocated", "--gpus", "1")
    Path("mine.yaml").write_text(shipped + "# changed\n", encoding="utf-8")
    line = cli.refused("report", "r")
    assert line.startswith("r/result.json: profile opt-13b-a100-80g-vllm had sha256 ")
    assert line.endswith("; restore that profile, or run dsim search -o again")
    Path("mine.yaml").unlink()
    assert "mine.yaml" in cli.refused("report", "r")
    assert not (folder / "report.html").exists()


def test_other_broken_files(cli: Cli, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "r"
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("report.html"))
    (target / "result.json").write_text("{")
    assert f"{target}/result.json: is no JSON" in cli.refused("report", str(target))
    (target / "result.json").write_bytes((folder / "result.json").read_bytes())
    config = (folder / "config.yaml").read_text()
    (target / "config.yaml").write_text(config.replace("13b", "14b"))
    assert cli.refused("report", str(target)).startswith(f"{target}/config.yaml:")
    (target / "config.yaml").unlink()
    assert "config.yaml" in cli.refused("report", str(target))
    (target / "config.yaml").write_text(config)
    (target / "attainment.csv").write_text("placement,rate\n1xC,2\n")
    assert f"{target}/attainment.csv:2: is no row of an attainment curve" in cli.refused("report", str(target))
    assert not (target / "report.html").exists()


def test_without_plotly(cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    line = cli.refused("report", str(folder), "-o", str(tmp_path / "p.html"))
    assert line == "dsim report: needs plotly; install it: pip install 'dsim[report]'"


# Sweeps

SWEEP = """
dsim_sweep: 1
name: steps
about: A decode step against its batch, <as> measured.
base: {measure: step, model: 13b, engine: distserve, step: {phase: decode, tp: 1, context_tokens: 512}}
factors:
  step.batch: {choices: [1, 16, 128]}
published:
  source: nobody & co
  points:
  - {where: {step.batch: 16}, step_s: 0.02}
plots:
- {kind: line, x: step.batch, y: step_s, file: steps, title: "a <title>"}
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "steps.yaml").write_text(SWEEP)
    assert main(["sweep", str(folder / "steps.yaml"), "-o", str(folder / "r"), "-q", "-j", "1"]) == 0
    return folder / "r"


def test_a_sweep(sweep: Path, cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    run = cli("report", str(sweep), "-o", str(target))
    assert (run.code, run.out, run.err) == (0, "", f"wrote {target}\n")
    text = target.read_text(encoding="utf-8")
    page = parsed(text)
    assert "A decode step against its batch, <as> measured." in page.text
    image = page.all("img")[0]
    assert (
        base64.b64decode(image.attributes["src"].removeprefix("data:image/svg+xml;base64,"))
        == (sweep / "steps.svg").read_bytes()
    )
    assert image.attributes["alt"] == "a <title>: line plot of step (ms) against batch (requests)"
    evidence = page.identified("evidence").text
    assert find_profile("13b", "a100-80g", engine="distserve").sha256 in evidence
    assert "whole steps were timed" in evidence
    assert "RMSE 1.2 points" in evidence
    assert "Nothing was simulated" in page.identified("assumptions").text
    caption = "One row for each combination of factors; in brackets 95 % intervals"
    with (sweep / "summary.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [[cells[0].text, cells[1].values[0]] for cells in page.table(caption)] == [
        [row["step.batch"], float(row["step_s"])] for row in rows
    ]
    with (sweep / "compare.csv").open(encoding="utf-8") as file:
        compared = list(csv.DictReader(file))
    assert [cells[3].values[0] for cells in page.table("Every published number")] == [
        float(row["simulated"]) for row in compared
    ]
    assert "nobody & co" in page.identified("published").text
    assert page.all("header")[0].all("p")[0].text == "step.batch (1, 16, 128) varied: 3 combinations, 3 rows."
    shown = json.loads(page.identified("figures").source)["steps-1"]["data"]
    assert [x for line in shown for x in line["x"]] == [1, 16, 128, 16]  # the published point is a line of its own
    assert shown[0]["y"] == pytest.approx([1e3 * float(row["step_s"]) for row in rows])
    assert shown[1]["hovertext"] == ["published<br>16 requests<br>20.0 ms"]
    assert page.identified("plot-steps-1").attributes["aria-label"].startswith(image.attributes["alt"])
    told = [[cell.text for cell in cells] for cells in page.table("Every point of the figure")]
    assert told[-1] == ["published", "16 requests", "20.0 ms"]
    assert len(told) == 4
    assert page.all("link") == []
    policy = next(e.attributes["content"] for e in page.all("meta") if "http-equiv" in e.attributes)
    assert re.match("default-src 'none'; script-src 'sha256-[^']+' 'sha256-[^']+'; ", policy)
    cli("report", str(sweep), "-o", str(tmp_path / "again.html"))
    assert (tmp_path / "again.html").read_bytes() == target.read_bytes()


def test_a_sweep_of_hostile_names_whose_files_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels, notes and paths are texts. Where a trace is gone its runs are still shown, what they rest on is not."""
    monkeypatch.chdir(tmp_path)
    trace = """<img src=x onerror=1> "'&.csv"""
    Path(trace).write_text("arrival_s,prompt_tokens,output_tokens\n0,64,4\n1,64,4\n")
    label = json.dumps(HOSTILE)
    Path("s.yaml").write_text(
        f"""
dsim_sweep: 1
about: {label}
base: {{model: 13b, engine: distserve, trace: {json.dumps(trace)}}}
factors:
  system: {{choices: [{{label: {label}, kv_blocks: 900}}, {{label: b, kv_blocks: 1000}}]}}
  placement: {{choices: [1xP:tp1pp1 + 1xD:tp1pp1]}}
outputs: [placement, ttft_s.mean]
plots:
- {{kind: goodput-bars, x: system, y: ttft_s.mean, file: bars, title: {label}}}
published:
  source: {label}
  points:
  - {{where: {{system: {label}}}, ttft_s.mean: 0.1, note: {label}}}
"""
    )
    folder = Path("r<e>s'\"&")
    assert main(["sweep", "s.yaml", "-o", str(folder), "-q", "-j", "1"]) == 0
    shown = " ".join(HOSTILE.split())
    for gone in (False, True):
        page = parsed(reported(folder, page=tmp_path / f"{gone}.html"))
        assert page.all("script") == page.all("b") == []
        assert len(page.all("img")) == 1
        assert shown in page.all("img")[0].attributes["alt"]
        for identity in ("published", "numbers"):
            assert shown in page.identified(identity).text, identity
        cells = page.table("One row for each combination of factors; in brackets 95 % intervals")[0]
        assert cells[1].all("code")[0].text == "1xP:tp1pp1 + 1xD:tp1pp1"  # which is not broken
        assert ("Valid range" in page.identified("evidence").text) is not gone
        Path(trace).unlink(missing_ok=True)
    assert "cannot be read any more" in page.identified("evidence").text


def test_refused_sweeps(sweep: Path, cli: Cli, tmp_path: Path) -> None:
    target = str(tmp_path / "p.html")
    assert "--seed: 1 belongs to the report of a search" in cli.refused(
        "report", str(sweep), "--seed", "1", "-o", target
    )
    started = tmp_path / "started"
    shutil.copytree(sweep, started)
    rows = (started / "rows.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (started / "rows.jsonl").write_text("".join(rows[:-1]), encoding="utf-8")
    words = f"has {len(rows) - 1} of the {len(rows)} rows of its sweep; finish it with dsim sweep --resume"
    assert words in cli.refused("report", str(started), "-o", target)


def test_roles_of_the_report_are_those_of_the_search(folder: Path) -> None:
    assert set(read_answer(folder).profiles) == {role.name.lower() for role in Role}


def point(changed: Changed, low: float, high: float) -> CasePoint:
    middle = Interval(0.9, 1.0, 1.1)
    return CasePoint(Case(changed, 1.2), middle, middle, Interval(low, (low + high) / 2, high))


@pytest.mark.parametrize(
    ("prompts", "steps", "expected"),
    [
        ((1.1, 1.3), (1.2, 1.4), "The recommendation stays against the best alternative, "),
        ((0.9, 1.3), (1.2, 1.4), "; too close to call with prompt lengths +20 %."),
        ((0.5, 0.6), (0.7, 0.8), "with prompt lengths +20 % and step times +20 %."),
    ],
)
def test_verdict_in_words(
    folder: Path, prompts: tuple[float, float], steps: tuple[float, float], expected: str
) -> None:
    answer = read_answer(folder)
    assert answer.recommended is not None
    assert answer.alternative is not None
    found = Sensitivity(
        recommended=answer.recommended.placement,
        other=answer.alternative.placement,
        rates=(),
        cases=(point(Changed.PROMPTS, *prompts), point(Changed.STEPS, *steps)),
        seed=0,
        replications=4,
        counted=4000,
    )
    page = parsed(render_search(report_of(folder, sensitivity=found)))
    assert expected in page.identified("sensitivity").all("p")[0].text
    assert expected in page.identified("recommendation").text
