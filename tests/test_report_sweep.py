"""What a sweep's page says and shows, from rows made by hand; in the browser where there is one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.plots import render
from experiments.report.finding import finding
from experiments.report.sweep_figures import interactive
from experiments.report.sweep_page import render_sweep
from experiments.store import Row, SweepResults, load_sweep
from experiments.sweepfile import read_outline
from tests.browser import find_browser, running
from tests.report_pages import parsed

HOSTILE = "</script><b onload=1>%{y} \"x'&"
CURVES = f"""
dsim_sweep: 1
about: Curves.
base: {{model: 13b, engine: distserve, slo: {{ttft: 0.4, tpot: 0.1}}, requests: 100}}
factors:
  system:
    choices:
    - {{label: {json.dumps(HOSTILE)}, placement: 1xP:tp1pp1 + 1xD:tp1pp1}}
    - {{label: weak, placement: 1xP:tp2pp1 + 1xD:tp1pp1}}
  rate_per_gpu: {{choices: [1, 2, 3]}}
replications: 2
plots:
- {{kind: attainment-rate, series: system, file: curves, marks: [{{x: 2.5, label: {json.dumps(HOSTILE)}}}]}}
- {{kind: pareto, series: system, labels: rate_per_gpu, file: front}}
- {{kind: line, x: rate_per_gpu, y: [attainment.both, tpot_s.mean], series: system, log: xy, file: both}}
"""
GOODPUT = """
dsim_sweep: 1
about: Goodput.
base: {measure: goodput, model: 13b, engine: distserve, slo: {ttft: 0.4, tpot: 0.1}, requests: 100}
factors:
  placement:
    choices: [1xP:tp1pp1 + 1xD:tp1pp1, 2xP:tp1pp1 + 1xD:tp1pp1, 1xP:tp1pp1 + 2xD:tp1pp1, 3xP:tp1pp1 + 1xD:tp1pp1]
plots:
- {kind: staircase, series: placement, file: stairs, price_usd_per_h: 2}
- {kind: ratio, file: ratio}
"""
#: Share of both by system and rate, in each of two replications.
SHARES = {HOSTILE: {1: (1.0, 0.98), 2: (0.92, 0.9), 3: (0.99, 0.2)}, "weak": {1: (0.8, 0.9), 2: (0.5, 0.5), 3: (0, 0)}}


def results_of(folder: Path, text: str, rows: Iterable[tuple[Mapping[str, Any], Any]]) -> SweepResults:
    """Write a sweep's folder of these rows: factors, and outputs or the error."""
    folder.mkdir(exist_ok=True)
    (folder / "sweep.yaml").write_text(text, encoding="utf-8")
    replications = read_outline(folder / "sweep.yaml").replications
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for number, (factors, outputs) in enumerate(rows):
            failed = isinstance(outputs, str)
            seen = number % replications
            row = Row(
                id="0" * 64,
                factors=factors,
                replication=seen,
                seed=seen,
                outputs={} if failed else outputs,
                error=outputs if failed else None,
                profiles={},
            )
            file.write(row.to_line())
    results = load_sweep(folder)
    results.check_complete(folder)
    for spec in results.plots:
        for name, content in render(spec, results.summary, published=results.published).items():
            (folder / name).write_bytes(content)
    return results


def curves(folder: Path) -> SweepResults:
    rows = [
        (
            {"system": system, "rate_per_gpu": rate},
            {
                "attainment": {"both": share, "ttft": share, "tpot": share},
                "tpot_s": {"mean": 0.02 * rate + 0.001 * share},
                "output_tokens_per_s": 100.0 * rate,
                "num_gpus": 2,
            },
        )
        for system, by_rate in SHARES.items()
        for rate, shares in by_rate.items()
        for share in shares
    ]
    return results_of(folder, CURVES, rows)


def goodput(folder: Path, *values: tuple[float, float, float] | str | None) -> SweepResults:
    names = ["1xP:tp1pp1 + 1xD:tp1pp1", "2xP:tp1pp1 + 1xD:tp1pp1", "1xP:tp1pp1 + 2xD:tp1pp1"]
    rows = []
    for name, value in zip([*names, "3xP:tp1pp1 + 1xD:tp1pp1"], values, strict=True):
        interval = dict(zip(("low", "best", "high"), value or (0.0, 0.0, 0.0), strict=True)) if value != "broke" else {}
        row: Any = {"goodput_per_gpu_per_s": interval, "num_gpus": 3 if name != names[0] else 2}
        rows.append(({"placement": name}, "broke" if value == "broke" else row))
    return results_of(folder, GOODPUT, rows)


def test_the_sentence_names_the_best_its_interval_its_ties_and_what_failed(tmp_path: Path) -> None:
    text = parsed(finding(goodput(tmp_path / "a", (1.8, 2.0, 2.2), (1.5, 1.7, 1.9), (1.0, 1.2, 1.4), "broke"))).text
    assert text == (
        "Of 4 combinations, 1xP:tp1pp1 + 1xD:tp1pp1 serves most: 2.00 (95 % interval 1.80–2.20) requests/s per GPU "
        "within its limits; 2xP:tp1pp1 + 1xD:tp1pp1 is tied with it, as intervals overlap. 1 combination without any "
        "goodput. 1 task of 4 failed and is left out."
    )
    text = parsed(finding(goodput(tmp_path / "b", (1, 1.2, 1.4), (1.5, 1.7, 1.9), (1, 1.2, 1.4), None))).text
    assert "2xP:tp1pp1 + 1xD:tp1pp1 serves most: 1.70" in text
    assert "; no other interval reaches it." in text


