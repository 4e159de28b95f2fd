"""Reads workloads and arrivals from the short texts of the command line and of YAML files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from dsim.errors import InputError, nearest
from dsim.workload.arrivals import Arrivals, Constant, Gamma, Poisson, Replayed
from dsim.workload.lengths import Fixed, Lengths, LogNormal, Uniform, cv_from_median
from dsim.workload.presets import PRESETS, preset
from dsim.workload.traces import read_lengths, read_trace

_T = TypeVar("_T")

_FILES: Final = (".csv", ".jsonl", ".json", ".ndjson")
#: What is no file, even where there is one of this name.
_WORDS: Final = (*PRESETS, "fixed", "uniform", "lognormal", "poisson", "constant", "gamma")
_NUMBER: Final = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)

_FIXED: Final = "as in fixed:512,64 (prompt, output tokens)"
_UNIFORM: Final = "as in uniform:512,64,0.8 (prompt, output tokens, shortest and perhaps longest as a factor)"
_LOGNORMAL: Final = "as in lognormal:prompt=700/1.2,output=200/1.5 (mean/cv) or prompt=700/median=500"


def parse_workload(text: str, *, option: str = "--workload", folder: Path = Path()) -> Lengths:
    """Return the lengths that a text describes.

    `sharegpt`, `humaneval` or `longbench`; `fixed:PROMPT,OUTPUT`; `uniform:PROMPT,OUTPUT,LOW[,HIGH]`;
    `lognormal:prompt=MEAN/CV,output=MEAN/CV`, where `median=TOKENS` may stand for the cv; or a file that `read_lengths`
    reads.

    Args:
        folder: that a file's path starts from.

    Raises:
        InputError: if the text describes none, with the option's name.

    >>> parse_workload("fixed:512,64")
    Fixed(prompt_tokens=512, output_tokens=64)
    """
    if text in PRESETS:
        return preset(text)
    kinds: dict[str, tuple[Callable[[str], Lengths], str]] = {
        "fixed": (_fixed, _FIXED),
        "uniform": (_uniform, _UNIFORM),
        "lognormal": (_lognormal, _LOGNORMAL),
    }
    kind, _, arguments = text.partition(":")
    if kind in kinds:
        make, usage = kinds[kind]
        return _made(make, arguments, option=option, text=text, usage=usage)
    if names_a_file(text, folder=folder):
        return read_lengths(folder / text)
    known = (*PRESETS, *kinds, "a CSV or JSONL file")
    raise InputError(option, "is unknown", value=text, hint=nearest(kind, known))


def parse_arrivals(text: str, *, option: str = "--arrivals", folder: Path = Path()) -> Arrivals:
    """Return the arrivals that a text describes: `poisson`, `constant`, `gamma:cv=CV`, or a trace file to replay.

    Raises:
        InputError: if the text describes none, with the option's name.

    >>> parse_arrivals("gamma:cv=2")
    Gamma(cv=2.0)
    """
    plain: dict[str, Arrivals] = {"poisson": Poisson(), "constant": Constant()}
    if text in plain:
        return plain[text]
    kind, _, arguments = text.partition(":")
    if kind == "gamma":
        return _made(_gamma, arguments, option=option, text=text, usage="as in gamma:cv=2")
    if names_a_file(text, folder=folder):
        return Replayed(read_trace(folder / text).arrival_s, source=text)
    raise InputError(option, "is unknown", value=text, hint=nearest(kind, (*plain, "gamma:cv=2", "a trace file")))


def names_a_file(text: str, *, folder: Path = Path()) -> bool:
    """Return whether a text for lengths or arrivals is the path, from `folder`, of a file of them.

    >>> names_a_file("my/trace.csv"), names_a_file("fixed:512,64")
    (True, False)
    """
    kind = text.partition(":")[0]
    if kind in _WORDS:
        return False
    return text.endswith(_FILES) or "/" in kind or os.path.isfile(folder / text)  # Path.is_file may raise.


def _made(make: Callable[[str], _T], arguments: str, *, option: str, text: str, usage: str) -> _T:
    """Return what `make` makes; its errors name the option, the whole text and how it is written."""
    try:
        return make(arguments)
    except InputError as error:
        rule = error.rule if error.name is None else f"{error.name}={error.value} {error.rule}"
        raise InputError(option, f"is wrong: {rule}", value=text, hint=usage) from None


def _fixed(arguments: str) -> Fixed:
    prompt, output = _parts(arguments, ",", 2, 2)
    return Fixed(_whole(prompt), _whole(output))


def _uniform(arguments: str) -> Uniform:
    prompt, output, *factors = _parts(arguments, ",", 3, 4)
    return Uniform(_whole(prompt), _whole(output), *(_number(factor) for factor in factors))


def _lognormal(arguments: str) -> LogNormal:
    sides = dict.fromkeys(("prompt", "output"), "")
    for part in _parts(arguments, ",", 2, 2):
        key, _, value = part.partition("=")
        if key not in sides:
            raise InputError("lognormal", f"unknown key {key!r}")
        if sides[key]:
            raise InputError("lognormal", f"key {key!r} appears twice")
        sides[key] = value
    return LogNormal(*_mean_and_cv(sides["prompt"]), *_mean_and_cv(sides["output"]))


def _mean_and_cv(text: str) -> tuple[float, float]:
    mean, spread = _parts(text, "/", 2, 2)
    key, _, value = spread.rpartition("=")
    if key not in {"", "cv", "median"}:
        raise InputError("lognormal", f"unknown key {key!r}")
    if key == "median":
        return _number(mean), cv_from_median(mean=_number(mean), median=_number(value))
    return _number(mean), _number(value)


def _gamma(arguments: str) -> Gamma:
    key, _, value = arguments.partition("=")
    if key != "cv":
        raise InputError("gamma", f"unknown key {key!r}" if key else "cv is missing")
    return Gamma(_number(value))


def _parts(text: str, separator: str, least: int, most: int) -> list[str]:
    parts = [part.strip() for part in text.split(separator)]
    if not least <= len(parts) <= most:
        count = str(least) if least == most else f"{least} or {most}"
        raise InputError("workload", f"{text!r} must have {count} parts between {separator!r}")
    return parts


def _number(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise InputError("workload", f"{text!r} must be a number >= 0")
    return float(text)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InputError("workload", f"{text!r} must be a whole number of tokens")
    return int(text)
