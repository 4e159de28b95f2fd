"""Mixes: pools of one placement on different GPUs, the GPUs that there are of each, and limits of batches to try."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dsim.errors import InputError
from dsim.options import Options, PrefillBatching
from dsim.pool_limits import beyond_range, with_limits
from dsim.pools import Placement, Policy, Pool, Role
from dsim.profile import BatchLimits, Profile
from placement.bounds import Case
from placement.space import Cluster, times

#: The profiles of one kind of placement: of prefill and decode, or of colocated. Pools name their GPUs.
Mix = Mapping[Role, Profile]
#: Most tokens of a batch that are tried: so many, the engine's own, or Lm.
TokenChoice = int | PrefillBatching


@dataclass(frozen=True, slots=True)
class BatchChoices:
    """The limits of a batch that a search tries for each role; nothing given: the engine's alone.

    Args:
        max_batch_tokens: of prefill pools and of colocated ones without a token budget.
        max_batch_requests: of any role; None: the engine's.
    """

    max_batch_tokens: Mapping[Role, tuple[TokenChoice, ...]] = field(default_factory=dict)
    max_batch_requests: Mapping[Role, tuple[int | None, ...]] = field(default_factory=dict)

    def with_lm(self) -> BatchChoices:
        """Return them with Lm, and nothing else, as the limit of prefill pools' tokens."""
        return replace(self, max_batch_tokens={**self.max_batch_tokens, Role.PREFILL: (PrefillBatching.LM,)})

    def check_lm(self, profiles: Mapping[Role, Profile], where: str = "--max-batch-tokens") -> None:
        """See that every profile whose Lm is to be tried has one.

        Raises:
            InputError: one has none.
        """
        for role, choices in self.max_batch_tokens.items():
            if PrefillBatching.LM in choices and role in profiles and profiles[role].saturation_tokens is None:
                rule = f"needs Lm, which profile {profiles[role].name} does not have"
                raise InputError(where, rule, value="lm", hint="leave lm out, or give numbers")

    def variants(self, placement: Placement, profiles: Mapping[Role, Profile]) -> Iterator[Placement]:
        """Yield the placement with every combination of limits, itself where there is nothing to try.

        A limit that is the engine's own is not written down.
        """
        if not self.max_batch_tokens and not self.max_batch_requests:
            yield placement
            return
        for pools in itertools.product(*(self._pools(pool, profiles[pool.role]) for pool in placement.pools)):
            yield replace(placement, pools=pools)

    def _pools(self, pool: Pool, profile: Profile) -> tuple[Pool, ...]:
        engine = profile.limits.get(pool.role, BatchLimits())
        tokens: list[int | None] = [None]
        if pool.limits_tokens:
            asked = self.max_batch_tokens.get(pool.role, (PrefillBatching.ENGINE,))
            tokens = [_tokens(choice, profile, pool.parallelism.tp) for choice in asked]
        requests = self.max_batch_requests.get(pool.role, (None,))
        return tuple(
            dict.fromkeys(
                replace(
                    pool,
                    max_batch_tokens=None if most == engine.tokens else most,
                    max_batch_requests=None if count == engine.requests else count,
                )
                for most in tokens
                for count in requests
            )
        )


def _tokens(choice: TokenChoice, profile: Profile, tp: int) -> int | None:
    """Return the tokens that are meant, None for the engine's limit, which also stands where Lm is not known."""
    if not isinstance(choice, PrefillBatching):
        return choice
    limit = profile.prefill_token_limit(choice)
    return limit.get(tp) if isinstance(limit, Mapping) else limit


@dataclass(frozen=True, slots=True)
class Parts(Cluster):
    """The GPUs of one mix whose roles lie on different ones: nodes have GPUs of one type.

    Args:
        parts: the GPUs of each role.
    """

    parts: Mapping[Role, Cluster] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """Nodes of all types."""
        return sum(part.num_nodes for part in self.parts.values())

    @property
    def largest_node(self) -> int:
        """GPUs of the largest node of any type."""
        return max(part.largest_node for part in self.parts.values())

    def packs(self, placement: Placement) -> bool:
        """Return whether the instances of each role fit into the nodes of its own GPUs, each within one."""
        return placement.num_gpus <= self.num_gpus and all(
            pool.parallelism.num_gpus <= self.parts[pool.role].largest_node
            and self.parts[pool.role].packs(_alone(pool))
            for pool in placement.pools
        )

    def on(self, placement: Placement) -> Placement:
        """Return the placement: wherever its instances lie, all KV goes from node to node."""
        return placement

    def _room(self, placement: Placement) -> int:
        copies = self.num_gpus // placement.num_gpus
        while copies > 1 and not self.packs(times(placement, copies)):
            copies -= 1
        return copies


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many GPUs of which type there are.

    Args:
        types: the GPUs of each type, by its name: as if there were no others.
        num_gpus: most in all.
        by_role: most of a role's pool; a role that is not there has no limit of its own.
    """

    types: Mapping[str, Cluster]
    num_gpus: int
    by_role: Mapping[Role, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.types:
            raise InputError("fleet", "must have a type of GPU", name="types")

    @property
    def all(self) -> Cluster:
        """All GPUs, as if they were of one type: what is counted where types do not matter."""
        total = min(self.num_gpus, sum(cluster.num_gpus for cluster in self.types.values()))
        if len(self.types) == 1:
            return replace(next(iter(self.types.values())), num_gpus=total, by_role=self.by_role)
        return Cluster(total, max(cluster.gpus_per_node for cluster in self.types.values()), by_role=self.by_role)

    def of(self, gpus: Mapping[Role, str]) -> Cluster:
        """Return the GPUs that pools of these roles may use together."""
        names = set(gpus.values())
        own = {name: replace(part, num_gpus=min(part.num_gpus, self.num_gpus)) for name, part in self.types.items()}
        if len(names) == 1:
            return replace(own[names.pop()], by_role=self.by_role)
        total = min(self.num_gpus, sum(own[name].num_gpus for name in names))
        parts = {role: own[name] for role, name in gpus.items()}
        return Parts(total, max(part.gpus_per_node for part in parts.values()), by_role=self.by_role, parts=parts)

    def allows(self, placement: Placement) -> bool:
        """Return whether no pool has more GPUs than its role may have."""
        return all(pool.num_gpus <= self.by_role.get(pool.role, pool.num_gpus) for pool in placement.pools)

    def at_most(self, num_gpus: int | None) -> Fleet:
        """Return the fleet with so many GPUs in all."""
        return self if num_gpus is None else replace(self, num_gpus=min(num_gpus, self.num_gpus))


def _alone(pool: Pool) -> Placement:
    """Return a placement of instances of these sizes and nothing beside them."""
    return Placement((Pool(Role.COLOCATED, pool.count, pool.parallelism, Policy.ORCA),))


def gpus_of(mix: Mix) -> dict[Role, str]:
    """Return the name of each role's GPU."""
    return {role: profile.gpu.name for role, profile in mix.items()}


