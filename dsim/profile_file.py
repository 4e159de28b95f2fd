"""Profile files: the YAML form of a latency profile (docs/profiles.md) and its checks."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from dsim.catalog import find_gpu, find_model, read_gpu, read_model
from dsim.contract import Violation, ViolationKind, find_violations
from dsim.errors import InputError
from dsim.gpu import LINK_SHARE, Gpu
from dsim.handovers import MIN_BYTES_PER_S, Link, find_preset
from dsim.latency import AffineDecode, AffineLatency, AffinePrefill, Bends, HostOverhead, LatencyModel, ValidRange
from dsim.layer_file import read_layers
from dsim.model import Model
from dsim.options import Evidence
from dsim.plain import content
from dsim.pools import Parallelism, Role
from dsim.profile import BatchLimits, FirstToken, Handover, HandoverMode, PointToPoint, Preemption, Profile
from dsim.profile_fit import read_fit
from dsim.table_latency import DecodeRow, PrefillTable, TableLatency
from dsim.yamlfile import Field, Section, parse_yaml, read_bytes, relocated

_TOP_KEYS = (
    "dsim_profile",
    "model",
    "gpu",
    "engine",
    "evidence",
    "expected_error",
    "source",
    "valid_range",
    "latency",
    "refused",
    "limits",
    "host",
    "handover",
    "p2p",
    "preemption",
    "kv",
    "saturation_tokens",
    "violations",
    "fit",
    "reason",
)
#: No step is longer: larger numbers are milliseconds, or a slip that would run away in a simulation.
_MAX_S = 10.0
#: What errors of tables of steps begin with.
_TABLES = ("prefill table", "decode table")
#: No GPU has less memory: smaller numbers are gigabytes.
_MIN_BYTES = 1e9
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "colocated": Role.COLOCATED}
_HOST_KEYS = ("step_s", "sequence_s", "token_s", "mixed_s", "reason")
_PARALLELISM = re.compile(r"tp([1-9]\d{0,4})pp([1-9]\d{0,4})")


def load_profile(path: Path | str, changes: Mapping[str, Field] = MappingProxyType({})) -> Profile:
    """Return the profile in a file.

    Args:
        changes: values by dotted key that stand instead of the file's own, or beside them; errors name their places.

    Raises:
        InputError: the file cannot be read, breaks the form of docs/profiles.md, or its numbers break the contract of
            latency models in a way that the file does not list under `violations`.
    """
    data, listed = read_bytes(path), tuple(changes.items())
    try:
        return _kept(data, str(path), listed)
    except TypeError:  # a change that is a collection has no hash
        return parse_profile(data, file=str(path), changes=changes)


@functools.lru_cache(maxsize=256)
def _kept(data: bytes, file: str, changes: tuple[tuple[str, Field], ...]) -> Profile:
    """Return the profile in `data`, the same object for the same content: a sweep asks for it once a task."""
    return parse_profile(data, file=file, changes=dict(changes))


def parse_profile(data: bytes, *, file: str, changes: Mapping[str, Field] = MappingProxyType({})) -> Profile:
    """Return the profile in `data`; `file` names it in errors. Raises like `load_profile`."""
    top = parse_yaml(data, file=file)
    for key, field in sorted(changes.items()):
        top = top.changed(key, field)
    top.only(_TOP_KEYS)
    version = top.need("dsim_profile")
    if version.integer() != 1:
        raise version.error("must be 1", "this is the version of the file's form, not of its contents")
    model, gpu = _model(top.need("model")), _gpu(top.need("gpu"))
    engine = top.section("engine").only(("name", "version", "reason"))
    engine_name = engine.text("name")
    valid_range = _valid_range(top.section("valid_range"))
    latency = _latency(top.section("latency"), model=model, valid_range=valid_range)
    refused = _refused(top.get("refused"), latency)
    host = _host(top.get("host"))
    kv = top.section("kv").only(("capacity_tokens", "bytes_per_gpu", "block_tokens", "admission_watermark", "reason"))
    capacity, bytes_per_gpu = _capacity(kv, model=model, gpu=gpu)
    preemption, swap_bytes_per_s = _preemption(top.get("preemption"))
    saturation, fit = _saturation(top.get("saturation_tokens"), latency), top.get("fit")
    evidence = top.get("evidence")
    profile = Profile(
        name=f"{model.name}-{gpu.name}-{engine_name}",
        model=model,
        gpu=gpu,
        engine=engine_name,
        engine_version=engine.text("version"),
        source=top.text("source"),
        latency=latency,
        refused=refused,
        host={role: pair[0] for role, pair in host.items()},
        host_pipelined={role: pair[1] for role, pair in host.items() if pair[1] is not None},
        request_s=_request_s(top.get("host")),
        limits=_limits(top.get("limits"), valid_range),
        handover=_handover(top.get("handover"), gpu),
        p2p=_p2p(top.get("p2p")),
        preemption=preemption,
        swap_bytes_per_s=swap_bytes_per_s,
        kv_capacity_tokens=capacity,
        kv_bytes_per_gpu=bytes_per_gpu,
        block_tokens=kv.integer("block_tokens", 16, at_least=1, at_most=4096),
        admission_watermark=_share(kv, "admission_watermark", 0.01),
        saturation_tokens=saturation if isinstance(saturation, int) else next(iter(saturation.values()), None),
        saturation_tokens_at={} if isinstance(saturation, int) else saturation,
        violations=_violations(top, latency=latency, model=model, gpu=gpu),
        reasons=_reasons(top),
        fit=None if fit is None else read_fit(fit),
        evidence=Evidence.MEASURED if evidence is None else evidence.choice(Evidence),
        expected_error=top.text("expected_error") if "expected_error" in top else "",
        sha256=hashlib.sha256(data).hexdigest(),
    )
    return _named_by_content(profile) if changes else profile


def _named_by_content(profile: Profile) -> Profile:
    """Return a changed profile with a digest of what it says, whose file's digest is part of: 0.4 is 400ms there."""
    said = json.dumps(content(profile), sort_keys=True, separators=(",", ":"))
    return replace(profile, sha256=hashlib.sha256(said.encode()).hexdigest())


