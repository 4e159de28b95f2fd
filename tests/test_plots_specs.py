"""Entries of `plots`: what they mean, and what is refused with line and remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsim.errors import InputError
from dsim.yamlfile import parse_yaml
from experiments.base import parse_setting
from experiments.expected import expected
from experiments.measures import measure
from experiments.plots import COMMON_KEYS, FORMS, OWN_KEYS, Kind, Mark, PlotSpec, parse_plot
from experiments.plots.check import LISTS, TEXTS
from experiments.plots.labels import quantity
from experiments.sweepfile import Sweep, read_sweep

COLUMNS = (
    "system",
    "rate_per_gpu",
    "slo.ttft",
    "slo.tpot",
    "placement",
    "num_gpus",
    "attainment.both",
    "attainment.both.low",
    "attainment.both.high",
    "ttft_s.p90",
    "goodput_per_gpu_per_s.low",
    "goodput_per_gpu_per_s.best",
    "goodput_per_gpu_per_s.high",
    "ttft_parts_s.queue",
    "ttft_parts_s.prefill",
    "quantiles.ttft_s",
    "total_per_s.best",
    "best.colocated.num_gpus",
    "best.colocated.total_per_s.best",
)


def parsed(text: str, *, varying: tuple[str, ...] = ()) -> PlotSpec:
    section = parse_yaml(f"plots:\n- {text}\n".encode(), file="fig.yaml").need("plots").items()[0].section()
    return parse_plot(section, columns=COLUMNS, varying=varying)


def test_defaults_are_those_of_the_kind() -> None:
    spec = parsed("{kind: attainment-rate}")
    assert (spec.x, spec.y, spec.series, spec.file, spec.target) == (
        "rate_per_gpu",
        ("attainment.both",),
        None,
        "attainment-rate",
        0.9,
    )
    assert parsed("{kind: goodput-bars}").y == ("goodput_per_gpu_per_s",)
    assert parsed("{kind: breakdown}").y == ("ttft_parts_s.queue", "ttft_parts_s.prefill")
    assert parsed("{kind: cdf}").y == ("quantiles.ttft_s",)
    assert parsed("{kind: bandwidth, x: rate_per_gpu, y: ttft_s.p90}").log_x


def test_every_key_is_understood() -> None:
    spec = parsed(
        "{kind: line, x: rate_per_gpu, y: [attainment.both, ttft_s.p90], series: system, title: A title, file: fig-1, "
        "where: {system: vLLM, num_gpus: 4}, log: xy, xlabel: X (1), ylabel: Y (2), marks: [{x: 512, label: Lm}], "
        "mark: num_gpus, target: 0.95}"
    )
    assert spec == PlotSpec(
        kind=Kind.LINE,
        file="fig-1",
        title="A title",
        x="rate_per_gpu",
        y=("attainment.both", "ttft_s.p90"),
        series="system",
        where={"system": "vLLM", "num_gpus": 4},
        xlabel="X (1)",
        ylabel="Y (2)",
        log_x=True,
        log_y=True,
        target=0.95,
        marks=(Mark(512, "Lm"),),
        mark="num_gpus",
    )


def test_factors_that_an_entry_forgets_make_series() -> None:
    assert parsed("{kind: attainment-rate, series: system}", varying=("system", "rate_per_gpu")).also == ()
    spec = parsed("{kind: attainment-rate, series: system}", varying=("system", "rate_per_gpu", "slo.ttft"))
    assert spec.also == ("slo.ttft",)
    spec = parsed("{kind: cdf, where: {system: vLLM}}", varying=("system", "rate_per_gpu"))
    assert spec.also == ("rate_per_gpu",)
    # What is along the axis may follow from the factor.
    assert parsed("{kind: goodput-bars}", varying=("system",)).also == ()


def test_keys_are_documented_once() -> None:
    assert not set(COMMON_KEYS) & set(OWN_KEYS)
    assert {key for form in FORMS.values() for key in form.keys} == set(OWN_KEYS)
    assert set(FORMS) == set(Kind)


MALFORMED = [
    ("{x: rate_per_gpu}", "fig.yaml:2: plots[0].kind is missing; add this key"),
    (
        "{kind: atainment-rate}",
        "fig.yaml:2: plots[0].kind='atainment-rate' is not known; did you mean 'attainment-rate'?",
    ),
    ("{kind: 3}", "plots[0].kind=3 is not known; expected one of attainment-rate"),
    ("{kind: timeline}", "is drawn from one run, not from a sweep; draw it with dsim plot DIR --kind timeline"),
    ("{kind: attainment-rate, serie: system}", "'serie' is not a known key in plots[0]; did you mean 'series'?"),
    ("{kind: cdf, x: rate_per_gpu}", "'x' is not a known key in plots[0]; "),
    ("{kind: goodput-bars, target: 0.9}", "'target' is not a known key in plots[0]; "),
    ("{kind: heatmap, value: num_gpus, series: system}", "'series' is not a known key in plots[0]; "),
    ("{kind: heatmap}", "fig.yaml:2: plots[0].value is missing; add this key"),
    (
        "{kind: line, y: num_gpus}",
        "fig.yaml:2: plots[0] needs the key x; add the column to show; there are attainment.both",
    ),
    (
        "{kind: bandwidth, y: num_gpus}",
        "plots[0] needs the key x, since there is no profile_set.handover.bandwidth_bytes",
    ),
    ("{kind: line, x: rate_per_gpu}", "plots[0] needs the key y; add the column"),
    (
        "{kind: attainment-scale}",
        "plots[0] needs the key x, since there is no slo_scale; add the column to show",
    ),
    (
        "{kind: line, x: rate_per_gpuu, y: num_gpus}",
        "x='rate_per_gpuu' is no column of the rows; did you mean 'rate_per_gpu'?",
    ),
    (
        "{kind: attainment-rate, y: attainment.bth}",
        "y='attainment.bth' is no column of the rows; did you mean 'attainment.both'?",
    ),
    ("{kind: attainment-rate, series: sistem}", "series='sistem' is no column of the rows; did you mean 'system'?"),
    ("{kind: line, x: rate_per_gpu, y: []}", "plots[0].y=[...] must not be empty"),
    (
        "{kind: line, x: rate_per_gpu, y: [num_gpus, num_gpus]}",
        "plots[0].y[1]='num_gpus' stands twice; keep one of the two",
    ),
    ("{kind: line, x: rate_per_gpu, y: 5}", "plots[0].y=5 must be a text; put it in quotes"),
    ("{kind: attainment-rate, target: 90}", "plots[0].target=90 must be < 1; write a value in that range"),
    ("{kind: attainment-rate, target: 90%}", "plots[0].target='90%' must be a number"),
    ("{kind: attainment-rate, where: system}", "plots[0].where='system' must be a mapping of keys to values"),
    (
        "{kind: attainment-rate, where: {sytem: a}}",
        "plots[0].where.sytem is no column of the rows; did you mean 'system'?",
    ),
    (
        "{kind: attainment-rate, where: {system: [a, b]}}",
        "where.system=[...] must be one value; write one figure for each value",
    ),
    (
        "{kind: attainment-rate, file: a/b}",
        "plots[0].file='a/b' must be a plain name of at most 100 characters; letters",
    ),
    ("{kind: attainment-rate, file: ..}", "plots[0].file='..' must be a plain name"),
    ("{kind: attainment-rate, file: ''}", "plots[0].file='' must not be empty"),
    ("{kind: line, x: rate_per_gpu, y: num_gpus, log: z}", "plots[0].log='z' is not known; expected x, y or xy"),
    ("{kind: cdf, log: xy}", "plots[0].log='xy' is not known; expected x"),
    ("{kind: attainment-rate, marks: [{x: 1}]}", "plots[0].marks[0].label is missing; add this key"),
    ("{kind: attainment-rate, marks: [{x: a, label: b}]}", "plots[0].marks[0].x='a' must be a number; write a number"),
    ("{kind: attainment-rate, marks: [{at: 1, label: b}]}", "'at' is not a known key in plots[0].marks[0]; "),
    ("{kind: staircase, price_usd_per_h: 0}", "plots[0].price_usd_per_h=0 must be > 0; write a value in that range"),
    ("{kind: staircase, max_rate_per_s: fast}", "plots[0].max_rate_per_s='fast' must be a number"),
    (
        "{kind: staircase, y: total_per_s}",
        "plots[0].y='total_per_s' is of all copies together; name goodput_per_gpu_per_s",
    ),
    (
        "{kind: staircase, x: best.colocated.num_gpus, y: best.colocated.total_per_s}",
        "plots[0].y='best.colocated.total_per_s' is of all copies together; name best.colocated.goodput_per_gpu_per_s",
    ),
    ("{kind: breakdown, share: 1}", "plots[0].share=1 must be true or false"),
    ("{kind: breakdown, y: attainment.bot}", "did you mean 'attainment.both'?"),
    ("{kind: pareto, x: ttft_s.p90, y: num_gpus, labels: name}", "labels='name' is no column of the rows"),
    ("{kind: attainment-rate, kind: line}", "plots[0].kind stands twice"),
    (
        "{kind: goodput-bars, y: [goodput_per_gpu_per_s, num_gpus]}",
        "plots[0].y=[...] has 2 columns, and kind goodput-bars shows one; write one figure for each",
    ),
    (
        "{kind: breakdown, y: [ttft_parts_s.queue, num_gpus]}",
        "plots[0].y=[...] has columns of different units, which do not stack: no unit, s; name columns of one unit",
    ),
    (
        "{kind: goodput-bars, x: goodput_per_gpu_per_s}",
        "x='goodput_per_gpu_per_s' is an interval; name goodput_per_gpu_per_s.best",
    ),
    (
        "{kind: staircase, x: rate_per_gpu}",
        "plots[0].x='rate_per_gpu' is no number of GPUs; name num_gpus, or leave x out",
    ),
    ("{kind: staircase, y: ttft_s.p90}", "plots[0].y='ttft_s.p90' is no rate; name goodput_per_gpu_per_s, or leave"),
    ("{kind: cdf, series: total_per_s}", "plots[0].series='total_per_s' is an interval; name total_per_s.best"),
    ("{kind: cdf, where: {total_per_s: 3}}", "plots[0].where.total_per_s is an interval; name total_per_s.best"),
]


@pytest.mark.parametrize(("text", "message"), MALFORMED)
def test_a_malformed_entry_is_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parsed(text)
    assert message in str(error.value)
    assert str(error.value).startswith("fig.yaml:2: ")
    assert "\n" not in str(error.value)


def test_one_cell_has_one_row() -> None:
    text = "{kind: heatmap, value: num_gpus}"
    with pytest.raises(
        InputError, match=r"fig.yaml:2: plots\[0\] would have several rows in one cell: system vary; make"
    ):
        parsed(text, varying=("slo.ttft", "slo.tpot", "system"))


SWEEP = """\
dsim_sweep: 1
about: Nothing. Nothing.
base:
  model: opt-13b
  workload: fixed:32,4
  slo: {ttft: 250ms, tpot: 0.1}
  requests: 50
  warmup: 0
  quantiles: [ttft_s]
