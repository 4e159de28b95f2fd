# ruff: noqa: E501 (tables of one case a line)
"""Options that say nothing of what is searched are refused, by `dsim search` and `dsim size`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import Cli

QUESTION = ("-m", "13b", "--slo", "ttft=0.4,tpot=0.1", "--gpus", "2", "--dry-run")
COLOCATED, DISAGGREGATED = ("--mode", "colocated"), ("--mode", "disaggregated")
CHUNKED = ("--policy", "chunked")
OF_COLOCATED = "is of colocated placements, which are not searched; leave it out, or change --mode"
OF_PAIRS = "is of disaggregated placements, which are not searched; leave it out, or change --mode"
NO_ROLE = "is a role that is not searched; leave it out, or change --mode"
WHOLE = "limits batches of whole prompts, and of colocated policies chunked alone is searched; leave it out, or give --token-budgets"

REFUSED = [
    ((*DISAGGREGATED, "--policy", "orca"), f"--policy: 'orca' {OF_COLOCATED}"),
    ((*DISAGGREGATED, "--policy", "orca", "--policy", "chunked"), f"--policy: 'orca, chunked' {OF_COLOCATED}"),
    ((*DISAGGREGATED, "--token-budgets", "512"), f"--token-budgets: '512' {OF_COLOCATED}"),
    ((*DISAGGREGATED, "--colocated-engine", "vllm"), f"--colocated-engine: 'vllm' {OF_COLOCATED}"),
    ((*DISAGGREGATED, "--colocated-profile", "mine.yaml"), f"--colocated-profile: 'mine.yaml' {OF_COLOCATED}"),
    ((*DISAGGREGATED, "--kv-blocks", "colocated=900"), f"--kv-blocks: 'colocated' {NO_ROLE}"),
    ((*DISAGGREGATED, "--max-batch-tokens", "512,colocated=900"), f"--max-batch-tokens: 'colocated' {NO_ROLE}"),
    ((*DISAGGREGATED, "--max-batch-requests", "colocated=64"), f"--max-batch-requests: 'colocated' {NO_ROLE}"),
    ((*COLOCATED, "--prefill-profile", "mine.yaml"), f"--prefill-profile: 'mine.yaml' {OF_PAIRS}"),
    ((*COLOCATED, "--decode-profile", "mine.yaml"), f"--decode-profile: 'mine.yaml' {OF_PAIRS}"),
    ((*COLOCATED, "--prefill-batching", "lm"), f"--prefill-batching: 'lm' {OF_PAIRS}"),
    ((*COLOCATED, "--affinity", "low"), f"--affinity: 'low' {OF_PAIRS}"),
    ((*COLOCATED, "--handover", "distserve"), f"--handover: 'distserve' {OF_PAIRS}"),
    ((*COLOCATED, "--kv-link", "nic"), f"--kv-link: 'nic' {OF_PAIRS}"),
    ((*COLOCATED, "--kv-blocks", "colocated=9,decode:tp2pp1=9"), f"--kv-blocks: 'decode' {NO_ROLE}"),
    ((*COLOCATED, "--max-batch-requests", "prefill=8"), f"--max-batch-requests: 'prefill' {NO_ROLE}"),
    ((*COLOCATED, *CHUNKED, "--max-batch-tokens", "512"), f"--max-batch-tokens: '512' {WHOLE}"),
    ((*CHUNKED, "--max-batch-tokens", "512,colocated=256"), f"--max-batch-tokens: 'colocated' {WHOLE}"),
    (("--policy", "orca", "--token-budgets", "512"), "--token-budgets: '512' is of policy chunked, which is not searched; leave it out, or add --policy chunked"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_says_nothing_is_refused(cli: Cli, options: tuple[str, ...], message: str) -> None:
    assert cli.refused("search", *QUESTION, *options) == message


def test_size_refuses_it_too_and_names_the_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "size.yaml"
    path.write_text("rate: 10\nmode: disaggregated\npolicy: [orca]\n")
    assert cli.refused("size", *QUESTION, "-c", str(path)) == f"{path}:3: policy='orca' {OF_COLOCATED}"


@pytest.mark.parametrize(
    "options",
    [
        (*DISAGGREGATED, "--prefill-batching", "engine", "--affinity", "low", "--handover", "distserve"),
        (*DISAGGREGATED, "--max-batch-tokens", "512,prefill=900", "--kv-blocks", "900,decode=500"),
        # Stages send each other what the NIC carries, wherever KV stays.
        (*COLOCATED, "--affinity", "high", "--nic", "25GB/s", "--kv-blocks", "900", "--max-batch-requests", "64"),
        (*COLOCATED, *CHUNKED, "--policy", "orca", "--max-batch-tokens", "512", "--token-budgets", "512"),
        (*CHUNKED, "--max-batch-tokens", "512", "--prefill-batching", "engine"),
    ],
)
def test_what_says_something_is_not(cli: Cli, options: tuple[str, ...]) -> None:
    assert cli("search", *QUESTION, *options).err == ""
