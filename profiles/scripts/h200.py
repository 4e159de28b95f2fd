"""Profiles one H200 within ten minutes: `python3 -m profiles.scripts.h200 -o DIR`, from the repository's root.

It needs torch, numpy and PyYAML and nothing else, so that it runs in an image that has torch and no dsim. Each job's
rows go to DIR/MODEL.csv; `--resume` goes on with an interrupted run. Fit them later, on any machine, with `dsim profile
fit`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Model and TP degrees.
JOBS = ("llama-3.1-8b:1", "qwen3-32b:1,2,4,8", "opt-13b:1,2,4")
#: Ten minutes less what starting an image, python and torch take.
BUDGET_S = 540.0
_NEEDED = ("torch", "numpy", "yaml")


@dataclass(frozen=True, slots=True)
class Job:
    """One model and its TP degrees."""

    model: str
    tps: tuple[int, ...]

    @property
    def share(self) -> int:
        """Parts of the budget: one for the model, one for each degree."""
        return 1 + len(self.tps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all jobs and return the exit code: 0 success, 1 a job failed, 2 wrong usage."""
    started_s = time.monotonic()
    asked = _parser().parse_args(arguments)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return _fail(f"needs {', '.join(missing)}; pip install torch numpy pyyaml")
    from dsim.errors import DsimError, InputError
    from profiles.profiling import Question, default_dtype, gpu_of, parse_device, parse_tps, profile
    from profiles.session import Bar
    from profiles.shapes import shape_of

    failed = False
    try:
        jobs = [
            Job(model, parse_tps(tps, where="--job"))
            for model, _, tps in (text.partition(":") for text in asked.job or JOBS)
        ]
        device = parse_device(asked.device)
        gpu = gpu_of(asked.gpu, device=device)
        questions = []
        for job in jobs:
            shape = shape_of(job.model, where="--job")
            questions.append(Question(shape, gpu, device, job.tps, default_dtype(shape, device)))
        asked.output_dir.mkdir(parents=True, exist_ok=True)
    except InputError as error:
        return _fail(str(error))
    for number, (job, question) in enumerate(zip(jobs, questions, strict=True)):
        now_s = time.monotonic()
        # What one job leaves over, or takes too much, is shared among those to come.
        left_s = started_s + asked.budget - now_s
        budget_s = left_s * job.share / sum(other.share for other in jobs[number:])
        out = asked.output_dir / f"{question.shape.model.name}.csv"
        try:
            outcome = profile(
                question,
                out,
                budget_s=budget_s,
                progress=Bar(sys.stderr),
                resume=asked.resume,
                overwrite=asked.overwrite,
            )
        except DsimError as error:
            _fail(f"{job.model}: {error}")
            failed = True
            continue
        sys.stdout.write(f"{out}: {outcome}\n")
        sys.stdout.flush()
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m profiles.scripts.h200", description=__doc__, allow_abbrev=False)
    parser.add_argument("-o", "--output-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="of all jobs together")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--gpu", help="its name in the catalog, if its own name is not")
    parser.add_argument("--job", action="append", metavar="MODEL:TP,...", help=f"instead of {' '.join(JOBS)}")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    return parser


def _fail(text: str) -> int:
    sys.stderr.write(f"error: {text}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
