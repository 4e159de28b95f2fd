"""The command that gives a result again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def search_command(options: Mapping[str, object]) -> list[str]:
    """Return the command line of a search with these options, quoted for a POSIX shell, an option with its value each.

    >>> " ".join(search_command({"slo": {"ttft": 0.4}, "model": "my model", "policy": ["orca", "chunked"], "seed": 0}))
    "dsim search --slo ttft=0.4 --model 'my model' --policy orca --policy chunked --seed 0 -o RESULT"
    """
    found = ["dsim search"]
    for key, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            found += [shlex.join(words)] if (words := _words(key.replace("_", "-"), item)) else []
    return [*found, "-o RESULT"]


def _words(key: str, value: object) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{key}"]
    text = ",".join(f"{name}={item}" for name, item in value.items()) if isinstance(value, dict) else str(value)
    # A value that starts with a dash would be taken for an option.
    return [f"--{key}={text}"] if text.startswith("-") else [f"--{key}", text]
