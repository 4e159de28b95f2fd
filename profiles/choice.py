"""Which latency profile is meant: the one with the best evidence, a shipped one or an estimate, or one's own file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from dsim.catalog import find_gpu, find_model
from dsim.errors import InputError, nearest
from dsim.gpu import Gpu
from dsim.hugging_face import is_config, read_config
from dsim.model import Model
from dsim.options import Evidence, ExpertSharing, KvDtype
from dsim.profile import Profile
from dsim.profile_file import load_profile
from dsim.yamlfile import Field
from profiles.borrow import borrowed_profile
from profiles.estimate import ENGINES, estimated_profile
from profiles.shipped import DEFAULT_GPU, profile_file, shipped_engines, shipped_profiles

#: Engines preferred where none is named and evidence is equal, in this order; then others by name.
_PREFERRED: Final = ("distserve", "vllm")
#: The engine that is estimated where none is named.
_ESTIMATED: Final = "vllm"
#: Evidence, best first.
_RANKS: Final = tuple(Evidence)
_NO_CHANGES: Final[Mapping[str, Field]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Variant:
    """How a model is run where that is not as its profiles were timed; nothing by default.

    Only step times that are estimated know of it.
    """

    experts: ExpertSharing = ExpertSharing.TP
    kv_dtype: KvDtype = KvDtype.AUTO

    def of(self, model: Model) -> Model:
        """Return the model with this KV cache."""
        element_bytes = {KvDtype.AUTO: model.kv_element_bytes, KvDtype.BF16: 2, KvDtype.FP8: 1}[self.kv_dtype]
        return model if element_bytes == model.kv_element_bytes else replace(model, kv_dtype_bytes=element_bytes)

    def changes(self, model: Model) -> str | None:
        """Return the option that makes steps of the model others than those that are timed, None where none does."""
        if self.of(model) is not model:
            return f"--kv-dtype {self.kv_dtype.value}"
        if self.experts is ExpertSharing.EP and model.experts is not None:
            return f"--experts {self.experts.value}"
        return None


AS_TIMED: Final = Variant()


def choose_profile(
    *,
    model: str | None = None,
    gpu: str | None = None,
    engine: str | None = None,
    file: Path | None = None,
    evidence: Evidence | None = None,
    changes: Mapping[str, Field] = _NO_CHANGES,
    variant: Variant = AS_TIMED,
) -> Profile:
    """Return the profile of these names with the best evidence, or the one in `file`, which must agree with them.

    Args:
        changes: values by dotted path that stand instead of those of the file.

    Raises:
        InputError: no model and no file, no such profile, or a file for something else.
    """
    if file is not None:
        profile = load_profile(file, changes)
        check_agreement(profile, model=model, gpu=gpu, engine=engine, evidence=evidence)
        option = variant.changes(profile.model)
        if option is not None:
            name, _, value = option.partition(" ")
            hint = "leave it out, or give a profile of steps that are so"
            raise InputError(name, "does not go with --profile, whose steps are otherwise", value=value, hint=hint)
        return profile
    if model is None:
        hint = "as in --model 13b (dsim models lists them), or give --profile FILE"
        raise InputError("--model", "is needed", hint=hint)
    used_gpu = DEFAULT_GPU if gpu is None else gpu
    return best_profile(model, used_gpu, engine=engine, evidence=evidence, changes=changes, variant=variant)


def best_profile(
    model: str,
    gpu: str,
    *,
    engine: str | None = None,
    evidence: Evidence | None = None,
    changes: Mapping[str, Field] = _NO_CHANGES,
    variant: Variant = AS_TIMED,
) -> Profile:
    """Return the profile with the best evidence: a shipped one, one with another engine's kernels, or an estimate.

    >>> best_profile("13b", "a100-80g").name, best_profile("llama-2-70b", "h100").name
    ('opt-13b-a100-80g-distserve', 'llama-2-70b-h100-sxm-vllm-2023')

    Args:
        model: a name, or the path of a Hugging Face `config.json`.
        engine: None: the one with the best evidence; DistServe's, then vLLM's where that is equal.
        evidence: None: the best there is.
        changes: as of `choose_profile`.

    Raises:
        InputError: no such model or GPU, or no profile with this evidence.
    """
    named = not is_config(model)
    known_model = find_model(model) if named else read_config(Path(model))
    known_gpu = find_gpu(gpu)
    wanted = None if engine is None else engine.strip().lower()
    option = variant.changes(known_model)
    if option is None and named:
        found = _timed(known_model, known_gpu, engine=wanted, evidence=evidence, changes=changes)
        if found is not None:
            return found
    if evidence not in {None, Evidence.ROOFLINE}:
        raise _none_with(evidence, known_model, known_gpu, engine=engine, option=option)
    if engine is not None and wanted not in ENGINES and named and evidence is None and option is None:
        rule = f"has no latency profile for {known_model.name} on {known_gpu.name}"
        known = nearest(engine, {**shipped_engines(known_model, known_gpu), **ENGINES})
        raise InputError("--engine", rule, value=engine, hint=f"{known} or give --profile FILE")
    used = _ESTIMATED if wanted is None else wanted
    return _estimated(known_model, known_gpu, engine=used, changes=changes, variant=variant)


def _timed(
    model: Model, gpu: Gpu, *, engine: str | None, evidence: Evidence | None, changes: Mapping[str, Field]
) -> Profile | None:
    """Return the best profile that is shipped, or one with another engine's kernels if that is better."""
    path = None
    if evidence is not Evidence.OTHER_KERNELS:
        path = _best_shipped(model, gpu, engine=engine, evidence=evidence)
    if path is not None and load_profile(path).evidence is not Evidence.ROOFLINE:
        return load_profile(path, changes)
    if engine is not None and engine in ENGINES and evidence in {None, Evidence.OTHER_KERNELS}:
        others = _best_shipped(model, gpu, engine=None, evidence=Evidence.KERNELS, but=engine)
        if others is not None:
            return borrowed_profile(load_profile(others, changes), engine)
    return None if path is None else load_profile(path, changes)


