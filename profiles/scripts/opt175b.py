"""Writes the shipped profiles of OPT-175B on A100-80GB: `python3 -m profiles.scripts.opt175b`.

Nobody published step times of OPT-175B. Its profiles are the analytic model, calibrated on OPT-13B and OPT-66B only:

    step = scale * analytic + layer_s * layers

with two numbers for each engine and phase, fitted to the published coefficients of both models at every tensor parallel
degree. How far off that is for a model that was not in the fit is known from fitting to one of them and comparing with
the other; it stands in the profile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from scipy.optimize import nnls

from dsim.analytic import AnalyticLatency, analytic_latency
from dsim.catalog import find_gpu, find_model
from dsim.latency import LatencyModel, ValidRange
from dsim.options import Evidence
from dsim.profile_file import load_profile
from profiles.export import Subject, checked_profile, profile_text
from profiles.fit import fit_rows
from profiles.rows import Phase, Point, Row, parse_rows, rows_text

MODEL: Final = "opt-175b"
GPU: Final = "a100-80g"
ENGINES: Final = ("distserve", "vllm")
CALIBRATED_ON: Final = ("opt-13b", "opt-66b")
#: Degrees that divide 96 heads and lie between those that were timed, or are one of them.
DEGREES: Final = (1, 2, 3, 4, 6, 8)
DATA: Final = Path(__file__).parents[1] / "data"
#: Steps that the coefficients are compared on: (prompts, tokens each), (batch, context tokens each).
_PREFILLS: Final = tuple((n, t) for n in (1, 2, 4, 8) for t in (64, 128, 256, 512, 1024, 2000) if n * t <= 8192)
_DECODES: Final = tuple((b, c) for b in (1, 4, 16, 32, 64, 94, 128, 192) for c in (128, 512, 1024))
#: KV tokens of an instance, by degrees: LLMServe/DistServe (Apache-2.0), max_num_tokens.csv.
_CAPACITY: Final = {
    "tp1pp6": 26208,
    "tp1pp8": 59536,
    "tp2pp3": 26208,
    "tp2pp4": 59536,
    "tp2pp6": 126160,
    "tp2pp8": 192800,
    "tp3pp2": 26208,
    "tp3pp3": 76192,
    "tp3pp4": 126160,
    "tp3pp6": 226112,
    "tp3pp8": 326064,
    "tp4pp2": 59520,
    "tp4pp3": 126160,
    "tp4pp4": 192800,
    "tp4pp6": 326064,
    "tp4pp8": 459328,
    "tp6pp1": 26208,
    "tp6pp2": 126160,
    "tp6pp3": 226112,
    "tp6pp4": 326064,
    "tp6pp6": 525968,
    "tp6pp8": 725872,
    "tp8pp1": 59520,
    "tp8pp2": 192784,
    "tp8pp3": 326048,
    "tp8pp4": 459328,
    "tp8pp6": 725856,
    "tp8pp8": 992400,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a calibration.

    Args:
        analytic_s: what the analytic model says.
        published_s: what the published coefficients say.
    """

    layers: int
    analytic_s: float
    published_s: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds of a step: `scale` times the analytic model's, and `layer_s` a layer."""

    scale: float
    layer_s: float

    def step_s(self, analytic_s: float, layers: int) -> float:
        """Seconds of a calibrated step."""
        return self.scale * analytic_s + self.layer_s * layers

    def errors(self, steps: Sequence[Step]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Relative errors against the published steps, shape (steps,)."""
        return np.array([self.step_s(step.analytic_s, step.layers) / step.published_s - 1 for step in steps])


def published_steps(model: str, engine: str, phase: Phase) -> list[Step]:
    """Return the steps of one model that its published coefficients time, with the analytic model's time of each."""
    profile = load_profile(DATA / f"{model}-{GPU}-{engine}.yaml")
    steps = []
    for tp, latency in sorted(profile.latency.items()):
        analytic = analytic_latency(profile.model, profile.gpu, tp)
        for size in _PREFILLS if phase is Phase.PREFILL else _DECODES:
            steps.append(Step(profile.model.layers, _seconds(analytic, phase, *size), _seconds(latency, phase, *size)))
    return steps


def calibrate(steps: Sequence[Step]) -> Calibration:
    """Return the calibration with the least squares of relative errors, neither number negative."""
    published = np.array([step.published_s for step in steps])
    columns = np.array([[step.analytic_s, step.layers] for step in steps])
    (scale, layer_s), _ = nnls(columns / published[:, None], np.ones(len(steps)))
    return Calibration(float(scale), float(layer_s))


def left_out_error(engine: str, phase: Phase) -> float:
    """Return the mean error for a model that was not in the fit: both models in turn."""
    steps = {model: published_steps(model, engine, phase) for model in CALIBRATED_ON}
    errors = [
        np.abs(calibrate(steps[other]).errors(steps[model])).mean()
        for model, other in zip(CALIBRATED_ON, reversed(CALIBRATED_ON), strict=True)
    ]
    return float(np.mean(errors))


def profile_of(engine: str) -> str:
    """Return the profile file of OPT-175B under one engine."""
    model, gpu = find_model(MODEL), find_gpu(GPU)
    like = load_profile(DATA / f"opt-66b-{GPU}-{engine}.yaml")
    calibrations = {
        phase: calibrate([s for name in CALIBRATED_ON for s in published_steps(name, engine, phase)])
        for phase in (Phase.PREFILL, Phase.DECODE)
    }
    valid = next(iter(like.latency.values())).valid_range
    head = {"model": model.name, "gpu": gpu.name, "source": "calibrated analytic model", "all_reduce": "modelled"}
    text = rows_text([row for tp in DEGREES for row in _rows(tp, calibrations, valid)], head)
    name = f"{MODEL}-{GPU}-{engine}.csv"
    data = text.encode()
    rows = parse_rows(data, file=name, model=model, gpu=gpu)
    errors = {phase: left_out_error(engine, phase) for phase in calibrations}
    subject = Subject(
        model=model,
        gpu=gpu,
        engine=engine,
        engine_version=like.engine_version,
        source=_source(calibrations, engine),
        range_reason=f"that of the coefficients of OPT-66B, on which it rests; degrees {', '.join(map(str, DEGREES))}",
        evidence=Evidence.ROOFLINE,
        expected_error=(
            f"about {errors[Phase.PREFILL]:.0%} (prefill), {errors[Phase.DECODE]:.0%} (decode): OPT-13B and OPT-66B, "
            "each from numbers fitted to the other"
        ),
    )
    fitted = profile_text(fit_rows(rows, model=model, gpu=gpu), rows, data, name=name, subject=subject)
    return _completed(fitted, engine)


def _seconds(latency: LatencyModel, phase: Phase, count: int, tokens: int) -> float:
    if phase is Phase.PREFILL:
        return latency.prefill_s([(tokens, 0)] * count)
    return latency.decode_s(count, count * tokens)


_PROMPTS: Final = (16, 64, 128, 256, 512, 768, 1024, 1536, 2048)
_PROMPTS_A_STEP: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_BATCHES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192)
_CONTEXTS: Final = (64, 128, 256, 512, 1024, 2048)


