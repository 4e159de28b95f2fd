"""`dsim validate`: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

from dsim.cli.app import app
from dsim.version import __version__
from tests.cli import Cli

SCHEMA = json.loads((Path(__file__).parents[1] / "docs/schema/validate.schema.json").read_text())
MODEL = ["-m", "llama-3.1-8b", "--gpu", "h100"]
COLOCATED = [*MODEL, "-p", "1xC:tp1"]
ROW = "concurrency,num_prompts,isl,osl,mean_ttft_ms,p99_ttft_ms,mean_tpot_ms,request_throughput\n"
ROWS = ROW + "4,20,512,64,30,60,7.5,8\n8,40,512,64,40,90,8.5,14\n"
REQUESTS = (
    "arrival_s,prompt_tokens,output_tokens,ttft_s,tpot_s\n0,512,64,0.03,0.0075\n0.5,256,1,0.02,\n1,700,32,0.03,0.008\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "requests.csv").write_text(REQUESTS)
    (tmp_path / "rows.csv").write_text(ROWS)
    (tmp_path / "row.csv").write_text(ROW + "4,20,512,64,30,60,7.5,8\n")
    (tmp_path / "vllm.json").write_text(json.dumps(VLLM))
    return tmp_path


VLLM: dict[str, Any] = {
    "backend": "vllm",
    "num_prompts": 3,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 2,
    "duration": 0.4,
    "completed": 3,
    "request_throughput": 7.5,
    "input_lens": [100, 200, 300],
    "output_lens": [3, 1, 2],
    "ttfts": [0.02, 0.025, 0.03],
    "itls": [[0.007, 0.008], [], [0.007]],
    "errors": ["", "", ""],
}


def answer(cli: Cli, *arguments: str) -> dict[str, Any]:
    """Return the JSON object that a validation prints, checked against the schema."""
    run = cli("validate", *arguments, "--format", "json")
    assert (run.code, run.err) == (0, "")
    found: dict[str, Any] = json.loads(run.out)
    jsonschema.validate(found, SCHEMA)
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ["requests.csv", *COLOCATED],
        ["requests.csv", *COLOCATED, "--slo", "ttft=0.04,tpot=0.01", "--policy", "orca", "--check"],
        ["requests.csv", *MODEL, "-p", "1xP:tp1 + 1xD:tp1", "--kv-blocks", "prefill=900,decode=1000"],
        ["row.csv", *COLOCATED, "--assume", "length_range=exact", "--token-budget", "512", "--max-seqs", "64"],
        ["rows.csv", *COLOCATED, "--row", "2", "--assume", "length_range=exact", "--tpot-definition", "guidellm"],
        ["vllm.json", *COLOCATED],
        ["vllm.json", *COLOCATED, "--kv-dtype", "fp8", "--engine", "sglang"],
    ],
)
def test_json_follows_the_schema(cli: Cli, folder: Path, arguments: list[str]) -> None:
    found = answer(cli, str(folder / arguments[0]), *arguments[1:])
    assert found["version"] == __version__
    assert found["comparisons"]
    # Every prediction names each input that it rests on.
    assert {"loop", "num_requests", "max_seqs", "kv_blocks", "kv_dtype"} <= set(found["inputs"])


def test_a_replay_of_requests(cli: Cli, folder: Path) -> None:
    found = answer(cli, str(folder / "requests.csv"), *COLOCATED, "--slo", "ttft=0.025,tpot=0.0078")
    assert (found["kind"], found["num_requests"]) == ("requests", 3)
    by_name = {one["name"]: one for one in found["comparisons"]}
    assert by_name["ttft_s.mean"]["measured"] == pytest.approx(0.08 / 3)
    # Second request: TTFT met, one token. First: TPOT met, TTFT not. Third: neither.
    shares = {name: one["measured"] for name, one in by_name.items() if name.startswith("attainment")}
    assert shares == {"attainment.both": 1 / 3, "attainment.ttft": 1 / 3, "attainment.tpot": 2 / 3}
    error = by_name["tpot_s.p50"]["error"]
    assert error == pytest.approx(by_name["tpot_s.p50"]["predicted"] / by_name["tpot_s.p50"]["measured"] - 1)
    assert found["inputs"]["policy"] == {"values": ["chunked"], "origin": "profile", "note": "vllm 0.24.0"}
    # Three requests reach no limit: whatever the unknown ones are, the prediction is one number.
    assert found["without_effect"] == ["token_budget", "max_seqs", "kv_blocks"]
    assert "every row counts: no warm-up is left out" in found["remarks"]


def test_what_is_not_known_gives_a_range(cli: Cli, folder: Path) -> None:
    found = answer(cli, str(folder / "row.csv"), *COLOCATED)
    assert found["inputs"]["length_range"]["values"] == ["exact", "0.8-1"]
    assert found["inputs"]["length_range"]["origin"] == "unknown"
    ttft = found["comparisons"][0]
    assert ttft["name"] == "ttft_s.mean"
    assert (ttft["predicted"], ttft["error"]) == (None, None)
    assert ttft["error_low"] < ttft["error_high"]


def test_the_table_names_every_input(cli: Cli, folder: Path) -> None:
    known = ["--row", "2", "--assume", "length_range=exact", "--max-seqs", "32"]
    run = cli("validate", str(folder / "rows.csv"), *COLOCATED, *known)
    assert (run.code, run.err) == (0, "")
    lines = run.out.splitlines()
    assert lines[0] == "llama-3.1-8b = Llama-3.1-8B (meta-llama/Llama-3.1-8B) on h100-sxm, engine vllm (0.24.0)"
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith(" ") and line.split()}
    assert shown["users"] == "8 from the file"
    assert shown["max_seqs"] == "32 given"
    assert shown["turnaround_s"] == "0 by default"
    assert shown["token_budget"] == "2048 | 8192 not known: all tried"
    assert shown["kv_blocks"].startswith("100% | 80% | 120% not known: all tried 100% is ")
    ttft = next(line for line in lines if "TTFT mean ms" in line)
    assert "[" in ttft
    assert ttft.endswith("] %")


def test_csv_has_the_inputs_beside_every_error(cli: Cli, folder: Path) -> None:
    run = cli("validate", str(folder / "requests.csv"), *COLOCATED, "--format", "csv", "--assume", "kv_blocks=900")
    rows = list(csv.DictReader(io.StringIO(run.out)))
    assert [row["name"] for row in rows][:2] == ["ttft_s.mean", "ttft_s.p50"]
    for row in rows:
        assert row["inputs.loop"] == "replay"
        assert row["inputs.max_seqs"] == "1024; 256; 128"
        assert row["inputs.kv_blocks"] == "900"
        assert float(row["error"]) == pytest.approx(float(row["predicted"]) / float(row["measured"]) - 1, abs=1e-12)


def test_files_and_the_same_again(cli: Cli, folder: Path) -> None:
    out = folder / "out"
    arguments = [str(folder / "requests.csv"), *COLOCATED, "--assume", "kv_blocks=900", "--assume", "max_seqs=8", "-q"]
    run = cli("validate", *arguments, "-o", str(out))
    assert (run.code, run.err) == (0, "")
    assert {path.name for path in out.iterdir()} == {"validation.json", "comparisons.csv", "config.yaml"}
    saved = json.loads((out / "validation.json").read_text())
    jsonschema.validate(saved, SCHEMA)
    assert yaml.safe_load((out / "config.yaml").read_text())["assume"] == ["kv_blocks=900", "max_seqs=8"]
    again = cli("validate", str(folder / "requests.csv"), "-c", str(out / "config.yaml"), "--format", "json")
    assert json.loads(again.out) == saved
    assert cli.refused("validate", *arguments, "-o", str(out)).startswith("--output-dir: ")


def test_a_dry_run_says_what_would_be_tried(cli: Cli, folder: Path) -> None:
    run = cli("validate", str(folder / "row.csv"), *COLOCATED, "--dry-run", "-o", str(folder / "out"))
    assert (run.code, run.err) == (0, "")
    assert "144 runs" in run.out
    assert "would write validation.json, comparisons.csv, config.yaml" in run.out
    assert not (folder / "out").exists()
    plan = json.loads(cli("validate", str(folder / "row.csv"), *COLOCATED, "--dry-run", "--format", "json").out)
    assert (plan["replays"], plan["inputs"]["users"]["values"]) == (144, [4])


def test_host_constants_are_fitted_on_request(cli: Cli, folder: Path) -> None:
    rows = "".join(f"{i / 4},{300 + 7 * i},{20 + i % 9},{0.03 + 0.001 * (i % 5)},0.009\n" for i in range(20))
    (folder / "many.csv").write_text(REQUESTS.splitlines()[0] + "\n" + rows)
    known = ["--policy", "chunked", "--token-budget", "2048", "--fit-host", "-q", "-o", str(folder / "out")]
    run = cli("validate", str(folder / "many.csv"), *COLOCATED, *known)
    assert (run.code, run.err) == (0, "")
    assert "host constants fitted to the even requests in" in run.out
    assert "the odd requests, which they were not:" in run.out
    found = json.loads((folder / "out/validation.json").read_text())
    jsonschema.validate(found, SCHEMA)
    assert set(found["host_fit"]["constants"]) == {"step_s", "sequence_s", "token_s", "request_s"}
    before = {one["name"]: abs(one["error"]) for one in found["comparisons"]}
    for part in ("fitted", "held_out"):
        errors = {one["name"]: abs(one["error"]) for one in found["host_fit"][part]}
        assert errors["ttft_s.mean"] < before["ttft_s.mean"]
        assert not any("per_s" in name for name in errors)
    rows_of_csv = csv.DictReader((folder / "out/comparisons.csv").read_text().splitlines())
    assert list(dict.fromkeys(row["part"] for row in rows_of_csv)) == ["all", "fitted", "held_out"]


def test_columns_of_another_log(cli: Cli, folder: Path) -> None:
    (folder / "log.csv").write_text("sent,in,out,first,done\n100,512,64,30,500\n600,512,64,31,510\n")
    columns = ["arrival_s=sent:ms", "prompt_tokens=in", "output_tokens=out", "ttft_s=first:ms", "e2e_s=done:ms"]
    mapped = [part for text in columns for part in ("--column", text)]
    found = answer(cli, str(folder / "log.csv"), *COLOCATED, *mapped)
    by_name = {one["name"]: one["measured"] for one in found["comparisons"]}
    assert by_name["ttft_s.mean"] == pytest.approx(0.0305)
    assert by_name["tpot_s.p50"] == pytest.approx((0.47 / 63 + 0.479 / 63) / 2)
    # From the first request to the last completion.
    assert by_name["throughput_per_s"] == pytest.approx(2 / (0.6 + 0.51 - 0.1))


H = "arrival_s,prompt_tokens,output_tokens,ttft_s,e2e_s\n"
A = "users,num_requests,prompt_tokens,output_tokens,mean_ttft_ms\n"


def changed(**values: object) -> str:
    return json.dumps({key: value for key, value in {**VLLM, **values}.items() if value != "-"})


#: Content of the file, more arguments, words of the line.
FILES: list[tuple[str | bytes, list[str], str]] = [
    ("", [], "/file: is empty; expected a header line"),
    ("  \n\n", [], "/file: is empty"),
    (b"\xff\xfe\x00", [], "/file:1: is not UTF-8 text; save the file as UTF-8"),
    (b"a,b\n\x00,1\n", [], "/file:2: holds a zero byte"),
    (b"\x1f\x8b\x08\x00", [], "/file:1: is not UTF-8 text; save the file as UTF-8, unpack it"),
    (H, [], "/file: has no rows; one request, or one run, a line"),
    (H + "0,10,10,0.1\n", [], "/file:2: the row has 4 of 5 fields; is the file complete?"),
    (H + '0,10,10,0.1,"1\n', [], "/file:2: is not CSV (unexpected end of data); is the file complete?"),
    ("arrival_s,arrival_s\n1,2\n", [], "/file:1: column='arrival_s' appears twice in the header"),
    (
        "arrival_s,prompt_tokens,output_tokens\n0,1,1\n",
        [],
        "/file: has no latencies; give one of ttft_s, tpot_s, e2e_s",
    ),
    ("arrival_s,output_tokens,ttft_s\n0,1,1\n", [], "/file: prompt_tokens is missing; add --column prompt_tokens=NAME"),
    ("arrival_s,prompt_tokens,ttft_s\n0,1,1\n", [], "/file: output_tokens is missing; add --column output_tokens=NAME"),
    ("arrival,prompt_tokens,output_tokens,ttft_s\n0,1,1,1\n", [], "/file: column arrival has no unit in its name; add"),
    (
        "arrival_s,prompt_tokens,output_tokens,ttft\n0,1,1,1\n",
        [],
        "/file: column ttft has no unit in its name; add --co",
    ),
    (H + "x,10,10,0.1,1\n", [], "/file:2: arrival_s='x' must be a number"),
    (H + "-1,10,10,0.1,1\n", [], "/file:2: arrival_s='-1' must be >= 0"),
    (H + ",10,10,0.1,1\n", [], "/file:2: arrival_s='' must be a number"),
    (H + "nan,10,10,0.1,1\n", [], "/file:2: arrival_s='nan' must be a number"),
    (H + "0,0,10,0.1,1\n", [], "/file:2: prompt_tokens='0' must be >= 1; drop this row"),
    (H + "0,10,-2,0.1,1\n", [], "/file:2: output_tokens='-2' must be >= 1"),
    (H + "0,10.5,10,0.1,1\n", [], "/file:2: prompt_tokens='10.5' must be a whole number"),
    (H + "0,10,1e12,0.1,1\n", [], "/file:2: output_tokens='1e12' must be at most 100000000"),
    (
        H + "0,131000,100,0.1,1\n",
        [],
        "/file:2: prompt + output tokens=131100 must be at most the model's context of 131072",
    ),
    (H + "0,10,10,0,1\n", [], "/file:2: ttft_s='0' must be > 0; drop requests that failed"),
    (H + "0,10,10,-0.1,1\n", [], "/file:2: ttft_s='-0.1' must be > 0; check which columns are which"),
    (H + "0,10,10,fast,1\n", [], "/file:2: ttft_s='fast' must be a number"),
    (H + "0,10,10,0.1,1e999\n", [], "/file:2: e2e_s='1e999' must be a finite number"),
    (H + "0,10,10,0.1,200000\n", [], "/file:2: e2e_s='200000' must be at most 100000 s; check its unit"),
    (H + "0,10,10,2,1\n", [], "/file:2: e2e_s=1.0 must be at least ttft_s; check the units of both"),
    (
        "arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n5,1,2,4,6\n",
        [],
        "/file:2: first_token_s=4.0 must not be before arrival_s; check the units of both",
    ),
    (
        "arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n5,1,2,7,6\n",
        [],
        "/file:2: last_token_s=6.0 must not be before first_token_s",
    ),
    (
        "arrival_s,prompt_tokens,output_tokens,cached_prompt_tokens,ttft_s\n5,4,2,4,6\n",
        [],
        "/file:2: cached_prompt_tokens=4 must be below the 4 prompt tokens",
    ),
    ('{"arrival_s": 0, "prompt_tokens": 1\n', [], "/file:1: is not JSON ("),
    ("[1, 2]", [], "/file: is not a list of objects; one object for each request or run"),
    ("[{", [], "/file: is not JSON (Expecting property name"),
    ("[]", [], "/file: is not a list of objects"),
    ('{"prompt_tokens": 1, "output_tokens": true, "ttft_s": 1, "arrival_s": 0}', [], "output_tokens='true' must be a"),
    ('{"prompt_tokens": 1, "output_tokens": [1], "ttft_s": 1, "arrival_s": 0}', [], "output_tokens='[1]' must be a nu"),
    (
        '{"prompt_tokens": 1, "output_tokens": 1, "ttft_s": NaN, "arrival_s": 0}',
        [],
        "/file:1: ttft_s=nan must be a finite",
    ),
    (
        '{"prompt_tokens": 1, "output_tokens": 1, "ttft_s": 1, "arrival_s": 0}\n{"prompt_tokens": 1}\n',
        [],
        "/file:2: output_tokens is missing; found prompt_tokens",
    ),
    (A + "0,1,1,1,1\n", [], "/file:2: users='0' must be between 1 and 1000000"),
    (A + "1.5,1,1,1,1\n", [], "/file:2: users='1.5' must be a whole number"),
    (A + "4,1000001,1,1,1\n", [], "/file:2: num_requests='1000001' must be between 1 and 1000000"),
    (A + "4,many,1,1,1\n", [], "/file:2: num_requests='many' must be a whole number"),
    (A + "4,10,1,1,0\n", [], "/file:2: mean_ttft_ms='0' must be > 0"),
    (A + "4,10,1,1,x\n", [], "/file:2: mean_ttft_ms='x' must be a number"),
    (A + "4,10,1,1,1\n5,10,1,1,1\n", [], "/file: has 2 rows of statistics; add --row N, from 1 to 2"),
    (A + "4,10,1,1,1\n", ["--row", "2"], "--row: 2 must be between 1 and 1"),
    (A + "4,10,1,1,1\n", ["--row", "0"], "--row: 0 must be between 1 and 1"),
    (A + "4,10,1,1,\n", [], "/file: has no statistics with known names; as in mean_ttft_ms"),
    ("qps,isl,osl,mean_ttft_ms\n-1,1,1,1\n", [], "/file:2: qps='-1' must be between 1e-9 and 1e9"),
    ("qps,isl,osl,mean_ttft_ms,ttft_mean_ms\n1,1,1,1,1\n", [], "ttft_s.mean='ttft_mean_ms' is there twice; keep one"),
    ("qps,isl,osl,p50_ttft_ms,p99_ttft_ms\n1,1,1,9,8\n", [], "/file:2: ttft_s.p99=0.008 must be at least p50; check"),
    ("qps,isl,osl,mean_ttft_ms,request_throughput\n1,1,1,1,0\n", [], "request_throughput='0' must be > 0"),
    (
        "qps,isl,osl,mean_ttft_ms,attainment\n1,1,1,1,90\n",
        [],
        "/file:2: attainment='90' must be between 0 and 1; give a",
    ),
    ("qps,isl,osl,mean_ttft_ms,burstiness\n1,1,1,1,0\n", [], "/file:2: burstiness='0' must be between 1e-9 and 1e9"),
    (
        "qps,isl,osl,mean_ttft_ms,policy\n1,1,1,1,fifo\n",
        [],
        "/file:2: policy='fifo' is not a known value; expected one",
    ),
    (changed(ttfts=[0.02, 0.03]), [], "/file:1: input_lens=3 must have 2 items, as ttfts has"),
    (changed(itls="-"), [], "/file:1: itls must be a list; was the result saved with --save-detailed?"),
    (changed(itls=[[0.1], [], 0.1]), [], "/file:1: itls[2]='0.1' must be a list of gaps"),
    (changed(itls=[[0.1], [], [-0.1]]), [], "/file:1: itls[2][0]=-0.1 must be > 0; check which columns are which"),
    (changed(errors=["", "x"]), [], "/file:1: errors=2 must have 3 items, as ttfts has"),
    (changed(errors=["x", "x", "x"]), [], "/file:1: output_lens has no request that succeeded"),
    (changed(start_times=[]), [], "/file:1: start_times=0 must have 3 items, as ttfts has"),
    (changed(output_lens=[{}, 1, 1]), [], "/file:1: output_lens[0]='{}' must be a number"),
    (changed(itls="-", ttfts="-", mean_ttft_ms=1.0, completed=10**400), [], "completed='1000000000000000000000000000"),
    (changed(start_times=3), [], "/file:1: start_times must be a list"),
    (changed(start_times=[0, "a", 1]), [], "/file:1: start_times[1]='a' must be a number"),
    (changed(ttfts=[0, 0, 0]), [], "/file:1: ttfts are all 0; measure an endpoint that streams its tokens"),
    (changed(input_lens=[0, 1, 1]), [], "/file:1: input_lens[0]=0 must be >= 1; drop this row"),
    (
        changed(ramp_up_strategy="linear"),
        [],
        "/file:1: ramp_up_strategy='linear' cannot be replayed without start_times",
    ),
    (changed(max_concurrency=-2), [], "/file:1: max_concurrency='-2' must be a whole number"),
    (changed(max_concurrency=[2]), [], "/file:1: max_concurrency='[2]' must be a number or a text"),
]


@pytest.mark.parametrize(("content", "more", "words"), FILES)
def test_malformed_files(cli: Cli, tmp_path: Path, content: str | bytes, more: list[str], words: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in cli.refused("validate", str(file), *COLOCATED, *more, "-o", str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == [file]


GOOD = {"--model": "llama-3.1-8b", "--gpu": "h100", "--placement": "1xC:tp1"}
OPTIONS: list[tuple[str, str | None, str]] = [
    ("--placement", "1xQ:tp1", "--placement: '1xQ:tp1' is not a pool"),
    ("--placement", "1xC:tp3", "--placement: '1xC:tp3' cannot run: colocated tp3pp1: tp=3 does not divide"),
    ("--model", "8b", "--model: '8b' names no model by itself"),
    ("--gpu", "h10", "--gpu: 'h10' is not a known GPU"),
    ("--engine", "vlm", "--engine: 'vlm' has no latency profile"),
    ("--evidence", "measured", "--evidence: 'measured' has no profile of llama-3.1-8b on h100-sxm"),
    ("--experts", "all", "--experts: 'all' is not one of"),
    ("--kv-dtype", "fp4", "--kv-dtype: 'fp4' is not one of"),
    ("--profile", "none.yaml", "none.yaml: does not exist; check the path"),
    ("--slo", "ttft=400", "--slo: ttft='400' reads as 400 s"),
    ("--kind", "trace", "--kind: 'trace' is not a known kind; expected one of requests, vllm, aggregate"),
    ("--kind", "aggregate", "requests.csv:2: has no statistics with known names"),
    ("--kind", "vllm", "requests.csv:2: has no statistics with known names"),
    ("--row", "1", "--row: 1 chooses one of several rows of statistics; leave it out"),
    ("--row", "one", "--row: 'one' must be a whole number"),
    ("--column", "ttft_s", "--column: 'ttft_s' is no assignment; write NAME=COLUMN"),
    ("--column", "ttfx_s=a", "--column: 'ttfx_s' is not a known name; did you mean 'ttft_s'?"),
    ("--column", "ttft_s=a", "--column: ttft_s='a' is not in "),
    ("--column", "ttft_s=a:min", "--column: ttft_s='min' has an unknown unit"),
    ("--column", "prompt_tokens=ttft_s:ms", "--column: prompt_tokens='prompt_tokens=ttft_s:ms' is not a time"),
    ("--column", "ttft_s.mean=ttft_s", "requests.csv: has 3 rows of statistics; add --row N"),
    ("--tpot-definition", "vlm", "--tpot-definition: 'vlm' is not a known tool; did you mean 'vllm'?"),
    ("--policy", "fifo", "--policy: 'fifo' is not one of"),
    ("--token-budget", "0", "--token-budget: 0 must be >= 1"),
    ("--max-seqs", "-1", "--max-seqs: -1 must be >= 1"),
    ("--max-seqs", "many", "--max-seqs: 'many' must be a whole number"),
    ("--kv-blocks", "0", "--kv-blocks: 0 must be >= 1"),
    ("--assume", "users", "--assume: 'users' is no assumption; write KEY=VALUE, as in token_budget=8192"),
    ("--assume", "user=3", "--assume: 'user' is not a known input; did you mean 'users'?"),
    ("--assume", "users=3", "--assume: users='3' does not bear on this run (replay, 1xC:tp1pp1, lengths of the file)"),
    ("--assume", "max_seqs=", "--assume: max_seqs is empty; most requests of one step"),
    ("--assume", "max_seqs=1,x", "--assume: max_seqs='x' must be a whole number"),
    ("--assume", "kv_blocks=0%", "--assume: kv_blocks='0%' must be between 1e-9 and 1e9"),
    ("--handover", "nixl", "--handover: 'nixl' is no handover that dsim knows"),
    ("--kv-link", "ethernet", "--kv-link: 'ethernet' is neither a link nor a rate"),
    ("--assume", "kv_dtype=fp8", "--assume: kv_dtype='fp8' is what the profile says; give --"),
    ("--assume", "length_range=1-0", "--assume: length_range='1-0' is no range; write exact, or LOW-HIGH as 0.8-1"),
    ("--assume", "turnaround_s=-1", "--assume: turnaround_s='-1' must be >= 0"),
    ("--assume", "turnaround_s=1day", "--assume: turnaround_s='1day' has an unknown unit 'day'"),
    ("--assume", "fixed_span=maybe", "--assume: fixed_span='maybe' is not a known value"),
    (
        "--assume",
        "loop=ajar",
        "--assume: loop='ajar' is not a known value; expected one of replay, open, burst, closed",
    ),
    ("--assume", "rate_per_s=nan", "--assume: rate_per_s='nan' must be a finite number"),
    ("--assume", "seed=4294967296", "--assume: seed='4294967296' must be between 0 and 4294967295"),
    ("--prefill-routing", "best", "--prefill-routing: 'best' is not one of"),
    ("--decode-routing", "best", "--decode-routing: 'best' is not one of"),
    ("--extrapolate", "=1", "--extrapolate: "),
    ("--fit-host", None, "--fit-host: 3 needs at least 20 requests; leave it out"),
    ("--check", "=1", "--check: "),
    ("--format", "xml", "--format: 'xml' is not one of"),
    ("--output-dir", "", "--output-dir: '' must not be empty"),
    ("--overwrite", "=1", "--overwrite: "),
    ("--config", "none.yaml", "none.yaml: does not exist"),
    ("--set", "policy", "--set: 'policy' is no assignment"),
    ("--dry-run", "=1", "--dry-run: "),
    ("--quiet", "=1", "--quiet: "),
    ("--no-color", "=1", "--no-color: "),
]


@pytest.mark.parametrize(("option", "value", "words"), OPTIONS)
def test_malformed_options(cli: Cli, folder: Path, option: str, value: str | None, words: str) -> None:
    others = {name: text for name, text in GOOD.items() if name != option}
    if option == "--profile":
        del others["--model"], others["--gpu"]
    arguments = [part for name, text in others.items() for part in (name, text)]
    wrong = option + ("" if value is None else value if value.startswith("=") else f"={value}")
    assert words in cli.refused("validate", str(folder / "requests.csv"), *arguments, wrong)


def test_every_option_is_in_the_table() -> None:
    command = typer.main.get_command(app).commands["validate"]  # type: ignore[attr-defined]
    names = {max(parameter.opts, key=len) for parameter in command.params} - {"--help", "file"}
    assert names - {option for option, _, _ in OPTIONS} == set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--column", "ttft_s=ttft_s", "--column", "ttft_s=e2e_s"], "--column: ttft_s='ttft_s=e2e_s' is given twice"),
        (
            ["--policy", "orca", "--assume", "policy=orca"],
            "--assume: policy='orca' is given twice; keep one of the two",
        ),
        (["--assume", "seed=1", "--assume", "seed=2"], "--assume: seed='2' is given twice; keep one of the two"),
        (
            ["--kind", "requests", "--column", "ttft_s.mean=ttft_s"],
            "--column: ttft_s.mean is not of a file of requests",
        ),
        (["--policy", "orca", "--token-budget", "9"], "--assume: token_budget='9' does not bear on this run"),
        (
            ["--token-budget", "100000"],
            "--placement: '1xC:tp1pp1' cannot run: a token budget of 100000 is beyond profile",
        ),
    ],
)
def test_options_that_do_not_go_together(cli: Cli, folder: Path, arguments: list[str], words: str) -> None:
    assert words in cli.refused("validate", str(folder / "requests.csv"), *COLOCATED, *arguments)


def test_a_file_is_needed(cli: Cli, folder: Path) -> None:
    assert cli.refused("validate", *COLOCATED).startswith("FILE: is needed; see dsim validate --help")
    missing = str(folder / "none.csv")
    assert cli.refused("validate", missing, *COLOCATED).startswith(f"{missing}: cannot be read: No such file")
    assert "cannot be read: Is a directory" in cli.refused("validate", str(folder), *COLOCATED)


def test_the_handover_is_an_input_too(cli: Cli, tmp_path: Path) -> None:
    """A run of NIXL's handover: replayed with it nothing differs, with the profile's own TTFT is too short."""
    at = [*MODEL, "-p", "1xP:tp1 + 1xD:tp1"]
    asked = ["--handover", "vllm-nixl", "--kv-link", "nic"]
    run = ("simulate", *at, *asked, "-r", "4", "-n", "30", "--finite", "-w", "fixed:1000,16", "-o", str(tmp_path))
    assert cli(*run).code == 0
    known = [str(tmp_path / "requests.csv"), *at, "--max-seqs", "256", "--kv-blocks", "5000"]
    right, wrong = answer(cli, *known, *asked), answer(cli, *known)
    errors = [{one["name"]: one["error"] for one in found["comparisons"]} for found in (right, wrong)]
    assert all(abs(error) < 1e-9 for error in errors[0].values())
    assert errors[1]["ttft_s.mean"] < -0.3
    said = [found["inputs"]["handover"] for found in (right, wrong)]
    assert [one["origin"] for one in said] == ["given", "profile"]
    assert said[0]["values"][0].startswith("pull-at-step, first token from decode")
    refused = cli("validate", known[0], *COLOCATED, *asked).err
    assert "--handover: 'vllm-nixl' is for disaggregated placements" in refused
