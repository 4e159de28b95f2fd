"""Limits of a batch to try, as users write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from dsim.errors import InputError, nearest
from dsim.options import PrefillBatching
from dsim.pools import Role
from placement.mixes import BatchChoices, TokenChoice

Limit = TypeVar("Limit")

_ROLES: Final = {role.name.lower(): role for role in Role}
#: Choices of one limit at most: each multiplies the placements.
_MOST_CHOICES: Final = 16
_MOST: Final = 1_000_000_000


def parse_batches(max_batch_tokens: str | None, max_batch_requests: str | None) -> BatchChoices:
    """Return the limits of a batch to try for each role.

    >>> parse_batches("prefill=2048,engine", "64,decode=128").max_batch_requests[Role.DECODE]
    (128,)

    Args:
        max_batch_tokens: numbers, `engine` or `lm`, for all roles or after `ROLE=` for one.
        max_batch_requests: numbers or `engine`.

    Raises:
        InputError: a text is no list of limits.
    """
    return BatchChoices(
        _choices("--max-batch-tokens", max_batch_tokens, (Role.PREFILL, Role.COLOCATED), _tokens),
        _choices("--max-batch-requests", max_batch_requests, tuple(Role), _requests),
    )


def _choices(
    option: str, text: str | None, roles: Sequence[Role], read: Callable[[str, str], Limit]
) -> dict[Role, tuple[Limit, ...]]:
    """Return the values of each role; what stands before any role is for all, what follows a value for its role."""
    found: dict[Role, list[Limit]] = {}
    at, own = roles, set[Role]()
    for part in () if text is None else text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if equals:
            role = _ROLES.get(key.lower())
            if role is None or role not in roles:
                names = [role.name.lower() for role in roles]
                raise InputError(option, "is no role that has this limit", value=key, hint=nearest(key, names))
            if role not in own:
                # Said of all before, and now of one: the one has its own.
                found.pop(role, None)
            own.add(role)
            at = (role,)
        choice = read(option, value if equals else key)
        for role in at:
            if choice not in found.setdefault(role, []):
                found[role].append(choice)
            if len(found[role]) > _MOST_CHOICES:
                raise InputError(option, f"has more than {_MOST_CHOICES} values", value=text, hint="try fewer")
    return {role: tuple(values) for role, values in found.items()}


def _tokens(option: str, text: str) -> TokenChoice:
    for batching in PrefillBatching:
        if text.lower() == batching.value:
            return batching
    return parse_number(option, text, "as in 2048,8192, engine or lm, or prefill=2048,8192")


def _requests(option: str, text: str) -> int | None:
    if text.lower() == PrefillBatching.ENGINE.value:
        return None
    return parse_number(option, text, "as in 64,128 or engine, or prefill=8,decode=64,128")


def parse_number(option: str, text: str, hint: str) -> int:
    """Return a whole number >= 1.

    Raises:
        InputError: it is none.
    """
    if re.fullmatch(r"[-+]?[0-9]{1,18}", text) is None:
        raise InputError(option, "is no number", value=text, hint=hint)
    value = int(text)
    if not 1 <= value <= _MOST:
        raise InputError(option, "must be >= 1" if value < 1 else f"must be <= {_MOST}", value=value)
    return value
