"""`--kv-blocks`: the engine's own numbers of KV blocks, and where those of a result come from."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dsim.cli.inputs import whole
from dsim.errors import InputError, nearest
from dsim.pools import Parallelism, Placement, Role

if TYPE_CHECKING:
    from dsim.profile import Profile

_OPTION = "--kv-blocks"
_ROLES = {role.name.lower(): role for role in Role}
_PARALLELISM = re.compile(r"tp([1-9][0-9]{0,2})pp([1-9][0-9]{0,2})")
#: Where a number of blocks comes from, for people; values of `dsim.profile.KvSource`.
SOURCE_NAMES = {
    "given": "--kv-blocks",
    "listed": "profile",
    "memory": "memory less weights",
    "range": "measured context",
}
_HINT = "as in 2588, or prefill=2588,decode=3400, or tp1pp1=2588,decode:tp2pp1=6000"


def parse_kv_blocks(text: str) -> dict[Role, dict[Parallelism | None, int]]:
    """Return KV blocks of an instance by role and parallelism, None for all others of the role.

    >>> parse_kv_blocks("prefill=100,decode:tp2pp1=300")[Role.DECODE]
    {Parallelism(tp=2, pp=1): 300}

    Args:
        text: a number, or numbers by role, by parallelism, or by both.

    Raises:
        InputError: it is not of this form, or says the same twice.
    """
    found: dict[tuple[Role | None, Parallelism | None], int] = {}
    for part in text.split(","):
        key, equals, number = part.strip().rpartition("=")
        if equals and not key.strip():
            raise InputError(_OPTION, "is not a number of blocks", value=part.strip(), hint=_HINT)
        role, parallelism = _key(key.strip()) if equals else (None, None)
        if (role, parallelism) in found:
            raise InputError(_OPTION, "stands twice", value=key.strip() or part.strip(), hint=_HINT)
        found[role, parallelism] = _number(number.strip())
    # What says more is written last, so that it stands.
    ordered = sorted(found.items(), key=lambda item: item[0][0] is not None)
    blocks: dict[Role, dict[Parallelism | None, int]] = {role: {} for role in Role}
    for (role, parallelism), number_of_blocks in ordered:
        for each in Role if role is None else (role,):
            blocks[each][parallelism] = number_of_blocks
    return {role: given for role, given in blocks.items() if given}


def _number(text: str) -> int:
    if re.fullmatch(r"[-+]?[0-9]{1,18}", text) is None:
        raise InputError(_OPTION, "must be a whole number", value=text, hint=_HINT)
    return whole(_OPTION, int(text), at_least=1)


def _key(text: str) -> tuple[Role | None, Parallelism | None]:
    role, parallelism = None, None
    for part in text.lower().split(":", 1):
        match = _PARALLELISM.fullmatch(part)
        if match is not None and parallelism is None:
            parallelism = Parallelism(int(match[1]), int(match[2]))
        elif part in _ROLES and role is None and parallelism is None:
            role = _ROLES[part]
        else:
            hint = nearest(part, [*_ROLES, "tp1pp1"])
            raise InputError(_OPTION, "is neither a role nor a parallelism", value=text, hint=hint)
    return role, parallelism


def with_kv_blocks(profiles: Mapping[Role, Profile], text: str | None) -> dict[Role, Profile]:
    """Return the profiles with the KV blocks that the option gives."""
    given = {} if text is None else parse_kv_blocks(text)
    return {role: replace(p, kv_blocks=given[role]) if role in given else p for role, p in profiles.items()}


def kv_blocks(profiles: Mapping[Role, Profile], placement: Placement) -> dict[str, int]:
    """Return KV blocks of an instance of each pool, by role."""
    blocks = {}
    for pool in placement.pools:
        if pool.role in profiles:
            profile, pp = profiles[pool.role], pool.parallelism.pp
            found = max(profile.kv_tokens(pool.parallelism), 0) // profile.block_tokens
            # Each engine loop of a colocated instance has a share of its own.
            blocks[pool.role.name.lower()] = found // pp * pp if pool.role is Role.COLOCATED else found
    return blocks


def kv_line(profiles: Mapping[Role, Profile], placement: Placement) -> str:
    """Return both for people."""
    blocks, sources = kv_blocks(profiles, placement), kv_sources(profiles, placement)
    return ", ".join(f"{role} {number:,} ({SOURCE_NAMES[sources[role]]})" for role, number in blocks.items())


def kv_reasons(profiles: Mapping[Role, Profile], placement: Placement) -> list[str]:
    """Return what the profiles say of the KV capacities that are theirs, a line each."""
    used = [
        profiles[pool.role]
        for pool in placement.pools
        if profiles[pool.role].kv_source(pool.parallelism).value in ("listed", "memory")
    ]
    texts = dict.fromkeys(" ".join(profile.reasons.get("kv", "").split()) for profile in used)
    return [f"KV blocks: {textwrap.shorten(text, 200, placeholder=' ...')}" for text in texts if text]


def kv_sources(profiles: Mapping[Role, Profile], placement: Placement) -> dict[str, str]:
    """Return where the KV capacity of each pool's instances comes from, by role."""
    return {
        pool.role.name.lower(): profiles[pool.role].kv_source(pool.parallelism).value
        for pool in placement.pools
        if pool.role in profiles
    }
