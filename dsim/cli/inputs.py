"""What several commands read from their options, checked, with the option's name in every error."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from dsim.cli.options import EvidenceChoice, PrefillBatching
from dsim.errors import InputError

if TYPE_CHECKING:
    from dsim.model import Model
    from dsim.profile import Profile

DEFAULT_GPU = "a100-80g"

#: The library names what it was given; users know it by the option.
_OPTIONS = {
    "arrivals": "--arrivals",
    "closed loop": "--closed-loop",
    "fixed lengths": "--workload",
    "lognormal lengths": "--workload",
    "options": "--prefill-batching",
    "rate": "--rate",
    "requests": "--requests",
    "seed": "--seed",
    "sharegpt": "--workload",
    "humaneval": "--workload",
    "longbench": "--workload",
    "uniform lengths": "--workload",
    "window": "--requests",
}


def whole(option: str, value: int, *, at_least: int, at_most: int = 1_000_000_000) -> int:
    """Return the number; InputError where it is out of range."""
    if value < at_least:
        raise InputError(option, f"must be >= {at_least}", value=value)
    if value > at_most:
        raise InputError(option, f"must be <= {at_most}", value=value)
    return value


def number(option: str, value: float, *, above: float = -math.inf, at_least: float = -math.inf) -> float:
    """Return the number; InputError where it is not finite or out of range."""
    if not math.isfinite(value):
        raise InputError(option, "must be a finite number", value=value)
    if value <= above:
        raise InputError(option, f"must be > {above:g}", value=value)
    if value < at_least:
        raise InputError(option, f"must be >= {at_least:g}", value=value)
    return value


def seconds(option: str, text: str) -> float:
    """Return a duration in seconds, >= 0."""
    from dsim.units import parse_duration_s

    return number(option, parse_duration_s(text, option), at_least=0)


def share(option: str, text: str) -> float:
    """Return a share between 0 and 1, both excluded, written as such or in per cent."""
    from dsim.units import split_quantity

    hint = "as in 0.9 or 90%"
    value, unit = split_quantity(text, option, hint=hint)
    if unit not in (None, "%"):
        raise InputError(option, f"has an unknown unit {unit!r}", value=text, hint=hint)
    value = value / 100 if unit == "%" else value
    if not 0 < value < 1:
        raise InputError(option, "must be above 0 and below 1", value=text, hint=hint)
    return value


def rate_per_s(text: str, option: str = "--rate") -> float:
    """Return a rate in requests per second, > 0."""
    from dsim.units import parse_rate_per_s

    value = number(option, parse_rate_per_s(text, option), above=0)
    if not 1e-9 <= value <= 1e9:
        raise InputError(
            option, "must be between 1e-9 and 1e9 requests per second", value=text, hint="as in 6 or 90/min"
        )
    return value


def profile_of(
    *,
    model: str | None,
    gpu: str | None,
    engine: str | None,
    file: Path | None,
    evidence: EvidenceChoice | None = None,
) -> Profile:
    """Return the profile of these names with the best evidence, or the one in `file`, which must agree with them."""
    from dsim.catalog import find_gpu
    from dsim.profile import Evidence
    from dsim.profile_file import load_profile

    if file is None:
        if model is None:
            raise InputError(
                "--model", "is needed", hint="as in --model 13b (dsim models lists them), or give --profile FILE"
            )
        from profiles.estimate import best_profile

        wanted = None if evidence is None else Evidence(evidence.value)
        return best_profile(model, DEFAULT_GPU if gpu is None else gpu, engine=engine, evidence=wanted)
    profile = load_profile(file)
    if evidence is not None and evidence.value != profile.evidence.value:
        raise _contradiction("--evidence", evidence.value, f"its evidence is {profile.evidence.value}")
    if model is not None and model != profile.model.name and _model_name(model) != profile.model.name:
        raise _contradiction("--model", model, f"the profile is for {profile.model.name}")
    if gpu is not None and gpu != profile.gpu.name and find_gpu(gpu).name != profile.gpu.name:
        raise _contradiction("--gpu", gpu, f"the profile is for {profile.gpu.name}")
    if engine is not None and engine != profile.engine:
        raise _contradiction("--engine", engine, f"the profile is for {profile.engine}")
    return profile


def prefill_limit(batching: PrefillBatching, profile: Profile) -> int | None:
    """Return the most tokens of a prefill batch, None for the engine's own limit."""
    if batching is PrefillBatching.ENGINE:
        return None
    if profile.saturation_tokens is None:
        raise InputError(
            "--prefill-batching",
            f"needs Lm, which profile {profile.name} does not have",
            value=batching.value,
            hint="add saturation_tokens to the profile, or use engine",
        )
    return profile.saturation_tokens


def by_option(error: InputError) -> InputError:
    """Return the error with the option's name where the library named what it was given."""
    option = _OPTIONS.get(error.where)
    if option is None:
        return error
    return InputError(option, error.rule, name=error.name, value=error.value, hint=error.hint)


def number_of(number: int, noun: str) -> str:
    """Return a number of things.

    >>> number_of(1, "GPU"), number_of(8, "GPU")
    ('1 GPU', '8 GPUs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def display_name(model: Model) -> str:
    """Return the model's name as people write it.

    >>> from dsim.catalog import find_model
    >>> display_name(find_model("13b")), display_name(find_model("llama-3.1-8b"))
    ('OPT-13B', 'Llama-3.1-8B')
    """
    if model.name.startswith("gpt-oss"):
        return model.name
    words = {
        "opt": "OPT",
        "glm": "GLM",
        "fp8": "FP8",
        "deepseek": "DeepSeek",
        "minimax": "MiniMax",
        "codellama": "CodeLlama",
    }
    parts = model.name.split("-")
    return "-".join(
        words.get(part) or (part.upper() if part[:1].isdigit() or part[1:2].isdigit() else part.capitalize())
        for part in parts
    )


def introduction(profile: Profile, *, asked: str | None) -> list[str]:
    """Return the lines that say what a name was taken for and where the numbers come from."""
    model = profile.model
    name = display_name(model)
    first = f"{asked} = {name} ({model.hugging_face})" if asked else f"{name} ({model.hugging_face})"
    return [
        f"{first} on {profile.gpu.name}, engine {profile.engine} ({profile.engine_version})",
        source_line(profile),
        *evidence_lines(profile),
    ]


def evidence_lines(profile: Profile) -> list[str]:
    """Return how good the numbers are, where they are not measured steps, and what of the model is left out."""
    lines = []
    if profile.evidence.value != "measured":
        error = f"; expected error of a step {profile.expected_error}" if profile.expected_error else ""
        lines.append(f"evidence: {profile.evidence.value}, no measured steps{error}")
    if profile.model.caveat:
        lines.append(f"caveat: {profile.model.caveat}")
    return lines


def source_line(profile: Profile) -> str:
    """Return the profile's name and where its numbers come from."""
    source = textwrap.shorten(profile.source, 120, placeholder=" ...")
    return f"profile {profile.name} [{profile.sha256[:12]}]: {source}"


def _model_name(model: str) -> str:
    """Return the name of the model that `--model` names."""
    from dsim.catalog import find_model
    from dsim.hugging_face import is_config, read_config

    return read_config(Path(model)).name if is_config(model) else find_model(model).name


def _contradiction(option: str, value: str, rule: str) -> InputError:
    return InputError(option, f"contradicts --profile: {rule}", value=value, hint=f"leave {option} out")
