"""`dsim profile from-kernels` and `dsim profile import` on the command line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from dsim.profile_file import load_profile
from tests.cli import Cli

needs_tables = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("aiconfigurator_core", "pyarrow")),
    reason="needs the extra `kernels`",
)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


class TestFromKernels:
    def test_without_the_extra(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name: None if name == "aiconfigurator_core" else find_spec(name)
        )
        line = cli.refused(
            "profile", "from-kernels", "-m", "llama-3.1-8b", "--gpu", "h100", "-o", str(tmp_path / "p.yaml")
        )
        assert "pip install 'dsim[kernels]'" in line

    @pytest.mark.parametrize(
        ("arguments", "rule"),
        [
            (("--tp", "0"), "--tp: '0' must be whole numbers >= 1"),
            (("--tp", "a,2"), "--tp: 'a,2' must be whole numbers >= 1"),
            (("--model", "deepseek-v3"), "multi-head latent attention"),
            (("--gpu", "h1000"), "h1000"),
        ],
    )
    def test_refused(self, cli: Cli, tmp_path: Path, arguments: tuple[str, ...], rule: str) -> None:
        given = {"--model": "llama-3.1-8b", "--gpu": "h100", "-o": str(tmp_path / "p.yaml")}
        given.update(zip(arguments[::2], arguments[1::2], strict=True))
        words = [word for pair in given.items() for word in pair]
        assert rule in cli.refused("profile", "from-kernels", *words)

    def test_files_that_are_there(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "p.yaml").touch()
        line = cli.refused(
            "profile", "from-kernels", "-m", "llama-3.1-8b", "--gpu", "h100", "-o", str(tmp_path / "p.yaml")
        )
        assert "--overwrite" in line

    @needs_tables
    def test_a_profile_and_its_rows(self, cli: Cli, tmp_path: Path) -> None:
        profile, rows = tmp_path / "p.yaml", tmp_path / "r.csv"
        common = ("-m", "llama-3.1-8b", "--gpu", "h100", "--tp", "1,2")
        run = cli("profile", "from-kernels", *common, "-o", str(profile), "--rows", str(rows))
        assert run.code == 0
        assert "wrote" in run.err
        made = load_profile(profile)
        assert sorted(made.latency) == [1, 2]
        assert made.violations == ()
        run = cli("profile", "fit", str(rows), "-o", str(tmp_path / "again.yaml"))
        assert run.code == 0
        assert load_profile(tmp_path / "again.yaml").latency == made.latency

    @needs_tables
    def test_names_that_the_tables_lack(self, cli: Cli, tmp_path: Path) -> None:
        common = ("profile", "from-kernels", "-m", "llama-3.1-8b", "-o", str(tmp_path / "p.yaml"))
        assert "expected one of a100-80g, b200-sxm" in cli.refused(*common, "--gpu", "mi300x")
        assert "did you mean 'vllm'" in cli.refused(*common, "--gpu", "h100", "--engine", "vlm")


class TestImport:
    def test_dynamo(self, cli: Cli, tmp_path: Path) -> None:
        for phase, arrays in (
            ("prefill", {"prefill_isl": [512, 1024, 2048, 4096], "prefill_ttft": [20.0, 30.0, 55.0, 110.0]}),
            (
                "decode",
                {
                    "x_kv_usage": [0.1, 0.2, 0.4, 0.4],
                    "y_context_length": [1000.0, 1000.0, 1000.0, 4000.0],
                    "z_itl": [8.0, 9.0, 11.0, 9.5],
                    "max_kv_tokens": [100_000],
                },
            ),
        ):
            directory = tmp_path / f"selected_{phase}_interpolation"
            directory.mkdir()
            np.savez(directory / "raw_data.npz", **{k: np.array(v) for k, v in arrays.items()})  # type: ignore[arg-type]
        rows = tmp_path / "rows.csv"
        run = cli(
            "profile", "import", "--dynamo", str(tmp_path), "-m", "llama-3.1-8b", "--gpu", "h100", "-o", str(rows)
        )
        assert (run.code, run.out) == (0, "")
        assert cli("profile", "fit", str(rows), "-o", str(tmp_path / "p.yaml")).code == 0

    def test_wrong_unit(self, cli: Cli, tmp_path: Path) -> None:
        file = tmp_path / "prefill_raw_data.json"
        file.write_text(json.dumps({"prefill_isl": [1024], "prefill_ttft": [30.0]}))
        line = cli.refused(
            "profile", "import", "--dynamo", str(file), "--unit", "s", "-m", "llama-3.1-8b", "--gpu", "h100",
            "-o", str(tmp_path / "rows.csv"),
        )  # fmt: skip
        assert "milliseconds" in line

    def test_nothing(self, cli: Cli, tmp_path: Path) -> None:
        assert "has nothing to import" in cli.refused("profile", "import", "-o", str(tmp_path / "rows.csv"))
