"""Groups of options: a dataclass whose fields are options stands for all of them in a command's parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, get_type_hints

from dsim.cli.options import (
    Assignments,
    Config,
    DryRun,
    EngineName,
    EvidenceOption,
    ExpertsOption,
    Format,
    FormatOption,
    GpuName,
    KvDtypeOption,
    ModelName,
    NoColor,
    ProfileFile,
    Quiet,
)
from dsim.options import ExpertSharing, KvDtype

if TYPE_CHECKING:
    from dsim.profile import Profile
    from profiles.choice import Variant
    from profiles.mixed import Wanted

Group = TypeVar("Group")


def grouped(command: Callable[..., int]) -> Callable[..., int]:
    """Return the command with the options of its groups as parameters of their own, which typer reads.

    Fields of a group are options or groups again; a name stands for one option, whichever group it is in.
    """
    hints = get_type_hints(command, include_extras=True)
    own, groups = dict[str, inspect.Parameter](), dict[str, type[Any]]()
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        if _is_group(hint):
            groups[name] = hint
            parameters += _options(hint)
        else:
            own[name] = parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)
            parameters.append(own[name])

    @functools.wraps(command)
    def run(**given: object) -> int:
        built = {name: taken(group, given) for name, group in groups.items()}
        return command(**built, **{name: given[name] for name in own})

    # A name that stands twice is an error here.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def taken(group: type[Group], given: Mapping[str, object]) -> Group:
    """Return a group with the values that are given to its options, and to those of the groups within it."""
    return group(**{name: taken(hint, given) if _is_group(hint) else given[name] for name, hint in _fields(group)})


def _is_group(hint: object) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and is_dataclass(hint)


def _options(group: type[Any]) -> tuple[inspect.Parameter, ...]:
    """Return the options of a group as parameters."""
    defaults = {field.name: field.default for field in fields(group)}
    found: list[inspect.Parameter] = []
    for name, hint in _fields(group):
        if _is_group(hint):
            found += _options(hint)
            continue
        default = inspect.Parameter.empty if defaults[name] is MISSING else defaults[name]
        found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default))
    return tuple(found)


def _fields(group: type[Any]) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(group, include_extras=True)
    return tuple((field.name, hints[field.name]) for field in fields(group))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """How a command that computes something gets its options, and prints what it finds."""

    output_format: FormatOption = Format.TABLE
    config: Config = None
    assignments: Assignments = None
    dry_run: DryRun = False
    quiet: Quiet = False
    no_color: NoColor = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model, the GPU and the step times: names, or a profile of one's own."""

    model: ModelName = None
    gpu: GpuName = None
    engine: EngineName = None
    profile: ProfileFile = None
    evidence: EvidenceOption = None
    experts: ExpertsOption = ExpertSharing.TP
    kv_dtype: KvDtypeOption = KvDtype.AUTO

    @property
    def variant(self) -> Variant:
        """How the model's steps differ from those that were timed."""
        from profiles.choice import Variant

        return Variant(self.experts, self.kv_dtype)

    def wanted(self, colocated_engine: str | None = None) -> Wanted:
        """Return what is asked for of every role."""
        from profiles.mixed import Wanted

        return Wanted(
            model=self.model,
            gpu=self.gpu,
            engine=self.engine,
            profile=self.profile,
            colocated_engine=colocated_engine,
            evidence=self.evidence,
            variant=self.variant,
        )

    def chosen(self) -> Profile:
        """Return the profile.

        Raises:
            InputError: there is none of these names, or the file is of others.
        """
        from profiles.choice import choose_profile

        return choose_profile(
            model=self.model,
            gpu=self.gpu,
            engine=self.engine,
            file=self.profile,
            evidence=self.evidence,
            variant=self.variant,
        )
