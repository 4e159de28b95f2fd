"""The latency profiles that come with dsim."""

from __future__ import annotations

from pathlib import Path

from dsim.catalog import find_gpu, find_model, gpus, models
from dsim.errors import InputError, nearest
from dsim.profile import Profile
from dsim.profile_file import load_profile

_DATA = Path(__file__).parent / "data"


def shipped_profiles() -> list[tuple[str, Path]]:
    """Return (name, file) of every shipped profile; a name is MODEL-GPU-ENGINE."""
    return [(path.stem, path) for path in sorted(_DATA.glob("*.yaml"))]


def find_profile(model: str, gpu: str, *, engine: str) -> Profile:
    """Return the shipped profile of a model on a GPU under an engine; catalog aliases are understood.

    >>> find_profile("13b", "a100-80g", engine="distserve").name
    'opt-13b-a100-80g-distserve'

    Raises:
        InputError: no such model, GPU or profile.
    """
    known_model, known_gpu = find_model(model), find_gpu(gpu)
    stem = f"{known_model.name}-{known_gpu.name}-"
    profiles = dict(shipped_profiles())
    path = profiles.get(stem + engine.strip().lower())
    if path is not None:
        return load_profile(path)
    engines = [name.removeprefix(stem) for name in profiles if name.startswith(stem)]
    if engines:
        raise InputError(
            "--engine",
            f"has no latency profile for {known_model.name} on {known_gpu.name}",
            value=engine,
            hint=f"{nearest(engine, engines)} or give --profile FILE",
        )
    pairs = {_split(name) for name in profiles}
    others = sorted(gpu for model_name, gpu in pairs if model_name == known_model.name)
    if others:
        raise InputError(
            "--gpu",
            f"has no latency profile for {known_model.name}",
            value=known_gpu.name,
            hint=f"there is one on {', '.join(others)}; or give --profile FILE (docs/profiles.md)",
        )
    known = ", ".join(sorted({model_name for model_name, _ in pairs}))
    hint = f"there are profiles for {known}; or give --profile FILE (docs/profiles.md)"
    if known_model.name == "opt-175b":
        hint = f"a later release models it; {hint}"
        raise InputError("--model", "has no published latency coefficients", value=known_model.name, hint=hint)
    raise InputError("--model", "has no latency profile", value=known_model.name, hint=hint)


def _split(name: str) -> tuple[str, str]:
    """Return model and GPU of a profile's name."""
    model = max((m.name for m in models() if name.startswith(f"{m.name}-")), key=len)
    gpu = max((g.name for g in gpus() if name.startswith(f"{model}-{g.name}-")), key=len)
    return model, gpu
