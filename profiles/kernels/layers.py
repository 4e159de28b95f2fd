"""Brings tables of one layer's kernel times, as LLMServingSim writes them, into a latency profile."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import MappingProxyType
from typing import Final

from dsim.contract import find_violations
from dsim.errors import InputError, nearest
from dsim.gpu import Gpu
from dsim.latency import ValidRange
from dsim.layer_latency import AttentionTimes, KernelTimes, LayerLatency
from dsim.model import Model
from dsim.options import Evidence
from profiles.entries import gpu_entry, model_entry
from profiles.kernels.hosts import NOTHING, HostConstants
from profiles.kernels.settings import engine_sections, host_section
from profiles.shapes import Shape

#: How often a step runs a kernel: so many times a layer, or once.
_LAYER: Final[Mapping[str, int]] = MappingProxyType(
    {
        "layernorm": 2,
        "qkv_proj": 1,
        "rotary_emb": 1,
        "o_proj": 1,
        "gate_up_proj": 1,
        "act_fn": 1,
        "down_proj": 1,
    }
)
_ONCE: Final = ("embedding", "final_layernorm")
_PER_SEQUENCE: Final = ("lm_head", "sampler")
_ATTENTION: Final = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_FILES: Final = ("dense.csv", "per_sequence.csv", "attention.csv")
#: No kernel of one layer takes longer: larger numbers are nanoseconds, or a slip.
_MAX_US: Final = 1_000_000
_LARGEST_BYTES: Final = 50_000_000


@dataclass(frozen=True, slots=True)
class LayerTables:
    """What one directory says of one degree: step times of one model on one GPU.

    Args:
        sha256: by file.
    """

    kernels: tuple[KernelTimes, ...]
    attention_layers: int
    attention: tuple[AttentionTimes, ...]
    sha256: Mapping[str, str]

    def latency(self) -> LayerLatency:
        """Return the latency model that looks up every step."""
        return LayerLatency.whole(
            kernels=self.kernels, attention_layers=self.attention_layers, attention=self.attention
        )


@dataclass(frozen=True, slots=True)
class LayerSubject:
    """What the tables are about.

    Args:
        source: whose they are, in words.
        host: the engine's work beside kernels.
    """

    model: Model
    gpu: Gpu
    engine: str
    engine_version: str
    source: str
    host: HostConstants = NOTHING


def read_layers(directory: Path, *, shape: Shape, tp: int = 1) -> LayerTables:
    """Return the tables of a directory with dense.csv, per_sequence.csv and attention.csv, in microseconds.

    Raises:
        InputError: a file cannot be read, lacks a column or a kernel, or holds what cannot be; or the model has
            kernels that such tables do not have.
    """
    model = shape.model
    if model.experts is not None or model.latent_attention is not None or model.sliding_window is not None:
        rule = "has experts, latent attention or windows, which such tables do not have"
        raise InputError("--model", rule, value=model.name)
    shape.rank(tp)
    needed = {name: times * model.layers for name, times in _LAYER.items()} | dict.fromkeys(_ONCE, 1)
    needed |= {"qk_norm": model.layers} if shape.qk_norm else {}
    needed |= {"all_reduce": 2 * model.layers} if tp > 1 else {}
    kernels = [
        *_kernels(directory / _FILES[0], "tokens", needed),
        *_kernels(directory / _FILES[1], "sequences", dict.fromkeys(_PER_SEQUENCE, 1)),
    ]
    points = _points(directory / _FILES[2])
    digests = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in _FILES}
    try:
        tables = LayerTables(tuple(kernels), model.layers, tuple(_attention(points)), digests)
        tables.latency()
    except InputError as error:
        where = f"{directory / _FILES[2]}: {error.where}"
        raise InputError(where, error.rule, name=error.name, value=error.value, hint="is it complete?") from None
    return tables


def layers_text(tables: Mapping[int, LayerTables], subject: LayerSubject) -> str:
    """Return a profile file in the form of docs/profiles.md, with the tables by tensor parallel degree in it."""
    latencies = {tp: tables[tp].latency() for tp in sorted(tables)}
    digests = "; ".join(
        f"tp {tp}: {name} sha256 {digest}" for tp in sorted(tables) for name, digest in tables[tp].sha256.items()
    )
    ranges = [latency.valid_range for latency in latencies.values()]
    valid = {
        name: int(min(getattr(one, name) for one in ranges))
        for name in ("chunk_tokens", "prefill_tokens", "decode_requests", "context_tokens")
    }
    lines = [
        f"# {subject.model.name} on {subject.gpu.name} under {subject.engine}: one-layer kernel times; "
        "docs/profiles.md explains every key.",
        "dsim_profile: 1",
        f"model: {_flow(model_entry(subject.model))}",
        f"gpu: {_flow(gpu_entry(subject.gpu))}",
        f"engine: {_flow({'name': subject.engine, 'version': subject.engine_version})}",
        f"evidence: {Evidence.KERNELS.value}",
        f"source: {_text(f'{subject.source}; {digests}')}",
        f"valid_range: {_flow({**valid, 'reason': 'the points of the tables'})}",
        "latency:",
    ]
    for tp in sorted(tables):
        lines += [f"  {tp}:", "    layer_tables:", *(f"      {line}" for line in _table_lines(tables[tp]))]
    sections = engine_sections(subject.model, subject.gpu, subject.engine, sorted(tables), ValidRange(**valid))
    for name, section in {**sections, "host": host_section(subject.host)}.items():
        lines += [f"{name}:", *(f"  {key}: {_flow(value)}" for key, value in section.items())]
    violations = [
        violation
        for tp, latency in latencies.items()
        for violation in find_violations(latency, model=subject.model, gpu=subject.gpu, tp=tp)
    ]
    if violations:
        lines.append("violations:")
        lines += [f"  - {_flow({'tp': v.tp, 'kind': v.kind.value, 'note': v.detail})}" for v in violations]
    return "\n".join(lines) + "\n"


def _table_lines(tables: LayerTables) -> Iterator[str]:
    yield "kernels:"
    for kernel in tables.kernels:
        entry = {"name": kernel.name, "times": kernel.times, kernel.by: kernel.amounts, "kernel_s": kernel.kernel_s}
        yield f"  - {_flow(entry)}"
    yield f"attention_layers: {tables.attention_layers}"
    yield "attention:"
    for block in tables.attention:
        entry = {
            "tokens": block.tokens,
            "cached_tokens": block.cached_tokens,
            "requests": block.requests,
            "request_context_tokens": block.request_context_tokens,
            "kernel_s": block.kernel_s,
        }
        yield f"  - {_flow(entry)}"


def _flow(value: object) -> str:
    """Return YAML on one line: a general writer takes minutes for tens of thousands of numbers."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        # All digits; 1e-05 as 1.0e-05, which other YAML readers take for a number too.
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return _text(value) if isinstance(value, str) else str(value)


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _kernels(file: Path, by: str, needed: Mapping[str, int]) -> Iterator[KernelTimes]:
    points: dict[str, dict[int, float]] = {}
    for line, row in _rows(file, ("layer", by, "time_us")):
        name = row["layer"]
        if name not in needed:
            rule = "is no kernel of this model at this degree"
            raise InputError(f"{file}:{line}", rule, name="layer", value=name, hint=nearest(name, list(needed)))
        amount = _whole(file, line, by, row[by], at_least=1)
        of_kernel = points.setdefault(name, {})
        if amount in of_kernel:
            raise InputError(f"{file}:{line}", f"stands twice for {name}", name=by, value=amount)
        of_kernel[amount] = _time_s(file, line, row["time_us"])
    for name in needed:
        if name not in points:
            hint = "ranks of several GPUs need its time" if name == "all_reduce" else None
            raise InputError(str(file), "has no times of this kernel", name="layer", value=name, hint=hint)
    for name, found in points.items():
        amounts = sorted(found)
        yield KernelTimes(name, needed[name], by, tuple(amounts), tuple(found[amount] for amount in amounts))


