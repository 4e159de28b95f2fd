"""Errors that say where, what, why and what to do about it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence

#: The library names what it was given; users know it by the option.
_OPTIONS = {
    "arrivals": "--arrivals",
    "closed loop": "--closed-loop",
    "fixed lengths": "--workload",
    "lognormal lengths": "--workload",
    "options": "--prefill-batching",
    "rate": "--rate",
    "requests": "--requests",
    "seed": "--seed",
    "sharegpt": "--workload",
    "humaneval": "--workload",
    "longbench": "--workload",
    "uniform lengths": "--workload",
    "window": "--requests",
}

#: Characters that an error shows of a value, and of one that may be a path.
_MOST_SHOWN, _MOST_OF_PATH = 80, 240


class DsimError(Exception):
    """Base of every error that dsim raises on purpose."""


class InternalError(DsimError):
    """Something in dsim is wrong, not in its input."""

    def __init__(self, what: str) -> None:
        super().__init__(f"internal error: {what}")


class InputError(DsimError):
    """A value that a user wrote cannot be used: one line, `where: name=value rule; hint`.

    >>> raise InputError("--rate", "must be > 0", value=-1, hint="give requests per second")
    Traceback (most recent call last):
    dsim.errors.InputError: --rate: -1 must be > 0; give requests per second
    """

    def __init__(
        self, where: str, rule: str, *, name: str | None = None, value: object = None, hint: str | None = None
    ) -> None:
        hint = hint or _remedy(rule)
        self.where = where
        self.rule = rule
        self.name = name
        self.value = value
        self.hint = hint
        subject = {
            (True, True): f"{name}={_shown(value)} ",
            (True, False): f"{name} ",
            (False, True): f"{_shown(value)} ",
            (False, False): "",
        }[name is not None, value is not None]
        super().__init__(f"{where}: {subject}{rule}; {hint}")


def by_option(error: InputError) -> InputError:
    """Return the error with the option's name where the library named what it was given."""
    option = _OPTIONS.get(error.where)
    if option is None:
        return error
    return InputError(option, error.rule, name=error.name, value=error.value, hint=error.hint)


class InfeasiblePlacementError(DsimError):
    """A placement that cannot run, with every reason why."""

    def __init__(self, placement: str, reasons: Sequence[str]) -> None:
        self.placement = placement
        self.reasons = tuple(reasons)
        super().__init__(f"{placement}: cannot run: " + "; ".join(reasons))


#: What to do about a rule that was not kept, where the place that found it out has nothing better to say.
_REMEDIES = (
    (r"must be (>|<|between|at least|at most|finite and)", "write a value in that range"),
    (r"must be (a|an) (finite |whole )*number", "write a number"),
    (r"must be .*finite", "write a finite number"),
    (r"must ", "change it so"),
    (r"cannot be read", "check the path and its permissions"),
)


def _remedy(rule: str) -> str:
    for pattern, remedy in _REMEDIES:
        if re.match(pattern, rule):
            return remedy
    return "correct it or leave it out"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint naming the known word nearest to `word`, or all of them.

    >>> nearest("tftt", ["ttft", "tpot"])
    "did you mean 'ttft'?"
    """
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "expected one of " + ", ".join(names)


def elided(text: str, most: int) -> str:
    """Return the text in at most so many characters: of a longer one, which may be a path, both ends.

    >>> elided("/home/someone/experiments/monday/rows.csv", 24)
    '/home/someo...y/rows.csv'
    """
    if len(text) <= most:
        return text
    end = (most - 3) // 2
    return f"{text[: most - 3 - end]}...{text[-end:]}"


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return elided(text, _MOST_OF_PATH if os.sep in text else _MOST_SHOWN)
