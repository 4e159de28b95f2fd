"""`dsim profile run` without the command line: what is asked for, the points it means, and the run itself."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsim.catalog import find_gpu
from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.version import __version__
from profiles.allreduce import TIMED_BYTES, AllReduceModel, AllReduces
from profiles.entries import model_entry
from profiles.grid import PHASES, CostModel, Limits, make_grid
from profiles.rows import Point
from profiles.session import (
    NothingTimedError,
    Outcome,
    Progress,
    RowsFile,
    Session,
    StepFailedError,
    check_output,
)
from profiles.shapes import DTYPE_BYTES, Shape

if TYPE_CHECKING:
    from profiles.profiler import TorchTimer
    from profiles.profiler.device import Device

#: What engines leave to weights and KV cache (vLLM's gpu_memory_utilization); of a CPU's memory, others want some too.
_MEMORY_SHARE = {"cuda": 0.9, "cpu": 0.5}
#: One rank's weights take no more of its memory than this; else the model runs on several pipeline stages.
_WEIGHTS_SHARE = 0.6
#: Largest steps by default: what engines batch by default on GPUs; what a core does in a second.
_DEFAULTS = {
    "cuda": {"prefill_tokens": 16384, "prefill_requests": 32, "decode_requests": 256, "context_tokens": 16384},
    "cpu": {"prefill_tokens": 2048, "prefill_requests": 8, "decode_requests": 32, "context_tokens": 2048},
}


#: Rows of each point by default: other programs disturb a CPU for seconds at a time, and hardly a GPU.
_ROUNDS = {"cuda": 3, "cpu": 5}
#: How to get torch.
INSTALL = "pip install '.[profile]' in the repository"
#: GPUs without a datasheet of their own, by how they call themselves, and one whose bounds hold for them too.
_LIKE = {
    # The same memory; its power limit allows fewer FLOP/s.
    "nvidia h200 nvl": "h200-sxm",
    # The same chip and memory.
    "nvidia a100-pcie-40gb": "a100-40g",
}


@dataclass(frozen=True, slots=True)
class Largest:
    """The user's own ends of the grid; None means the default of the device."""

    prefill_tokens: int | None = None
    decode_requests: int | None = None
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be timed.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
        gpu: its datasheet, for the grid, modelled all-reduces and the head of the file.
        dtype: `bf16`, `fp16` or `fp32`.
        all_reduce: instead of timing or assuming it.
        rounds: rows of each point at most; None means the default of the device.
    """

    shape: Shape
    gpu: Gpu
    device: str
    tps: tuple[int, ...]
    dtype: str
    phases: tuple[str, ...] = PHASES
    largest: Largest = Largest()
    all_reduce: AllReduceModel | None = None
    rounds: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for tp in self.tps:
            self.shape.rank(tp)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a weight and of a KV element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def limits(self) -> Limits:
        """The ends of the grid."""
        defaults = _DEFAULTS[self._kind]
        longest = self.shape.model.context_tokens
        prefill_tokens = self.largest.prefill_tokens or defaults["prefill_tokens"]
        context_tokens = min(self.largest.context_tokens or defaults["context_tokens"], longest)
        return Limits(
            prompt_tokens=min(max(prefill_tokens, context_tokens), longest),
            prefill_tokens=prefill_tokens,
            prefill_requests=defaults["prefill_requests"],
            decode_requests=self.largest.decode_requests or defaults["decode_requests"],
            context_tokens=context_tokens,
            kv_tokens={tp: self._kv_tokens(tp) for tp in self.tps},
        )

    @property
    def most_rounds(self) -> int:
        """Rows of each point at most."""
        return self.rounds or _ROUNDS[self._kind]

    def levels(self) -> list[list[Point]]:
        """Return the points to time, most telling first."""
        return make_grid(
            self.shape,
            self.gpu,
            tps=self.tps,
            limits=self.limits,
            dtype_bytes=self.dtype_bytes,
            phases=self.phases,
        )

    def kv_bytes_per_gpu(self, memory_bytes: float) -> float:
        """Return the bytes for weights and KV cache of a device that has so much memory."""
        return _MEMORY_SHARE[self._kind] * memory_bytes

    @property
    def _kind(self) -> str:
        return self.device.partition(":")[0]

    def _kv_tokens(self, tp: int) -> float:
        memory = self.kv_bytes_per_gpu(self.gpu.memory_bytes)
        weights = self.shape.weight_bytes(tp, self.dtype_bytes)
        pp = 1
        while weights / pp > _WEIGHTS_SHARE * memory:
            pp *= 2
        return (memory - weights / pp) / (self.shape.kv_bytes_per_token(tp, self.dtype_bytes) / pp)


def gpu_of(name: str | None, *, device: str) -> Gpu:
    """Return the datasheet of the device: the one named, the CPU's stand-in, or what the GPU's own name says.

    Raises:
        InputError: the name is unknown, or none is given and the device's own is not in the catalog.
    """
    if name is not None:
        return find_gpu(name)
    if device == "cpu":
        return find_gpu("cpu")
    if not has_torch():
        raise InputError("--gpu", "is needed: without torch nobody can ask the device", hint="dsim gpus lists them")
    from profiles.profiler.device import open_device

    return _gpu_called(open_device(device).facts()["device"])


def _gpu_called(own: str) -> Gpu:
    """Return the datasheet of the GPU that calls itself so."""
    if " mig " in f" {own.lower()} ":
        raise InputError(
            "--gpu",
            f"is needed: {own!r} is a slice of a GPU, which has no datasheet",
            hint="name a GPU that is no slower in anything, such as the whole one",
        )
    try:
        return find_gpu(_LIKE.get(own.strip().lower(), own))
    except InputError:
        raise InputError("--gpu", f"is needed: the catalog has no {own!r}", hint="dsim gpus lists them") from None


def has_torch() -> bool:
    """Return whether torch is installed, without importing it."""
    try:
        return importlib.util.find_spec("torch") is not None
    except ValueError:
        return False


def profile(
    question: Question,
    out: Path,
    *,
    budget_s: float,
    progress: Progress,
    resume: bool = False,
    overwrite: bool = False,
    started_s: float | None = None,
    timed_all_reduces: dict[int, Mapping[int, float]] | None = None,
) -> Outcome:
    """Time the question's points into the rows file `out`.

    Args:
        budget_s: wall-clock seconds in all, from `started_s` (of `time.monotonic`; default: now) on.
        timed_all_reduces: seconds by bytes by TP degree, timed before; those timed now are added.

    Raises:
        InputError: torch or the device is missing, or the file cannot be written or resumed.
        OutOfMemoryError, StepFailedError: the device cannot run the model.
        NothingTimedError: the budget is too short for any point.
    """
    started_s = time.monotonic() if started_s is None else started_s
    check_output(out, resume=resume, overwrite=overwrite)
    if not has_torch():
        raise InputError("dsim profile run", "needs torch, which is not installed", hint=INSTALL)
    progress.update(elapsed_s=time.monotonic() - started_s, budget_s=budget_s, rows=0, text="preparing")
    until_s = started_s + budget_s
    timer, device = _prepared(question, until_s=until_s)
    all_reduces, failures = _all_reduces(question, {} if timed_all_reduces is None else timed_all_reduces, until_s)
    head = _head(question, timer, device, all_reduces, failures, budget_s=budget_s)
    if resume:
        file = RowsFile.resume(out, head)
    else:
        file = RowsFile.create(out, head, overwrite=overwrite)
    session = Session(
        timer=timer,
        file=file,
        cost=_cost(question),
        all_reduces=all_reduces,
        budget_s=budget_s,
        started_s=started_s,
        clock=time.monotonic,
        progress=progress,
        rounds=question.most_rounds,
    )
    outcome = session.run(question.levels())
    if not outcome.timed:
        if not file.rows:
            out.unlink()
        raise NothingTimedError(f"nothing was timed within {budget_s:.3g} s; give more time, or a smaller model")
    return outcome


def _prepared(question: Question, *, until_s: float) -> tuple[TorchTimer, Device]:
    """Return the timer, with weights and kernels that work, and the device.

    Raises:
        NothingTimedError: that alone takes longer than until `until_s`.
    """
    from profiles.profiler import TorchTimer, open_device

    device = open_device(question.device, threads=question.threads)
    timer = TorchTimer(question.shape, device, dtype=question.dtype)
    needed_s, left_s = timer.setup_s(question.tps, _cost(question).step_s), until_s - time.monotonic()
    if needed_s > left_s:
        raise NothingTimedError(
            f"making weights of {question.shape.model.name} and a first step take about {needed_s:.0f} s, "
            f"{max(left_s, 0):.0f} s are left; give more time, or a smaller model"
        )
    timer.probe(question.tps)
    return timer, device


def _cost(question: Question) -> CostModel:
    gpu = question.gpu
    return CostModel(
        question.shape, question.dtype_bytes, flops_per_s=gpu.bf16_flops_per_s, bytes_per_s=gpu.hbm_bytes_per_s
    )


def _all_reduces(
    question: Question, timed_before: dict[int, Mapping[int, float]], until_s: float
) -> tuple[AllReduces, dict[int, str]]:
    """Return the all-reduces of all degrees, and why some are modelled although there are GPUs enough."""
    timed: dict[int, Mapping[int, float]] = {}
    models: dict[int, AllReduceModel] = {}
    failures: dict[int, str] = {}
    for tp in question.tps:
        if tp == 1:
            continue
        if question.all_reduce is not None:
            models[tp] = question.all_reduce
            continue
        try:
            seconds = timed_before.get(tp) or _timed_all_reduces(question, tp, until_s)
        except StepFailedError as error:
            failures[tp], seconds = str(error), None
        if seconds is None:
            models[tp] = AllReduceModel.modelled(question.gpu, tp)
        else:
            timed[tp] = timed_before[tp] = seconds
    return AllReduces(question.shape, question.dtype_bytes, timed, models), failures


def _timed_all_reduces(question: Question, tp: int, until_s: float) -> Mapping[int, float] | None:
    from profiles.profiler.collective import available, time_all_reduces

    if not available(tp, question.device):
        return None
    # Starting processes takes seconds, but no run may wait for a network that does not answer.
    timeout_s = min(60.0, max(until_s - time.monotonic(), 0.0) / 4)
    return time_all_reduces(tp, TIMED_BYTES, timeout_s=timeout_s)


def _head(
    question: Question,
    timer: TorchTimer,
    device: Device,
    all_reduces: AllReduces,
    failures: Mapping[int, str],
    *,
    budget_s: float,
) -> dict[str, object]:
    facts = device.facts()
    return {
        "model": model_entry(question.shape.model, dtype_bytes=question.dtype_bytes),
        "gpu": question.gpu.name,
        "engine": {"name": "kernels", "version": f"torch {facts['torch']}"},
        "source": f"dsim profile run, dsim {__version__}: random weights at the model's sizes, one rank at a time",
        "dtype": question.dtype,
        **facts,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "all_reduce": all_reduces.kind,
        "host_overhead": "excluded",
        "kv_bytes_per_gpu": round(question.kv_bytes_per_gpu(min(device.memory_bytes, question.gpu.memory_bytes))),
        "settings": {
            "dsim": __version__,
            "budget_s": budget_s,
            "rounds": question.most_rounds,
            "tp": list(question.tps),
            "phases": list(question.phases),
            "largest_prefill_tokens": question.limits.prefill_tokens,
            "largest_decode_requests": question.limits.decode_requests,
            "largest_context_tokens": question.limits.context_tokens,
            "memory_bytes": device.memory_bytes,
            **timer.settings(),
            **all_reduces.settings(),
            **{f"all_reduce_tp{tp}_not_timed": reason for tp, reason in failures.items()},
        },
    }


def parse_tps(text: str, *, where: str = "--tp") -> tuple[int, ...]:
    """Return the TP degrees in a comma-separated list, smallest first.

    >>> parse_tps("4,1,2")
    (1, 2, 4)

    Raises:
        InputError: one is no whole number from 1 to 1024, or stands twice.
    """
    degrees = []
    for word in text.split(","):
        digits = word.strip()
        if not (digits.isascii() and digits.isdigit() and 1 <= int(digits[:9]) <= 1024):
            raise InputError(where, "must be whole numbers from 1 to 1024", value=text, hint="as in 1,2,4")
        degrees.append(int(digits))
    if len(set(degrees)) < len(degrees):
        raise InputError(where, "has a degree twice", value=text)
    return tuple(sorted(degrees))


def parse_phases(text: str, *, where: str = "--phases") -> tuple[str, ...]:
    """Return the phases in a comma-separated list.

    Raises:
        InputError: one is unknown.
    """
    words = tuple(word.strip() for word in text.split(","))
    for word in words:
        if word not in PHASES:
            raise InputError(where, "is not a phase", value=word, hint=f"expected some of {','.join(PHASES)}")
    return words


def parse_device(text: str, *, where: str = "--device") -> str:
    """Return the device's name as torch has it.

    Raises:
        InputError: it is neither `cpu` nor `cuda` nor `cuda:N`.
    """
    name, _, index = text.strip().lower().partition(":")
    if name not in ("cpu", "cuda") or (index and (name == "cpu" or not (index.isascii() and index.isdigit()))):
        raise InputError(where, "is not known", value=text, hint="expected cpu, cuda or cuda:N")
    return f"{name}:{int(index[:6])}" if index else name


def default_dtype(shape: Shape, device: str) -> str:
    """Return the type that the model has on this device: 16 bits only where hardware has them."""
    return "fp32" if device == "cpu" or shape.model.dtype_bytes == 4 else "bf16"
