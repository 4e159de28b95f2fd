"""Compiles the simulator's modules: `python .build/extensions.py TARGET` puts their extension modules there.

Which ones, and what this needs, says pyproject.toml beside `.build`, under tool.hatch.build.targets.wheel.hooks.custom.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import sysconfig
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, Final

#: The tree that this file lies in.
ROOT: Final = Path(__file__).resolve().parents[1]


def settings(root: Path = ROOT) -> dict[str, Any]:
    """Return what pyproject.toml says about the compilation: `modules` and `requires`."""
    with (root / "pyproject.toml").open("rb") as file:
        hooks = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    found: dict[str, Any] = hooks["custom"]
    return found


def missing() -> str | None:
    """Return what keeps C from being compiled here; None if nothing is known to."""
    if platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it takes CPython with its lock"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "there is no Python.h (on Debian in the package python3-dev)"
    # On Windows setuptools knows where to look.
    if os.name != "nt":
        command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        if not command or shutil.which(command[0]) is None:
            return "there is no C compiler"
    return None


def build(target: Path, root: Path = ROOT) -> None:
    """Compile the modules of the tree `root` into `target`, which gets its packages' folders.

    Raises:
        SystemExit, Exception: it does not work.
    """
    os.chdir(root)
    os.environ["MYPYPATH"] = str(Path(__file__).parent / "stubs")
    import setuptools
    from mypyc.build import mypycify
    from setuptools.command.build_ext import build_ext

    class _ParallelBuild(build_ext):
        """Compiles the files of an extension at the same time."""

        def build_extensions(self) -> None:
            compiler: Any = self.compiler
            if compiler.compiler_type == "unix":
                one_by_one = compiler.compile

                def compile_all(sources: list[str], **named: Any) -> list[str]:  # noqa: ANN401 handed on
                    with ThreadPoolExecutor(os.cpu_count()) as threads:
                        parts = threads.map(lambda source: one_by_one([source], **named), sources)
                        return list(chain.from_iterable(parts))

                compiler.compile = compile_all
            super().build_extensions()

    with tempfile.TemporaryDirectory() as scratch:
        extensions = mypycify(
            [
                # The same everywhere, whatever packages lie around; types are `mypy`'s business.
                "--config-file=",
                "--no-site-packages",
                "--ignore-missing-imports",
                "--follow-imports=silent",
                f"--cache-dir={scratch}/mypy",
                *settings(root)["modules"],
            ],
            opt_level="2",
            debug_level="0",
            multi_file=True,
            target_dir=f"{scratch}/c",
            group_name="dsim",
        )
        for extension in extensions:
            flags = [flag for flag in extension.extra_compile_args if flag != "-Werror"]
            # No fused multiply-add: results are the same on every machine, compiled or not.
            extension.extra_compile_args = flags if os.name == "nt" else [*flags, "-ffp-contract=off"]
        command = _ParallelBuild(setuptools.Distribution({"name": "dsim", "ext_modules": extensions}))
        command.build_lib, command.build_temp = str(target), f"{scratch}/o"
        command.ensure_finalized()
        command.run()


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