def _none_with(
    evidence: Evidence | None, model: Model, gpu: Gpu, *, engine: str | None, option: str | None
) -> InputError:
    what = f"{model.name} on {gpu.name}" + ("" if engine is None else f" under {engine}")
    what += "" if option is None else f" with {option}"
    hint = "leave it out for the best there is, or give --profile FILE (docs/profiles.md)"
    if evidence is Evidence.OTHER_KERNELS and engine is None:
        hint = "name the engine that has none of its own, as in --engine sglang"
    value = None if evidence is None else evidence.value
    return InputError("--evidence", f"has no profile of {what}", value=value, hint=hint)


def choose_colocated(
    used: Profile,
    *,
    engine: str | None = None,
    file: Path | None = None,
    changes: Mapping[str, Field] = _NO_CHANGES,
    variant: Variant = AS_TIMED,
) -> Profile:
    """Return the profile of colocated placements: the measured one where the other engine only runs disaggregated.

    Args:
        used: the profile of the disaggregated ones.
        changes: as of `choose_profile`.

    Raises:
        InputError: both engine and file, no such profile, or one of another model or GPU.
    """
    if file is not None:
        if engine is not None:
            raise InputError(
                "--colocated-engine", "does not go with --colocated-profile", hint="leave one of the two out"
            )
        other = load_profile(file, changes)
        _check_beside(used, other, file)
        return other
    if engine is None:
        beside = f"{used.model.name}-{used.gpu.name}-vllm"
        if used.engine != "distserve" or beside not in dict(shipped_profiles()):
            return used
        engine = "vllm"
    if engine == used.engine:
        return used
    wanted, forced = engine.strip().lower(), None if used.evidence is not Evidence.ROOFLINE else Evidence.ROOFLINE
    try:
        if variant == AS_TIMED:
            found = _timed(used.model, used.gpu, engine=wanted, evidence=forced, changes=changes)
            if found is not None:
                return found
        if forced is not None:
            return _estimated(used.model, used.gpu, engine=wanted, changes=changes, variant=variant)
        return load_profile(profile_file(model=used.model.name, gpu=used.gpu.name, engine=engine), changes)
    except InputError as error:
        if error.where not in {"--engine", "--gpu", "--model"}:
            raise
        raise InputError("--colocated-engine", error.rule, value=engine, hint=error.hint) from None


def check_agreement(
    profile: Profile,
    *,
    model: str | None = None,
    gpu: str | None = None,
    engine: str | None = None,
    evidence: Evidence | None = None,
) -> None:
    """Refuse names beside a profile that are not the profile's own.

    Raises:
        InputError: one of them is not.
    """
    own_model, own_gpu = profile.model.name, profile.gpu.name
    if evidence is not None and evidence is not profile.evidence:
        raise _contradiction("--evidence", evidence.value, f"its evidence is {profile.evidence.value}")
    if model is not None and model != own_model and _model_name(model) != own_model:
        raise _contradiction("--model", model, f"the profile is for {own_model}")
    if gpu is not None and gpu != own_gpu and find_gpu(gpu).name != own_gpu:
        raise _contradiction("--gpu", gpu, f"the profile is for {own_gpu}")
    if engine is not None and engine != profile.engine:
        raise _contradiction("--engine", engine, f"the profile is for {profile.engine}")


def _best_shipped(
    model: Model, gpu: Gpu, *, engine: str | None, evidence: Evidence | None, but: str | None = None
) -> Path | None:
    """Return the file with the best evidence, of one engine or of any but one; None where there is none."""
    known = {name: path for name, path in shipped_engines(model, gpu).items() if name != but}
    if engine is not None:
        known = {engine: known[engine]} if engine in known else {}
    found = []
    for name, path in known.items():
        its_evidence = load_profile(path).evidence
        if evidence in {None, its_evidence}:
            preference = _PREFERRED.index(name) if name in _PREFERRED else len(_PREFERRED)
            found.append((_RANKS.index(its_evidence), preference, name, path))
    return min(found)[-1] if found else None


def _estimated(
    model: Model, gpu: Gpu, *, engine: str, changes: Mapping[str, Field], variant: Variant = AS_TIMED
) -> Profile:
    if changes:
        rule = f"changes a profile file, and step times of {model.name} on {gpu.name} are estimated without one"
        raise InputError("--profile-set", rule, hint="give profile FILE")
    return estimated_profile(variant.of(model), gpu, engine=engine, experts=variant.experts)


def _check_beside(used: Profile, other: Profile, file: Path) -> None:
    """Refuse a colocated profile of another model or GPU."""
    for name, mine, theirs in (("model", used.model, other.model), ("GPU", used.gpu, other.gpu)):
        if mine.name != theirs.name:
            rule = f"is for {name} {theirs.name}, the other profile for {mine.name}"
            raise InputError("--colocated-profile", rule, value=str(file), hint="give profiles of the same two")


def _model_name(model: str) -> str:
    """Return the name of the model that `--model` names."""
    return read_config(Path(model)).name if is_config(model) else find_model(model).name


def _contradiction(option: str, value: str, rule: str) -> InputError:
    return InputError(option, f"contradicts --profile: {rule}", value=value, hint=f"leave {option} out")
