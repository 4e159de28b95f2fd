"""Raw timing rows: the CSV form of docs/profile_rows.md, written by the profiler and read by the fits."""

from __future__ import annotations

import csv
import enum
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from dsim.catalog import find_gpu, find_model, read_experts, read_gpu, read_model
from dsim.contract import decode_bound_s, prefill_bound_s
from dsim.errors import InputError, nearest
from dsim.gpu import Gpu
from dsim.model import Model
from dsim.yamlfile import Field, Section, parse_yaml, read_bytes


class Phase(enum.Enum):
    """What a step does."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Status(enum.Enum):
    """What became of a timed point; only OK rows have a time."""

    OK = "ok"
    OOM = "oom"
    FAILED = "failed"
    SKIPPED = "skipped"


#: Columns in the order they are written; `status` is last, so that a line cut short never passes for a whole one.
COLUMNS = (
    "phase",
    "tp",
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "context_tokens",
    "decode_requests",
    "repeat",
    "step_s",
    "comm_s",
    "spread_s",
    "status",
)
NEEDED_COLUMNS = ("phase", "tp", "requests", "prompt_tokens", "context_tokens", "step_s")
METADATA_KEYS = (
    "dsim_rows",
    "model",
    "experts",
    "gpu",
    "engine",
    "source",
    "licence",
    "dtype",
    "device",
    "driver",
    "torch",
    "date",
    "all_reduce",
    "host_overhead",
    "kv_bytes_per_gpu",
    "settings",
)
#: A step this many times above its bound (plus launches) or below it has the wrong unit.
_FAR = 200.0
_BELOW = 50.0
#: Launches and host work of a step, which no roofline knows.
_LAUNCH_S = 0.02
#: Neighbouring points differ by less than this beyond what their work explains.
_JUMP = 100.0
_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One step that was timed.

    Args:
        requests: prompts of a prefill or mixed step, batch of a decode step.
        prompt_tokens: tokens computed for each prompt; 0 in decode steps.
        cached_tokens: tokens of each prompt whose KV was there before.
        context_tokens: of each decoding request in this step, a mean where the row is one; 0 in prefill steps.
        decode_requests: decoding requests of a mixed step, else 0.
    """

    phase: str
    tp: int
    requests: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    context_tokens: float = 0.0
    decode_requests: int = 0

    def __str__(self) -> str:
        if self.phase == Phase.DECODE.value:
            return f"tp {self.tp} decode of {self.requests} x {self.context_tokens:g} context tokens"
        text = f"tp {self.tp} {self.phase} of {self.requests} x {self.prompt_tokens} tokens"
        if self.cached_tokens:
            text += f" after {self.cached_tokens} cached"
        if self.decode_requests:
            text += f" with {self.decode_requests} decoding at {self.context_tokens:g}"
        return text


@dataclass(frozen=True, slots=True)
class Row:
    """One timing of one point.

    Args:
        step_s: seconds of the whole model step on one rank, all-reduce included; NaN unless the status is OK.
        comm_s: the all-reduce share of it; None where unknown.
        spread_s: spread of the timings behind `step_s` (half of the 16-84 % range); None where unknown.
        line: line of the file, 0 for rows made here.
    """

    point: Point
    step_s: float
    repeat: int = 0
    comm_s: float | None = None
    spread_s: float | None = None
    status: Status = Status.OK
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Metadata:
    """What the head of a rows file says about all of its rows; everything is optional.

    Args:
        all_reduce: how `comm_s` was found: `measured`, `modelled` or `none` (tp 1 only).
        host_overhead: whether `step_s` includes the engine's host work: `included`, `excluded`.
        kv_bytes_per_gpu: device memory for weights and KV cache together.
        settings: whatever else the timing depended on, texts by name.
    """

    model: Model | None = None
    gpu: Gpu | None = None
    engine: str | None = None
    engine_version: str | None = None
    source: str | None = None
    licence: str | None = None
    dtype: str | None = None
    device: str | None = None
    driver: str | None = None
    torch: str | None = None
    date: str | None = None
    all_reduce: str | None = None
    host_overhead: str | None = None
    kv_bytes_per_gpu: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rows:
    """A rows file."""

    file: str
    metadata: Metadata
    rows: tuple[Row, ...]

    @property
    def ok(self) -> tuple[Row, ...]:
        """The rows that have a time."""
        return tuple(row for row in self.rows if row.status is Status.OK)


