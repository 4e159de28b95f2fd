"""Every malformed value of every option is one line with place, value and remedy, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main

from dsim.cli.app import app
from tests.cli import Cli

GOOD = {"--model": "13b", "--placement": "1xP:tp2pp1 + 1xD:tp1pp1", "--rate": "3", "--slo": "ttft=0.4,tpot=0.1"}

# Option, value, words of the line. {dir} is a directory with the files that FILES lists.
SIMULATE = [
    ("--model", "12b", "--model: '12b' is not a known model; did you mean"),
    ("--model", "70b", "--model: '70b' names no model by itself; write one of llama-2-70b"),
    ("--model", "", "--model: '' needs the name of a model"),
    ("--model", "qwen3.5-27b", "--model: 'qwen3.5-27b' has hybrid linear attention"),
    ("--model", "none/config.json", "none/config.json: cannot be read: No such file or directory; check the path"),
    ("--gpu", "a101", "--gpu: 'a101' is not a known GPU; did you mean"),
    ("--gpu", "a100", "--gpu: 'a100' names no GPU by itself"),
    ("--gpu", "cpu", "--gpu: 'cpu' has no known efficiencies to estimate step times with; there are efficiencies for"),
    ("--evidence", "kernels", "--evidence: 'kernels' has no profile of opt-13b on a100-80g; leave it out for the best"),
    ("--evidence", "other-kernels", "of opt-13b on a100-80g; name the engine that has none of its own"),
    ("--experts", "pp", "--experts: 'pp' is not one of 'tp', 'ep'"),
    ("--kv-dtype", "int4", "--kv-dtype: 'int4' is not one of 'auto', 'bf16', 'fp8'"),
    ("--gpu", "", "--gpu: '' needs the name of a GPU"),
    ("--engine", "vlm", "--engine: 'vlm' has no latency profile for opt-13b on a100-80g; did you mean 'vllm'?"),
    ("--engine", "", "--engine: '' has no latency profile"),
    ("--profile", "", "--profile: '' must not be empty"),
    ("--profile", "{dir}/none.yaml", "none.yaml: does not exist; check the path"),
    ("--profile", "{dir}", ": is a directory; give a file"),
    ("--profile", "{dir}/empty.yaml", "empty.yaml: is empty"),
    ("--profile", "{dir}/cut.yaml", "cut.yaml:"),
    ("--profile", "{dir}/binary", "binary:1: is not UTF-8 text"),
    ("--placement", "", "--placement: '' is not a pool; write COUNTxROLE:tpNppM"),
    ("--placement", "1xP:tp2pp1", "--placement: '1xP:tp2pp1' needs one prefill and one decode pool"),
    ("--placement", "1xP:tp2pp1 + 1xC:tp1pp1", "needs one prefill and one decode pool, or one colocated pool; write"),
    ("--placement", "1xQ:tp1pp1", "--placement: '1xQ:tp1pp1' is not a pool"),
    ("--placement", "0xC:tp1pp1", "--placement: count=0 must be >= 1"),
    ("--placement", "-1xC:tp1pp1", "--placement: '-1xC:tp1pp1' is not a pool"),
    ("--placement", "1xC:tp0pp1", "--placement: tp=0 must be >= 1"),
    ("--placement", "1xC:tp1pp0", "--placement: pp=0 must be >= 1"),
    ("--placement", "1xC:tp3pp1", "'1xC:tp3pp1' cannot run: colocated tp3pp1: tp=3 does not divide the 40 attention"),
    ("--placement", "1xC:tp1pp3", "cannot run: colocated tp1pp3: pp=3 does not divide the 40 layers of opt-13b"),
    ("--placement", "1xC:tp8pp1", "has no coefficients for tp=8"),
    ("--slo", "", "--slo: has an empty limit; write ttft=0.4,tpot=0.1"),
    ("--slo", "tftt=0.4", "--slo: 'tftt' is not a known key; did you mean 'ttft'?"),
    ("--slo", "ttft=nan", "--slo: ttft='nan' must be a finite number"),
    ("--slo", "ttft=-1", "--slo: ttft='-1' must be > 0"),
    ("--slo", "ttft=400", "--slo: ttft='400' reads as 400 s, longer than any sensible target; write ttft=400ms"),
    ("--rate", "-1", "--rate: -1.0 must be > 0"),
    ("--rate", "0", "--rate: 0.0 must be > 0"),
    ("--rate", "nan", "--rate: 'nan' must be a finite number; as in 6 (per second) or 90/min"),
    ("--rate", "inf", "--rate: 'inf' must be a finite number"),
    ("--rate", "1e999", "--rate: '1e999' must be a finite number"),
    ("--rate", "1e12", "--rate: '1e12' must be between 1e-9 and 1e9 requests per second"),
    ("--rate", "six", "--rate: 'six' is not a number; as in 6 (per second) or 90/min"),
    ("--rate", "6/day", "--rate: '6/day' has an unknown unit '/day'"),
    ("--rate", "", "--rate: '' is not a number"),
    ("--workload", "sharegtp", "--workload: 'sharegtp' is unknown; did you mean 'sharegpt'?"),
    ("--workload", "", "--workload: '' is unknown; expected one of sharegpt"),
    ("--workload", "fixed:512", "--workload: 'fixed:512' is wrong: '512' must have 2 parts"),
    ("--workload", "fixed:0,1", "--workload: 'fixed:0,1' is wrong: prompt_tokens=0 must be between"),
    ("--workload", "fixed:-5,1", "must be a whole number of tokens"),
    ("--workload", "fixed:nan,1", "must be a whole number of tokens"),
    ("--workload", "fixed:2000,100", "prompt_tokens + output_tokens=2100 must be at most the model's context of 2048"),
    ("--workload", "uniform:512,64,2,1", "--workload: 'uniform:512,64,2,1' is wrong: low=2.0 must be at most high"),
    ("--workload", "lognormal:prompt=1e7/1,output=1e7/1", "--workload: practically never fit the model's context"),
    ("--workload", "{dir}/none.csv", "none.csv: cannot be read"),
    ("--workload", "{dir}/empty.csv", "empty.csv: is empty; expected a header line"),
    ("--workload", "{dir}/cut.csv", "cut.csv:3: "),
    ("--workload", "{dir}/header.csv", "header.csv: has no rows; one request a line"),
    (
        "--workload",
        "{dir}/long.csv",
        "long.csv:2: prompt_tokens + output_tokens=3000 must be at most the model's context",
    ),
    ("--arrivals", "poison", "--arrivals: 'poison' is unknown; did you mean 'poisson'?"),
    ("--arrivals", "", "--arrivals: '' is unknown"),
    ("--arrivals", "gamma", "--arrivals: 'gamma' is wrong: cv is missing"),
    ("--arrivals", "gamma:cv=0", "--arrivals: 'gamma:cv=0' is wrong: cv=0.0 must be between"),
    ("--arrivals", "gamma:cv=nan", "--arrivals: 'gamma:cv=nan' is wrong"),
    ("--arrivals", "{dir}/none.csv", "none.csv: cannot be read"),
    ("--requests", "0", "--requests: 0 must be >= 1"),
    ("--requests", "-5", "--requests: -5 must be >= 1"),
    ("--requests", "1e3", "--requests: '1e3' must be a whole number"),
    ("--requests", "", "--requests: '' must be a whole number"),
    ("--requests", "99999999999", "--requests: 99999999999 must be <= 1000000000"),
    ("--warmup", "-1", "--warmup: -1 must be >= 0"),
    ("--warmup", "half", "--warmup: 'half' must be a whole number"),
    ("--finite", "=3", "--finite: does not take a value"),
    ("--trace", "{dir}/good.csv", "--rate: '3' does not go with --trace; leave one of the two out"),
    ("--closed-loop", "4", "--rate: '3' does not go with --closed-loop; leave one of the two out"),
    ("--turnaround", "1", "--turnaround: '1' does not go with an open loop"),
    ("--stagger", "1", "--stagger: '1' does not go with an open loop"),
    ("--skip-first-wave", None, "--skip-first-wave: does not go with an open loop"),
    ("--policy", "fcfs", "--policy: 'fcfs' is not one of 'orca', 'prefill-first', 'decode-first', 'chunked'"),
    ("--policy", "orca", "--policy: 'orca' belongs to colocated placements; as in 1xC:tp1pp1"),
    ("--token-budget", "0", "--token-budget: 0 must be >= 1"),
    ("--token-budget", "x", "--token-budget: 'x' must be a whole number"),
    ("--token-budget", "512", "--token-budget: 512 belongs to --policy chunked; add --policy chunked"),
    ("--prefill-routing", "random", "--prefill-routing: 'random' is not one of 'round-robin', 'join-shortest-queue'"),
    ("--decode-routing", "", "--decode-routing: '' is not one of"),
    ("--prefill-batching", "max", "--prefill-batching: 'max' is not one of 'engine', 'lm'"),
    ("--kv-blocks", "0", "--kv-blocks: 0 must be >= 1"),
    ("--kv-blocks", "1.5", "--kv-blocks: '1.5' must be a whole number"),
    ("--kv-blocks", "prefil=4", "--kv-blocks: 'prefil' is neither a role nor a parallelism; did you mean 'prefill'?"),
    ("--kv-blocks", "tp1pp1:decode=4", "--kv-blocks: 'tp1pp1:decode' is neither a role nor a parallelism"),
    ("--kv-blocks", "decode=4,5,decode=6", "--kv-blocks: 'decode' stands twice"),
    ("--handover", "nixl", "--handover: 'nixl' is no handover that dsim knows"),
    ("--handover", "vllm-nixl,hop=1", "--handover: 'hop' is not a known key; did you mean 'hop_s'?"),
    ("--handover", "", "--handover: '' is no handover that dsim knows"),
    ("--kv-link", "ethernet", "--kv-link: 'ethernet' is neither a link nor a rate"),
    ("--kv-link", "25", "--kv-link: '25' must be >= 1e+06 bytes per second"),
    ("--nodes", "0", "--nodes: 0 must be >= 1"),
    ("--nic", "fast", "--nic: 'fast' belongs to --nodes; add --nodes N, or give --kv-link"),
    ("--gpus-per-node", "8", "--gpus-per-node: 8 belongs to --nodes; add --nodes N"),
    ("--affinity", "low", "--affinity: 'low' belongs to --nodes; add --nodes N"),
    ("--affinity", "x", "--affinity: 'x' is not one of 'high', 'low'"),
    ("--prefill-gpu", "a101", "--prefill-gpu: 'a101' is not a known GPU; did you mean"),
    ("--decode-gpu", ",", "--decode-gpu: ',' names no GPU; as in h100 or h100,h20"),
    ("--prefill-profile", "{dir}/none.yaml", "none.yaml: does not exist; check the path"),
    ("--decode-profile", "{dir}/none.yaml", "none.yaml: does not exist; check the path"),
    ("--aggregate", "=1", "--aggregate: does not take a value"),
    ("--extrapolate", "=1", "--extrapolate: does not take a value"),
    ("--check", "=1", "--check: does not take a value"),
    ("--step-log", None, "--step-log: needs a place to write to; add --output-dir DIR"),
    ("--seed", "-1", "--seed: -1 must be >= 0"),
    ("--seed", "4294967296", "--seed: 4294967296 must be <= 4294967295"),
    ("--seed", "0x10", "--seed: '0x10' must be a whole number"),
    ("--seed", "1" * 30, "must be a whole number"),
    ("--format", "yaml", "--format: 'yaml' is not one of 'table', 'json', 'csv'"),
    ("--output-dir", "", "--output-dir: '' must not be empty"),
    ("--output-dir", "{dir}/good.csv", "good.csv' is no directory; give another path"),
    ("--output-dir", "{dir}/good.csv/sub", "good.csv is no directory"),
    ("--overwrite", "=1", "--overwrite: does not take a value"),
    ("--config", "", "--config: '' must not be empty"),
    ("--config", "{dir}/none.yaml", "none.yaml: does not exist"),
    ("--config", "{dir}/empty.yaml", "empty.yaml: is empty"),
    ("--set", "rate", "--set: 'rate' is no assignment; write KEY=VALUE, as in slo.ttft=0.4"),
    ("--set", "rat=1", "--set: 'rat' is not a known key; did you mean 'rate'?"),
    ("--set", "rate=[", "--set: 'rate=[' is not YAML"),
    ("--set", "seed=!!int 3", "--set: 'seed=!!int 3' uses the YAML tag"),
    ("--set", "zzz=1", "--set: 'zzz' is not a known key; see dsim simulate --help"),
    ("--set", "requests=many", "--set: requests: 'many' must be a whole number"),
    ("--dry-run", "=1", "--dry-run: does not take a value"),
    ("--quiet", "=1", "--quiet: does not take a value"),
    ("--no-color", "=1", "--no-color: does not take a value"),
]

SEARCH_GOOD = {"--model": "13b", "--slo": "ttft=0.4,tpot=0.1"}
SEARCH = [
    ("--objective", "cheap", "--objective: 'cheap' is not one of 'goodput_per_gpu', 'goodput_per_dollar', 'min_gpus'"),
    ("--objective", "min_gpus", "--rate: is needed with --objective min_gpus; as in --rate 40"),
    ("--rate", "40", "--rate: '40' belongs to --objective min_gpus; add --objective min_gpus, or ask dsim size"),
    ("--price", "", "--price: '' is not a number; as in --price 2.5 or --price h100=2.5"),
    ("--price", "two", "--price: 'two' is not a number; as in"),
    ("--price", "-1", "--price: -1.0 must be >= 0"),
    ("--price", "2.5USD", "--price: '2.5USD' has a unit 'USD'; as in"),
    ("--price", "h100=2", "--price: 'h100' is not used: a100-80g; leave it out"),
    ("--price", "h101=2", "--price: 'h101' is not a known GPU; did you mean"),
    ("--price", "a100-80g=2,a100-sxm=3", "--price: 'a100-80g' is given twice; correct it or leave it out"),
    ("--price", "2,3", "--price: '3' is given twice for all GPUs; give one price of all GPUs, and others by name"),
    ("--price", "1e300", "--price: '1e300' must be <= 1e+06; as in --price 2.5"),
    ("--pareto", "yes", "--pareto: "),
    ("--model", "12b", "--model: '12b' is not a known model"),
    ("--evidence", "hearsay", "'hearsay' is not one of"),
    ("--experts", "", "--experts: '' is not one of"),
    ("--kv-dtype", "8", "--kv-dtype: '8' is not one of"),
    ("--handover", "mode=push", "--handover: mode='push' is not known; expected one of direct"),
    ("--kv-link", "25GB", "--kv-link: '25GB' has an unknown unit 'GB'"),
    ("--nic", "slow", "--nic: 'slow' is not a number; as in 25GB/s or 200Gbit/s"),
    ("--prefill-gpu", "a101", "--prefill-gpu: 'a101' is not a known GPU; did you mean"),
    ("--decode-gpu", ",", "--decode-gpu: ',' names no GPU; as in h100 or h100,h20"),
    ("--colocated-gpu", "h101", "--colocated-gpu: 'h101' is not a known GPU; did you mean"),
    ("--prefill-profile", "{dir}/none.yaml", "none.yaml: does not exist; check the path"),
    ("--decode-profile", "{dir}/none.yaml", "none.yaml: does not exist; check the path"),
    ("--token-budgets", "0", "--token-budgets: 0 must be >= 1"),
    ("--max-batch-tokens", "many", "--max-batch-tokens: 'many' is no number; as in 2048,8192, engine or lm"),
    ("--max-batch-requests", "decode=0", "--max-batch-requests: 0 must be >= 1"),
    ("--kv-blocks", "decode=many", "--kv-blocks: 'many' must be a whole number; as in 2588, or prefill=2588"),
    ("--gpu", "a101", "--gpu: 'a101' is not a known GPU"),
    ("--engine", "vlm", "--engine: 'vlm' has no latency profile"),
    ("--profile", "{dir}/cut.yaml", "cut.yaml:"),
    ("--colocated-engine", "vlm", "--colocated-engine: 'vlm' has no latency profile for opt-13b on a100-80g; did you"),
    ("--colocated-engine", "", "--colocated-engine: '' has no latency profile"),
    ("--colocated-profile", "{dir}/none.yaml", "none.yaml: does not exist"),
    ("--colocated-profile", "", "--colocated-profile: '' must not be empty"),
    ("--slo", "", "--slo: has an empty limit"),
    ("--slo", "tftt=1", "--slo: 'tftt' is not a known key; did you mean 'ttft'?"),
    ("--slo", "ttft=400,tpot=100", "write ttft=400ms for milliseconds or ttft=400s for seconds"),
    ("--gpus", "0", "--gpus: 0 must be >= 1"),
    ("--gpus", "-1", "--gpus: -1 must be >= 1"),
    ("--gpus", "two", "--gpus: 'two' must be a whole number"),
    ("--gpus", "nan", "--gpus: 'nan' must be a whole number"),
    ("--gpus", "1000000", "--gpus: 1000000 must be <= 100000"),
    ("--nodes", "0", "--nodes: 0 must be >= 1"),
    ("--nodes", "x", "--nodes: 'x' must be a whole number"),
    ("--gpus-per-node", "0", "--gpus-per-node: 0 must be >= 1"),
    ("--gpus-per-node", "8.5", "--gpus-per-node: '8.5' must be a whole number"),
    ("--workload", "{dir}/empty.csv", "empty.csv: is empty"),
    ("--workload", "{dir}/cut.csv", "cut.csv:3: "),
    ("--workload", "{dir}/long.csv", "must be at most the model's context of 2048"),
    ("--workload", "fixed:2000,100", "--workload: prompt_tokens + output_tokens=2100 must be at most"),
    ("--arrivals", "gamma:cv=-1", "--arrivals: 'gamma:cv=-1' is wrong"),
    ("--attainment", "0", "--attainment: '0' must be above 0 and below 1; as in 0.9 or 90%"),
    ("--attainment", "1", "--attainment: '1' must be above 0 and below 1"),
    ("--attainment", "90", "--attainment: '90' must be above 0 and below 1; as in 0.9 or 90%"),
    ("--attainment", "nan", "--attainment: 'nan' must be a finite number; as in 0.9 or 90%"),
    ("--attainment", "most", "--attainment: 'most' is not a number; as in 0.9 or 90%"),
    ("--attainment", "0.9x", "--attainment: '0.9x' has an unknown unit 'x'"),
    ("--affinity", "medium", "--affinity: 'medium' is not one of 'high', 'low'"),
    ("--mode", "all", "--mode: 'all' is not one of 'disaggregated', 'colocated', 'both'"),
    ("--policy", "fcfs", "--policy: 'fcfs' is not one of 'orca', 'prefill-first'"),
    ("--prefill-batching", "max", "--prefill-batching: 'max' is not one of 'engine', 'lm'"),
    ("--requests", "5", "--requests: 5 must be >= 10"),
    ("--requests", "-1", "--requests: -1 must be >= 10"),
    ("--requests", "1e3", "--requests: '1e3' must be a whole number"),
    ("--extrapolate", "=1", "--extrapolate: does not take a value"),
    ("--top", "0", "--top: 0 must be >= 1"),
    ("--top", "all", "--top: 'all' must be a whole number"),
    ("--precision", "0", "--precision: '0' must be above 0 and below 1"),
    ("--precision", "-3%", "--precision: '-3%' must be above 0 and below 1"),
    ("--confidence", "95", "--confidence: '95' must be above 0 and below 1; as in 0.9 or 90%"),
    ("--confidence", "1", "--confidence: '1' must be above 0 and below 1"),
    ("--confidence", "1e-9", "--confidence: '1e-9' must be 0.5 to 0.999; as in 0.95 or 95%"),
    ("--confidence", "49.9%", "--confidence: '49.9%' must be 0.5 to 0.999"),
    ("--confidence", "0.9999999999999", "--confidence: '0.9999999999999' must be 0.5 to 0.999"),
    ("--confidence", "sure", "--confidence: 'sure' is not a number"),
    ("--seed", "-1", "--seed: -1 must be >= 0"),
    ("--jobs", "0", "--jobs: 0 must be >= 1"),
    ("--jobs", "-2", "--jobs: -2 must be >= 1"),
    ("--jobs", "many", "--jobs: 'many' must be a whole number"),
    ("--format", "xml", "--format: 'xml' is not one of 'table', 'json', 'csv'"),
    ("--output-dir", "{dir}/good.csv", "good.csv' is no directory; give another path"),
    ("--resume", "=1", "--resume: does not take a value"),
    ("--resume", None, "--resume: needs the directory that the search wrote to; add --output-dir"),
    ("--retry-failed", "=1", "--retry-failed: does not take a value"),
    ("--retry-failed", None, "--retry-failed: needs --resume; add --resume"),
    ("--cache", "", "--cache: '' must not be empty"),
    ("--cache", "{dir}", ": is no file; move it away, or give another place"),
    ("--cache", "{dir}/good.csv", "good.csv: is no cache of dsim; move it away, or give another place"),
    ("--cache", "{dir}/none/runs", "runs: cannot be made: its directory is not there; make the directory"),
    ("--dask", "", "--dask: '' must not be empty; give the scheduler's address, as tcp://host:8786"),
    ("--time-limit", "0", "--time-limit: '0' must be > 0; as in 60s"),
    ("--time-limit", "-1", "--time-limit: "),
    ("--time-limit", "soon", "--time-limit: 'soon' "),
    ("--shard", "0/4", "--shard: '0/4' is no part of a whole; as in 1/4, 2/4, 3/4 and 4/4"),
    ("--shard", "1/4", "--shard: '1/4' needs a directory for what it finds; give --output-dir, without --cache"),
    ("--merge", "", "--merge: '' must not be empty"),
    ("--merge", "{dir}", "--merge: has no shards; give the directories that --shard wrote to"),
    ("--merge", "{dir}/good.csv", "good.csv' is no directory; give the directories that --shard wrote to"),
    ("--overwrite", "=1", "--overwrite: does not take a value"),
    ("--config", "{dir}/none.yaml", "none.yaml: does not exist"),
    ("--set", "gpu", "--set: 'gpu' is no assignment"),
    ("--set", "gpus=0", "--set: gpus=0 must be >= 1"),
    ("--dry-run", "=1", "--dry-run: does not take a value"),
    ("--quiet", "=1", "--quiet: does not take a value"),
    ("--no-color", "=1", "--no-color: does not take a value"),
]

# Options with a trace or a closed loop instead of a rate.
OTHER_TRAFFIC = [
    (["--trace", ""], "--trace: '' must not be empty"),
    (["--trace", "{dir}/none.csv"], "none.csv: cannot be read"),
    (["--trace", "{dir}"], ": cannot be read"),
    (["--trace", "{dir}/empty.csv"], "empty.csv: is empty"),
    (["--trace", "{dir}/header.csv"], "header.csv: has no rows"),
    (["--trace", "{dir}/cut.csv"], "cut.csv:3: "),
    (["--trace", "{dir}/columns.csv"], "arrival_s is missing"),
    (["--trace", "{dir}/unsorted.csv"], "unsorted.csv:3: arrival_s must not be earlier than the row before; sort"),
    (["--trace", "{dir}/nan.csv"], "nan.csv:2: arrival_s='nan' must be a number"),
    (["--trace", "{dir}/negative.csv"], "negative.csv:2: prompt_tokens='-3' must be >= 1"),
    (
        ["--trace", "{dir}/long.csv"],
        "long.csv:2: prompt + output tokens=3000 must be at most the model's context of 2048",
    ),
    (["--trace", "{dir}/binary"], "binary:1: is not UTF-8 text"),
    (["--trace", "{dir}/good.csv", "-n", "3"], "--requests: 3 asks for more requests than the trace has"),
    (["--trace", "{dir}/good.csv", "--warmup", "2"], "--warmup: 2 asks for more requests than the trace has"),
    (["--trace", "{dir}/good.csv", "-w", "sharegpt"], "--workload: 'sharegpt' does not go with --trace"),
    (["--trace", "{dir}/good.csv", "--closed-loop", "3"], "--closed-loop: 3 does not go with --trace"),
    (["--trace", "{dir}/good.csv", "--finite"], "--finite: does not go with --trace"),
    (["--closed-loop", "0"], "--closed-loop: 0 must be >= 1"),
    (["--closed-loop", "many"], "--closed-loop: 'many' must be a whole number"),
    (["--closed-loop", "4", "-n", "3"], "--closed-loop: num_requests=3 must be at least 4"),
    (["--closed-loop", "4", "--turnaround", "-1"], "--turnaround: -1.0 must be >= 0"),
    (["--closed-loop", "4", "--turnaround", "nan"], "--turnaround: 'nan' must be a finite number; as in 0.4 (seconds)"),
    (["--closed-loop", "4", "--stagger", "soon"], "--stagger: 'soon' is not a number; as in 0.4 (seconds), 400ms"),
    (["--closed-loop", "4", "--stagger", "1 day"], "--stagger: '1 day' has an unknown unit 'day'"),
    (["--closed-loop", "4", "--arrivals", "poisson"], "--arrivals: 'poisson' does not go with --closed-loop"),
    ([], "--rate: is needed; as in --rate 6; or replay with --trace FILE"),
]

SIZE_GOOD = {**SEARCH_GOOD, "--rate": "40"}
SIZE = [
    ("--rate", "-1", "--rate: -1.0 must be > 0"),
    ("--rate", "many", "--rate: 'many' is not a number; as in 6 (per second) or 90/min"),
    ("--users", "10", "--users: 10 does not go with --rate; leave one of the two out"),
    ("--users", "1.5", "--users: '1.5' must be a whole number"),
    ("--think-time", "30s", "--think-time: '30s' belongs to --users; leave it out, or add --users"),
    ("--gpus", "0", "--gpus: 0 must be >= 1"),
    ("--nodes", "0", "--nodes: 0 must be >= 1"),
    ("--copy-gpus", "0", "--copy-gpus: 0 must be >= 1"),
    ("--copy-gpus", "65", "--copy-gpus: 65 must be <= 64"),
    (
        "--objective",
        "goodput_per_gpu",
        "--objective: 'goodput_per_gpu' says nothing of GPUs for a rate; take min_gpus or",
    ),
    ("--price", "h100=2", "--price: 'h100' is not used: a100-80g; leave it out"),
]

FILES = {
    "empty.yaml": b"",
    "cut.yaml": b"dsim_profile: 1\nmodel: opt-13b\ngpu: a1",
    "binary": b"\xff\xfe\x00\x01",
    "empty.csv": b"",
    "header.csv": b"arrival_s,prompt_tokens,output_tokens\n",
    "cut.csv": b"arrival_s,prompt_tokens,output_tokens\n0,10,10\n1,20\n",
    "columns.csv": b"time,prompt,output\n0,10,10\n",
    "unsorted.csv": b"arrival_s,prompt_tokens,output_tokens\n1,10,10\n0,10,10\n",
    "nan.csv": b"arrival_s,prompt_tokens,output_tokens\nnan,10,10\n",
    "negative.csv": b"arrival_s,prompt_tokens,output_tokens\n0,-3,10\n",
    "long.csv": b"arrival_s,prompt_tokens,output_tokens\n0,2000,1000\n",
    "good.csv": b"arrival_s,prompt_tokens,output_tokens\n0,10,10\n1,10,10\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def given(option: str, value: str | None, *, good: dict[str, str], folder: Path) -> list[str]:
    """Return arguments that are good but for one."""
    others = {name: text for name, text in good.items() if name != option}
    if option == "--profile":
        del others["--model"]
    arguments = [part for name, text in others.items() for part in (name, text)]
    if value is None:
        return [*arguments, option]
    filled = value.replace("{dir}", str(folder))
    return [*arguments, option + filled if filled.startswith("=") else f"{option}={filled}"]


@pytest.mark.parametrize(("option", "value", "words"), SIMULATE)
def test_malformed_options_of_simulate(cli: Cli, folder: Path, option: str, value: str | None, words: str) -> None:
    assert words in cli.refused("simulate", *given(option, value, good=GOOD, folder=folder))
    assert {path.name for path in folder.iterdir()} == set(FILES)


@pytest.mark.parametrize(("option", "value", "words"), SEARCH)
def test_malformed_options_of_search(cli: Cli, folder: Path, option: str, value: str | None, words: str) -> None:
    assert words in cli.refused("search", *given(option, value, good=SEARCH_GOOD, folder=folder))
    assert {path.name for path in folder.iterdir()} == set(FILES)


@pytest.mark.parametrize(("option", "value", "words"), SIZE)
def test_malformed_options_of_size(cli: Cli, folder: Path, option: str, value: str | None, words: str) -> None:
    assert words in cli.refused("size", *given(option, value, good=SIZE_GOOD, folder=folder))
    assert {path.name for path in folder.iterdir()} == set(FILES)


@pytest.mark.parametrize(("arguments", "words"), OTHER_TRAFFIC)
def test_malformed_traffic_of_simulate(cli: Cli, folder: Path, arguments: list[str], words: str) -> None:
    filled = [argument.replace("{dir}", str(folder)) for argument in arguments]
    assert words in cli.refused("simulate", "-m", "13b", "-p", GOOD["--placement"], *filled, "-o", str(folder / "out"))
    assert {path.name for path in folder.iterdir()} == set(FILES)


def options_of(name: str) -> set[str]:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    return {max(parameter.opts, key=len) for parameter in command.params} - {"--help"}


def test_every_option_is_in_the_tables() -> None:
    """A new option needs a malformed value here."""
    simulate = {option for option, _, _ in SIMULATE} | {part for parts, _ in OTHER_TRAFFIC for part in parts}
    assert options_of("simulate") - simulate == set()
    assert options_of("search") - {option for option, _, _ in SEARCH} == set()
    # The others are those of search, read by the same code.
    assert options_of("size") - options_of("search") <= {option for option, _, _ in SIZE}


def test_gpus_and_nodes_exclude_each_other(cli: Cli) -> None:
    good = [part for pair in SEARCH_GOOD.items() for part in pair]
    assert cli.refused("search", *good, "--gpus", "2", "--nodes", "1") == (
        "--nodes: 1 does not go with --gpus; leave one of the two out"
    )


@pytest.mark.parametrize("option", ["--model", "--placement"])
def test_missing_options_are_named(cli: Cli, option: str) -> None:
    arguments = [part for name, text in GOOD.items() if name != option for part in (name, text)]
    assert cli.refused("simulate", *arguments).startswith(f"{option}: is needed")


def test_a_search_needs_a_model_and_limits(cli: Cli) -> None:
    assert cli.refused("search", "--slo", "ttft=0.4").startswith("--model: is needed; as in --model 13b")
    assert cli.refused("search", "--model", "13b").startswith("--slo: is needed; see dsim search --help")


def test_a_model_that_does_not_fit(cli: Cli) -> None:
    error = cli.refused("simulate", "-m", "66b", "-p", "1xC:tp1pp1", "--rate", "1")
    assert error.startswith("--placement: '1xC:tp1pp1' cannot run: colocated tp1pp1: ")


@pytest.mark.parametrize("command", ["models", "gpus", "profiles"])
@pytest.mark.parametrize("arguments", [["--format", "xml"], ["--format", ""], ["--no-color=1"], ["--jobs", "2"], ["x"]])
def test_malformed_options_of_the_lists(cli: Cli, command: str, arguments: list[str]) -> None:
    assert cli.refused(command, *arguments)
