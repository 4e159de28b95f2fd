"""What is asked for of the pools of each role: GPUs, profiles, how many GPUs of which, and limits of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsim.cli.handover import HandoverOptions, fills_a_node
from dsim.cli.inputs import whole
from dsim.cli.mixes import mixed_ends, named_on, role_lines
from dsim.cli.options import DecodeGpu, DecodeProfile, PrefillGpu, PrefillProfile
from dsim.errors import InputError
from dsim.options import PrefillBatching
from dsim.pools import Placement, Role

if TYPE_CHECKING:
    from dsim.profile import Profile
    from placement.mixes import BatchChoices, Fleet, Mix
    from placement.search import Question
    from profiles.mixed import Wanted


@dataclass(frozen=True, slots=True)
class Chosen:
    """The profiles of a search over mixes of GPUs.

    Args:
        profiles: of the first mix of each kind, by role.
    """

    profiles: Mapping[Role, Profile]
    mixes: tuple[Mix, ...]
    fleet: Fleet

    def first(self, role: Role) -> Profile:
        """Return the profile of a role's first GPU, or of any role where this one is not searched."""
        return self.profiles.get(role) or next(iter(self.profiles.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """GPUs and profiles of prefill and decode pools."""

    prefill_gpu: PrefillGpu = None
    decode_gpu: DecodeGpu = None
    prefill_profile: PrefillProfile = None
    decode_profile: DecodeProfile = None

    def beside(self, colocated_gpu: str | None = None, colocated_profile: Path | None = None) -> RoleOptions:
        """Return the options of all roles."""
        return RoleOptions(
            gpus=(self.prefill_gpu, self.decode_gpu, colocated_gpu),
            files=(self.prefill_profile, self.decode_profile, colocated_profile),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOptions:
    """The options that name GPUs and profiles of roles, in the order prefill, decode, colocated."""

    gpus: tuple[str | None, str | None, str | None]
    files: tuple[Path | None, Path | None, Path | None]

    @property
    def are_given(self) -> bool:
        """Whether roles are asked for apart; a profile of colocated placements alone does not count."""
        return any(self.gpus) or any(self.files[:2])

    def wanted(self, names: Wanted) -> Wanted:
        """Return what is asked for of every role.

        Args:
            names: what is asked for whatever the role.
        """
        gpus = {
            role: gpu_names(f"--{role.name.lower()}-gpu", text)
            for role, text in zip(Role, self.gpus, strict=True)
            if text is not None
        }
        files = {role: file for role, file in zip(Role, self.files, strict=True) if file is not None}
        return replace(names, gpus=gpus, files=files)

    def chosen(
        self,
        names: Wanted,
        *,
        roles: Sequence[Role],
        gpus: str | None,
        nodes: int | None,
        gpus_per_node: int | None,
        side_by_side: bool,
        handover: HandoverOptions,
    ) -> Chosen:
        """Return the profiles of every mix, and the GPUs there are.

        Raises:
            InputError: an option, what is wrong with it and what to do.
        """
        from placement.fleet import fleet_of
        from profiles.mixed import mixes_of, profiles_of_roles

        for role, text in zip(Role, self.gpus, strict=True):
            if text is not None and role not in roles:
                option, hint = f"--{role.name.lower()}-gpu", "leave it out, or change --mode"
                raise InputError(option, "is of a role that is not searched", value=text, hint=hint)
        if nodes is not None and gpus is not None:
            raise InputError("--nodes", "does not go with --gpus", value=nodes, hint="leave one of the two out")
        if gpus_per_node is not None:
            whole("--gpus-per-node", gpus_per_node, at_least=1, at_most=1024)
        found = profiles_of_roles(self.wanted(names))
        fleet = fleet_of(
            found, roles=roles, gpus=gpus, nodes=nodes, gpus_per_node=gpus_per_node, side_by_side=side_by_side
        )

        def change(profile: Profile, link: str | None) -> Profile:
            return _handing(profile, handover, link)

        mixes = mixes_of(found, roles, change)
        check_handed_over(mixes)
        pairs = [{p.gpu.name for p in mix.values()} for mix in mixes if Role.PREFILL in mix]
        if side_by_side and pairs and min(map(len, pairs)) > 1:
            rule = "keeps pairs within a node, and a node has GPUs of one type"
            raise InputError("--affinity", rule, value="low", hint="leave it out, or name one GPU for both roles, too")
        first: dict[Role, Profile] = {}
        for mix in mixes:
            first = {**mix, **first}
        return Chosen(first, mixes, fleet)


@dataclass(frozen=True, slots=True)
class Placed:
    """What a placement that is given runs with.

    Args:
        placement: with the GPU of each pool where they differ, or where the user named it.
    """

    placement: Placement
    profiles: Mapping[Role, Profile]

    @property
    def front(self) -> Profile:
        """The profile of the pool that requests come to first."""
        return self.profiles[self.placement.pools[0].role]

    def heading(self, model: str | None) -> list[str]:
        """Return the lines that say which profiles the pools have, and what KV goes over."""
        from profiles.handover import handover_line

        used = [(pool.role, self.profiles[pool.role]) for pool in self.placement.pools]
        gpus = ", ".join(dict.fromkeys(profile.gpu.name for _, profile in used))
        lines = [named_on(self.front.model, gpus, asked=model), *role_lines(used)]
        if not self.placement.is_colocated:
            ends = f"KV {mixed_ends(self.profiles)}: " if "," in gpus else ""
            lines.append(ends + handover_line(self.profiles[Role.DECODE]))
        return lines


def placed(
    placement: Placement,
    names: Wanted,
    options: RoleOptions,
    *,
    handover: HandoverOptions,
    nodes: int | None = None,
) -> Placed | None:
    """Return what a placement runs with whose pools name GPUs, or whose roles have options; None for others.

    Raises:
        InputError: an option or a GPU, what is wrong with it and what to do.
    """
    from dsim.catalog import find_gpu
    from profiles.mixed import handed_over, profiles_of_roles

    pools = [
        pool if pool.gpu is None else replace(pool, gpu=find_gpu(pool.gpu, where="--placement").name)
        for pool in placement.pools
    ]
    if not options.are_given and not any(pool.gpu for pool in pools):
        return None
    wanted = options.wanted(names)
    for role, gpus in wanted.gpus.items():
        option = f"--{role.name.lower()}-gpu"
        if role not in {pool.role for pool in pools}:
            raise InputError(option, "is of a role that the placement does not have", value=",".join(gpus))
        if len(gpus) > 1:
            raise InputError(option, "names more than one GPU", value=",".join(gpus), hint="name one")
    own = {pool.role: (pool.gpu,) for pool in pools if pool.gpu is not None and pool.role not in wanted.files}
    for role, (name,) in own.items():
        given = wanted.gpus.get(role, (name,))
        if find_gpu(given[0]).name != name:
            option = f"--{role.name.lower()}-gpu"
            raise InputError(option, f"contradicts --placement, which says {name}", value=given[0])
    if placement.is_colocated:
        # There is one pool: what is said of it is said of all.
        wanted = replace(wanted, gpu=pools[0].gpu or wanted.gpu)
    found = profiles_of_roles(replace(wanted, gpus={**wanted.gpus, **own}))
    profiles = {role: each[0] for role, each in found.items()}
    handover.check_moves(placement, nic=nodes is None)
    if not placement.is_colocated:
        prefill, decode = profiles[Role.PREFILL], profiles[Role.DECODE]
        if prefill.gpu.name == decode.gpu.name:
            crosses = fills_a_node(placement, decode, nodes)
            prefill, decode = (_handing(profile, handover, None, crosses=crosses) for profile in (prefill, decode))
        else:
            prefill, decode = handed_over(prefill, decode, lambda profile, link: _handing(profile, handover, link))
            pools = [replace(pool, gpu=profiles[pool.role].gpu.name) for pool in pools]
        profiles |= {Role.PREFILL: prefill, Role.DECODE: decode}
        check_handed_over([profiles])
    return Placed(replace(placement, pools=tuple(pools)), profiles)


def check_handed_over(mixes: Sequence[Mix]) -> None:
    """See that KV can be handed over within each mix.

    Raises:
        InputError: it cannot.
    """
    from placement.mixes import check_mixes

    try:
        check_mixes(mixes)
    except InputError as error:
        where = "--kv-dtype" if error.name == "kv_bytes_per_token" else "--decode-gpu"
        raise InputError(where, error.rule, name=error.name, value=error.value, hint=error.hint) from None


def roles_of(mode: str) -> tuple[Role, ...]:
    """Return the roles that a mode searches.

    >>> [role.value for role in roles_of("both")]
    ['P', 'D', 'C']
    """
    return tuple(role for role in Role if mode == "both" or (role is Role.COLOCATED) == (mode == "colocated"))


def gpu_names(option: str, text: str) -> tuple[str, ...]:
    """Return the GPUs that an option names."""
    names = tuple(part.strip() for part in text.split(","))
    if "" in names:
        raise InputError(option, "names no GPU", value=text, hint="as in h100 or h100,h20; see dsim gpus")
    return names


def whole_number_of_gpus(text: str | None) -> int | None:
    """Return a plain number of GPUs; None where none is given."""
    from placement.fleet import number_of_gpus

    return None if text is None else number_of_gpus(text)


def there_of_each(question: Question) -> dict[str, int] | None:
    """Return the GPUs there are of each type; None where there is one."""
    fleet = question.fleet
    return None if fleet is None or len(fleet.types) < 2 else {n: part.num_gpus for n, part in fleet.types.items()}


def available_by_type(question: Question, text: str | None) -> tuple[dict[str, int] | None, Question]:
    """Return the GPUs there are of each type, None without such limits; and the question about what they allow.

    Raises:
        InputError: numbers that cannot be.
    """
    from placement.cover import check_available
    from placement.fleet import budgets

    if text is None or "=" not in text:
        return None, question
    fleet = question.fleet
    if fleet is None or len(fleet.types) < 2:
        hint = "give a plain number, or several GPUs (--prefill-gpu, --decode-gpu)"
        raise InputError("--gpus", "is by type, and there is one", value=text, hint=hint)
    there, of_role = budgets(text, list(fleet.types), question.roles)
    if of_role:
        raise InputError("--gpus", "is by GPU here, not by role", value=text, hint=f"as in {next(iter(fleet.types))}=8")
    missing = [name for name in fleet.types if name not in there]
    if missing:
        raise InputError("--gpus", f"says nothing of {missing[0]}", value=text, hint=f"add {missing[0]}=N")
    check_available(there)
    types = {n: replace(part, num_gpus=min(part.num_gpus, there[n])) for n, part in fleet.types.items()}
    return there, replace(question, fleet=replace(fleet, types=types))


def _handing(profile: Profile, options: HandoverOptions, link: str | None, *, crosses: bool = False) -> Profile:
    """Return a profile with the handover asked for.

    Args:
        link: that KV between GPUs of two types goes over, where the user names none; None: they are of one type.
        crosses: all KV of GPUs of one type goes from node to node.
    """
    kv_link = options.kv_link
    if link is None:
        return options.of(profile, crosses_nodes=crosses)
    if kv_link is not None and kv_link.strip().lower() in ("nvlink", "pcie"):
        rule = "is within a node, and nodes have GPUs of one type"
        raise InputError("--kv-link", rule, value=kv_link, hint="leave it out, or give nic or a rate")
    # All KV goes from node to node.
    return replace(options, kv_link=kv_link or options.nic or link, nic=None).of(profile, crosses_nodes=True)


# Limits of batches


def asked_batches(
    batching: PrefillBatching, max_batch_tokens: str | None, max_batch_requests: str | None
) -> BatchChoices:
    """Return the limits of a batch to try for each role.

    Raises:
        InputError: a text is no list of limits.
    """
    from placement.batches import parse_batches

    if batching is PrefillBatching.LM and max_batch_tokens is not None:
        hint = "leave one of the two out; --max-batch-tokens takes lm, too"
        raise InputError("--max-batch-tokens", "does not go with --prefill-batching lm", hint=hint)
    return parse_batches(max_batch_tokens, max_batch_requests)


def asked_budgets(text: str | None) -> tuple[int, ...]:
    """Return the token budgets to try."""
    from placement.batches import parse_number
    from placement.space import TOKEN_BUDGETS

    if text is None:
        return TOKEN_BUDGETS
    numbers = [parse_number("--token-budgets", part.strip(), "as in 512,2048,8192") for part in text.split(",")]
    return tuple(dict.fromkeys(numbers))


def check_lm(question: Question) -> None:
    """See that every profile whose Lm is to be tried has one.

    Raises:
        InputError: one has none.
    """
    for mix in question.mixes or (question.profiles,):
        question.batches.check_lm({role: profile for role, profile in mix.items() if role in question.roles})