def _model(field: Field) -> Model:
    if isinstance(field.value, str):
        return find_model(field.value, where=field.where)
    return read_model(field.section())


def _gpu(field: Field) -> Gpu:
    if isinstance(field.value, str):
        return find_gpu(field.value, where=field.where)
    return read_gpu(field.section())


def _valid_range(section: Section) -> ValidRange:
    section.only(("chunk_tokens", "prefill_tokens", "decode_requests", "context_tokens", "reason"))
    context = section.get("context_tokens")
    return ValidRange(
        chunk_tokens=section.integer("chunk_tokens", at_least=1),
        prefill_tokens=section.integer("prefill_tokens", at_least=1),
        decode_requests=section.integer("decode_requests", at_least=1),
        context_tokens=math.inf if context is None else context.integer(at_least=1),
    )


def _latency(section: Section, *, model: Model, valid_range: ValidRange) -> dict[int, LatencyModel]:
    result: dict[int, LatencyModel] = {}
    for tp, field in section.by_integer().items():
        if model.attention_heads % tp:
            raise field.error_of_key(
                f"is a tensor parallel degree that does not divide the {model.attention_heads} heads of {model.name}"
            )
        entry = field.section()
        if "layer_tables" in entry:
            result[tp] = _layers(entry, valid_range)
        else:
            result[tp] = _table(entry, valid_range) if "table" in entry else _affine(entry, valid_range)
    if not result:
        raise section.field.error(
            "must have at least one tensor parallel degree", "such as 1: {prefill: ..., decode: ...}"
        )
    return result


def _layers(section: Section, valid_range: ValidRange) -> LatencyModel:
    own_range = section.only(("layer_tables", "valid_range")).get("valid_range")
    return read_layers(section, valid_range if own_range is None else _valid_range(own_range.section()))


