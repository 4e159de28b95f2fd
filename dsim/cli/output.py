"""Results as tables, JSON, CSV, and files that are complete or absent."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import typer

from dsim.cli.options import Format
from dsim.errors import InputError
from dsim.plain import finite, flat


@dataclass(slots=True)
class Table:
    """Rows of text under headings.

    Args:
        headings: those that start with `<` are aligned to the left, the others to the right.
    """

    headings: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)


def to_json(value: object) -> str:
    """Return the value as indented JSON; numbers that are not finite become null."""
    return json.dumps(finite(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def to_csv(rows: Sequence[Mapping[str, object]], first: Sequence[str] = ()) -> str:
    """Return the rows as CSV with a header line; nested values get dotted column names.

    Args:
        first: columns that stand first, also where there are no rows.
    """
    records = [{name: _cell(value) for name, value in flat(row)} for row in rows]
    columns = list(dict.fromkeys([*first, *(name for record in records for name in record)]))
    # A nested value that is null in one row and an object in another has its columns from the latter.
    parents = {name.rpartition(".")[0] for name in columns}
    columns = [name for name in columns if name not in parents]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def emit(text: str) -> None:
    """Print data on stdout; a reader that has gone away, such as `head`, is no failure."""
    with _to_stdout():
        typer.echo(text, nl=False)


@contextlib.contextmanager
def _to_stdout() -> Iterator[None]:
    """Name stdout where it cannot be written; a reader that has gone away is no failure.

    Either way what is left of the text is not tried again when Python ends.
    """
    try:
        yield
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:
        silence_stdout()
        raise OSError(error.errno, error.strerror, "standard output") from None


def emit_data(
    output_format: Format,
    value: Mapping[str, object] | Sequence[Mapping[str, object]],
    *,
    rows: Sequence[Mapping[str, object]] | None = None,
    first: Sequence[str] = (),
) -> bool:
    """Print data as JSON or CSV and return True; False where a table is asked for, which is left to the caller.

    Args:
        rows: of the CSV; None: the value is rows, or one.
        first: columns that stand first, as of `to_csv`.
    """
    if output_format is Format.JSON:
        emit(to_json(value))
    elif output_format is Format.CSV:
        own = [value] if isinstance(value, Mapping) else value
        emit(to_csv(own if rows is None else rows, first))
    return output_format is not Format.TABLE


def print_rows(rows: Sequence[Mapping[str, object]], table: Table, *, output_format: Format, no_color: bool) -> int:
    """Print rows as data, or the table that is made of them; return the exit code."""
    if not emit_data(output_format, rows):
        show(table, color=use_color(no_color=no_color))
    return 0


def silence_stdout() -> None:
    """Let whatever is still to be flushed to stdout vanish."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(*parts: Table | str, color: bool = True) -> None:
    """Print tables and lines on stdout, never cut or wrapped when it is not a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    # As wide as it needs: a terminal wraps whole lines, folded numbers cannot be read.
    console = Console(no_color=not color, highlight=False, width=10_000)
    # Rich flushes stdout when it has captured something.
    with _to_stdout():
        for number, part in enumerate(parts):
            with console.capture() as printed:
                if isinstance(part, str):
                    console.print(Text(part), soft_wrap=True)
                else:
                    table = RichTable(box=SIMPLE_HEAD, pad_edge=False)
                    for heading in part.headings:
                        left = heading.startswith("<")
                        table.add_column(heading.removeprefix("<"), justify="left" if left else "right")
                    for row in part.rows:
                        table.add_row(*(Text(cell) for cell in row))
                    console.print(table)
            lines = [line.rstrip() for line in printed.get().splitlines()]
            while len(lines) > 1 and not lines[-1]:
                lines.pop()
            while len(lines) > 1 and not lines[0]:
                lines.pop(0)
            emit("\n" * (number > 0) + "\n".join(lines) + "\n")


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """A directory that result files are written into, each of them whole or not at all."""

    path: Path
    overwrite: bool = False

    def check(self, names: Sequence[str]) -> None:
        """See beforehand that files of these names can be written.

        Raises:
            InputError: the path is no directory, is not writable, or has such a file and may not be overwritten.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError("--output-dir", "is no directory", value=str(self.path), hint="give another path")
        parent = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not parent.is_dir():
            raise InputError("--output-dir", f"cannot be made: {parent} is no directory", value=str(self.path))
        if not os.access(parent, os.W_OK | os.X_OK):
            raise InputError("--output-dir", f"cannot be written: no permission in {parent}", value=str(self.path))
        present = [name for name in names if (self.path / name).exists()]
        if present and not self.overwrite:
            raise InputError(
                "--output-dir",
                f"already has {', '.join(present)}",
                value=str(self.path),
                hint="give another directory, or --overwrite",
            )

    def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write the files; they get their names only when all are complete."""
        self.check(list(files))
        with contextlib.ExitStack() as stack:
            make_folder(self.path, stack)
            staged = {name: stack.enter_context(self._staged(name, content)) for name, content in files.items()}
            for name, temporary in staged.items():
                temporary.replace(self.path / name)

    @contextlib.contextmanager
    def _staged(self, name: str, content: str | bytes) -> Iterator[Path]:
        temporary = self.path / f".{name}.{os.getpid()}.part"
        try:
            temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def make_folder(path: Path, stack: contextlib.ExitStack) -> None:
    """Make an output directory, which is removed again while it is empty.

    Raises:
        InputError: it cannot be made.
    """
    for folder in [folder for folder in reversed((path, *path.parents)) if not folder.exists()]:
        try:
            folder.mkdir()
        except OSError as error:
            rule = f"cannot be made: {error.strerror}"
            raise InputError("--output-dir", rule, value=str(path), hint="give another directory") from None
        stack.callback(_remove_if_empty, folder)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def note(text: str, *, quiet: bool) -> None:
    """Print a line on stderr unless quiet."""
    if not quiet:
        typer.echo(text, err=True)


def use_color(*, no_color: bool) -> bool:
    """Return whether stdout may be coloured."""
    return not no_color and sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _cell(value: object) -> object:
    """Return what CSV has for a value."""
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return value
