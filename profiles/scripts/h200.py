"""Profiles one H200 within ten minutes: `python3 -m profiles.scripts.h200 -o DIR`, from the repository's root.

It needs torch, numpy and PyYAML and nothing else, so that it runs in an image that has torch and no dsim. Each job's
rows go to DIR/MODEL.csv; `--resume` goes on with an interrupted run. Fit them later, on any machine, with `dsim profile
fit`.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profiles.profiling import Question

#: Model and TP degrees.
JOBS = ("llama-3.1-8b:1", "qwen3-32b:1,2,4,8", "opt-13b:1,2,4")
#: Ten minutes less what starting an image, python and torch take.
BUDGET_S = 540.0
_NEEDED = ("torch", "numpy", "yaml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all jobs and return the exit code: 0 success, 1 a job failed, 2 wrong usage, 130 interrupted."""
    started_s = time.monotonic()
    asked = _parser().parse_args(arguments)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return _fail(f"needs {', '.join(missing)}; pip install torch numpy pyyaml")
    from dsim.errors import InputError

    try:
        questions = _questions(asked)
        asked.output_dir.mkdir(parents=True, exist_ok=True)
    except (InputError, OSError) as error:
        return _fail(str(error))
    try:
        return _run(questions, asked, until_s=started_s + asked.budget)
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; the same command with --resume goes on\n")
        return 130


def _questions(asked: argparse.Namespace) -> list[Question]:
    from profiles.profiling import Question, default_dtype, gpu_of, parse_device, parse_tps
    from profiles.shapes import shape_of

    jobs = [text.partition(":") for text in asked.job or JOBS]
    device = parse_device(asked.device)
    shapes = [shape_of(model, where="--job") for model, _, _ in jobs]
    tps = [parse_tps(text, where="--job") for _, _, text in jobs]
    gpu = gpu_of(asked.gpu, device=device)
    return [Question(s, gpu, device, t, default_dtype(s, device)) for s, t in zip(shapes, tps, strict=True)]


def _run(questions: Sequence[Question], asked: argparse.Namespace, *, until_s: float) -> int:
    from dsim.errors import DsimError
    from profiles.profiling import profile
    from profiles.session import Bar

    failed = False
    all_reduces: dict[int, Mapping[int, float]] = {}
    for number, question in enumerate(questions):
        # What one job leaves over, or takes too much, is shared among those to come.
        left_s = until_s - time.monotonic()
        budget_s = left_s * _share(question) / sum(_share(other) for other in questions[number:])
        out = asked.output_dir / f"{question.shape.model.name}.csv"
        try:
            outcome = profile(
                question,
                out,
                budget_s=budget_s,
                progress=Bar(sys.stderr),
                resume=asked.resume,
                overwrite=asked.overwrite,
                timed_all_reduces=all_reduces,
            )
        except DsimError as error:
            _fail(f"{question.shape.model.name}: {error}")
            failed = True
            continue
        sys.stdout.write(f"{out}: {outcome}\n")
        sys.stdout.flush()
    return 1 if failed else 0


def _share(question: Question) -> int:
    """Return a job's parts of the budget: one for the model, one for each degree."""
    return 1 + len(question.tps)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 or more seconds")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m profiles.scripts.h200", description=__doc__, allow_abbrev=False)
    parser.add_argument("-o", "--output-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--budget", type=_seconds, default=BUDGET_S, metavar="SECONDS", help="of all jobs together")
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
