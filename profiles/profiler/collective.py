"""Times all-reduces between this machine's GPUs (NCCL), or between processes on its CPU (Gloo)."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from profiles.session import StepFailedError

#: All-reduces between two marks, so that starting and stopping does not count.
_IN_A_ROW = 20
_REPEATS = 5
#: What torch raises for a process that failed; no kind of RuntimeError.
_PROCESS_ERRORS = (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException)


def available(tp: int, device: str) -> bool:
    """Return whether this machine has GPUs enough to time all-reduces over `tp` of them."""
    return device.startswith("cuda") and torch.cuda.device_count() >= tp and bool(dist.is_nccl_available())


def time_all_reduces(
    tp: int, sizes_bytes: Sequence[int], *, backend: str = "nccl", timeout_s: float = 60.0
) -> dict[int, float]:
    """Return the seconds of one all-reduce of each size over `tp` processes, each with its own GPU under NCCL.

    Raises:
        StepFailedError: the processes cannot be started, cannot reach each other, or take longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (tp, tuple(sizes_bytes), backend, folder)
        try:
            processes = torch.multiprocessing.spawn(_rank, args=arguments, nprocs=tp, join=False)
            _join(processes, timeout_s)
            result = json.loads((Path(folder) / "seconds.json").read_text(encoding="utf-8"))
        except (*_PROCESS_ERRORS, RuntimeError, OSError) as error:
            lines = str(error).strip().splitlines()
            raise StepFailedError(f"all-reduces: {lines[-1] if lines else type(error).__name__}") from error
        return {int(size): float(seconds) for size, seconds in result.items()}


def _join(processes: torch.multiprocessing.ProcessContext, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    try:
        while not processes.join(timeout=0.1):
            if time.monotonic() > until_s:
                raise StepFailedError(f"all-reduces: no answer within {timeout_s:.3g} s")
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _rank(rank: int, tp: int, sizes_bytes: Sequence[int], backend: str, folder: str) -> None:
    on_gpu = backend == "nccl"
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=tp)
    try:
        result = {}
        for size in sizes_bytes:
            tensor = torch.zeros(max(size // 2, 1), dtype=torch.bfloat16, device=device)
            result[size] = _timed(tensor, on_gpu=on_gpu)
            del tensor
        dist.barrier()
        if rank == 0:
            (Path(folder) / "seconds.json").write_text(json.dumps(result), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _timed(tensor: torch.Tensor, *, on_gpu: bool) -> float:
    """Return the median seconds of one all-reduce; under CUDA graphs, as engines run it in decode steps."""

    def several() -> None:
        for _ in range(_IN_A_ROW):
            dist.all_reduce(tensor)

    several()
    run = several
    if on_gpu:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            several()
        run = graph.replay
        run()
        torch.cuda.synchronize()
    times_s = []
    for _ in range(_REPEATS):
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        times_s.append((time.perf_counter() - start_s) / _IN_A_ROW)
    return statistics.median(times_s)