def _table(section: Section, valid_range: ValidRange) -> TableLatency:
    section.only(("table", "valid_range"))
    own_range = section.get("valid_range")
    table = section.section("table").only(("prefill", "decode", "extrapolate"))
    prefill_field = table.need("prefill")
    entry = prefill_field.section().only(("tokens", "cached_tokens", "step_s"))
    rows = entry.need("step_s").items()
    nested = any(isinstance(row.value, tuple) for row in rows)
    prefill = relocated(
        prefill_field,
        _TABLES,
        lambda: PrefillTable(
            tokens=entry.need("tokens").integers(at_least=0),
            step_s=tuple(map(_times_s, rows)) if nested else (_times_s(entry.need("step_s")),),
            cached_tokens=entry.need("cached_tokens").integers(at_least=0) if "cached_tokens" in entry else (0,),
        ),
    )
    decode_field = table.need("decode")
    decode = tuple(_decode_row(row) for row in decode_field.items())
    known = relocated(decode_field, _TABLES, lambda: TableLatency(prefill, decode, valid_range))
    wanted = valid_range if own_range is None else _valid_range(own_range.section())
    measured = TableLatency.range_of(prefill, decode)
    if not table.flag("extrapolate", default=False):
        for name in ("chunk_tokens", "prefill_tokens", "decode_requests", "context_tokens"):
            most = getattr(measured, name)
            # A limit of the total context need not be given: then the table has one.
            if name != "context_tokens" and getattr(wanted, name) > most:
                rule = f"must reach valid_range.{name}={getattr(wanted, name):g}, and ends at {most:g}"
                raise section.need("table").error_of_key(
                    rule, "lower valid_range, or say extrapolate: true in the table"
                )
        wanted = replace(wanted, context_tokens=min(wanted.context_tokens, measured.context_tokens))
    return replace(known, valid_range=wanted)


def _decode_row(field: Field) -> DecodeRow:
    row = field.section().only(("requests", "request_context_tokens", "step_s"))
    return relocated(
        field,
        _TABLES,
        lambda: DecodeRow(
            requests=row.integer("requests", at_least=1),
            request_context_tokens=row.need("request_context_tokens").integers(at_least=0),
            step_s=_times_s(row.need("step_s")),
        ),
    )


def _times_s(field: Field) -> tuple[float, ...]:
    return field.numbers(above=0, at_most=_MAX_S)


def _affine(section: Section, valid_range: ValidRange) -> AffineLatency:
    section.only(("prefill", "decode", "valid_range"))
    own_range = section.get("valid_range")
    prefill = section.section("prefill").only(
        ("constant_s", "per_token_s", "per_token_squared_s", "per_request_s", "bends")
    )
    decode = section.section("decode").only(("threshold_requests", "small", "large"))
    small = _affine_decode(decode.section("small"))
    threshold, large_field = decode.get("threshold_requests"), decode.get("large")
    if threshold is not None and large_field is None:
        raise threshold.error("needs `large` beside it", "give the coefficients from this batch on, or remove the key")
    return AffineLatency(
        prefill=AffinePrefill(
            constant_s=prefill.number("constant_s", at_least=0, at_most=_MAX_S),
            per_token_s=prefill.number("per_token_s", at_least=0, at_most=_MAX_S),
            per_token_squared_s=prefill.number("per_token_squared_s", at_least=0, at_most=_MAX_S),
            per_request_s=prefill.number("per_request_s", 0.0, at_least=0, at_most=_MAX_S),
            bends=_bends(prefill, amount="tokens", slope="per_token_s"),
        ),
        small=small,
        large=small if large_field is None else _affine_decode(large_field.section()),
        threshold_requests=1 if large_field is None else decode.integer("threshold_requests", at_least=2),
        valid_range=valid_range if own_range is None else _valid_range(own_range.section()),
    )


def _affine_decode(section: Section) -> AffineDecode:
    section.only(("constant_s", "per_context_token_s", "per_request_s", "bends"))
    return AffineDecode(
        constant_s=section.number("constant_s", at_least=0, at_most=_MAX_S),
        per_context_token_s=section.number("per_context_token_s", at_least=0, at_most=_MAX_S),
        per_request_s=section.number("per_request_s", at_least=0, at_most=_MAX_S),
        bends=_bends(section, amount="requests", slope="per_request_s"),
    )


def _bends(section: Section, *, amount: str, slope: str) -> Bends:
    """Return (from, slope) of the list `bends`, which must rise."""
    listed = section.get("bends")
    bends: list[tuple[int, float]] = []
    for item in () if listed is None else listed.items():
        bend = item.section().only((f"from_{amount}", slope))
        start = bend.integer(f"from_{amount}", at_least=1)
        if bends and start <= bends[-1][0]:
            raise bend.need(f"from_{amount}").error(f"must be > {bends[-1][0]}, that of the bend before")
        bends.append((start, bend.number(slope, at_least=0, at_most=_MAX_S)))
    return tuple(bends)


