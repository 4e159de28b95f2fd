"""Writes the figures of docs/validation.md: `python -m tests.validation`; `--check` only says which are out of date.

It needs the public measurements beside the repository, and takes about a minute of CPU. What stands between
`<!-- NAME -->` and `<!-- end -->` on the page is written by the function of that name below; the rest is text.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests import distserve
from tests.truth import closed_loop, layer_tables, mooncake, open_loop, splitwise, static_batches, summary
from tests.truth.common import TRUTH

PAGE: Final = Path(__file__).parents[1] / "docs" / "validation.md"
BLOCKS: Final[Mapping[str, Callable[[], str]]] = {
    "summary": summary.report,
    "layer tables": layer_tables.report,
    "static batches": static_batches.report,
    "closed loop": closed_loop.report,
    "closed loop, other settings": closed_loop.settings_report,
    "open loop": open_loop.report,
    "open loop, other settings": open_loop.settings_report,
    "splitwise": splitwise.report,
    "mooncake": mooncake.report,
    "distserve runs": distserve.runs_report,
    "distserve curves": distserve.curves_report,
}
#: What takes more than a few seconds of CPU.
SLOW: Final = frozenset({"closed loop, other settings", "open loop, other settings", "distserve curves"})
_BLOCK: Final = re.compile(r"<!-- (?P<name>[a-z, ]+) -->\n\n(?P<text>.*?)\n\n<!-- end -->", re.DOTALL)


def written(page: str) -> dict[str, str]:
    """Return the text of each block of the page."""
    return {match["name"]: match["text"] for match in _BLOCK.finditer(page)}


def updated(page: str, names: Iterable[str] = BLOCKS) -> str:
    """Return the page with these blocks written again."""
    texts = {name: BLOCKS[name]() for name in names}

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- {name} -->\n\n{texts.get(name, match['text'])}\n\n<!-- end -->"

    return _BLOCK.sub(block, page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or say what is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    if not TRUTH.is_dir() or not distserve.DATA.is_dir():
        sys.stderr.write(f"needs the measurements in {TRUTH.parent}\n")
        return 1
    page = PAGE.read_text(encoding="utf-8")
    now = updated(page)
    before, after = written(page), written(now)
    stale = [name for name in after if before[name] != after[name]]
    for name in stale:
        sys.stderr.write(f"{'out of date' if options.check else 'written'}: {name}\n")
    if options.check:
        return 1 if stale else 0
    PAGE.write_text(now, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
