"""The device whose kernels are timed: a CUDA GPU by events and graphs, or the CPU by the clock."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dsim.errors import InputError
from profiles.session import OutOfMemoryError, StepFailedError

#: A timing is at least this long, by repeating the run, so that clocks and event marks do not count.
_CUDA_TIMING_S = 1e-3
_CPU_TIMING_S = 4e-3
_MOST_SAMPLES = 30
#: Runs that take longer average over many disturbances themselves: half as many are enough.
_LONG_S = 0.05
#: Queries of nvidia-smi by the name of the setting.
_CLOCKS = {
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "largest_sm_clock": "clocks.max.sm",
    "power_limit": "power.limit",
    "temperature_c": "temperature.gpu",
}


class CaptureError(StepFailedError):
    """A step whose kernels cannot be captured in a CUDA graph."""


class Device(Protocol):
    """Where steps run."""

    @property
    def torch_name(self) -> str:
        """What torch calls it."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of the last cache before memory."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Bytes of its memory."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes that can still be allocated."""
        ...

    def prepared(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return the run warmed up, and as a CUDA graph where there are such.

        Raises:
            CaptureError: there are such, but not of this run.
        """
        ...

    def run_eagerly(self) -> None:
        """Make no more CUDA graphs."""
        ...

    def samples_s(self, run: Callable[[], object], *, seconds: float, at_least: int) -> list[float]:
        """Return the seconds of single runs, timed for about `seconds` but at least so often, half if they are long."""
        ...

    def facts(self) -> dict[str, str]:
        """Return device, driver and torch as texts, for the head of a rows file."""
        ...

    def settings(self) -> dict[str, str | int | float]:
        """Return what else times depend on: clocks, threads, caches."""
        ...

    def release(self) -> None:
        """Give memory that is no longer used back to the device."""
        ...


def open_device(name: str, *, threads: int | None = None) -> Device:
    """Return the device `cpu`, `cuda` or `cuda:N`.

    Args:
        threads: of the CPU; default 1, which other load on the machine disturbs least.

    Raises:
        InputError: there is no such device here.
    """
    if name == "cpu":
        return Cpu(threads or 1)
    if not torch.cuda.is_available():
        raise InputError("--device", "is not there: torch sees no CUDA GPU", value=name, hint="use --device cpu")
    index = int(name.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise InputError("--device", f"is not there: torch sees {torch.cuda.device_count()} GPUs", value=name)
    return Cuda(index)


#: In messages of allocators, of cuBLAS and of cuDNN.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Turn torch's errors into ours."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemoryError("out of memory") from error
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(_first_line(error)) from error
    except (RuntimeError, TypeError, ValueError) as error:
        # Versions of torch differ in what they raise for an argument that a kernel does not take.
        text = _first_line(error)
        if any(sign in str(error).lower() for sign in _OUT_OF_MEMORY):
            raise OutOfMemoryError(text) from error
        raise StepFailedError(text) from error


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU, timed by the wall clock; with one thread by that thread's own clock.

    The two agree on an idle machine. On one that others use too, the thread's clock stops while they have the core.
    """

    threads: int

    def __post_init__(self) -> None:
        torch.set_num_threads(self.threads)

    @property
    def torch_name(self) -> str:
        """What torch calls it."""
        return "cpu"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the last cache before memory, 32 MiB where Linux does not say."""
        sizes = [_size(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        return max(sizes, default=0) or 32 * 2**20

    @property
    def memory_bytes(self) -> int:
        """Bytes of the machine's memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def free_bytes(self) -> int:
        """Return the bytes that nobody uses."""
        if "SC_AVPHYS_PAGES" in os.sysconf_names:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return self.memory_bytes // 2

    def prepared(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return the run, warmed up."""
        run()
        return run

    def run_eagerly(self) -> None:
        """Nothing to do."""

    def samples_s(self, run: Callable[[], object], *, seconds: float, at_least: int) -> list[float]:
        """Return the seconds of single runs."""
        clock = time.thread_time if self.threads == 1 else time.perf_counter

        def timed(times: int) -> float:
            start_s = clock()
            for _ in range(times):
                run()
            return clock() - start_s

        return _sampled(timed, seconds=seconds, at_least=at_least, timing_s=_CPU_TIMING_S)

    def facts(self) -> dict[str, str]:
        """Return processor, operating system and torch."""
        name = platform.processor() or platform.machine()
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("model name"):
                    name = line.partition(":")[2].strip()
                    break
        return {"device": name, "driver": f"{platform.system()} {platform.release()}", "torch": str(torch.__version__)}

    def settings(self) -> dict[str, str | int | float]:
        """Return threads, vector instructions and cache."""
        return {
            "threads": self.threads,
            "clock": "thread" if self.threads == 1 else "wall",
            "cpu_capability": str(torch.backends.cpu.get_cpu_capability()),
            "cache_bytes": self.cache_bytes,
        }

    def release(self) -> None:
        """Nothing to do."""


class Cuda:
    """A CUDA GPU, timed by events around replays of a graph."""

    def __init__(self, index: int) -> None:
        self._index = index
        torch.cuda.set_device(index)
        self._properties = torch.cuda.get_device_properties(index)
        self._captures = True
        # One attention kernel for all shapes: flash where it can, not cuDNN's here and there.
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
        # Each capture collects garbage first: not among all that torch's modules hold.
        gc.freeze()
        self._heat_up()

    @property
    def torch_name(self) -> str:
        """What torch calls it."""
        return f"cuda:{self._index}"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the L2 cache, 64 MiB where torch does not say."""
        return int(getattr(self._properties, "L2_cache_size", 0)) or 64 * 2**20

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory."""
        return int(self._properties.total_memory)

    def free_bytes(self) -> int:
        """Return the bytes that the driver or torch's allocator could still give."""
        free = int(torch.cuda.mem_get_info(self._index)[0])
        return free + int(torch.cuda.memory_reserved(self._index)) - int(torch.cuda.memory_allocated(self._index))

    def prepared(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return the replay of the run's graph, warmed up.

        Raises:
            CaptureError: the run cannot be captured.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        if not self._captures:
            return run
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # Other errors, such as illegal memory accesses, are no matter of graphs.
            if "captur" not in str(error).lower():
                raise
            torch.cuda.synchronize()
            raise CaptureError(_first_line(error)) from error
        replay: Callable[[], object] = graph.replay
        replay()
        torch.cuda.synchronize()
        return replay

    def run_eagerly(self) -> None:
        """Make no more CUDA graphs."""
        self._captures = False

    def samples_s(self, run: Callable[[], object], *, seconds: float, at_least: int) -> list[float]:
        """Return the seconds of single runs."""

        def timed(times: int) -> float:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(times):
                run()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000

        return _sampled(timed, seconds=seconds, at_least=at_least, timing_s=_CUDA_TIMING_S)

    def facts(self) -> dict[str, str]:
        """Return GPU, driver, and torch with its CUDA version."""
        driver = self._asked("driver_version") or "unknown"
        return {
            "device": str(torch.cuda.get_device_name(self._index)),
            "driver": f"NVIDIA {driver}",
            "torch": f"{torch.__version__} CUDA {torch.version.cuda}",
        }

    def settings(self) -> dict[str, str | int | float]:
        """Return clocks under load, power limit, and cache."""
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._asked, ",".join(_CLOCKS.values()))
            self._heat_up(until=answer.done)
            values = [value.strip() for value in answer.result().split(",")]
        clocks = dict(zip(_CLOCKS, values, strict=True)) if len(values) == len(_CLOCKS) else {}
        return {
            **{name: value for name, value in clocks.items() if value},
            "cuda_graphs": "yes" if self._captures else "no",
            "cache_bytes": self.cache_bytes,
            "multiprocessors": int(self._properties.multi_processor_count),
            "capability": f"{self._properties.major}.{self._properties.minor}",
        }

    def release(self) -> None:
        """Give memory that is no longer used back to the device."""
        torch.cuda.empty_cache()

    def _heat_up(self, until: Callable[[], bool] = lambda: True) -> None:
        """Multiply for a third of a second and until something holds, so that clocks are those of work."""
        matrix = torch.randn(4096, 4096, device=self.torch_name, dtype=torch.bfloat16)
        until_s = time.perf_counter() + 0.3
        while time.perf_counter() < until_s or not until():
            for _ in range(10):
                torch.mm(matrix, matrix)
            torch.cuda.synchronize()

    def _asked(self, query: str) -> str:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={self._uuid()}"]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        return run.stdout.strip().splitlines()[0] if run.stdout.strip() else ""

    def _uuid(self) -> str:
        # CUDA_VISIBLE_DEVICES renumbers GPUs for torch but not for nvidia-smi.
        uuid = getattr(self._properties, "uuid", None)
        return str(self._index) if uuid is None else f"GPU-{uuid}"


def _sampled(
    timed: Callable[[int], float],
    *,
    seconds: float,
    at_least: int,
    timing_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return seconds per run; each timing covers so many runs that it is long enough to be measured.

    Args:
        timed: returns the seconds of so many runs, by whichever clock.
        seconds: of `clock`, the wall's, after which no timing is begun.
        at_least: timings, half as many if a run is long.
        timing_s: of one timing, at least.
    """
    until_s = clock() + seconds
    once_s = timed(1)
    times = max(1, round(timing_s / max(once_s, 1e-7)))
    # The first run is part of the warm-up where others follow cheaply.
    samples = [] if times > 1 else [once_s]
    if once_s >= _LONG_S:
        at_least = (at_least + 1) // 2
    while len(samples) < at_least or (clock() < until_s and len(samples) < _MOST_SAMPLES):
        samples.append(timed(times) / times)
    return samples


def _first_line(error: BaseException) -> str:
    lines: list[Any] = str(error).strip().splitlines()
    return str(lines[0])[:200] if lines else type(error).__name__


def _size(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii").strip()
        return int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return 0