factors:
  system:
    choices:
    - {label: DistServe, placement: 1xP:tp2pp1 + 1xD:tp1pp1, engine: distserve}
    - {label: vLLM, placement: 1xC:tp1pp1, engine: vllm}
  rate_per_gpu: {choices: [30/min, 1, 1.5]}
  slo.e2e: {choices: [900ms]}
plots:
- PLOT
"""
#: Figures of which it is known before anything runs that they cannot be drawn, and what is said.
HOPELESS = [
    (
        "{kind: line, x: system, y: ttft_s.p90}",
        "plots[0].x='system' has texts, such as 'DistServe', where numbers are needed; name a column of numbers",
    ),
    ("{kind: line, x: rate_per_gpu, y: placement}", "y='placement' has texts, such as '1xP:tp2pp1 + 1xD:tp1pp1', whe"),
    ("{kind: line, x: rate_per_gpu, y: saturation}", "plots[0].y='saturation' has texts where numbers are needed; na"),
    ("{kind: line, x: rate_per_gpu, y: [ttft_s.p90, model]}", "plots[0].y[1]='model' has texts, such as 'opt-13b', w"),
    ("{kind: line, x: rate_per_gpu, y: ttft_s.p90, mark: engine}", "plots[0].mark='engine' has texts, such as 'dists"),
    ("{kind: line, x: rate_per_gpu, y: quantiles.ttft_s}", "y='quantiles.ttft_s' has lists where single values are"),
    ("{kind: heatmap, x: rate_per_gpu, y: system, value: policy}", "plots[0].value='policy' has texts, such as 'pref"),
    ("{kind: pareto, x: engine}", "plots[0].x='engine' has texts, such as 'distserve', where numbers are needed"),
    ("{kind: cdf, y: quantiles.tpot_s}", "y='quantiles.tpot_s' is a column that none of the rows shown has; add it to"),
    ("{kind: cdf, y: [quantiles.ttft_s, ttft_s.p90]}", "plots[0].y[1]='ttft_s.p90' has no quantiles, which a distrib"),
    ("{kind: cdf, where: {system: VLLM}}", "plots[0].where.system='VLLM' selects no row; it is DistServe, vLLM in th"),
    ("{kind: cdf, where: {rate_per_gpu: 2}}", "where.rate_per_gpu=2 selects no row; it is 0.5, 1, 1.5 in these rows;"),
    (
        "{kind: cdf, where: {system: vLLM, placement: 1xP:tp2pp1 + 1xD:tp1pp1}}",
        "plots[0].where.placement='1xP:tp2pp1 + 1xD:tp1pp1' selects no row; it is 1xC:tp1pp1 in these rows",
    ),
    ("{kind: cdf, where: {policy: orca}}", "where.policy='orca' selects no row; it is null, prefill-first in these r"),
    ("{kind: ratio, y: ttft_s.p90}", "plots[0] needs the column placement, which has '1xC:tp1pp1' among its values,"),
    ("{kind: ratio, x: system, y: ttft_s.p90}", "plots[0].x='system' has 'DistServe' among its values, which has no"),
    ("{kind: goodput-bars, x: engine, y: ttft_s.p90, where: {num_gpus: 1}}", "has several rows for one bar: engine=v"),
    ("{kind: goodput-bars, x: system, y: model}", "plots[0].y='model' has texts, such as 'opt-13b', where numbers ar"),
    ("{kind: staircase, y: throughput_per_s, where: {model: opt-13b}}", "plots[0] has several rows for one line; tel"),
    (
        "{kind: heatmap, x: engine, y: model, value: ttft_s.p90, where: {gpu: a100-80g}}",
        "plots[0] has several rows for one cell: engine=distserve, model=opt-13b; make what they differ in x or y, or",
    ),
    ("{kind: breakdown, x: rate_per_gpu, where: {model: opt-13b}}", "plots[0] has several rows for one bar: rate_per"),
    ("{kind: line, x: rate_per_gpu, y: utilization.decode, where: {system: vLLM}}", "is a column that none of the ro"),
    ("{kind: goodput-bars, x: system}", "plots[0] needs the key y; add the column to show; there are"),
]  # fmt: skip
#: Figures that can be drawn, as far as that is known.
HOPEFUL = [
    "{kind: line, x: rate_per_gpu, y: [ttft_s.p90, utilization.decode], series: system}",
    "{kind: attainment-rate, series: system, where: {slo.e2e: 900ms}}",
    "{kind: attainment-rate, where: {rate_per_gpu: 30/min}}",
    "{kind: ratio, y: ttft_s.p90, where: {system: DistServe, rate_per_gpu: 1}}",
    "{kind: ratio, y: ttft_s.p90, series: rate_per_gpu, where: {policy: null}}",
    "{kind: cdf, where: {rate_per_gpu: 1.0}}",
    "{kind: goodput-bars, x: engine, y: ttft_s.p90}",
    "{kind: heatmap, x: rate_per_gpu, y: system, value: num_gpus, best: policy}",
    "{kind: pareto, labels: rate_per_gpu, series: saturation}",
    "{kind: line, x: ttft_s.p50, y: ttft_s.p90, where: {saturation: steady}}",
    "{kind: staircase, y: throughput_per_s, series: system, where: {rate_per_gpu: 1}}",
    "{kind: breakdown, x: system}",
]


def sweep_of(plot: str, folder: Path, *, base: str = "") -> Sweep:
    path = folder / "fig.yaml"
    path.write_text(SWEEP.replace("PLOT", plot).replace("  warmup: 0\n", f"  warmup: 0\n{base}"), encoding="utf-8")
    return read_sweep(path)


@pytest.mark.parametrize(("plot", "message"), HOPELESS, ids=map(str, range(len(HOPELESS))))
def test_figures_that_cannot_be_drawn_are_refused_before_anything_runs(plot: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        sweep_of(plot, tmp_path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'fig.yaml'}:18: plots[0]")
    assert "; " in str(error.value)
    assert len(str(error.value).removeprefix(str(tmp_path))) < 400
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("plot", HOPEFUL)
def test_figures_that_can_be_drawn_are_not_refused(plot: str, tmp_path: Path) -> None:
    assert len(sweep_of(plot, tmp_path).outline.plots) == 1


def test_values_of_where_are_written_as_choices_are(tmp_path: Path) -> None:
    plots = sweep_of(
        "{kind: attainment-rate, series: system, where: {slo.e2e: 900ms, rate_per_gpu: 30/min}}", tmp_path
    ).outline.plots
    assert plots[0].where == {"slo.e2e": 0.9, "rate_per_gpu": 0.5}


def test_without_limits_there_is_no_attainment(tmp_path: Path) -> None:
    text = SWEEP.replace("  slo: {ttft: 250ms, tpot: 0.1}\n", "").replace("  slo.e2e: {choices: [900ms]}\n", "")
    (tmp_path / "fig.yaml").write_text(text.replace("PLOT", "{kind: attainment-rate, series: system}"))
    with pytest.raises(InputError, match=r"which none of the rows shown has; give limits in base\.slo"):
        read_sweep(tmp_path / "fig.yaml")


SMALL = "model: 13b\nworkload: fixed:32,4\nslo: {ttft: 0.25, tpot: 0.1}\nrequests: 60\nwarmup: 0\n"
PAIR, ONE = "placement: 1xP:tp2pp1 + 1xD:tp1pp1\n", "placement: 1xC:tp1pp1\nengine: vllm\n"
LENGTHS = "prompt_tokens: 64, context_tokens: 64, chunk_tokens: 16, batch: 2"
STEP = f"measure: step\nmodel: 13b\nstep: {{phase: PHASE, {LENGTHS}}}\n"
SETTINGS = [
    f"{SMALL}{PAIR}rate: 3\nquantiles: [ttft_s]\n",
    f"{SMALL}{PAIR}rate: 3\nphase: prefill\n",
    f"{SMALL}{PAIR}rate: 3\nphase: decode\n",
    f"{SMALL}{ONE}rate_per_gpu: 3\npolicy: chunked\n".replace("slo: {ttft: 0.25, tpot: 0.1}\n", ""),
    f"{SMALL}{PAIR}measure: goodput\nfinite: true\n".replace("32,4", "1000,8"),
    f"{SMALL}{ONE}measure: goodput\nfinite: true\n".replace("32,4", "1000,8"),
    f"{SMALL}measure: search\nsearch: {{gpus: 1, requests: 60, timing: true, policies: [orca], jobs: 1}}\n",
    f"{SMALL}measure: search\nsearch: {{gpus: 2, method: authors, mode: colocated, policies: [orca], jobs: 1}}\n",
    *(STEP.replace("PHASE", phase) for phase in ("prefill", "decode", "mixed", "chunked")),
    "measure: queueing\nrate: 1\nqueueing: {formula: md1, prefill_s: 0.2}\n",
    "measure: queueing\nrate: 1\nqueueing: {formula: speedup, prefill_s: 0.2, tp_speedup: 1.5}\n",
]


def flat(columns: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in columns.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize("text", SETTINGS, ids=map(str, range(len(SETTINGS))))
def test_rows_are_as_expected(text: str) -> None:
    """What is known of a row before its task runs is what its task gives."""
    setting = parse_setting(parse_yaml(text.encode(), file="base.yaml"), folder=Path())
    known, found = expected(setting, {"system": "a", "placement": "b"}), dict(flat(measure(setting, seed=3)))
    given = {name: value for name, value in found.items() if value is not None}
    assert set(given) <= known.columns
    assert {name: found[name] for name in known.values if name in found} == {
        name: value for name, value in known.values.items() if name not in {"system"} and name in found
    }
    assert set(known.values) - set(found) <= {"system", "placement"}
    texts = {name for name, value in given.items() if isinstance(value, str)}
    assert texts == {name for name in given if name.rpartition(".")[2] in TEXTS}
    assert {name for name, value in given.items() if isinstance(value, list)} == {
        name for name in given if name.startswith(LISTS)
    }


@pytest.mark.parametrize(
    ("column", "axis", "factor"),
    [
        ("ttft_s.p90", "TTFT, p90 (s)", 1),
        ("tpot_s.mean", "TPOT, mean (ms)", 1e3),
        ("attainment.ttft", "requests within the TTFT limit (%)", 100),
        ("goodput_per_gpu_per_s.best", "goodput (requests/s per GPU)", 1),
        ("best.colocated.goodput_per_gpu_per_s.best", "goodput, best colocated (requests/s per GPU)", 1),
        ("utilization.decode", "busy share, decode (%)", 100),
        ("parts_share.decode_queue", "decode queue (%)", 100),
        ("kv_blocks.prefill", "KV blocks, prefill", 1),
        ("search.gpus", "GPUs", 1),
        ("slo.tpot", "TPOT limit (ms)", 1e3),
        ("parts_s.transfer", "transfer (s)", 1),
        ("ttft_parts_s.transfer", "transfer and the wait for it (s)", 1),
        ("quantiles.transfer_s", "KV transfer (ms)", 1e3),
        ("profile_set.swap_bytes_per_s", "swap (GB/s)", 1e-9),
        ("num_requests", "requests", 1),
        ("something_else", "something else", 1),
    ],
)  # fmt: skip
def test_axes_say_what_they_show_in_which_unit(column: str, axis: str, factor: float) -> None:
    assert (quantity(column).axis, quantity(column).factor) == (axis, factor)
