"""Brings the published measurements of Splitwise into the form of docs/profile_rows.md."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dsim.errors import InputError
from profiles.rows import Phase, Point, Row, rows_text

MODELS: Final = {"llama2-70b": "llama-2-70b"}
GPUS: Final = {"a100-80gb": "a100-80g", "h100-80gb": "h100-sxm"}
#: Generations of 512 tokens and more stopped early at end of sequence, so their mean step times are wrong.
MOST_OUTPUT_TOKENS: Final = 511
SOURCE: Final = (
    "Mutinifni/splitwise-sim (MIT), the measurements published with Splitwise (Patel et al., ISCA 2024): whole "
    "prefills and mean decode steps of one static batch, vLLM of 2023"
)


def read_splitwise(path: Path, *, model: str, gpu: str) -> list[Row]:
    """Return the usable rows of one model on one GPU.

    Left out: `token_size` of 512 and more (generation stopped early), and batch 64 at TP 2, whose prompt times are
    those of a smaller batch. A decode step's context is the mean over the steps timed: prompt + token_size / 2.

    Args:
        model: as the file names it, such as `llama2-70b`.
        gpu: likewise, such as `a100-80gb`.
    """
    rows: list[Row] = []
    repeats: dict[Point, int] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line["model"] != model or line["gpu"] != gpu:
                continue
            tp, batch, prompt = (int(line[name]) for name in ("tp", "batch_size", "prompt_size"))
            output = int(line["token_size"])
            if output > MOST_OUTPUT_TOKENS or (tp == 2 and batch == 64):
                continue
            prefill = Point(Phase.PREFILL.value, tp, batch, prompt)
            decode = Point(Phase.DECODE.value, tp, batch, context_tokens=prompt + output / 2)
            for point, column in ((prefill, "prompt_time_ms"), (decode, "token_time_ms")):
                repeat = repeats[point] = repeats.get(point, -1) + 1
                rows.append(Row(point, float(line[column]) / 1e3, repeat))
    if not rows:
        raise InputError(str(path), "has no usable rows", name="model, gpu", value=f"{model}, {gpu}")
    return sorted(rows, key=lambda row: (row.point, row.repeat))


def head(model: str, gpu: str) -> Mapping[str, object]:
    """Return the head of the rows file."""
    return {
        "model": MODELS[model],
        "gpu": GPUS[gpu],
        "engine": {"name": "vllm-2023", "version": "vLLM of 2023, as measured for Splitwise"},
        "source": SOURCE,
        "licence": "MIT",
        "dtype": "fp16",
        "all_reduce": "measured",
        "host_overhead": "included",
        "settings": {
            "left out": "token_size >= 512; TP 2 with batch 64",
            "decode context": "prompt + half of the tokens generated",
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the rows of one GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurements", type=Path, help="splitwise_iteration.csv")
    parser.add_argument("--gpu", choices=sorted(GPUS), required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    rows = read_splitwise(options.measurements, model="llama2-70b", gpu=options.gpu)
    options.output.write_text(rows_text(rows, head("llama2-70b", options.gpu)), encoding="utf-8")


if __name__ == "__main__":
    main()
