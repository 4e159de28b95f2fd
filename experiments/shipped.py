"""Sweep files that come with dsim."""

from __future__ import annotations

from pathlib import Path

from dsim.errors import InputError, nearest

_FOLDER = Path(__file__).parent


def shipped_sweeps() -> dict[str, Path]:
    """Return the files by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.yaml"))}


def find_sweep(text: str, where: str) -> Path:
    """Return the file of this path, or the shipped one of this name.

    Raises:
        InputError: there is neither.
    """
    path = Path(text)
    if path.is_file():
        return path
    known = shipped_sweeps()
    if text in known:
        return known[text]
    if path.is_dir():
        raise InputError(where, "is a directory", value=text, hint="give a sweep file, or a name that --list shows")
    hint = nearest(path.stem, known) if known else "check the path"
    hint = hint if hint.startswith("did") else "check the path; dsim sweep --list shows the names"
    raise InputError(where, "is no file and no name of a shipped sweep", value=text, hint=hint)