def _refused(field: Field | None, latency: Mapping[int, LatencyModel]) -> dict[int, str]:
    if field is None:
        return {}
    result = {}
    for tp, reason in field.section().by_integer().items():
        if tp in latency:
            raise reason.error_of_key("stands under latency as well", "keep one of the two")
        result[tp] = reason.text()
    return result


def _saturation(field: Field | None, latency: Mapping[int, LatencyModel]) -> int | dict[int, int]:
    """Return Lm, by tensor parallel degree unless one number stands for all; empty where nothing is known."""
    if field is None:
        return {}
    if not isinstance(field.value, dict):
        return field.integer(at_least=1)
    found = field.section().by_integer()
    if not found:
        raise field.error("must be a whole number, or numbers by tensor parallel degree", "such as {2: 307, 8: 608}")
    for tp, entry in found.items():
        if tp not in latency:
            raise entry.error_of_key("is a tensor parallel degree that does not stand under latency")
    return {tp: found[tp].integer(at_least=1) for tp in sorted(found)}


def _limits(field: Field | None, valid: ValidRange) -> dict[Role, BatchLimits]:
    defaults = {
        Role.PREFILL: BatchLimits(tokens=valid.prefill_tokens),
        Role.DECODE: BatchLimits(requests=valid.decode_requests),
        Role.COLOCATED: BatchLimits(tokens=valid.prefill_tokens, requests=valid.decode_requests),
    }
    if field is None:
        return defaults
    section = field.section().only((*_ROLES, "reason"))
    result = dict(defaults)
    for name, role in _ROLES.items():
        entry = section.get(name)
        if entry is None:
            continue
        keys = ("requests", "reason") if role is Role.DECODE else ("tokens", "requests", "reason")
        limits = entry.section().only(keys)
        most_tokens = ("prefill_tokens", valid.prefill_tokens)
        most_requests = ("decode_requests", math.inf if role is Role.PREFILL else valid.decode_requests)
        result[role] = BatchLimits(
            tokens=_limit(limits, "tokens", default=defaults[role].tokens, most=most_tokens),
            requests=_limit(limits, "requests", default=defaults[role].requests, most=most_requests),
        )
    return result


def _limit(section: Section, key: str, *, default: float, most: tuple[str, float]) -> float:
    field = section.get(key)
    if field is None:
        return default
    limit = field.integer(at_least=1)
    if limit > most[1]:
        raise field.error(
            f"must be <= valid_range.{most[0]}={most[1]:g}", "the coefficients are not known to hold beyond it"
        )
    return limit


def _host(field: Field | None) -> dict[Role, tuple[HostOverhead, HostOverhead | None]]:
    if field is None:
        return {}
    section = field.section().only((*_ROLES, "request_s", "reason"))
    result = {}
    for name, role in _ROLES.items():
        entry = section.get(name)
        if entry is None:
            continue
        overhead = entry.section().only((*_HOST_KEYS, "pipelined"))
        pipelined = overhead.get("pipelined")
        result[role] = (
            _host_overhead(overhead),
            None if pipelined is None else _host_overhead(pipelined.section().only(_HOST_KEYS)),
        )
    return result


def _host_overhead(section: Section) -> HostOverhead:
    return HostOverhead(
        step_s=section.number("step_s", 0.0, at_least=0, at_most=_MAX_S),
        sequence_s=section.number("sequence_s", 0.0, at_least=0, at_most=_MAX_S),
        token_s=section.number("token_s", 0.0, at_least=0, at_most=_MAX_S),
        mixed_s=section.number("mixed_s", 0.0, at_least=0, at_most=_MAX_S),
    )


def _request_s(host: Field | None) -> float:
    return 0.0 if host is None else host.section().number("request_s", 0.0, at_least=0, at_most=_MAX_S)


def _handover(field: Field | None, gpu: Gpu) -> Handover:
    base = Handover(
        first_token_from=FirstToken.PREFILL,
        stalls_decode=False,
        latency_s=0.001,
        bandwidth_bytes_per_s=LINK_SHARE * gpu.nvlink_bytes_per_s,
        watermark=0.05,
    )
    return base if field is None else read_handover(field.section(), gpu, base=base)


