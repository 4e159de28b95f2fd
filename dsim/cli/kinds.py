"""Refuses options that say nothing of the placements that are searched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsim.cli.options import AffinityChoice, ModeChoice
from dsim.cli.pools import roles_of
from dsim.errors import InputError
from dsim.options import PrefillBatching
from dsim.pools import Policy, Role

if TYPE_CHECKING:
    from dsim.cli.question import QuestionOptions

_CHANGE_MODE = "leave it out, or change --mode"


def check_kinds(options: QuestionOptions) -> None:
    """See that every option given is of a kind of placement, a policy or a role that is searched.

    GPUs of roles are left to those who read them.

    Raises:
        InputError: one is not: it would change nothing.
    """
    colocated, disaggregated = _of_colocated(options), _of_disaggregated(options)
    for mode, kind, given in (
        (ModeChoice.DISAGGREGATED, "colocated", colocated),
        (ModeChoice.COLOCATED, "disaggregated", disaggregated),
    ):
        for option, value in given.items():
            if value is not None and options.mode is mode:
                rule = f"is of {kind} placements, which are not searched"
                raise InputError(option, rule, value=value, hint=_CHANGE_MODE)
    policies = set(options.policy or Policy)
    if options.token_budgets is not None and Policy.CHUNKED not in policies:
        rule, hint = "is of policy chunked, which is not searched", "leave it out, or add --policy chunked"
        raise InputError("--token-budgets", rule, value=options.token_budgets, hint=hint)
    roles = roles_of(options.mode.value)
    for option, text in (
        ("--max-batch-tokens", options.max_batch_tokens),
        ("--max-batch-requests", options.max_batch_requests),
        ("--kv-blocks", options.kv_blocks),
    ):
        for role in _named(text):
            if role not in roles:
                raise InputError(option, "is a role that is not searched", value=role.name.lower(), hint=_CHANGE_MODE)
    only_chunked = policies == {Policy.CHUNKED}
    if only_chunked and options.max_batch_tokens is not None:
        named = Role.COLOCATED in _named(options.max_batch_tokens)
        if named or options.mode is ModeChoice.COLOCATED:
            rule = "limits batches of whole prompts, and of colocated policies chunked alone is searched"
            hint = "leave it out, or give --token-budgets"
            value = "colocated" if named else options.max_batch_tokens
            raise InputError("--max-batch-tokens", rule, value=value, hint=hint)


def _of_colocated(options: QuestionOptions) -> dict[str, str | None]:
    """Return the options of colocated placements, and their values where they are given."""
    return {
        "--policy": ", ".join(policy.value for policy in options.policy) if options.policy else None,
        "--token-budgets": options.token_budgets,
        "--colocated-engine": options.colocated_engine,
        "--colocated-profile": None if options.colocated_profile is None else str(options.colocated_profile),
    }


def _of_disaggregated(options: QuestionOptions) -> dict[str, str | None]:
    """Return the options of disaggregated placements, and their values where they are given."""
    pair, batching, affinity = options.pair, options.prefill_batching, options.affinity
    return {
        "--prefill-profile": None if pair.prefill_profile is None else str(pair.prefill_profile),
        "--decode-profile": None if pair.decode_profile is None else str(pair.decode_profile),
        # The others are the defaults.
        "--prefill-batching": batching.value if batching is PrefillBatching.LM else None,
        "--affinity": affinity.value if affinity is AffinityChoice.LOW else None,
        "--handover": options.handover.handover,
        "--kv-link": options.handover.kv_link,
    }


def _named(text: str | None) -> Iterator[Role]:
    """Yield the roles that a text names, as in `prefill=8,decode:tp2pp1=9`; what is no role is others' to refuse."""
    roles = {role.name.lower(): role for role in Role}
    for part in () if text is None else text.lower().split(","):
        key, equals, _ = part.partition("=")
        role = roles.get(key.partition(":")[0].strip())
        if equals and role is not None:
            yield role
