"""Shards: parts of a search that run apart, each in a file, and the one answer that is made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from dsim.errors import InputError
from dsim.pools import Placement

if TYPE_CHECKING:
    from placement.cache import Cache
    from placement.result import SearchResult, Trial
    from placement.runner import Progress
    from placement.search import Question

Item = TypeVar("Item")

#: Goodput over that of the best of its kind from which a placement of a shard is reported, and how many at most.
_CLOSE: Final = 0.98
_FINALISTS: Final = 3

_FILE = re.compile(r"runs-([0-9]{1,6})-of-([0-9]{1,6})\.sqlite")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `part` of `parts` of a sweep's tasks or a search's candidates: every `parts`-th."""

    part: int
    parts: int

    @classmethod
    def parse(cls, text: str, where: str) -> Shard:
        """Return the shard that `i/n` says.

        >>> Shard.parse("1/4", "--shard")
        Shard(part=1, parts=4)
        """
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise InputError(where, "is no part of a whole", value=text, hint="as in 1/4, 2/4, 3/4 and 4/4")
        return cls(int(match[1]), int(match[2]))

    @property
    def suffix(self) -> str:
        """What its files have in their names."""
        return f"-{self.part}-of-{self.parts}"

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items of this part."""
        return items[self.part - 1 :: self.parts]


@dataclass(frozen=True, slots=True)
class Ledger:
    """What one shard of a search found.

    Args:
        question: digest of what was asked.
        trials: of its candidates.
        starts: rates where the goodputs of those that got through the race were first looked for.
        probes, requests: simulated for it.
    """

    shard: Shard
    question: str
    trials: tuple[Trial, ...]
    starts: Mapping[Placement, float]
    probes: int
    requests: int

    def to_text(self) -> str:
        """Return the ledger as text, every number to the last bit."""
        from placement.cache import codec
        from placement.result import Trial

        form, rates = codec(tuple[Trial, ...]), codec(Mapping[Placement, float])
        head = {"part": self.shard.part, "parts": self.shard.parts, "question": self.question}
        counts = {"probes": self.probes, "requests": self.requests}
        found = {"starts": rates.to_plain(self.starts), "trials": form.to_plain(self.trials)}
        return json.dumps({**head, **counts, **found}, separators=(",", ":"))

    @classmethod
    def of_text(cls, text: str) -> Ledger:
        """Return the ledger that a text says."""
        from placement.cache import codec
        from placement.result import Trial

        said = json.loads(text)
        trials = codec(tuple[Trial, ...]).from_plain(said["trials"])
        starts = codec(Mapping[Placement, float]).from_plain(said["starts"])
        shard = Shard(said["part"], said["parts"])
        return cls(shard, said["question"], trials, starts, said["probes"], said["requests"])


def search_shard(
    question: Question, shard: Shard, *, executor: Executor | None = None, progress: Progress | None = None
) -> tuple[SearchResult, Ledger]:
    """Return the answer for one part of the candidates, and what it leaves for the merge."""
    from placement.cache import question_id
    from placement.search import candidates, search_among

    among = frozenset(shard.share(candidates(question)))
    result, starts = search_among(question, among, executor=executor, progress=progress)
    # A challenger may have come to its goodput without the race.
    found = {t.placement: starts.get(t.placement, t.goodput.rate_per_s.best) for t in result.complete if t.goodput}
    found = {placement: rate for placement, rate in found.items() if rate > 0}
    return result, Ledger(shard, question_id(question), result.trials, found, result.probes, result.requests)


def merge(
    question: Question,
    ledgers: Sequence[Ledger],
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Return the one answer that shards give together; in which order they come makes no difference.

    A candidate that fell behind in its shard fell behind rivals that are in the merge, too. Those that each shard
    reports are compared with each other by the search itself: the runs that it asks for are mostly those of the shards,
    which a cache has, and the others are on the same requests, so that intervals and ratios are those of any search.
    Those that did best in the long runs of their shards are reported, whatever short ones say of them.

    Raises:
        InputError: shards are missing, double, or of another question.
    """
    from placement.result import by_worth
    from placement.search import search_among

    check_whole(question, ledgers)
    starts = {placement: rate for ledger in ledgers for placement, rate in ledger.starts.items()}
    trials = [trial for ledger in ledgers for trial in ledger.trials]
    asked = replace(question, always=tuple(dict.fromkeys([*question.always, *_finalists(trials)])))
    found, _ = search_among(asked, starts.keys(), starts=starts, executor=executor, progress=progress)
    others = [trial for ledger in ledgers for trial in ledger.trials if trial.placement not in starts]
    return replace(
        found,
        question=question.to_dict(),
        trials=by_worth([*found.trials, *others]),
        probes=found.probes + sum(ledger.probes for ledger in ledgers),
        requests=found.requests + sum(ledger.requests for ledger in ledgers),
    )


