"""The latency profiles that come with dsim."""

from __future__ import annotations

from pathlib import Path

from dsim.catalog import find_gpu, find_model, gpus, models
from dsim.errors import InputError, nearest
from dsim.gpu import Gpu
from dsim.model import Model
from dsim.profile import Profile
from dsim.profile_file import load_profile

#: What is meant where nothing is said.
DEFAULT_GPU = "a100-80g"

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
    return load_profile(profile_file(model=model, gpu=gpu, engine=engine))


def shipped_engines(model: Model, gpu: Gpu) -> dict[str, Path]:
    """Return the files of the shipped profiles of a model on a GPU, by engine."""
    stem = f"{model.name}-{gpu.name}-"
    return {name.removeprefix(stem): path for name, path in shipped_profiles() if name.startswith(stem)}


def profile_file(*, model: str, gpu: str, engine: str) -> Path:
    """Return the file of the shipped profile of these names.

    Raises:
        InputError: as `find_profile`.
    """
    known_model, known_gpu = find_model(model), find_gpu(gpu)
    engines = shipped_engines(known_model, known_gpu)
    path = engines.get(engine.strip().lower())
    if path is not None:
        return path
    if engines:
        raise InputError(
            "--engine",
            f"has no latency profile for {known_model.name} on {known_gpu.name}",
            value=engine,
            hint=f"{nearest(engine, engines)} or give --profile FILE",
        )
    pairs = {_split(name) for name, _ in shipped_profiles()}
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
    raise InputError("--model", "has no latency profile", value=known_model.name, hint=hint)


def _split(name: str) -> tuple[str, str]:
    """Return model and GPU of a profile's name."""
    model = max((m.name for m in models() if name.startswith(f"{m.name}-")), key=len)
    gpu = max((g.name for g in gpus() if name.startswith(f"{model}-{g.name}-")), key=len)
    return model, gpu
