"""What several commands read from their options, checked, with the option's name in every error."""

from __future__ import annotations

import math
import os
import textwrap
from typing import TYPE_CHECKING, Any

from dsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dsim.model import Model
    from dsim.pools import Placement, Role
    from dsim.profile import Profile
    from dsim.slo import Slo


def whole(option: str, value: int, *, at_least: int, at_most: int = 1_000_000_000) -> int:
    """Return the number; InputError where it is out of range."""
    if value < at_least:
        raise InputError(option, f"must be >= {at_least}", value=value)
    if value > at_most:
        raise InputError(option, f"must be <= {at_most}", value=value)
    return value


def seed_of(value: int) -> int:
    """Return the seed that `--seed` gives."""
    return whole("--seed", value, at_least=0, at_most=2**32 - 1)


def workers_of(jobs: int | None) -> int:
    """Return the processes that `--jobs` asks for: without it one for each core that this process may use."""
    if jobs is not None:
        return whole("--jobs", jobs, at_least=1, at_most=1024)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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

    >>> number_of(1, "GPU"), number_of(8, "GPU"), number_of(147_224, "placement")
    ('1 GPU', '8 GPUs', '147,224 placements')
    """
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


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
    found = {}
    for role, p in profiles.items():
        if role in roles:
            own = described_profile(p)
            found[role.name.lower()] = {"name": own.pop("name"), "gpu": p.gpu.name, "engine": p.engine, **own}
    return found


def described_profile(profile: Profile) -> dict[str, Any]:
    """Return the name of a profile and what its step times rest on."""
    return {
        "name": profile.name,
        "sha256": profile.sha256,
        "source": profile.source,
        "evidence": profile.evidence.value,
        "expected_error": profile.expected_error,
    }


def described_slo(slo: Slo) -> dict[str, float | None]:
    """Return the limits, seconds."""
    return {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s}


def check_runs(text: str, placement: Placement, profiles: Mapping[Role, Profile]) -> None:
    """See that a placement can run.

    Args:
        text: as the option has it.

    Raises:
        InputError: it cannot, with every reason.
    """
    from placement.feasibility import cannot_run

    reasons = cannot_run(placement, profiles)
    if reasons:
        raise not_runnable(text, reasons)


def not_runnable(text: str, reasons: Sequence[str]) -> InputError:
    """Return the error that says why a placement cannot run."""
    hint = "change the parallel degrees, or give a --profile that has them"
    return InputError("--placement", "cannot run: " + "; ".join(dict.fromkeys(reasons)), value=text, hint=hint)


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
