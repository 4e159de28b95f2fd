"""docs/sweeps.md says what the schema says, and its example is a sweep."""

from __future__ import annotations

import json
import re
from pathlib import Path

from experiments.reference import with_tables
from experiments.sweepfile import read_sweep
from tests.cli import Cli

PAGE = Path(__file__).parents[1] / "docs" / "sweeps.md"


def test_tables_are_those_of_the_schema() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python -m experiments.reference docs/sweeps.md"
    assert text.count("<!-- table:") == text.count("<!-- end -->") == 10
    assert (
        with_tables("a\n<!-- table: range -->\nold\n<!-- end -->\n") != "a\n<!-- table: range -->\nold\n<!-- end -->\n"
    )


def test_the_example_runs(cli: Cli, tmp_path: Path) -> None:
    match = re.search(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    file = tmp_path / "fig.yaml"
    file.write_text(match[1], encoding="utf-8")
    assert len(read_sweep(file).tasks) == 60
    run = cli("sweep", str(file), "--quick", "-o", str(tmp_path / "out"), "-j", "1", "--set", "base.requests=50")
    assert run.code == 0
    assert {"attainment.svg", "compare.csv"} <= {path.name for path in (tmp_path / "out").iterdir()}
    records = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert len(records) == 6
