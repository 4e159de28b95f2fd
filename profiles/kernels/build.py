"""Builds a latency profile from kernel tables: compose, write rows, fit them, export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.model import Model
from dsim.options import Evidence
from profiles.export import Subject, profile_text
from profiles.fit import FittedRows, TpFit, fit_rows
from profiles.kernels.hosts import HOSTS, NOTHING, HostConstants
from profiles.kernels.package import PACKAGE, KernelPackage, check_engine
from profiles.kernels.rows import Reach, composed_rows, kv_tokens
from profiles.kernels.settings import engine_sections, host_section
from profiles.kernels.steps import Kernels, find_steps
from profiles.rows import Row, parse_rows, rows_text
from profiles.shapes import Shape


@dataclass(frozen=True, slots=True)
class Question:
    """What a profile is wanted of.

    Args:
        tps: degrees; those that cannot be composed are left out with a note, unless none is left.
        host: host work; None for what is known of the engine.
    """

    shape: Shape
    gpu: Gpu
    engine: str
    tps: Sequence[int] = (1, 2, 4, 8)
    reach: Reach = field(default_factory=Reach)
    host: HostConstants | None = None

    @property
    def host_constants(self) -> HostConstants:
        """The given ones, else the engine's, else none."""
        return self.host or HOSTS.get(self.engine, NOTHING)


@dataclass(frozen=True, slots=True)
class Built:
    """A profile file and the rows it was fitted to."""

    profile: str
    rows: str


def build(package: KernelPackage, question: Question, *, note: Callable[[str], None]) -> Built:
    """Return the profile of a question.

    Args:
        note: told about degrees that are left out.

    Raises:
        InputError: the tables lack the engine, or kernels of every degree.
    """
    check_engine(package, question.engine)
    rows: list[Row] = []
    kernels: dict[int, Kernels] = {}
    failed: list[InputError] = []
    for tp in question.tps:
        try:
            steps, used = find_steps(package, question.engine, question.shape, question.gpu, tp)
        except InputError as error:
            failed.append(error)
            note(f"tp {tp} is left out: {error}")
            continue
        if kv_tokens(steps, question.gpu) < 1:
            note(f"tp {tp} is left out: {question.shape.model.name} does not fit into {tp} x {question.gpu.name}")
            continue
        kernels[tp] = used
        rows += composed_rows(steps, question.gpu, question.reach)
    if not rows:
        if failed:
            raise failed[-1]
        raise InputError(
            "--tp", "leaves nothing: the model fits into none of these", value=", ".join(map(str, question.tps))
        )
    text = rows_text(rows, _head(package, question, kernels))
    return Built(_profile(question, text), text)


def _head(package: KernelPackage, question: Question, kernels: dict[int, Kernels]) -> dict[str, object]:
    model, gpu = question.shape.model, question.gpu
    used = [source for one in kernels.values() for source in one.sources.values()]
    own = sorted({source.version for source in used if source.engine == question.engine})
    return {
        "model": model.name,
        "gpu": gpu.name,
        "engine": {"name": question.engine, "version": ", ".join(own) or "kernels of other engines"},
        "source": f"composed from kernel times of {PACKAGE} {package.version} ({package.system})",
        "licence": "Apache-2.0",
        "dtype": "bf16",
        "all_reduce": "measured" if any(tp > 1 for tp in kernels) else "none",
        "host_overhead": "excluded",
        "settings": {
            **{f"tp {tp}": str(used) for tp, used in kernels.items()},
            "tables": sorted({table for used in kernels.values() for table in used.tables}),
        },
    }


_DENSE_ERROR = "4 to 8 % beside measured steps (docs/validation.md)"
#: GPUs of which there are measured steps.
_COMPARED = ("a100-80g", "h100-sxm", "h200-sxm")
_EXPERTS_ERROR = "unknown, no measured steps with experts to compare with"
_RANGE = (
    "prompts and batches up to the largest that were timed; contexts up to 131072 tokens a request and up to what the "
    "memory of the GPUs holds: beyond the largest timed product of batch and context, attention is proportional to it. "
    "Nobody timed chunks after cached tokens: they are composed from whole prompts"
)


def expected_error(model: Model, gpu: Gpu) -> str:
    """Return how far off a composed step may be, in words."""
    if model.experts is not None:
        return _EXPERTS_ERROR
    return _DENSE_ERROR if gpu.name in _COMPARED else f"{_DENSE_ERROR}, none of them on {gpu.name}"


def _profile(question: Question, text: str) -> str:
    model, gpu = question.shape.model, question.gpu
    name = f"{model.name}-{gpu.name}-{question.engine}.csv"
    data = text.encode()
    rows = parse_rows(data, file=name, model=model, gpu=gpu)
    host, metadata = question.host_constants, rows.metadata
    fitted = _hosted(fit_rows(rows, model=model, gpu=gpu), host)
    kernels = "; ".join(f"{key}: {used}" for key, used in metadata.settings.items())
    subject = Subject(
        model=model,
        gpu=gpu,
        engine=question.engine,
        engine_version=metadata.engine_version or "unknown",
        source=f"{metadata.source}; {kernels}",
        host=host_section(host),
        sections=engine_sections(model, gpu, question.engine, sorted(fitted.by_tp), fitted.valid_range),
        range_reason=_RANGE,
        evidence=Evidence.KERNELS,
        expected_error=expected_error(model, gpu),
    )
    return profile_text(fitted, rows, data, name=name, subject=subject)


#: Sizes of which the profile keeps K.
_K_TOKENS = frozenset({1, 16, 128, 512, 2048, 8192})


def _hosted(fitted: FittedRows, host: HostConstants) -> FittedRows:
    """Return the fit with the host work of each prompt beside its kernels.

    Intervals and appendix A are left out: composed rows have no noise that they would speak of.
    """

    def hosted(fit: TpFit) -> TpFit:
        prefill = fit.latency.prefill
        prefill = replace(prefill, per_request_s=prefill.per_request_s + host.prompt_s)
        return replace(fit, latency=replace(fit.latency, prefill=prefill), constants={}, appendix_a=None)

    speed_up = tuple(k for k in fitted.speed_up if k.tokens in _K_TOKENS)
    return replace(fitted, by_tp={tp: hosted(fit) for tp, fit in fitted.by_tp.items()}, speed_up=speed_up)