def read_handover(section: Section, gpu: Gpu, *, base: Handover, link: Link = Link.NVLINK) -> Handover:
    """Return the handover that a section says (docs/profiles.md).

    Args:
        base: what holds where the section names no preset and does not give a key.
        link: whose line rate a preset reaches a share of, unless the section says which.

    Raises:
        InputError: a key or a value cannot be used.
    """
    section.only(
        (
            *("preset", "link", "first_token_from", "mode", "stalls_decode", "latency_s", "bandwidth_bytes_per_s"),
            *("node_bandwidth_bytes_per_s", "watermark", "hop_s", "post_s", "post_block_s", "step_s", "reason"),
        )
    )
    named, over = section.get("preset"), section.get("link")
    preset = None if named is None else find_preset(named.text(), where=named.where)
    if over is not None:
        link = over.choice(Link)
    line_bytes_per_s = link.line_bytes_per_s(gpu)
    if preset is not None:
        rates = (preset.reached_bytes_per_s(rate) for rate in (line_bytes_per_s, gpu.network_bytes_per_s))
        within, across = rates
        base = replace(preset.rest, bandwidth_bytes_per_s=within, node_bandwidth_bytes_per_s=min(within, across))
    elif over is not None:
        base = replace(base, bandwidth_bytes_per_s=LINK_SHARE * line_bytes_per_s, node_bandwidth_bytes_per_s=None)
    across_nodes = section.get("node_bandwidth_bytes_per_s")
    first, mode = section.get("first_token_from"), section.get("mode")
    try:
        return Handover(
            first_token_from=base.first_token_from if first is None else first.choice(FirstToken),
            mode=base.mode if mode is None else mode.choice(HandoverMode),
            stalls_decode=section.flag("stalls_decode", default=base.stalls_decode),
            latency_s=section.number("latency_s", base.latency_s, at_least=0, at_most=_MAX_S),
            bandwidth_bytes_per_s=section.number(
                "bandwidth_bytes_per_s", base.bandwidth_bytes_per_s, at_least=MIN_BYTES_PER_S
            ),
            node_bandwidth_bytes_per_s=(
                base.node_bandwidth_bytes_per_s
                if across_nodes is None
                else across_nodes.number(at_least=MIN_BYTES_PER_S)
            ),
            watermark=_share(section, "watermark", base.watermark, above=0),
            hop_s=section.number("hop_s", base.hop_s, at_least=0, at_most=_MAX_S),
            post_s=section.number("post_s", base.post_s, at_least=0, at_most=_MAX_S),
            post_block_s=section.number("post_block_s", base.post_block_s, at_least=0, at_most=_MAX_S),
            step_s=section.number("step_s", base.step_s, at_least=0, at_most=_MAX_S),
        )
    except InputError as error:
        if error.where != "handover" or error.name is None:
            raise
        # Two keys that do not go together: one of them stands here.
        others = {"mode": "stalls_decode", "hop_s": "mode"}
        at = section.get(error.name) or section.get(others.get(error.name, error.name)) or named or section.field
        raise InputError(
            at.where,
            error.rule,
            name=f"{section.field.name}.{error.name}".lstrip("."),
            value=error.value,
            hint=error.hint,
        ) from None


def _p2p(field: Field | None) -> PointToPoint:
    if field is None:
        return PointToPoint()
    section = field.section().only(("latency_s", "bandwidth_bytes_per_s", "across_nodes", "reason"))
    latency_s = section.number("latency_s", 0.0, at_least=0, at_most=_MAX_S)
    rate = section.get("bandwidth_bytes_per_s")
    bytes_per_s = math.inf if rate is None else rate.number(at_least=MIN_BYTES_PER_S)
    across = section.section("across_nodes") if "across_nodes" in section else None
    if across is None:
        return PointToPoint(latency_s, bytes_per_s, latency_s, bytes_per_s)
    across.only(("latency_s", "bandwidth_bytes_per_s"))
    return PointToPoint(
        latency_s,
        bytes_per_s,
        node_latency_s=across.number("latency_s", at_least=0, at_most=_MAX_S),
        node_bandwidth_bytes_per_s=across.number("bandwidth_bytes_per_s", at_least=MIN_BYTES_PER_S),
    )


