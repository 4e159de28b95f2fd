"""The latency profiles that come with dsim."""

from __future__ import annotations

from pathlib import Path

from dsim.catalog import find_gpu, find_model, gpus, models
from dsim.errors import InputError, nearest
from dsim.profile import Profile
from dsim.profile_file import load_profile

#: What is meant where nothing is said.
DEFAULT_GPU = "a100-80g"
DEFAULT_ENGINE = "distserve"

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


def profile_file(*, model: str | None, gpu: str | None = None, engine: str | None = None) -> Path:
    """Return the file of the shipped profile of these names.

    Without a GPU it is the one DistServe ran on; without an engine DistServe's, or the only one that is known there.

    Raises:
        InputError: as `find_profile`, or no model.
    """
    if model is None:
        hint = "as in --model 13b (dsim models lists them), or give --profile FILE"
        raise InputError("--model", "is needed", hint=hint)
    known_model, known_gpu = find_model(model), find_gpu(DEFAULT_GPU if gpu is None else gpu)
    stem = f"{known_model.name}-{known_gpu.name}-"
    profiles = dict(shipped_profiles())
    engines = [name.removeprefix(stem) for name in profiles if name.startswith(stem)]
    if engine is None:
        engine = engines[0] if len(engines) == 1 else DEFAULT_ENGINE
    path = profiles.get(stem + engine.strip().lower())
    if path is not None:
        return path
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


def choose_profile(
    *, model: str | None = None, gpu: str | None = None, engine: str | None = None, file: Path | None = None
) -> Profile:
    """Return the shipped profile of these names, or the one in `file`, which must then agree with them.

    Raises:
        InputError: no model and no file, no such profile, or a file for something else.
    """
    if file is None:
        return load_profile(profile_file(model=model, gpu=gpu, engine=engine))
    profile = load_profile(file)
    check_agreement(profile, model=model, gpu=gpu, engine=engine)
    return profile


def check_agreement(profile: Profile, *, model: str | None, gpu: str | None, engine: str | None) -> None:
    """Refuse names beside a profile that are not the profile's own.

    Raises:
        InputError: one of them is not.
    """
    own_model, own_gpu = profile.model.name, profile.gpu.name
    if model is not None and model != own_model and find_model(model).name != own_model:
        raise _contradiction("--model", model, f"the profile is for {own_model}")
    if gpu is not None and gpu != own_gpu and find_gpu(gpu).name != own_gpu:
        raise _contradiction("--gpu", gpu, f"the profile is for {own_gpu}")
    if engine is not None and engine != profile.engine:
        raise _contradiction("--engine", engine, f"the profile is for {profile.engine}")


def choose_colocated(used: Profile, *, engine: str | None = None, file: Path | None = None) -> Profile:
    """Return the profile of colocated placements: the measured one where the other engine only runs disaggregated.

    Args:
        used: the profile of the disaggregated ones.

    Raises:
        InputError: both engine and file, no such profile, or one of another model or GPU.
    """
    if file is not None:
        if engine is not None:
            raise InputError(
                "--colocated-engine", "does not go with --colocated-profile", hint="leave one of the two out"
            )
        other = load_profile(file)
        check_beside(used, other, file)
        return other
    if engine is None:
        beside = f"{used.model.name}-{used.gpu.name}-vllm"
        if used.engine != "distserve" or beside not in dict(shipped_profiles()):
            return used
        engine = "vllm"
    if engine == used.engine:
        return used
    try:
        return find_profile(used.model.name, used.gpu.name, engine=engine)
    except InputError as error:
        raise InputError("--colocated-engine", error.rule, value=engine, hint=error.hint) from None


def check_beside(used: Profile, other: Profile, file: Path) -> None:
    """Refuse a colocated profile of another model or GPU.

    Raises:
        InputError: it is of another one.
    """
    for name, mine, theirs in (("model", used.model, other.model), ("GPU", used.gpu, other.gpu)):
        if mine.name != theirs.name:
            rule = f"is for {name} {theirs.name}, the other profile for {mine.name}"
            raise InputError("--colocated-profile", rule, value=str(file), hint="give profiles of the same two")


def _contradiction(option: str, value: str, rule: str) -> InputError:
    return InputError(option, f"contradicts --profile: {rule}", value=value, hint=f"leave {option} out")


def _split(name: str) -> tuple[str, str]:
    """Return model and GPU of a profile's name."""
    model = max((m.name for m in models() if name.startswith(f"{m.name}-")), key=len)
    gpu = max((g.name for g in gpus() if name.startswith(f"{model}-{g.name}-")), key=len)
    return model, gpu
