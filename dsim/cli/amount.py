"""How many placements a search compares, said before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsim.cli.inputs import number_of
from dsim.cli.output import note

if TYPE_CHECKING:
    from dsim.cli.search_runs import Runs
    from placement.search import Question

#: Placements above which a search may take long; and these times GPUs, as runs on more GPUs have more requests.
_MANY = 10_000
_MANY_ON_GPUS = 300_000


def told_how_many(question: Question, runs: Runs, *, quiet: bool, fewer: str, only: tuple[str, ...] = ()) -> str:
    """Say on stderr if a search may take long and what shortens it; return how many placements it compares.

    Where nobody is to be told nothing is counted; nor for a merge, which compares few.

    Args:
        fewer: what to do for fewer GPUs.
        only: options that shorten it and that not every command has.
    """
    if quiet or runs.merge:
        return ""
    from placement.search import candidates

    found = candidates(question)
    count = len(found if runs.shard is None else runs.shard.share(found))
    gpus = question.cluster.num_gpus
    if count > _MANY or count * gpus > _MANY_ON_GPUS:
        ways = ["a wider --precision", "one --mode", "one --policy", fewer, *only, "--time-limit"]
        ways += [] if runs.dask else ["more --jobs"]
        kept = runs.folder is not None or runs.cache is not None
        keep = "" if kept else "; with -o DIR what has run is kept, and --resume goes on"
        text = f"{number_of(count, 'placement')} on up to {number_of(gpus, 'GPU')} are compared, which may take long"
        note(f"note: {text}; shorter with {', '.join(ways[:-1])} or {ways[-1]}{keep}", quiet=quiet)
    return number_of(count, "placement")
