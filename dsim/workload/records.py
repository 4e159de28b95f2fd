"""Reads records from CSV and JSON Lines, with the file and line in every error."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

from dsim.errors import InputError
from dsim.workload.lengths import MAX_TOKENS

MAX_ARRIVAL_S: Final = 1e9
"""Latest arrival: above it a time is more likely a date, and no longer exact to a tenth of a microsecond."""

_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
Record = dict[str, Any]


class Reader:
    """The records of one file, checked access to their values, and the line it has come to for messages."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.line = 1

    def fail(self, rule: str, *, name: str | None = None, value: object = None, hint: str | None = None) -> NoReturn:
        """Raise the error of the current line."""
        raise InputError(f"{self.path}:{self.line}", rule, name=name, value=value, hint=hint)

    def value(self, record: Record, name: str) -> object:
        """Return the value of a column that must be there."""
        if name not in record:
            self.fail("is missing", name=name, hint="found " + ", ".join(list(record)[:8]))
        return record[name]

    def number(self, name: str, value: object) -> int | float:
        """Return the number that a CSV field or a JSON value says."""
        if isinstance(value, str):
            text = value.strip()
            if text.isascii() and text.isdigit() and len(text) < 19:
                return int(text)
            if not _NUMBER.fullmatch(text):
                self.fail("must be a number", name=name, value=value)
            return float(text)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail("must be a number", name=name, value=json.dumps(value))
        return value

    def tokens(self, name: str, value: object, least: int = 1) -> int:
        """Return a number of tokens."""
        number = self.number(name, value)
        if isinstance(number, float) and not number.is_integer():
            self.fail("must be a whole number", name=name, value=value)
        if number < least:
            self.fail(f"must be >= {least}", name=name, value=value, hint="drop this row" if number == 0 else None)
        if number > MAX_TOKENS:
            self.fail(f"must be at most {MAX_TOKENS}", name=name, value=value)
        return int(number)

    def seconds(self, name: str, value: object, unit_s: float = 1.0) -> float:
        """Return a time of `unit_s` seconds, counted from the start of the file."""
        seconds = self.number(name, value)
        # A JSON integer may be too long for a float.
        if not 0 <= seconds <= 1e300 or not 0 <= seconds * unit_s <= MAX_ARRIVAL_S:
            hint = "count from the start of the trace" if seconds > 0 else None
            self.fail(f"must be >= 0 and at most {MAX_ARRIVAL_S / unit_s:g}", name=name, value=value, hint=hint)
        return seconds * unit_s if unit_s != 1 else float(seconds)

    def text(self) -> str:
        """Return the text of the file.

        Raises:
            InputError: it cannot be read, is no text, or is empty.
        """
        try:
            data = Path(self.path).read_bytes()
        except (OSError, ValueError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
            raise InputError(self.path, f"cannot be read: {reason}") from None
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as problem:
            self.line = data.count(b"\n", 0, problem.start) + 1
            self.fail("is not UTF-8 text", hint="save the file as UTF-8, unpack it if it is compressed")
        if "\0" in text:
            self.line = text.count("\n", 0, text.index("\0")) + 1
            self.fail("holds a zero byte", hint="save the file as UTF-8 text")
        if not text.strip():
            raise InputError(self.path, "is empty", hint="expected a header line and one request a line, or JSONL")
        return text

    def records(self, text: str) -> Iterator[Record]:
        """Yield the records of CSV with a header line, or of JSON Lines; `line` is that of the last one."""
        return self._json(text) if text.lstrip()[:1] in {"{", "["} else self._csv(text)

    def _csv(self, text: str) -> Iterator[Record]:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header: list[str] | None = None
        while True:
            try:
                fields = next(reader, None)
            except csv.Error as problem:
                self.line = reader.line_num
                self.fail(f"is not CSV ({problem})", hint="is the file complete?")
            if fields is None:
                return
            self.line = reader.line_num
            if not fields:
                continue
            if header is None:
                header = [name.strip() for name in fields]
                if len(set(header)) < len(header):
                    twice = next(name for name in header if header.count(name) > 1)
                    self.fail("appears twice in the header", name="column", value=twice)
                continue
            if len(fields) != len(header):
                self.fail(f"the row has {len(fields)} of {len(header)} fields", hint="is the file complete?")
            yield dict(zip(header, fields, strict=True))

    def _json(self, text: str) -> Iterator[Record]:
        for line, row in enumerate(text.split("\n"), start=1):
            if not row.strip():
                continue
            self.line = line
            try:
                record = json.loads(row)
            except (ValueError, RecursionError) as problem:
                reason = problem.msg if isinstance(problem, json.JSONDecodeError) else "too large"
                self.fail(f"is not JSON ({reason})", hint="is the file complete? one object a line")
            if not isinstance(record, dict):
                self.fail(
                    "is not a JSON object",
                    hint='one object a line, such as {"prompt_tokens": 512, "output_tokens": 64}',
                )
            yield record