def _preemption(field: Field | None) -> tuple[Preemption, float]:
    if field is None:
        return Preemption.RECOMPUTE, math.inf
    section = field.section().only(("method", "swap_bytes_per_s", "reason"))
    method = section.need("method").choice(Preemption)
    if method is Preemption.SWAP:
        return method, section.number("swap_bytes_per_s", at_least=MIN_BYTES_PER_S)
    rate = section.get("swap_bytes_per_s")
    if rate is not None:
        raise rate.error("belongs to method swap and only to it", "remove the key")
    return method, math.inf


def _capacity(section: Section, *, model: Model, gpu: Gpu) -> tuple[dict[Parallelism, int], float | None]:
    listed, per_gpu = section.get("capacity_tokens"), section.get("bytes_per_gpu")
    if listed is None and per_gpu is None:
        raise section.field.error(
            "must have capacity_tokens or bytes_per_gpu", "give what the engine prints when it starts"
        )
    capacity: dict[Parallelism, int] = {}
    for key, field in ({} if listed is None else listed.section().fields).items():
        match = _PARALLELISM.fullmatch(key)
        if match is None:
            raise field.error_of_key("is not a parallelism", "write tp1pp1, tp2pp1 and so on")
        parallelism = Parallelism(int(match[1]), int(match[2]))
        if model.attention_heads % parallelism.tp or parallelism.pp > model.layers:
            raise field.error_of_key(
                f"does not divide the {model.attention_heads} heads and {model.layers} layers of {model.name}"
            )
        most_tokens = parallelism.num_gpus * gpu.memory_bytes // model.kv_bytes_per_token
        capacity[parallelism] = field.integer(at_least=1)
        if capacity[parallelism] > most_tokens:
            raise field.error(
                f"must be <= {most_tokens}, all the memory of {parallelism.num_gpus} {gpu.name}",
                "the unit is tokens, of the whole instance",
            )
    bytes_per_gpu = None if per_gpu is None else per_gpu.number(at_least=_MIN_BYTES)
    if per_gpu is not None and bytes_per_gpu is not None and bytes_per_gpu > gpu.memory_bytes:
        raise per_gpu.error(f"must be <= {gpu.memory_bytes}, the memory of one {gpu.name}", "the unit is bytes")
    return capacity, bytes_per_gpu


def _share(section: Section, key: str, default: float, *, above: float = -math.inf) -> float:
    field = section.get(key)
    return default if field is None else field.number(above=above, at_least=0, at_most=1)


def _violations(top: Section, *, latency: Mapping[int, LatencyModel], model: Model, gpu: Gpu) -> tuple[str, ...]:
    found = [v for tp in sorted(latency) for v in find_violations(latency[tp], model=model, gpu=gpu, tp=tp)]
    unlisted = {(v.tp, v.kind): v for v in found}
    listed = top.get("violations")
    for item in () if listed is None else listed.items():
        section = item.section().only(("tp", "kind", "note"))
        if "note" in section:
            section.text("note")
        kind = section.need("kind").choice(ViolationKind)
        if kind is ViolationKind.NOT_POSITIVE:
            raise section.need("kind").error("cannot be allowed", "correct the coefficients")
        if unlisted.pop((section.integer("tp", at_least=1), kind), None) is None:
            raise item.error(f"lists {kind.value}, which the numbers do not show (or show once)", "remove this item")
    for violation in unlisted.values():
        _refuse(violation, top)
    return tuple(str(v) for v in found)


def _refuse(violation: Violation, top: Section) -> None:
    """Refuse a violation that the file does not admit to."""
    if violation.kind in (ViolationKind.BELOW_BOUND, ViolationKind.INSENSITIVE):
        # A datasheet can be wrong, a file's dtype unusual, its numbers a what-if: told to the user, not refused.
        return
    hint = "correct the coefficients"
    if violation.kind is not ViolationKind.NOT_POSITIVE:
        hint += f", or list {{tp: {violation.tp}, kind: {violation.kind.value}}} under violations"
    field = top.section("latency").by_integer()[violation.tp]
    raise field.error_of_key(f"breaks the contract of latency models: {violation.detail}", hint)


def _reasons(top: Section) -> dict[str, str]:
    reasons: dict[str, str] = {}

    def collect(field: Field) -> None:
        if isinstance(field.value, dict):
            for key, inner in field.value.items():
                if key == "reason":
                    reasons[field.name or "profile"] = inner.text()
                else:
                    collect(inner)

    collect(top.field)
    return reasons