def _rows(tp: int, calibrations: dict[Phase, Calibration], valid: ValidRange) -> Iterator[Row]:
    analytic: AnalyticLatency = analytic_latency(find_model(MODEL), find_gpu(GPU), tp)
    layers = analytic.model.layers
    for tokens in _PROMPTS:
        for count in _PROMPTS_A_STEP:
            if count * tokens <= valid.prefill_tokens:
                seconds = _seconds(analytic, Phase.PREFILL, count, tokens)
                point = Point(Phase.PREFILL.value, tp, count, tokens)
                yield Row(point, calibrations[Phase.PREFILL].step_s(seconds, layers))
    for context in _CONTEXTS:
        for batch in _BATCHES:
            seconds = _seconds(analytic, Phase.DECODE, batch, context)
            point = Point(Phase.DECODE.value, tp, batch, context_tokens=context)
            yield Row(point, calibrations[Phase.DECODE].step_s(seconds, layers))


def _source(calibrations: dict[Phase, Calibration], engine: str) -> str:
    numbers = "; ".join(
        f"{phase.value} {c.scale:.3f} x analytic + {c.layer_s * 1e6:.0f} us a layer"
        for phase, c in calibrations.items()
    )
    return (
        f"analytic model (docs/estimates.md), calibrated on the coefficients of OPT-13B and OPT-66B under {engine} "
        f"(LLMServe/DistServe, Apache-2.0, profiler-{GPU}.{engine}.json): {numbers}; KV capacities: max_num_tokens.csv "
        "of the same"
    )


def _completed(text: str, engine: str) -> str:
    """Return the fitted profile with the sections that step times do not settle, as OPT-66B has them."""
    comment, _, _ = text.partition("\n")
    content = yaml.safe_load(text)
    like = yaml.safe_load((DATA / f"opt-66b-{GPU}-{engine}.yaml").read_text(encoding="utf-8"))
    content["valid_range"]["prefill_tokens"] = like["valid_range"]["prefill_tokens"]
    for key in ("limits", "host", "handover", "preemption"):
        content[key] = {**like[key], "reason": "OPT-66B's, not fitted to anything of OPT-175B; reasons stand there"}
    content["kv"] = {
        "bytes_per_gpu": like["kv"]["bytes_per_gpu"],
        "admission_watermark": like["kv"]["admission_watermark"],
        "reason": "capacities as published; bytes_per_gpu, for degrees not listed, is OPT-66B's",
        "capacity_tokens": dict(_CAPACITY),
    }
    return f"{comment}\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the profiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output-dir", type=Path, default=DATA)
    options = parser.parse_args(arguments)
    for engine in ENGINES:
        text = profile_of(engine)
        file = options.output_dir / f"{MODEL}-{GPU}-{engine}.yaml"
        checked_profile(text, file=str(file))
        file.write_text(text, encoding="utf-8")
        sys.stderr.write(f"{file} written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
