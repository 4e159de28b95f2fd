"""What several commands read from their options, checked, with the option's name in every error."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from dsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dsim.model import Model
    from dsim.pools import Role
    from dsim.profile import Profile


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


def rate_per_s(text: str, option: str = "--rate") -> float:
    """Return a rate in requests per second, > 0."""
    from dsim.units import parse_rate_per_s

    value = number(option, parse_rate_per_s(text, option), above=0)
    if not 1e-9 <= value <= 1e9:
        raise InputError(
            option, "must be between 1e-9 and 1e9 requests per second", value=text, hint="as in 6 or 90/min"
        )
    return value


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


def described_profiles(profiles: Mapping[Role, Profile], roles: Collection[Role]) -> dict[str, Any]:
    """Return the profile of each role and what its step times rest on."""
    return {
        role.name.lower(): {
            "name": p.name,
            "gpu": p.gpu.name,
            "engine": p.engine,
            "sha256": p.sha256,
            "source": p.source,
            "evidence": p.evidence.value,
            "expected_error": p.expected_error,
        }
        for role, p in profiles.items()
        if role in roles
    }


def evidence_lines(profile: Profile) -> list[str]:
    """Return how good the numbers are, and what of the model is left out."""
    error = f"; expected error of a step {profile.expected_error}" if profile.expected_error else ""
    measured = profile.evidence.value == "measured"
    lines = [f"evidence: {profile.evidence.value}" + (" steps" if measured else ", no measured steps") + error]
    if profile.model.caveat:
        lines.append(f"caveat: {profile.model.caveat}")
    return lines


def source_line(profile: Profile) -> str:
    """Return the profile's name and where its numbers come from."""
    source = textwrap.shorten(profile.source, 120, placeholder=" ...")
    return f"profile {profile.name} [{profile.sha256[:12]}]: {source}"
