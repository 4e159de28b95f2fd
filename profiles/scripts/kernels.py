"""Writes the shipped profiles that come from kernel tables: `python3 -m profiles.scripts.kernels`.

It needs `pip install 'dsim[kernels]'` and takes a few minutes; `-o DIR` writes elsewhere than to profiles/data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from dsim.catalog import find_gpu
from dsim.errors import InputError
from profiles.export import checked_profile
from profiles.kernels.build import Question, build
from profiles.kernels.package import open_package
from profiles.shapes import shape_of

MODELS: Final = (
    "llama-2-13b",
    "llama-2-70b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "mixtral-8x7b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "qwen3-32b",
)
GPUS: Final = ("a100-80g", "b200-sxm", "h100-sxm", "h200-sxm")
#: What is measured under TensorRT-LLM somewhere, to compare with.
TRTLLM: Final = (
    ("llama-2-13b", "a100-80g"),
    ("llama-2-13b", "h100-sxm"),
    ("llama-2-70b", "a100-80g"),
    ("llama-2-70b", "h100-sxm"),
    ("llama-3.1-8b", "h100-sxm"),
    ("llama-3.1-8b", "h200-sxm"),
)


def jobs() -> Iterator[tuple[str, str, str]]:
    """Yield model, GPU and engine of every shipped profile from kernel tables."""
    for model in MODELS:
        for gpu in GPUS:
            yield model, gpu, "vllm"
    for model, gpu in TRTLLM:
        yield model, gpu, "trtllm"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the profiles; say which could not be written and why."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output-dir", type=Path, default=Path(__file__).parents[1] / "data")
    parser.add_argument("--tables", type=Path, default=None, help="directory of the tables; default: the package's")
    options = parser.parse_args(arguments)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    failed = 0
    for model, gpu, engine in jobs():
        file = options.output_dir / f"{model}-{gpu}-{engine}.yaml"
        try:
            package = open_package(gpu, root=options.tables)
            question = Question(shape_of(model), find_gpu(gpu), engine)
            built = build(package, question, note=partial(say, file.stem))
            profile = checked_profile(built.profile, file=str(file))
        except InputError as error:
            say(file.stem, error)
            failed += 1
            continue
        for violation in profile.violations:
            say(file.stem, violation)
        file.write_text(built.profile, encoding="utf-8")
        say(file.stem, "written")
    return 1 if failed else 0


def say(name: str, text: object) -> None:
    """Print to stderr."""
    sys.stderr.write(f"{name}: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
