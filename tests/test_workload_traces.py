"""Trace files: what is read from them, and the one line that says what is wrong with one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.errors import InputError
from dsim.workload import (
    Poisson,
    Replayed,
    Workload,
    parse_arrivals,
    parse_workload,
    preset,
    read_lengths,
    read_trace,
    rescale,
)
from profiles.length_tables import fit

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"measured data not found at {SHARED}")

HEADER = "arrival_s,prompt_tokens,output_tokens\n"
GOOD = '{"arrival_s": 0.5, "prompt_tokens": 3, "output_tokens": 2}\n'
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(folder: Path, content: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        HEADER + "0,10,2\n1.5,20,3\n",
        HEADER + "0,10,2\n1.5,20,3",
        HEADER + "0.0,10.0,2.0\n15e-1,2e1,3\n",
        HEADER.replace("\n", "\r\n") + "0,10,2\r\n\r\n1.5,20,3\r\n",
        "﻿" + HEADER + "0,10,2\n1.5,20,3\n",
        'id,output_tokens,prompt_tokens, arrival_s ,note\n7,2,10,0,"a, b"\n8,3,20, 1.5 ,\n',
        '{"arrival_s": 0, "prompt_tokens": 10, "output_tokens": 2}\n\n'
        '{"arrival_s": 1.5, "prompt_tokens": 20.0, "output_tokens": 3, "extra": [null]}\n',
    ],
)
def test_every_form_reads_as_the_same_requests(tmp_path: Path, content: str) -> None:
    trace = read_trace(written(tmp_path, content))
    assert trace.arrival_s.tolist() == [0.0, 1.5]
    assert trace.prompt_tokens.tolist() == [10, 20]
    assert trace.output_tokens.tolist() == [2, 3]
    assert trace.cached_prompt_tokens.tolist() == [0, 0]


def test_cached_prompt_tokens_are_read(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens,cached_prompt_tokens\n0,10,2,9\n1,10,2,0\n"
    assert read_trace(written(tmp_path, text)).cached_prompt_tokens.tolist() == [9, 0]


def test_lengths_need_no_arrivals_and_workloads_draw_from_them(tmp_path: Path) -> None:
    path = written(tmp_path, "prompt_tokens,output_tokens\n10,2\n20,3\n")
    assert read_lengths(path).mean_tokens(context_tokens=100) == (15, 2.5, 0)
    workload = Workload(Poisson(), parse_workload(str(path)))
    trace = workload.trace(rate_per_s=1, num_requests=100, seed=1, context_tokens=100)
    assert set(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)) == {(10, 2), (20, 3)}
    with pytest.raises(InputError, match=r"t.csv:3: prompt_tokens \+ output_tokens=23 must be at most"):
        workload.trace(rate_per_s=1, num_requests=100, seed=1, context_tokens=22)


def test_arrivals_of_a_file_are_replayed(tmp_path: Path) -> None:
    arrivals = parse_arrivals(str(written(tmp_path, HEADER + "0.25,10,2\n1.5,20,3\n")))
    assert isinstance(arrivals, Replayed)
    assert arrivals.arrival_s.tolist() == [0.25, 1.5]


BAD: list[tuple[str, str | bytes, str]] = [
    ("empty file", "", "is empty; expected"),
    ("blank lines only", "\n \n", "is empty; expected"),
    ("header only", HEADER, "has no rows"),
    ("no header", "0,10,2\n1,10,2\n", ":2: arrival_s is missing; found 0, 10, 2"),
    (
        "missing column",
        "arrival_s,prompt_tokens\n0,1\n",
        ":2: output_tokens is missing; found arrival_s, prompt_tokens",
    ),
    ("misspelt column", "arrival,prompt_tokens,output_tokens\n0,1,1\n", ":2: arrival_s is missing; found arrival,"),
    ("column twice", "arrival_s,prompt_tokens,prompt_tokens\n0,1,1\n", ":1: column='prompt_tokens' appears twice"),
    ("cut off in a row", HEADER + "0,10,2\n1,10", ":3: the row has 2 of 3 fields; is the file complete?"),
    ("cut off after a comma", HEADER + "0,10,2\n1,10,", ":3: output_tokens='' must be a number"),
    ("field too many", HEADER + "0,10,2,9\n", ":2: the row has 4 of 3 fields"),
    ("open quote", HEADER + '0,10,"2\n', "is not CSV (unexpected end of data)"),
    ("huge field", HEADER + f"0,10,{'9' * 200_000}\n", "is not CSV (field larger than field limit"),
    ("NaN", HEADER + "0,nan,2\n", ":2: prompt_tokens='nan' must be a number"),
    ("infinity", HEADER + "0,10,inf\n", ":2: output_tokens='inf' must be a number"),
    ("overflow", HEADER + "0,1e999,2\n", ":2: prompt_tokens='1e999' must be a whole number"),
    ("NaN arrival", HEADER + "NaN,10,2\n", ":2: arrival_s='NaN' must be a number"),
    ("negative tokens", HEADER + "0,-10,2\n", ":2: prompt_tokens='-10' must be >= 1"),
    ("zero prompt", HEADER + "0,0,2\n", ":2: prompt_tokens='0' must be >= 1; drop this row"),
    ("zero output", HEADER + "0,10,0\n", ":2: output_tokens='0' must be >= 1; drop this row"),
    ("half a token", HEADER + "0,10.5,2\n", ":2: prompt_tokens='10.5' must be a whole number"),
    ("words", HEADER + "0,ten,2\n", ":2: prompt_tokens='ten' must be a number"),
    ("python number", HEADER + "0,1_0,2\n", ":2: prompt_tokens='1_0' must be a number"),
    ("hexadecimal", HEADER + "0,0x10,2\n", ":2: prompt_tokens='0x10' must be a number"),
    ("other digits", HEADER + "0,١,2\n", ":2: prompt_tokens='١' must be a number"),
    ("huge tokens", HEADER + "0,99999999999999999999999,2\n", "must be at most 100000000"),
    ("negative arrival", HEADER + "-1,10,2\n", ":2: arrival_s='-1' must be >= 0"),
    ("date for a time", HEADER + "1700000000,10,2\n", "must be >= 0 and at most 1e+09; count from the start"),
    ("unsorted", HEADER + "1,10,2\n\n0.5,10,2\n", ":4: arrival_s must not be earlier than the row before; sort"),
    ("not UTF-8", (HEADER + "0,10,2\n").encode() + b"\xff,1,1\n", ":3: is not UTF-8 text; save"),
    ("UTF-16", (HEADER + "0,10,2\n").encode("utf-16"), ":1: is not UTF-8 text"),
    ("zero byte", HEADER + "0,1\0,2\n", ":2: holds a zero byte"),
    ("gzip", b"\x1f\x8b\x08\x00\x00\x00", ":1: is not UTF-8 text"),
    ("over the context", HEADER + "0,10,2\n1,2000,49\n", ":3: prompt + output tokens=2049 must be at most the model's"),
    ("all cached", HEADER[:-1] + ",cached_prompt_tokens\n0,10,2,10\n", "cached_prompt_tokens=10 must be below prompt"),
    ("negative cached", HEADER[:-1] + ",cached_prompt_tokens\n0,10,2,-1\n", "cached_prompt_tokens='-1' must be >= 0"),
    ("JSON cut off", GOOD + GOOD[:20], ":2: is not JSON ("),
    ("JSON array", "[" + GOOD + "]", ":1: is not JSON ("),
    ("JSON array line", "[1, 2]\n", ":1: is not a JSON object; one object a line"),
    ("JSON number line", GOOD + "7\n", ":2: is not a JSON object"),
    ("JSON NaN", GOOD.replace("3", "NaN"), ":1: prompt_tokens=nan must be a whole number"),
    ("JSON null", GOOD.replace("3", "null"), ":1: prompt_tokens='null' must be a number"),
    ("JSON true", GOOD.replace("3", "true"), ":1: prompt_tokens='true' must be a number"),
    ("JSON list", GOOD.replace("3", "[3]"), ":1: prompt_tokens='[3]' must be a number"),
    ("JSON half", GOOD.replace("3", "3.5"), ":1: prompt_tokens=3.5 must be a whole number"),
    ("JSON huge", GOOD.replace("3", "9" * 400), ":1: prompt_tokens=9999"),
    ("JSON too many digits", GOOD.replace("3", "9" * 9999), ":1: is not JSON (too large)"),
    ("JSON huge arrival", GOOD.replace("0.5", "9" * 400), ":1: arrival_s=9999"),
    ("JSON nested", '{"a":' + "[" * 200_000 + "\n", ":1: is not JSON ("),
    ("JSON key missing", GOOD + '{"arrival_s": 1, "prompt_tokens": 1}\n', ":2: output_tokens is missing; found"),
    ("Azure date", AZURE + "yesterday,1,1\n", ":2: TIMESTAMP='yesterday' must be a date and time; as in 2023-"),
    ("Azure month", AZURE + "2023-13-16 18:15:46.68,1,1\n", ":2: TIMESTAMP='2023-13-16 18:15:46.68' must be a date"),
    (
        "Azure unsorted",
        AZURE + "2023-11-16 18:15:46.6805901,1,1\n2023-11-16 18:15:46.6805900,1,1\n",
        ":3: TIMESTAMP must not be earlier than the row before; sort",
    ),
    ("Azure zero", AZURE + "2023-11-16 18:15:46.68,1,0\n", ":2: GeneratedTokens='0' must be >= 1"),
    ("Azure without time", AZURE[10:] + "1,1\n", ":2: TIMESTAMP is missing"),
    ("Mooncake hashes", MOONCAKE.replace("[1, 2]", '"12"'), ":1: hash_ids='12' must be a list of whole numbers"),
    ("Mooncake time", MOONCAKE.replace("0,", "-1,", 1), ":1: timestamp=-1 must be >= 0"),
]


@pytest.mark.parametrize(("content", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_malformed_files_give_one_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(InputError) as caught:
        read_trace(path, context_tokens=2048)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert message in text
    assert "\n" not in text
    assert len(text) < 300 + len(str(path))


@pytest.mark.parametrize("name", [".", "missing.csv", "no/dir.csv", "bad\0name.csv"])
def test_unreadable_paths_give_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot be read") as caught:
        read_trace(tmp_path / name)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes, header: bool) -> None:
    path = written(tmp_path_factory.getbasetemp(), (HEADER.encode() if header else b"") + content, "fuzz.csv")
    for read in (read_trace, read_lengths):
        try:
            read(path)
        except InputError as error:
            assert str(error).startswith(str(path))  # noqa: PT017


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
keys = ("arrival_s", "prompt_tokens", "output_tokens", "timestamp", "input_length", "output_length", "hash_ids")


@given(st.lists(st.dictionaries(st.sampled_from(keys), json_values), min_size=1, max_size=3))
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]) -> None:
    path = written(tmp_path_factory.getbasetemp(), "\n".join(map(json.dumps, rows)), "fuzz.jsonl")
    for read in (read_trace, read_lengths):
        try:
            read(path)
        except InputError as error:
            assert str(error).startswith(str(path))  # noqa: PT017


def test_azure_times_keep_seven_digits(tmp_path: Path) -> None:
    rows = "2023-11-16 23:59:59.9999999,10,2\n2023-11-17 00:00:00.0000001,20,3\n2023-11-17T00:00:01Z,20,3\n"
    trace = read_trace(written(tmp_path, AZURE + rows))
    assert trace.arrival_s.tolist() == [0.0, 2e-7, 1.0000001]


def test_mooncake_prefix_hits(tmp_path: Path) -> None:
    def row(tokens: int, blocks: list[int]) -> str:
        return json.dumps({"timestamp": 1500, "input_length": tokens, "output_length": 2, "hash_ids": blocks}) + "\n"

    text = row(600, [1, 2]) + row(600, [1, 2]) + row(1100, [1, 3, 2]) + row(512, [1]) + row(300, [9])
    path = written(tmp_path, text, "t.jsonl")
    trace = read_trace(path)
    # A hit ends at the first block that is new; the last prompt token is always computed.
    assert trace.cached_prompt_tokens.tolist() == [0, 599, 512, 511, 0]
    assert set(trace.arrival_s) == {1.5}
    assert not read_trace(path, prefix_hits=False).cached_prompt_tokens.any()


def test_rescale_changes_the_rate_and_nothing_else(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, HEADER + "3,10,2\n4,20,3\n7,30,4\n"))
    scaled = rescale(trace, rate_per_s=1)
    assert scaled.arrival_s.tolist() == [0.0, 0.5, 2.0]
    assert scaled.prompt_tokens is trace.prompt_tokens
    with pytest.raises(InputError, match="rate: 0 must be between"):
        rescale(trace, rate_per_s=0)


def test_twenty_thousand_rows_take_less_than_a_second(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + "".join(f"{i / 10},{i % 1000 + 1},{i % 300 + 1}\n" for i in range(20_000)))
    start = time.process_time()
    assert len(read_trace(path)) == 20_000
    assert time.process_time() - start < 1


@needs_shared
@pytest.mark.parametrize(("kind", "rows"), [("conv", 19_366), ("code", 8_819)])
def test_azures_traces_are_read_whole(kind: str, rows: int) -> None:
    trace = read_trace(SHARED / f"traces/AzureLLMInferenceTrace_{kind}.csv")
    assert len(trace) == rows
    assert 55 < trace.arrival_s[-1] / 60 < 60
    assert trace.arrival_s[0] == 0


@needs_shared
def test_mooncakes_trace_is_read_whole() -> None:
    trace = read_trace(SHARED / "traces/mooncake_conversation.jsonl")
    assert len(trace) == 12_031
    assert trace.cached_prompt_tokens.sum() / trace.prompt_tokens.sum() == pytest.approx(0.37, abs=0.005)


@needs_shared
def test_the_real_runs_are_read_and_sharegpt_follows_them() -> None:
    trace = read_trace(SHARED / "distserve/runs/c21d12-1600-16rps.csv", context_tokens=2048)
    assert len(trace) == 1600
    levels = [0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99]
    table = parse_workload("sharegpt").draw(np.random.default_rng(0), 200_000, context_tokens=2048)
    for real, ours in ((trace.prompt_tokens, table.prompt), (trace.output_tokens, table.output)):
        assert np.quantile(ours, levels) == pytest.approx(np.quantile(real, levels), rel=0.05, abs=3)


@needs_shared
def test_the_shipped_table_is_the_fit() -> None:
    trace = read_trace(SHARED / "distserve/runs/c21d12-1600-16rps.csv")
    fitted, shipped = (
        fit("sharegpt", trace.prompt_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)),
        preset("sharegpt"),
    )
    # Linear algebra libraries differ in the last digits.
    assert fitted.prompt_tokens == pytest.approx(shipped.prompt_tokens, abs=0.2)
    assert fitted.shares == pytest.approx(shipped.shares, abs=3e-4)