def read_rows(path: Path | str, *, model: Model | None = None, gpu: Gpu | None = None) -> Rows:
    """Return the rows in a CSV file.

    Args:
        model: wins over the file's head, for the check of units.
        gpu: likewise.

    Raises:
        InputError: the file cannot be read or breaks the form; the error names line and column.
    """
    return parse_rows(read_bytes(path), file=str(path), model=model, gpu=gpu)


def parse_rows(data: bytes, *, file: str, model: Model | None = None, gpu: Gpu | None = None) -> Rows:
    """Return the rows in `data`; `file` names it in errors. Raises like `read_rows`."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(f"{file}:{line}", "is not UTF-8 text", hint="save the file as UTF-8") from None
    if not text.strip():
        raise InputError(file, "is empty", hint=f"expected a header line with {', '.join(NEEDED_COLUMNS)}")
    lines = text.splitlines()
    if not text.endswith(("\n", "\r")):
        raise InputError(
            f"{file}:{len(lines)}", "ends within a line", hint="the file is cut short; or end it with a newline"
        )
    head = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    metadata = _metadata(lines[:head], file)
    rows = list(_rows(lines, head, file))
    if not rows:
        raise InputError(file, "has no rows", hint="the file is cut short, or nothing was timed")
    _refuse_duplicates(rows, file)
    ok = [row for row in rows if row.status is Status.OK]
    if not ok:
        raise InputError(file, "has no row with status ok", hint="nothing can be fitted to it")
    _refuse_units(ok, file, model=model or metadata.model, gpu=gpu or metadata.gpu)
    return Rows(file, metadata, tuple(rows))


def rows_text(rows: Iterable[Row], head: Mapping[str, object] | None = None) -> str:
    """Return a rows file: the head as YAML comments, the header line, one line per row.

    Args:
        head: values by key of `METADATA_KEYS`, texts, numbers or mappings of them.
    """
    return head_text(head or {}) + "".join(row_text(row) for row in rows)


def head_text(head: Mapping[str, object]) -> str:
    """Return the head of a rows file, its header line included; rows of `row_text` may be appended to it."""
    import yaml

    shown = yaml.safe_dump({"dsim_rows": 1, **head}, sort_keys=False, allow_unicode=True, width=110)
    return "".join(f"# {line}\n" for line in shown.splitlines()) + ",".join(COLUMNS) + "\n"


def row_text(row: Row) -> str:
    """Return one line of a rows file."""
    point = row.point
    cells = [
        point.phase,
        point.tp,
        point.requests,
        point.prompt_tokens,
        point.cached_tokens,
        f"{point.context_tokens:g}" if point.context_tokens < 1e6 else int(point.context_tokens),
        point.decode_requests,
        row.repeat,
        *(_shown_s(value) for value in (row.step_s, row.comm_s, row.spread_s)),
        row.status.value,
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _shown_s(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"


def _metadata(lines: Sequence[str], file: str) -> Metadata:
    if not any(line[1:].strip() for line in lines):
        return Metadata()
    text = "\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines)
    # Heads of other tools' files are plain remarks.
    if not re.match(r"\s*dsim_rows\s*:", text):
        return Metadata()
    top = parse_yaml(text.encode(), file=file).only(METADATA_KEYS)
    version = top.need("dsim_rows")
    if version.integer() != 1:
        raise version.error("must be 1", "this is the version of the file's form, not of its contents")
    engine_name, engine_version = _engine(top.get("engine"))
    kv = top.get("kv_bytes_per_gpu")
    return Metadata(
        model=_model(top.get("model"), top.get("experts")),
        gpu=_gpu(top.get("gpu")),
        engine=engine_name,
        engine_version=engine_version,
        all_reduce=_one_of(top, "all_reduce", ("measured", "modelled", "none")),
        host_overhead=_one_of(top, "host_overhead", ("included", "excluded")),
        kv_bytes_per_gpu=None if kv is None else kv.number(at_least=1e6),
        settings=_settings(top),
        **{key: _plain(top, key) for key in ("source", "licence", "dtype", "device", "driver", "torch", "date")},
    )


def _model(entry: Field | None, experts_entry: Field | None) -> Model | None:
    """Return the model; experts may stand beside it instead of in it."""
    experts = read_experts(experts_entry)
    if entry is None:
        return None
    model = find_model(entry.value, where=entry.where) if isinstance(entry.value, str) else read_model(entry.section())
    if experts is None or experts_entry is None or model.experts == experts:
        return model
    if model.experts is not None:
        raise experts_entry.error_of_key(f"contradicts model {model.name}, which has others", "leave experts out")
    return replace(model, ffn_size=0, experts=experts)


def _gpu(entry: Field | None) -> Gpu | None:
    if entry is None:
        return None
    return find_gpu(entry.value, where=entry.where) if isinstance(entry.value, str) else read_gpu(entry.section())


def _engine(entry: Field | None) -> tuple[str | None, str | None]:
    if entry is None:
        return None, None
    section = entry.section().only(("name", "version"))
    return section.text("name"), section.text("version")


def _one_of(top: Section, key: str, known: Sequence[str]) -> str | None:
    field_ = top.get(key)
    if field_ is None:
        return None
    text = field_.text()
    if text not in known:
        raise field_.error("is not known", nearest(text, known))
    return text


def _plain(top: Section, key: str) -> str | None:
    field_ = top.get(key)
    if field_ is None:
        return None
    return str(field_.value) if isinstance(field_.value, int | float) else field_.text()


def _settings(top: Section) -> dict[str, str]:
    field_ = top.get("settings")
    if field_ is None:
        return {}
    settings = {}
    for key, value in field_.section().fields.items():
        if isinstance(value.value, dict):
            raise value.error("must be a text, a number or a list of them", "settings have one level")
        if isinstance(value.value, tuple):
            settings[key] = ", ".join(str(item.value) for item in value.items())
        else:
            settings[key] = str(value.value)
    return settings


def _rows(lines: Sequence[str], head: int, file: str) -> Iterator[Row]:
    if head == len(lines):
        raise InputError(file, "has no header line", hint=f"expected {', '.join(NEEDED_COLUMNS)}")
    reader = csv.reader(lines[head:], strict=True)
    columns: list[str] = []
    try:
        for cells in reader:
            line = head + reader.line_num
            where = f"{file}:{line}"
            if not columns:
                columns = [cell.strip() for cell in cells]
                _check_columns(columns, where)
                continue
            if not cells or not any(cell.strip() for cell in cells) or cells[0].startswith("#"):
                continue
            if len(cells) != len(columns):
                raise InputError(where, f"has {len(cells)} values for {len(columns)} columns", hint="is it cut short?")
            yield _row(dict(zip(columns, (cell.strip() for cell in cells), strict=True)), where, line)
    except csv.Error as error:
        raise InputError(f"{file}:{head + reader.line_num}", f"is not CSV: {error}") from None


def _check_columns(columns: Sequence[str], where: str) -> None:
    missing = [name for name in NEEDED_COLUMNS if name not in columns]
    if missing:
        raise InputError(
            where,
            "is missing" if len(missing) == 1 else "are missing",
            name=("column " if len(missing) == 1 else "columns ") + ", ".join(missing),
            hint=f"the header line has {', '.join(columns)}"[:300],
        )
    for name in columns:
        if name not in COLUMNS:
            raise InputError(where, "is not a known column", value=name, hint=nearest(name, COLUMNS))
        if columns.count(name) > 1:
            raise InputError(where, "stands twice in the header", name=f"column {name}")


@dataclass(frozen=True, slots=True)
class _Line:
    """The cells of one line, and how errors name it."""

    cells: Mapping[str, str]
    where: str

    def choice(self, name: str, known: Sequence[str], default: str) -> str:
        """Return one of the known words."""
        word = self.cells.get(name, default)
        if word not in known:
            raise self.error(f"is not a known {name}", name=name, value=word, hint=nearest(word, known))
        return word

    def whole(self, name: str, *, at_least: int) -> int:
        """Return a whole number; an empty cell is 0 where that may be."""
        text = self.cells.get(name, "")
        if not text and at_least == 0:
            return 0
        number = _number(text, self.where, name)
        if not number.is_integer() or number < at_least or number > 1e9:
            raise self.error(f"must be a whole number >= {at_least}", name=name, value=text)
        return int(number)

    def context(self) -> float:
        """Return the context of each decoding request."""
        number = _number(self.cells["context_tokens"], self.where, "context_tokens")
        if not 1 <= number <= 1e9:
            raise self.error("must be >= 1", name="context_tokens", value=self.cells["context_tokens"])
        return number

    def refuse(self, names: Iterable[str], phase: str) -> None:
        """Refuse cells that a phase does not use, unless they are empty or 0."""
        for name in names:
            text = self.cells.get(name, "")
            if text and _number(text, self.where, name) != 0:
                raise self.error(f"must be empty or 0 in {phase} rows", name=name, value=text)

    def error(self, rule: str, *, name: str, value: str, hint: str | None = None) -> InputError:
        """Return the error of a cell."""
        return InputError(self.where, rule, name=name, value=value, hint=hint)


def _row(cells: Mapping[str, str], where: str, line: int) -> Row:
    read = _Line(cells, where)
    phase = read.choice("phase", [phase.value for phase in Phase], "")
    status = Status(read.choice("status", [member.value for member in Status], Status.OK.value))
    point, repeat = _point(read, phase), read.whole("repeat", at_least=0)
    if status is not Status.OK:
        return Row(point, math.nan, repeat, status=status, line=line)
    step_s, comm_s, spread_s = _times(read)
    return Row(point, step_s, repeat, comm_s, spread_s, status, line)


def _point(read: _Line, phase: str) -> Point:
    prefills, decodes = phase != Phase.DECODE.value, phase != Phase.PREFILL.value
    is_mixed = phase == Phase.MIXED.value
    unused = [] if prefills else ["prompt_tokens", "cached_tokens"]
    read.refuse([*unused, *([] if decodes else ["context_tokens"]), *([] if is_mixed else ["decode_requests"])], phase)
    return Point(
        phase=phase,
        context_tokens=read.context() if decodes else 0.0,
        tp=read.whole("tp", at_least=1),
        requests=read.whole("requests", at_least=1),
        prompt_tokens=read.whole("prompt_tokens", at_least=1) if prefills else 0,
        cached_tokens=read.whole("cached_tokens", at_least=0) if prefills else 0,
        decode_requests=read.whole("decode_requests", at_least=1) if is_mixed else 0,
    )


def _times(read: _Line) -> tuple[float, float | None, float | None]:
    """Return step_s, comm_s and spread_s of a row with status ok."""
    cells = read.cells
    step_s = _seconds(cells["step_s"], read.where, "step_s")
    if step_s <= 0:
        raise read.error("must be > 0", name="step_s", value=cells["step_s"], hint="a time, in seconds")
    comm_s, spread_s = (
        _seconds(cells[name], read.where, name) if cells.get(name) else None for name in ("comm_s", "spread_s")
    )
    if comm_s is not None and comm_s >= step_s:
        rule = f"must be below step_s={step_s:g}, which includes it"
        raise read.error(rule, name="comm_s", value=cells["comm_s"])
    return step_s, comm_s, spread_s


def _number(text: str, where: str, name: str) -> float:
    if not text:
        raise InputError(where, "is missing", name=name)
    if _FLOAT.fullmatch(text) is None:
        rule = "must be a finite number" if text.lower().lstrip("+-") in ("nan", "inf", "infinity") else "is no number"
        raise InputError(where, rule, name=name, value=text)
    number = float(text)
    if not math.isfinite(number):
        raise InputError(where, "must be a finite number", name=name, value=text)
    return number


def _seconds(text: str, where: str, name: str) -> float:
    number = _number(text, where, name)
    if number < 0:
        raise InputError(where, "must be > 0" if name == "step_s" else "must be >= 0", name=name, value=text)
    return number


def _refuse_duplicates(rows: Sequence[Row], file: str) -> None:
    seen: dict[tuple[Point, int], int] = {}
    for row in rows:
        first = seen.setdefault((row.point, row.repeat), row.line)
        if first != row.line:
            raise InputError(
                f"{file}:{row.line}",
                f"times {row.point} again, as line {first} does",
                name="repeat",
                value=row.repeat,
                hint="number the repeats, or keep one of the two",
            )


def bound_s(point: Point, *, model: Model, gpu: Gpu) -> float:
    """Seconds below which the datasheet allows no step of this kind."""
    chunks = [(point.prompt_tokens, point.cached_tokens)] * point.requests if point.prompt_tokens else []
    bounds = []
    if chunks:
        bounds.append(prefill_bound_s(chunks, model=model, gpu=gpu, tp=point.tp))
    decoding = point.decode_requests or (0 if chunks else point.requests)
    if decoding:
        total = int(decoding * point.context_tokens)
        bounds.append(decode_bound_s(decoding, total, model=model, gpu=gpu, tp=point.tp))
    return max(bounds)


def _refuse_units(rows: Sequence[Row], file: str, *, model: Model | None, gpu: Gpu | None) -> None:
    """Refuse times that are off by about 1000, against the roofline where it is known and against neighbours."""

    def fail(row: Row, rule: str) -> NoReturn:
        hint = "step_s is in seconds; was it written in milliseconds, or divided by 1000 twice?"
        raise InputError(f"{file}:{row.line}", rule, name="step_s", value=row.step_s, hint=hint)

    if model is not None and gpu is not None:
        for row in rows:
            bound = bound_s(row.point, model=model, gpu=gpu)
            if row.step_s > _FAR * (bound + _LAUNCH_S):
                fail(row, f"is {row.step_s / bound:.0f} times the roofline of {model.name} on {gpu.name}")
            if row.step_s < bound / _BELOW:
                fail(row, f"is {bound / row.step_s:.0f} times below the roofline of {model.name} on {gpu.name}")
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.point.phase, row.point.tp), []).append(row)
    for group in groups.values():
        _refuse_jumps(group, fail)


def _refuse_jumps(group: Sequence[Row], fail: Callable[[Row, str], NoReturn]) -> None:
    ordered = sorted(group, key=lambda row: (_work(row.point), row.line))
    # The side with fewer rows is the wrong one.
    for i in range(1, len(ordered)):
        before, after = ordered[i - 1], ordered[i]
        growth = max(_work(after.point) / _work(before.point), 1.0) ** 2
        if after.step_s > _JUMP * growth * before.step_s or before.step_s > _JUMP * after.step_s:
            wrong = after if i >= len(ordered) / 2 else before
            other = before if wrong is after else after
            ratio = max(wrong.step_s / other.step_s, other.step_s / wrong.step_s)
            side = "above" if wrong.step_s > other.step_s else "below"
            fail(wrong, f"is {ratio:.0f} times {side} line {other.line}, the point next to it")


def _work(point: Point) -> float:
    """Tokens that a step computes or reads, at least 1."""
    decoding = point.decode_requests or (0 if point.prompt_tokens else point.requests)
    return max(point.requests * point.prompt_tokens + decoding * (1 + point.context_tokens / 1000), 1.0)
