"""The tests, run with compiled modules: `python -m tests.compiled [PYTEST ARGUMENT ...]`.

The tree is copied to a throw-away folder and compiled there. Without arguments the tests run that simulate (`TESTS`).
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
#: What exercises the simulator most, and whatever starts, stops and feeds it.
TESTS: Final = (
    "tests/test_compiled.py",
    "tests/test_aggregates.py",
    "tests/test_cli_basics.py",
    "tests/test_cli_interrupt.py",
    "tests/test_closed_forms.py",
    "tests/test_events.py",
    "tests/test_handovers.py",
    "tests/test_laws.py",
    "tests/test_metamorphic.py",
    "tests/test_metrics.py",
    "tests/test_nodes.py",
    "tests/test_placement_runner.py",
    "tests/test_profiles_of_roles.py",
    "tests/test_routing.py",
    "tests/test_search_dask.py",
    "tests/test_table_latency.py",
    "tests/test_twin.py",
)
#: Of the tree, what the copy does not have.
_LEFT_OUT: Final = shutil.ignore_patterns(
    ".git", "__pycache__", ".venv", "venv", "build", "dist", "results", ".*_cache", ".hypothesis", "*.egg-info"
)
#: Refuses to go on where a compiled module is not the one that is imported.
_CHECK: Final = """
import importlib, pathlib, sys
from importlib.machinery import EXTENSION_SUFFIXES
for path in sys.argv[1:]:
    file = importlib.import_module(path.removesuffix(".py").replace("/", ".")).__file__
    assert file.endswith(tuple(EXTENSION_SUFFIXES)) and pathlib.Path.cwd() in pathlib.Path(file).parents, file
"""


def main(arguments: list[str]) -> int:
    """Compile a copy, run pytest there and return its exit code; 0 where nothing can be compiled."""
    build = runpy.run_path(str(ROOT / ".build" / "extensions.py"))
    if (why := build["missing"]()) is not None:
        sys.stdout.write(f"skipped: nothing is compiled, {why}\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="dsim-") as scratch:
        tree = Path(scratch, "dsim").resolve()
        shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
        if (ROOT.parent / "shared").is_dir():
            (tree.parent / "shared").symlink_to((ROOT.parent / "shared").resolve())
        run = subprocess.run(
            [sys.executable, str(tree / ".build" / "extensions.py"), str(tree)],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            sys.stdout.write(f"{run.stdout}{run.stderr}the modules cannot be compiled\n")
            return 1
        # Processes that tests start find the copy, too, wherever they run; and the tree as it is, to compare with.
        environment = {**os.environ, "PYTHONPATH": str(tree), "DSIM_PURE_TREE": str(ROOT)}
        modules = build["settings"](tree)["modules"]
        subprocess.run([sys.executable, "-c", _CHECK, *modules], cwd=tree, env=environment, check=True)
        # Doctests are read from sources, and pytest refuses one that is not what was imported.
        ignored = [f"--ignore={module}" for module in modules]
        command = [sys.executable, "-m", "pytest", *ignored, *(arguments or TESTS)]
        return subprocess.run(command, cwd=tree, env=environment, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.compiled", description=__doc__)
    sys.exit(main(parser.parse_known_args()[1]))