def _finalists(trials: Sequence[Trial]) -> list[Placement]:
    """Return the best of each kind by the goodputs of the shards, and those close to it."""
    from placement.result import rank

    found = []
    for kind in (False, True):
        own = [trial for trial in trials if trial.goodput and trial.placement.is_colocated is kind]
        own.sort(key=rank)
        # Ranks begin with what is compared, the best first: it is negative.
        found += [t.placement for t in own if rank(t)[0] <= rank(own[0])[0] * _CLOSE][:_FINALISTS]
    return found


def check_whole(question: Question, ledgers: Iterable[Ledger], where: str = "--merge") -> None:
    """See that ledgers are the parts of one search of this question, each of them once.

    Raises:
        InputError: they are not.
    """
    from placement.cache import question_id

    own = question_id(question)
    seen: set[Shard] = set()
    for ledger in sorted(ledgers, key=lambda ledger: (ledger.shard.parts, ledger.shard.part)):
        shard = ledger.shard
        name = f"{shard.part}/{shard.parts}"
        if ledger.question != own:
            hint = "give the options of its search, and run it again if dsim has changed since"
            raise InputError(where, f"has shard {name} of another search, or by another build of dsim", hint=hint)
        if shard in seen:
            raise InputError(where, f"has shard {name} twice", hint="give every directory once")
        seen.add(shard)
    if not seen:
        raise InputError(where, "has no shards", hint="give the directories that --shard wrote to")
    parts = {shard.parts for shard in seen}
    if len(parts) > 1:
        counts = " and ".join(str(count) for count in sorted(parts))
        raise InputError(where, f"has shards of {counts} parts", hint="give those of one search")
    (count,) = parts
    missing = sorted(set(range(1, count + 1)) - {shard.part for shard in seen})
    if missing:
        names = ", ".join(f"{part}/{count}" for part in missing[:5]) + (" and more" if len(missing) > 5 else "")
        rule = f"lacks {len(missing)} of {count} shards: {names}"
        raise InputError(where, rule, hint="run them with --shard, or give their directories too")


def shard_files(folder: Path) -> list[Path]:
    """Return the files of shards in a folder, by number."""
    found = {path: match for path in folder.glob("runs-*-of-*.sqlite") if (match := _FILE.fullmatch(path.name))}
    return sorted(found, key=lambda path: (int(found[path][2]), int(found[path][1])))


def read_ledger(cache: Cache) -> Ledger:
    """Return the ledger in a shard's file.

    Raises:
        InputError: the shard has not ended, or the file holds something else.
    """
    text = cache.notes.get("ledger")
    if text is None:
        raise InputError(
            str(cache.path), "holds a shard that has not ended", hint="finish it with --shard and --resume"
        )
    try:
        return Ledger.of_text(text)
    except (ValueError, KeyError, TypeError, InputError):
        hint = "run the shard again with this dsim"
        raise InputError(str(cache.path), "holds a shard of another dsim", hint=hint) from None
