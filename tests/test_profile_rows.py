"""Rows files: what is read, what is refused and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsim.errors import InputError
from profiles.rows import COLUMNS, Phase, Point, Row, Rows, Status, parse_rows, read_rows, rows_text

DOCS = Path(__file__).parents[1] / "docs" / "profile_rows.md"
EXAMPLE = DOCS.read_text(encoding="utf-8").split("```csv\n")[1].split("```")[0]
#: No model, no GPU: only neighbours can show a wrong unit.
BARE = """phase,tp,requests,prompt_tokens,context_tokens,step_s
prefill,1,1,128,,0.02
prefill,1,1,256,,0.03
prefill,1,1,512,,0.05
prefill,1,1,1024,,0.09
decode,1,1,,512,0.011
decode,1,8,,512,0.012
decode,1,16,,512,0.013
"""


def parse(text: str) -> Rows:
    return parse_rows(text.encode(), file="rows.csv")


def test_the_documented_example_is_read() -> None:
    rows = parse(EXAMPLE)
    assert [row.status for row in rows.rows] == [Status.OK] * 4 + [Status.OOM]
    assert len(rows.ok) == 4
    assert rows.metadata.model is not None
    assert rows.metadata.model.name == "llama-3.1-8b"
    assert rows.metadata.engine == "kernels"
    assert rows.metadata.settings == {"warmup": "3"}
    assert rows.rows[1].point == Point("prefill", 1, 4, 512, 1024)
    assert rows.rows[3].point == Point("mixed", 1, 1, 512, 0, 2048, 64)


def test_six_columns_are_enough() -> None:
    assert len(parse(BARE).ok) == 7


def test_what_is_written_is_read() -> None:
    rows = parse(EXAMPLE)
    again = parse(rows_text(rows.rows, {"model": "llama-3.1-8b", "gpu": "h200", "dtype": "bf16"}))
    assert [(r.point, r.repeat, r.step_s, r.comm_s, r.status) for r in again.ok] == [
        (r.point, r.repeat, r.step_s, r.comm_s, r.status) for r in rows.ok
    ]
    assert COLUMNS[-1] == "status"


MALFORMED = [
    ("", "rows.csv: is empty"),
    ("phase,tp\n", "rows.csv:1: columns requests, prompt_tokens, context_tokens, step_s are missing"),
    (BARE.splitlines(keepends=True)[0], "rows.csv: has no rows"),
    (BARE.replace("step_s", "time_s"), "rows.csv:1: column step_s is missing"),
    (BARE.replace("step_s", "step_s,stepp_s").replace("0\n", "0,\n"), "rows.csv:1: 'stepp_s' is not a known column"),
    (BARE.replace("0.05\n", "nan\n"), "rows.csv:4: step_s='nan' must be a finite number"),
    (BARE.replace("0.05\n", "\n"), "rows.csv:4: step_s is missing"),
    (BARE.replace("0.05\n", "0\n"), "rows.csv:4: step_s='0' must be > 0"),
    (BARE.replace("0.05\n", "-0.05\n"), "rows.csv:4: step_s='-0.05' must be > 0"),
    (BARE.replace("0.05\n", "50 ms\n"), "rows.csv:4: step_s='50 ms' is no number"),
    (BARE.replace("1,512,,", "1,512.5,,"), "rows.csv:4: prompt_tokens='512.5' must be a whole number >= 1"),
    (BARE.replace("1,512,,", "1,,,"), "rows.csv:4: prompt_tokens is missing"),
    (BARE.replace("1,512,,", "1,256,,"), "rows.csv:4: repeat=0 times tp 1 prefill of 1 x 256 tokens again, as line 3"),
    (
        BARE.replace("prefill,1,1,512", "prefil,1,1,512"),
        "rows.csv:4: phase='prefil' is not a known phase; did",
    ),
    (BARE.replace("prefill,1,1,512", "prefill,0,1,512"), "rows.csv:4: tp='0' must be a whole number >= 1"),
    (BARE.replace("decode,1,8,,512", "decode,1,8,,"), "rows.csv:7: context_tokens is missing"),
    (
        BARE.replace("decode,1,8,,512", "decode,1,8,64,512"),
        "rows.csv:7: prompt_tokens='64' must be empty or 0",
    ),
    (BARE.replace("1,512,,0.05\n", "1,512\n"), "rows.csv:4: has 4 values for 6 columns"),
    (BARE[:-3], "rows.csv:8: ends within a line"),
    (BARE.replace("0.05\n", "50\n"), "rows.csv:4: step_s=50.0 is "),
    (BARE.replace("0.05\n", "0.00005\n"), "rows.csv:4: step_s=5e-05 is "),
    (EXAMPLE.replace("0.0113", "11.3"), "rows.csv:16: step_s=11.3 is "),
    (EXAMPLE.replace("0.0113", "0.0000113"), "rows.csv:16: step_s=1.13e-05 is "),
    (EXAMPLE.replace("0.0113,,", "0.0113,0.02,"), "rows.csv:16: comm_s='0.02' must be below step_s=0.0113"),
    (EXAMPLE.replace("0.0001,ok", "0.0001,o"), "rows.csv:14: status='o' is not a known status"),
    (EXAMPLE.replace("dtype", "dtyp"), "rows.csv:7: 'dtyp' is not a known key; did you mean 'dtype'?"),
    (
        EXAMPLE.replace("# dtype", "# experts: {experts: 8, per_token: 9, ffn_size: 64}\n# dtype"),
        "rows.csv:7: experts.per_token=9 must be <= 8",
    ),
    (EXAMPLE.replace("# dtype", "# experts: {experts: 8}\n# dtype"), "rows.csv:7: experts.per_token is missing"),
    (EXAMPLE.replace("h200", "h201"), "rows.csv:3: 'h201' is not a known GPU"),
    (EXAMPLE.replace("all_reduce: none", "all_reduce: maybe"), "rows.csv:10: all_reduce='maybe' is not known"),
]


@pytest.mark.parametrize(("text", "expected"), MALFORMED)
def test_malformed_rows_are_named_by_row_and_column(text: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_a_whole_file_in_milliseconds_is_refused_where_model_and_gpu_are_known() -> None:
    rows = parse(EXAMPLE)
    slow = [Row(r.point, 1000 * r.step_s, r.repeat) for r in rows.ok]
    with pytest.raises(InputError, match=r"step_s=18.2 is 2495 times the roofline of llama-3.1-8b on h200-sxm"):
        parse(rows_text(slow, {"model": "llama-3.1-8b", "gpu": "h200"}))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_rows(tmp_path / "rows.csv")


def test_remarks_of_other_tools_are_passed_over() -> None:
    rows = parse("# timed by me\n" + BARE)
    assert rows.metadata.model is None
    assert {row.point.phase for row in rows.ok} == {Phase.PREFILL.value, Phase.DECODE.value}