#: Seconds by chunk and cached tokens, requests and context.
_Points = dict[tuple[int, int], dict[int, dict[int, float]]]


def _points(file: Path) -> _Points:
    points: _Points = {}
    for line, row in _rows(file, (*_ATTENTION, "time_us")):
        chunk, cached, requests, context = (_whole(file, line, name, row[name], at_least=0) for name in _ATTENTION)
        found = points.setdefault((chunk, cached), {}).setdefault(requests, {})
        if context in found:
            place = f"{chunk}, {cached}, {requests}, {context}"
            raise InputError(f"{file}:{line}", "stands twice", name=", ".join(_ATTENTION), value=place)
        found[context] = _time_s(file, line, row["time_us"])
    return points


def _attention(points: _Points) -> Iterator[AttentionTimes]:
    """Yield full grids: requests with the same contexts of one chunk and as many cached tokens together."""
    for (chunk, cached), by_requests in sorted(points.items()):
        grids: dict[tuple[int, ...], list[int]] = {}
        for requests in sorted(by_requests):
            contexts = tuple(sorted(by_requests[requests]))
            # No requests are a grid of their own: they have no context.
            grids.setdefault(contexts if requests else (), []).append(requests)
        for several in grids.values():
            columns = tuple(sorted(by_requests[several[0]]))
            times = tuple(tuple(by_requests[n][context] for context in columns) for n in several)
            yield AttentionTimes(chunk, cached, tuple(several), columns, times)


def _whole(file: Path, line: int, name: str, text: str, *, at_least: int) -> int:
    try:
        number = float(text)
        whole = int(number)
    except (ValueError, OverflowError, TypeError):
        raise InputError(f"{file}:{line}", "must be a whole number", name=name, value=text) from None
    if whole != number or whole < at_least:
        raise InputError(f"{file}:{line}", f"must be a whole number >= {at_least}", name=name, value=text)
    return whole


def _time_s(file: Path, line: int, text: str) -> float:
    try:
        microseconds = Decimal(text)
    except (InvalidOperation, TypeError):
        raise InputError(f"{file}:{line}", "must be a number", name="time_us", value=text) from None
    if not (microseconds.is_finite() and 0 < microseconds <= _MAX_US):
        raise InputError(f"{file}:{line}", f"must be > 0 and <= {_MAX_US}", name="time_us", value=text)
    return float(microseconds.scaleb(-6))


def _rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line and the columns of each row."""
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise InputError(str(file), "is too large for a table of kernel times")
        with file.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                hint = f"needed: {', '.join(columns)}"
                raise InputError(str(file), "is missing", name=f"column {missing[0]}", hint=hint)
            for row in reader:
                yield reader.line_num, row
    except OSError as error:
        raise InputError(str(file), f"cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(file), f"is no CSV file: {error}") from None
