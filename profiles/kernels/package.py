"""The installed kernel tables: where they lie, which systems, engines and versions they have, and their columns."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InputError, nearest

PACKAGE: Final = "aiconfigurator-core"
_MODULE = "aiconfigurator_core"
_HINT = "pip install 'dsim[kernels]'"

#: Directory of the tables by GPU of the catalog; the package knows more of which it has no matrix products.
SYSTEMS: Final[Mapping[str, str]] = {
    "a100-80g": "a100_sxm",
    "b200-sxm": "b200_sxm",
    "b300-sxm": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100-sxm": "h100_sxm",
    "h200-sxm": "h200_sxm",
    "l40s": "l40s",
    "rtx-pro-6000-server": "rtx_pro_6000_server",
}
#: Engine names as the tables spell them, in the order in which they stand in for one another.
ENGINES: Final = ("vllm", "trtllm", "sglang")


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Columns of one parquet file.

    Args:
        path: below the package's data directory.
        columns: arrays by name, all of one length.
    """

    path: str
    sha256: str
    engine: str
    version: str
    columns: Mapping[str, NDArray[np.generic]]

    def only(self, keep: NDArray[np.bool_]) -> Table:
        """Return the rows where `keep` holds."""
        kept = {name: values[keep] for name, values in self.columns.items()}
        return Table(self.path, self.sha256, self.engine, self.version, kept)

    def where(self, **values: object) -> Table:
        """Return the rows that have these values; a column that the file lacks holds 0 or nothing, and matches."""
        keep = np.ones(len(self), dtype=np.bool_)
        for name, value in values.items():
            if name in self.columns:
                keep &= self.columns[name] == value
        return self.only(keep)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return a column as numbers."""
        return self.columns[name].astype(np.float64)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


@dataclass(frozen=True, slots=True)
class KernelPackage:
    """The tables of one GPU.

    Args:
        root: the data directory of the package.
        system: the GPU's directory.
        version: of the package.
    """

    root: Path
    system: str
    version: str
    _read: dict[str, Table] = field(default_factory=dict, repr=False, compare=False)

    def versions(self, op: str, engine: str, file: str) -> list[str]:
        """Return the versions of an engine that have a file, newest first; pre-releases after releases."""
        base = self.root / self.system / op / engine
        found = [path.parent.name for path in base.glob(f"*/{file}")]
        return sorted(found, key=_age, reverse=True)

    def engines(self, op: str, file: str) -> list[str]:
        """Return the engines that have a file."""
        return [engine for engine in ENGINES if self.versions(op, engine, file)]

    def table(self, op: str, engine: str, version: str, file: str) -> Table:
        """Return a file's rows that have a time; those with a size of 0 are left out."""
        path = f"{self.system}/{op}/{engine}/{version}/{file}"
        if path not in self._read:
            self._read[path] = _table(self.root / path, path, engine, version)
        return self._read[path]


def open_package(gpu: str, *, root: Path | None = None) -> KernelPackage:
    """Return the installed tables of a GPU of the catalog.

    Args:
        root: a data directory to read instead of the installed package's.

    Raises:
        InputError: the package or pyarrow is missing, or it has no tables of this GPU.
    """
    version = "of a directory"
    if root is None:
        root, version = _installed()
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError("dsim profile from-kernels", "needs pyarrow, which is not installed", hint=_HINT)
    system = SYSTEMS.get(gpu)
    if system is None or not (root / system).is_dir():
        known = sorted(name for name, directory in SYSTEMS.items() if (root / directory).is_dir())
        raise InputError("--gpu", f"has no kernel tables in {PACKAGE}", value=gpu, hint=nearest(gpu, known))
    return KernelPackage(root, system, version)


def check_engine(package: KernelPackage, engine: str) -> None:
    """Refuse an engine that the tables of this GPU do not have."""
    known = package.engines("gemm", "gemm_perf.parquet")
    if engine not in known:
        rule = f"has no kernel tables for {package.system}"
        raise InputError("--engine", rule, value=engine, hint=nearest(engine, known))


def _installed() -> tuple[Path, str]:
    spec = importlib.util.find_spec(_MODULE)
    locations = None if spec is None else spec.submodule_search_locations
    if not locations:
        raise InputError("dsim profile from-kernels", f"needs {PACKAGE}, which is not installed", hint=_HINT)
    root = Path(next(iter(locations))) / "systems" / "data"
    version = importlib.metadata.version(PACKAGE)
    if not root.is_dir():
        raise InputError("dsim profile from-kernels", f"finds no tables in {PACKAGE} {version} at {root}", hint=_HINT)
    return root, version


def _age(version: str) -> tuple[list[int], int, int]:
    """Return a key by which versions are ordered.

    >>> sorted(["1.3.0rc20", "1.3.0", "1.3.0rc3", "0.24.0"], key=_age)
    ['0.24.0', '1.3.0rc3', '1.3.0rc20', '1.3.0']
    """
    match = re.match(r"([\d.]+)(?:\.?(rc|dev|post)(\d+))?", version)
    if match is None:
        return [], 0, 0
    kind = {"dev": -2, "rc": -1, None: 0, "post": 1}[match[2]]
    return [int(part) for part in match[1].strip(".").split(".")], kind, int(match[3] or 0)


def _table(file: Path, path: str, engine: str, version: str) -> Table:
    import pyarrow.parquet

    try:
        data = file.read_bytes()
        read = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(str(file), f"cannot be read: {error}") from None
    columns = {name: read.column(name).to_numpy() for name in read.column_names}
    table = Table(path, hashlib.sha256(data).hexdigest(), engine, version, columns)
    latency = table.numbers("latency") if "latency" in columns else np.zeros(0)
    if not len(latency):
        raise InputError(str(file), "has no rows with a latency", hint="is the package complete?")
    keep = np.isfinite(latency) & (latency > 0)
    for name in _SIZES:
        if name in columns:
            keep &= table.numbers(name) > 0
    return table.only(keep)


#: Columns that must be >= 1: rows with m = 0 exist and say nothing.
_SIZES: Sequence[str] = ("m", "n", "k", "batch_size", "isl", "num_tokens", "message_size")
