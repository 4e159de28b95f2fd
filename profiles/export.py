"""Writes fitted rows as a profile file."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import yaml

from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.latency import AffineDecode, AffineLatency, Bends, ValidRange
from dsim.model import Model
from dsim.options import Evidence
from dsim.profile import Profile
from dsim.profile_file import parse_profile
from dsim.profile_fit import Fit, FitError, SpeedUp
from profiles.entries import gpu_entry, model_entry
from profiles.fit import FittedRows, TpFit
from profiles.knee import Saturation
from profiles.rows import Metadata, Rows

#: Share of the device memory that engines give to weights and KV cache where nobody says.
MEMORY_SHARE: Final = 0.9
_METHOD: Final = (
    "weighted least squares on relative errors, constants >= 0, Huber loss; intervals of constants and of Lm by knee "
    "are 95 % ones by profile likelihood, those of Lm by share and of K follow the mean errors; held out: fitted to "
    "every other point"
)


@dataclass(frozen=True, slots=True)
class Subject:
    """What the rows are about.

    Args:
        host: the whole `host` section, where something other than the rows says it.
        sections: likewise `limits`, `p2p` and `kv`.
        range_reason: what the rows span, where it is more than was timed.
        evidence: what the rows are.
        expected_error: how far steps may be off, in words; empty where nobody said.
    """

    model: Model
    gpu: Gpu
    engine: str
    engine_version: str
    source: str
    host: Mapping[str, object] | None = None
    sections: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    range_reason: str = "what the rows span, over all tensor parallel degrees"
    evidence: Evidence = Evidence.MEASURED
    expected_error: str = ""


def profile_text(fitted: FittedRows, rows: Rows, rows_bytes: bytes, *, name: str, subject: Subject) -> str:
    """Return a profile file in the form of docs/profiles.md.

    Args:
        name: of the rows file, to stand in the profile.
        rows_bytes: its bytes, for their digest.
    """
    content = _content(fitted, rows, rows_bytes, name=name, subject=subject)
    head = f"# {subject.model.name} on {subject.gpu.name} under {subject.engine}, fitted to {name}; "
    head += "docs/profiles.md explains every key.\n"
    return head + yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def checked_profile(text: str, *, file: str) -> Profile:
    """Return the profile that the text holds; raises as `dsim.profile_file.parse_profile`."""
    return parse_profile(text.encode(), file=file)


def _content(fitted: FittedRows, rows: Rows, rows_bytes: bytes, *, name: str, subject: Subject) -> dict[str, object]:
    valid = fitted.valid_range
    content: dict[str, object] = {
        "dsim_profile": 1,
        "model": model_entry(subject.model),
        "gpu": gpu_entry(subject.gpu),
        "engine": {"name": subject.engine, "version": subject.engine_version},
        **_evidence(subject),
        "source": _source(rows.metadata, subject.source),
        "valid_range": {**_range(valid), "reason": subject.range_reason},
        "latency": {
            tp: _latency(fit.latency, own=fit.latency.valid_range != valid) for tp, fit in fitted.by_tp.items()
        },
        **{name: dict(subject.sections[name]) for name in ("limits", "p2p") if name in subject.sections},
        "host": _host(rows, fitted.host_step_s) if subject.host is None else dict(subject.host),
        "kv": dict(subject.sections["kv"]) if "kv" in subject.sections else _kv(rows.metadata, fitted, subject),
    }
    saturation = {
        tp: max(round(fit.saturation.tokens.best), 1)
        for tp, fit in fitted.by_tp.items()
        if fit.saturation is not None and math.isfinite(fit.saturation.tokens.best)
    }
    if saturation:
        content["saturation_tokens"] = saturation
    content["fit"] = _fit_section(fitted, name, rows_bytes)
    return content


def _source(metadata: Metadata, source: str) -> str:
    timings = {
        "device": metadata.device,
        "driver": metadata.driver,
        "torch": metadata.torch,
        "dtype": metadata.dtype,
        "date": metadata.date,
        "all-reduce": metadata.all_reduce,
        "licence of the rows:": metadata.licence,
    }
    return source + "".join(f"; {key} {value}" for key, value in timings.items() if value is not None)


def _kv(metadata: Metadata, fitted: FittedRows, subject: Subject) -> dict[str, object]:
    given = metadata.kv_bytes_per_gpu
    bytes_per_gpu = float(given if given is not None else MEMORY_SHARE * subject.gpu.memory_bytes)
    reason = "as the rows file says"
    if given is None:
        reason = f"assumed: {MEMORY_SHARE:.0%} of the GPU's memory for weights and KV cache"
    _refuse_no_room(bytes_per_gpu, sorted(fitted.by_tp), subject.model)
    return {"bytes_per_gpu": bytes_per_gpu, "reason": reason}


def _refuse_no_room(bytes_per_gpu: float, degrees: Sequence[int], model: Model) -> None:
    """Refuse weights that the most GPUs do not hold: of each degree, with a pipeline stage for every layer."""
    if bytes_per_gpu * max(degrees) * model.layers > model.weight_bytes:
        return
    raise InputError(
        "kv",
        f"leaves no room: {model.name} has {model.weight_bytes / 1e9:.1f} GB of weights, and no number of pipeline "
        f"stages of tp {', '.join(map(str, degrees))} holds them at {bytes_per_gpu / 1e9:.1f} GB a GPU",
    )


def _latency(latency: AffineLatency, *, own: bool) -> dict[str, object]:
    p = latency.prefill
    prefill: dict[str, object] = {
        "constant_s": _number(p.constant_s),
        "per_token_s": _number(p.per_token_s),
        "per_token_squared_s": _number(p.per_token_squared_s),
    }
    if p.per_request_s:
        prefill["per_request_s"] = _number(p.per_request_s)
    if p.bends:
        prefill["bends"] = _bends(p.bends, amount="tokens", slope="per_token_s")
    result: dict[str, object] = {"prefill": prefill, "decode": {"small": _decode(latency.small)}}
    if own:
        result["valid_range"] = _range(latency.valid_range)
    return result


def _decode(decode: AffineDecode) -> dict[str, object]:
    result: dict[str, object] = {
        "constant_s": _number(decode.constant_s),
        "per_context_token_s": _number(decode.per_context_token_s),
        "per_request_s": _number(decode.per_request_s),
    }
    if decode.bends:
        result["bends"] = _bends(decode.bends, amount="requests", slope="per_request_s")
    return result


def _bends(bends: Bends, *, amount: str, slope: str) -> list[dict[str, object]]:
    return [_Flow({f"from_{amount}": start, slope: _number(slope_s)}) for start, slope_s in bends]


def _host(rows: Rows, host_step_s: float) -> dict[str, object]:
    if host_step_s:
        reason = "given with the fit and taken out of the constants of every step"
        return {**{role: {"step_s": host_step_s} for role in ("prefill", "decode", "colocated")}, "reason": reason}
    reasons = {
        "included": "the rows time whole engine steps: host work is in the constants and cannot be told from kernels",
        "excluded": "the rows time kernels only, not an engine's host work; add what yours takes a launch",
    }
    default = "the rows do not say whether they include the engine's host work"
    return {"request_s": 0.0, "reason": reasons.get(rows.metadata.host_overhead or "", default)}


def _fit_section(fitted: FittedRows, name: str, rows_bytes: bytes) -> dict[str, object]:
    section: dict[str, object] = {
        "rows": name,
        "rows_sha256": hashlib.sha256(rows_bytes).hexdigest(),
        "reason": _METHOD,
    }
    saturation = {tp: fit.saturation for tp, fit in fitted.by_tp.items() if fit.saturation is not None}
    if saturation:
        section["saturation_tokens"] = {tp: _saturation(found) for tp, found in saturation.items()}
    section["constants"] = {
        tp: {name: _Flow(_interval(fit_, 6)) for name, fit_ in fit.constants.items()}
        for tp, fit in fitted.by_tp.items()
    }
    section["errors"] = [_error(error) for fit in fitted.by_tp.values() for error in fit.errors]
    if fitted.speed_up:
        section["speed_up"] = [_speed_up(k) for k in fitted.speed_up]
    appendix = [_appendix_a(fit) for fit in fitted.by_tp.values() if fit.appendix_a is not None]
    if appendix:
        section["appendix_a"] = appendix
    return section


def _saturation(found: Saturation) -> dict[str, object]:
    """Return Lm with its ends, those left out that the rows do not reach."""
    ends = {key: value for key, value in _interval(found.tokens, 4).items() if value not in (0, math.inf)}
    return _Flow({**ends, "method": found.method})


def _speed_up(k: SpeedUp) -> dict[str, object]:
    shown: dict[str, object] = {"tp": k.tp, "base_tp": k.base_tp, "phase": k.phase, "tokens": k.tokens}
    if k.context_tokens is not None:
        shown["context_tokens"] = _number(k.context_tokens)
    shown |= _interval(k.k, 4)
    if k.comm_share is not None:
        shown["comm_share"] = _number(k.comm_share, 3)
    return _Flow(shown)


def _error(error: FitError) -> dict[str, object]:
    shown: dict[str, object] = {
        "tp": error.tp,
        "phase": error.phase,
        "region": error.region,
        "points": error.points,
        "mean": _number(error.mean, 3),
        "worst": _number(error.worst, 3),
    }
    if not math.isnan(error.r2):
        shown["r2"] = round(error.r2, 5)
    return _Flow(shown)


def _appendix_a(fit: TpFit) -> dict[str, object]:
    found = fit.appendix_a
    if found is None:
        return {}
    constants = {f"c{i}": _number(c) for i, c in enumerate(found.constants, 1)}
    errors = {"prefill_error": _number(found.prefill_error, 3), "decode_error": _number(found.decode_error, 3)}
    return _Flow({"tp": found.tp, **constants, **errors})


def _interval(fit: Fit, digits: int) -> dict[str, object]:
    # Rounding all three alike keeps low <= best <= high.
    return {key: _number(value, digits) for key, value in (("low", fit.low), ("best", fit.best), ("high", fit.high))}


def _range(valid: ValidRange) -> dict[str, object]:
    return {
        "chunk_tokens": int(valid.chunk_tokens),
        "prefill_tokens": int(valid.prefill_tokens),
        "decode_requests": int(valid.decode_requests),
        "context_tokens": int(valid.context_tokens),
    }


def _evidence(subject: Subject) -> dict[str, object]:
    """Return the keys that say how good the numbers are, where there is something to say."""
    measured = subject.evidence is Evidence.MEASURED
    return {
        **({} if measured else {"evidence": subject.evidence.value}),
        **({"expected_error": subject.expected_error} if subject.expected_error else {}),
    }


def _number(value: float, digits: int = 8) -> float:
    """Return the number with so many significant digits."""
    return float(f"{value:.{digits}g}")


class _Flow(dict[str, object]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    """Writes `_Flow` on one line, and floats so that YAML 1.2 reads them as such."""


def _flow(dumper: _Dumper, value: Mapping[str, object]) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", value, flow_style=True)


_Dumper.add_representer(_Flow, _flow)
