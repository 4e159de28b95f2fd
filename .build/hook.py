"""Puts compiled modules into the wheel where there is a C compiler; without one the wheel is pure Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: Environment variable: 0: do not compile; 1: fail where it fails; otherwise as above.
_SWITCH: Final = "DSIM_COMPILE"


class CompiledModules(BuildHookInterface[Any]):
    """What hatchling asks before it builds a wheel."""

    _scratch: str | None = None

    @property
    def _switch(self) -> str:
        switch = os.environ.get(_SWITCH, "")
        if switch not in {"", "0", "1"}:
            raise SystemExit(f"dsim: {_SWITCH}={switch} must be 0 (never compile) or 1 (compile or fail)")
        return switch

    def _missing(self) -> str | None:
        """Return why nothing is compiled; None if it may be."""
        sys.path.insert(0, str(Path(__file__).parent))
        try:
            from extensions import missing
        finally:
            sys.path.pop(0)
        return missing()

    def dependencies(self) -> list[str]:
        """Return what the compilation needs; nothing is fetched where nothing is compiled."""
        if self._switch == "0" or (self._switch != "1" and self._missing()):
            return []
        requires: list[str] = self.config["requires"]
        return requires

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; edits of an editable installation must take effect, so it is never compiled."""
        if version == "editable" or self._switch == "0":
            return
        why = self._missing()
        if why is None:
            self._scratch = tempfile.mkdtemp(prefix="dsim-")
            script = Path(__file__).with_name("extensions.py")
            command = [sys.executable, str(script), self._scratch]
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if not run.returncode:
                self._add(Path(self._scratch), build_data)
                return
            why = "the compilation failed"
            last = "".join(f"    {line}\n" for line in run.stdout.splitlines()[-12:])
            sys.stderr.write(f"dsim: the compilation said at last:\n{last}")
        if self._switch == "1":
            raise SystemExit(f"dsim: cannot be compiled: {why}")
        sys.stderr.write(f"dsim: pure Python, about half as fast: {why}\n")

    def _add(self, folder: Path, build_data: dict[str, Any]) -> None:
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            build_data["force_include"][str(path)] = path.relative_to(folder).as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what lies in the wheel now."""
        del version, build_data, artifact_path
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
