"""Entries of `plots`: what they mean, and what is refused with line and remedy."""

from __future__ import annotations

import pytest

from dsim.errors import InputError
from dsim.yamlfile import parse_yaml
from experiments.plots import COMMON_KEYS, FORMS, OWN_KEYS, Kind, Mark, PlotSpec, parse_plot
from experiments.plots.labels import quantity

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
    ("{kind: bandwidth, y: num_gpus}", "plots[0] needs the key x; add the column"),
    ("{kind: line, x: rate_per_gpu}", "plots[0] needs the key y; add the column"),
    ("{kind: attainment-scale}", "plots[0] needs the key x; add the column"),
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