def test_the_sentence_says_how_far_each_curve_meets_the_target(tmp_path: Path) -> None:
    """A rate counts as long as every lower one meets the target: what rises again after 3 would not."""
    text = parsed(finding(curves(tmp_path / "r"))).text
    shown = " ".join(HOSTILE.split())
    assert f"90 % of requests within all limits: {shown} up to 2 requests/s per GPU (91.0 %, 95 % interval " in text
    assert "too close to call" in text
    assert text.endswith("weak at no swept rate.")


def test_a_sweep_of_failures_has_a_sentence(tmp_path: Path) -> None:
    curves(tmp_path / "r")
    path = tmp_path / "r" / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    failed = [{**row, "status": "failed", "error": "broke"} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in failed), encoding="utf-8")
    assert parsed(finding(load_sweep(tmp_path / "r"))).text == (
        "No attainment to show in curves. 12 tasks of 12 failed and are left out."
    )


def test_points_say_their_values_and_intervals(tmp_path: Path) -> None:
    results = curves(tmp_path / "r")
    summary = results.summary
    (panel,) = interactive(results.plots[0], summary, None, summary_text="s")
    best, low, high = (summary[f"attainment.both{end}"].to_numpy() for end in ("", ".low", ".high"))
    for number, line in enumerate(panel.lines):
        rows = slice(3 * number, 3 * number + 3)
        assert list(line.x) == [1, 2, 3]
        assert [s.best for s in line.y] == pytest.approx(100 * best[rows])
        assert [s.low for s in line.y] == pytest.approx(100 * low[rows])
        assert [s.high for s in line.y] == pytest.approx(100 * high[rows])
    assert panel.lines[0].told[0][0] == "1 requests/s per GPU"
    assert panel.lines[1].told[1] == ("2 requests/s per GPU", "50.0 %")


def test_steps_and_ratios_say_theirs(tmp_path: Path) -> None:
    results = goodput(tmp_path / "g", (1.8, 2.0, 2.2), (1.5, 1.7, 1.9), (1.0, 1.2, 1.4), None)
    (stairs, ratio), summary = results.plots, results.summary
    (panel,) = interactive(stairs, summary, None, summary_text="s")
    assert panel.lines[0].told[2] == ("4.00 – 8.00 requests/s", "4 GPUs (4 – 6), 8.00 USD/h")
    (panel,) = interactive(ratio, summary.iloc[:3], None, summary_text="s")
    assert [texts[0] for texts in panel.lines[0].told] == ["1:2", "1:1", "2:1"]


def test_texts_of_users_are_escaped_and_bytes_are_the_same(tmp_path: Path) -> None:
    curves(tmp_path / "r")
    text = render_sweep(tmp_path / "r")
    assert text == render_sweep(tmp_path / "r")
    page = parsed(text)
    assert page.all("b") == []
    figures = json.loads(page.identified("figures").source)
    assert list(figures) == ["curves-1", "front-1", "both-1", "both-2"]
    for figure in figures.values():
        assert all("<b onload" not in told for line in figure["data"] for told in line["hovertext"])
        assert all("hovertemplate" not in line for line in figure["data"])
        assert all("<b" not in line["name"] for line in figure["data"])
    assert "&lt;b" in figures["curves-1"]["layout"]["annotations"][-1]["text"]
    assert len(page.all("img")) == 3


@pytest.mark.skipif(find_browser() is None, reason="needs a chromium")
def test_a_sweep_in_the_browser(tmp_path: Path) -> None:
    from tests.test_report_browser import drawn, wait_for

    curves(tmp_path / "r")
    page = tmp_path / "report.html"
    page.write_text(render_sweep(tmp_path / "r"), encoding="utf-8")
    program = find_browser()
    (tmp_path / "chromium").mkdir()
    assert program is not None
    with running(program, tmp_path / "chromium") as browser:
        drawn(browser, page)
        assert browser.complaints == []
        assert {url for url in browser.requests if not url.startswith(("data:", "blob:"))} == {page.as_uri()}
        for name, points in {
            "curves-1": 6,
            "front-1": 9,
            "both-1": 5,
            "both-2": 6,
        }.items():  # 0 % is on no logarithmic axis
            assert browser.value(f'document.querySelectorAll("#plot-{name} .points path").length') == points
        shown = '[...document.querySelectorAll("{}")].map((e) => e.checkVisibility())'
        assert browser.value(shown.format("img.static")) == [False] * 3
        browser.value('document.getElementById("plot-curves-1").scrollIntoView({block: "center"})')
        point = 'document.querySelectorAll("#plot-curves-1 .points path")[4].getBoundingClientRect()'
        x, y = browser.value(f"(() => {{ const b = {point}; return [b.x + b.width / 2, b.y + b.height / 2]; }})()")
        browser.move(x - 3, y)
        browser.move(x, y)
        wait_for(lambda: browser.value('document.querySelectorAll("#plot-curves-1 .hovertext").length'))
        told = browser.value('document.querySelector("#plot-curves-1 .hoverlayer").textContent')
        assert "weak" in told
        assert "2 requests/s per GPU" in told
        assert "50.0 %" in told
        browser.command("Emulation.setEmulatedMedia", {"media": "print"})
        assert browser.value(shown.format("img.static")) == [True] * 3
        assert browser.value(shown.format(".plot")) == [False] * 4
        browser.command("Emulation.setEmulatedMedia", {"media": ""})
        assert browser.value("window.hacked") is None
        assert browser.complaints == []