def on_gpus(placement: Placement, mix: Mix) -> Placement:
    """Return the placement with the GPU of each pool by name."""
    pools = tuple(replace(pool, gpu=mix[pool.role].gpu.name) for pool in placement.pools)
    return replace(placement, pools=pools)


def mix_of(placement: Placement, mixes: Iterable[Mix], profiles: Mapping[Role, Profile]) -> Mapping[Role, Profile]:
    """Return the profiles of the mix whose GPUs the pools name; `profiles` where they name none.

    Raises:
        InputError: no mix has these GPUs.
    """
    names = {pool.role: pool.gpu for pool in placement.pools}
    if not any(names.values()):
        return profiles
    for mix in mixes:
        if gpus_of(mix) == names:
            return mix
    if all(profiles[role].gpu.name == name for role, name in names.items() if role in profiles):
        return profiles
    raise InputError("search", "is on GPUs that are not searched", value=str(placement), hint="name its GPUs")


def case_of(placement: Placement, known: Case, mixes: Sequence[Mix], cases: dict[object, Case]) -> Case:
    """Return what the bounds of a placement rest on: the profiles of its GPUs, with the limits of its pools.

    Args:
        cases: those made before, by what they depend on.
    """
    profiles = mix_of(placement, mixes, known.profiles)
    limits = tuple((pool.role, pool.gpu, pool.max_batch_tokens, pool.max_batch_requests) for pool in placement.pools)
    own = any(tokens or requests for _, _, tokens, requests in limits)
    if profiles is known.profiles and not own:
        return known
    if limits not in cases:
        options = known.options
        if placement.pools[0].role is Role.PREFILL and placement.pools[0].max_batch_tokens is not None:
            options = replace(options, prefill_token_limit=None)
        placed = {pool.role: with_limits(profiles[pool.role], pool) for pool in placement.pools}
        used: Mapping[Role, Profile] = {**profiles, **placed} if own else profiles
        cases[limits] = replace(known, profiles=used, options=options, known={}, waits={}, idle={})
    return cases[limits]


def limit_reasons(placement: Placement, profiles: Mapping[Role, Profile], options: Options) -> tuple[str, ...]:
    """Return which limits of the pools are beyond what their profiles were measured with."""
    if options.extrapolate:
        return ()
    return tuple(
        f"{pool.role.name.lower()} {pool.parallelism}: {reason}"
        for pool in placement.pools
        for reason in beyond_range(pool, profiles[pool.role])
    )


def check_mixes(mixes: Sequence[Mix]) -> None:
    """See that KV can go from each prefill to its decode side, and that all mixes serve one model.

    Raises:
        InputError: it cannot, or they do not.
    """
    every = [profile for mix in mixes for profile in mix.values()]
    if len({profile.model.name for profile in every}) > 1:
        names = " and ".join(sorted({profile.model.name for profile in every}))
        raise InputError("profiles", "must be the same for all pools", name="model", value=names)
    for mix in mixes:
        if Role.PREFILL not in mix:
            continue
        ends = (mix[Role.PREFILL], mix[Role.DECODE])
        for name, values in (
            ("block_tokens", [profile.block_tokens for profile in ends]),
            ("kv_bytes_per_token", [profile.model.kv_bytes_per_token for profile in ends]),
        ):
            if values[0] != values[1]:
                between = f"of {ends[0].name} and {ends[1].name}"
                rule = f"differ: KV {between} is laid out otherwise and cannot be handed over"
                hint = "choose profiles of one engine family and one --kv-dtype"
                raise InputError("profiles", rule, name=name, value=f"{values[0]} and {values[1]}", hint=hint)
