"""Compiled modules: the same results, and what a compiled class or loop could do otherwise."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.options import Options, Window
from dsim.pools import Placement
from dsim.simulate import simulate
from dsim.version import is_compiled
from dsim.workload import Workload
from dsim.workload.arrivals import Poisson
from dsim.workload.presets import preset
from placement.worker import timed
from tests.reference.systems import make_profile, make_trace

ROOT = Path(__file__).parents[1]
#: The tree with the same sources, not compiled; set by `python -m tests.compiled`.
PURE = os.environ.get("DSIM_PURE_TREE")


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_compiler_is_the_one_that_checks_the_types() -> None:
    requires = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["requires"]
    (mypy,) = (requirement for requirement in requires if requirement.startswith("mypy"))
    assert mypy in pyproject()["project"]["optional-dependencies"]["lint"]


def test_all_modules_that_are_to_be_compiled_are_of_one_kind() -> None:
    modules = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
    assert len(modules) > 10
    for path in modules:
        file = importlib.import_module(path.removesuffix(".py").replace("/", ".")).__file__
        assert file is not None
        assert is_compiled() == (not file.endswith(".py")), file
    assert PURE is None or is_compiled()


@pytest.mark.skipif(PURE is None, reason="nothing is compiled here: python -m tests.compiled")
def test_results_are_the_same_compiled_or_not() -> None:
    systems = 400
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.compiled_runs", str(systems)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for tree in (ROOT, PURE)
    ]
    compiled, pure = (run.communicate()[0].splitlines() for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(pure) > systems
    assert [line for line in pure if "exit code" in line and "exit code 0" not in line] == []
    assert compiled == pure


def test_results_are_copied_and_pickled_whole() -> None:
    trace = make_trace([0.0, 1.0, 5.0, 9.0], [16, 20, 40, 3], [9, 2, 1, 30])
    placement = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1")
    result = simulate(placement, trace, profiles=make_profile(), options=Options(log_steps=True))
    for again in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):  # noqa: S301 its own
        assert again.steps == result.steps
        assert again.steps
        assert again.itl() == result.itl()
        for name, values in result.columns.items():
            np.testing.assert_array_equal(again.columns[name], values)


@pytest.mark.usefixtures("no_gc_callbacks")
@pytest.mark.parametrize(
    "placement", ["1xP:tp1pp1 + 1xD:tp1pp1", "1xD:tp1pp1 + 1xP:tp1pp2", "2xC:tp1pp1", "1xC:tp1pp2"]
)
def test_a_run_whose_time_is_over_ends(placement: str) -> None:
    """It is stopped by an exception in its thread, which compiled code looks for only where it calls other code."""
    profile = make_profile()
    workload = Workload(Poisson(), preset("sharegpt"))

    def endless(_scenario: object, _item: object) -> None:
        blocks = workload.blocks(rate_per_s=2.0, seed=0, context_tokens=profile.model.context_tokens)
        simulate(Placement.parse(placement), blocks, profiles=profile, window=Window(counted=10**8))

    start_s = time.thread_time()
    done = timed(endless, None, None, 0.5)
    assert done.too_long
    assert time.thread_time() - start_s < 3
