"""Pools and placements: how many instances of which role, at which parallel degrees."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dsim.errors import InfeasiblePlacementError, InputError
from dsim.nodes import Layout, Nodes, cuts, fits, layout


class Role(enum.Enum):
    """What the instances of a pool do; the value is the letter of the placement notation."""

    PREFILL = "P"
    DECODE = "D"
    COLOCATED = "C"


class Policy(enum.Enum):
    """How a colocated instance mixes prefill and decode (docs/semantics.md, section 6)."""

    ORCA = "orca"
    PREFILL_FIRST = "prefill-first"
    DECODE_FIRST = "decode-first"
    CHUNKED = "chunked"


@dataclass(frozen=True, slots=True, order=True)
class Parallelism:
    """Tensor (tp) and pipeline (pp) parallel degree of one instance.

    Args:
        inter_node_pp: equal segments of its stages that lie in different nodes; 1 where nobody says which nodes.
    """

    tp: int = 1
    pp: int = 1
    inter_node_pp: int = field(default=1, repr=False)

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("pp", self.pp), ("inter_node_pp", self.inter_node_pp)):
            if value < 1:
                raise InputError("parallelism", "must be >= 1", name=name, value=value)
        if self.pp % self.inter_node_pp:
            raise InputError("parallelism", f"must divide pp={self.pp}", name="inter_node_pp", value=self.inter_node_pp)

    @property
    def degrees(self) -> Parallelism:
        """The degrees alone, wherever the stages lie."""
        return self if self.inter_node_pp == 1 else Parallelism(self.tp, self.pp)

    @property
    def num_gpus(self) -> int:
        """GPUs of one instance."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}"


@dataclass(frozen=True, slots=True)
class Pool:
    """`count` equal instances of one role.

    Args:
        policy: only for colocated pools.
        token_budget: tokens per step of the `chunked` policy, only there.
        max_batch_tokens: most tokens of a batch that prefills, instead of the engine's limit; None: that one. Not of
            decode pools, nor of `chunked`, which has its token budget.
        max_batch_requests: most requests of a batch (of a micro-batch), instead of the engine's limit; None: that one.
        gpu: name of the GPU that its instances lie on; None: that of the role's profile.
    """

    role: Role
    count: int
    parallelism: Parallelism
    policy: Policy | None = None
    token_budget: int | None = None
    max_batch_tokens: int | None = None
    max_batch_requests: int | None = None
    gpu: str | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError("placement", "must be >= 1", name="count", value=self.count)
        if (self.policy is not None) != (self.role is Role.COLOCATED):
            raise InputError(
                "placement", "belongs to colocated pools and only to them", name="policy", value=self.policy
            )
        if (self.token_budget is not None) != (self.policy is Policy.CHUNKED):
            raise InputError(
                "placement",
                "belongs to the chunked policy and only to it",
                name="token_budget",
                value=self.token_budget,
            )
        for name in ("token_budget", "max_batch_tokens", "max_batch_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError("placement", "must be >= 1", name=name, value=value)
        if self.max_batch_tokens is not None and not self.limits_tokens:
            other = "max_batch_requests" if self.role is Role.DECODE else "the token budget"
            rule = "belongs to pools that prefill whole prompts"
            raise InputError(
                "placement", rule, name="max_batch_tokens", value=self.max_batch_tokens, hint=f"use {other}"
            )

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole pool."""
        return self.count * self.parallelism.num_gpus

    @property
    def limits_tokens(self) -> bool:
        """Whether its batches have a limit of tokens: they prefill, and have no token budget."""
        return self.role is not Role.DECODE and self.policy is not Policy.CHUNKED

    @property
    def policy_or_fail(self) -> Policy:
        """The policy of a colocated pool."""
        if self.policy is None:
            raise InputError("placement", "is not a colocated pool", value=str(self))
        return self.policy

    def __str__(self) -> str:
        tokens = "" if self.max_batch_tokens is None else f"/tokens{self.max_batch_tokens}"
        requests = "" if self.max_batch_requests is None else f"/requests{self.max_batch_requests}"
        gpu = "" if self.gpu is None else f"@{self.gpu}"
        return f"{self.count}x{self.role.value}:{self.parallelism}{tokens}{requests}{gpu}"

    @property
    def label(self) -> str:
        """The notation followed by policy and token budget where there are any."""
        if self.policy is None:
            return str(self)
        budget = "" if self.token_budget is None else f" {self.token_budget}"
        return f"{self} ({self.policy.value}{budget})"


#: Counts to 9999 and degrees to 999: more is a slip of the finger.
_POOL = re.compile(
    r"([0-9]{1,4})\s*x\s*([A-Za-z]+)\s*:\s*tp([0-9]{1,3})(?:pp([0-9]{1,3}))?((?:/[a-z]+[0-9]{1,9})*)(?:@([\w.-]+))?",
    re.IGNORECASE,
)
#: What stands after a slash: the attribute of the pool.
_LIMITS = {"tokens": "max_batch_tokens", "requests": "max_batch_requests"}


@dataclass(frozen=True, slots=True)
class Placement:
    """The pools of a deployment: one prefill and one decode pool, or one colocated pool.

    Args:
        nodes: that the instances are packed onto (`on`); None: all GPUs are joined by fast links.

    >>> p = Placement.parse("1xP:tp2pp1 + 2xD:tp1pp1")
    >>> p.num_gpus, str(p)
    (4, '1xP:tp2pp1 + 2xD:tp1pp1')
    >>> p = Placement.parse("1xP:tp2/tokens4096@h100-sxm + 2xD:tp1/requests64@h20-96g")
    >>> p.pools[0].max_batch_tokens, p.pools[1].max_batch_requests, p.pools[1].gpu
    (4096, 64, 'h20-96g')
    """

    pools: tuple[Pool, ...]
    nodes: Nodes | None = None

    def __post_init__(self) -> None:
        roles = [pool.role for pool in self.pools]
        if roles not in ([Role.PREFILL, Role.DECODE], [Role.COLOCATED]):
            raise InputError(
                "placement",
                "needs one prefill and one decode pool, or one colocated pool",
                value=" + ".join(map(str, self.pools)),
                hint="write '1xP:tp2pp1 + 1xD:tp1pp1' or '1xC:tp1pp1'",
            )

    @classmethod
    def disaggregated(
        cls, *, prefill: Parallelism, num_prefill: int, decode: Parallelism, num_decode: int
    ) -> Placement:
        """Return `num_prefill` prefill and `num_decode` decode instances."""
        return cls((Pool(Role.PREFILL, num_prefill, prefill), Pool(Role.DECODE, num_decode, decode)))

    @classmethod
    def colocated(
        cls, *, parallelism: Parallelism, count: int, policy: Policy, token_budget: int | None = None
    ) -> Placement:
        """Return `count` colocated instances under one policy."""
        return cls((Pool(Role.COLOCATED, count, parallelism, policy, token_budget),))

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        policy: Policy = Policy.PREFILL_FIRST,
        token_budget: int | None = None,
        where: str = "--placement",
    ) -> Placement:
        """Return the placement written as `1xP:tp2pp1 + 1xD:tp1pp1` or `2xC:tp1pp1`.

        A pool may go on with `/tokens4096` and `/requests64`, its own limits of a batch, and `@h100-sxm`, its GPU.

        Args:
            policy: used by colocated pools.
            token_budget: used by colocated pools under `chunked` (default 2048).

        Raises:
            InputError: the text is not of this form.
        """
        pools = []
        for part in text.split("+"):
            match = _POOL.fullmatch(part.strip())
            letter = match[2].upper()[:1] if match else ""
            if match is None or letter not in "PDC":
                raise InputError(
                    where,
                    "is not a pool",
                    value=part.strip(),
                    hint="write COUNTxROLE:tpNppM with role P, D or C, as in '1xP:tp2pp1 + 1xD:tp1pp1'; counts to 9999",
                )
            role = Role(letter)
            colocated = role is Role.COLOCATED
            chunked = colocated and policy is Policy.CHUNKED
            try:
                pools.append(
                    Pool(
                        role,
                        int(match[1]),
                        Parallelism(int(match[3]), int(match[4] or 1)),
                        policy if colocated else None,
                        (token_budget or 2048) if chunked else None,
                        gpu=match[6],
                        **_limits(match[5], part.strip(), where),
                    )
                )
            except InputError as error:
                raise InputError(where, error.rule, name=error.name, value=error.value, hint=error.hint) from None
        try:
            return cls(tuple(sorted(pools, key=lambda pool: "PDC".index(pool.role.value))))
        except InputError as error:
            raise InputError(where, error.rule, value=text, hint=error.hint) from None

    @property
    def num_gpus(self) -> int:
        """GPUs of all pools together."""
        return sum(pool.num_gpus for pool in self.pools)

    def on(self, nodes: Nodes) -> Placement:
        """Return the placement packed onto nodes; one that fits one node has nothing to say about them.

        >>> Placement.parse("2xP:tp4pp1 + 2xD:tp4pp1").on(Nodes(16, 8)).layout.pools
        (((0,), (1,)), ((0,), (1,)))

        Raises:
            InfeasiblePlacementError: it does not fit.
        """
        segments: Sequence[int] | None = [1] * len(self.pools)
        within = self.num_gpus <= min(nodes.gpus_per_node, nodes.num_gpus)
        if not within:
            segments = cuts(nodes, _degrees(self.pools)) if self.packs(nodes) else None
        if segments is None:
            rule = f"its instances do not pack into {len(nodes.gpus)} nodes of {nodes.gpus_per_node} GPUs"
            raise InfeasiblePlacementError(str(self), [rule])
        pools = tuple(
            pool
            if pool.parallelism.inter_node_pp == cut
            else replace(pool, parallelism=replace(pool.parallelism, inter_node_pp=cut))
            for pool, cut in zip(self.pools, segments, strict=True)
        )
        return Placement(pools, None if within else nodes)

    def packs(self, nodes: Nodes) -> bool:
        """Return whether the instances fit into the nodes."""
        return fits(nodes, _degrees(self.pools))

    @property
    def layout(self) -> Layout | None:
        """Where the instances lie; None where no nodes are named."""
        return None if self.nodes is None else _layout(self.pools, self.nodes)

    def named_dict(self) -> dict[str, object]:
        """Return what names the placement and how it schedules, as in docs/output.md."""
        pool = self.pools[0]
        policy = None if pool.policy is None else pool.policy.value
        return {"placement": str(self), "policy": policy, "token_budget": pool.token_budget}

    def layout_dict(self) -> dict[str, object]:
        """Return where the instances lie, as in docs/output.md; empty where no nodes are named."""
        found = self.layout
        if found is None or self.nodes is None:
            return {}
        roles = [pool.role.name.lower() for pool in self.pools]
        where: dict[str, object] = {
            "num_gpus": self.nodes.num_gpus,
            "gpus_per_node": self.nodes.gpus_per_node,
            "side_by_side": self.nodes.side_by_side,
            **{role: [list(at) for at in pool] for role, pool in zip(roles, found.pools, strict=True)},
        }
        return {"layout": where}

    @property
    def crossings(self) -> tuple[tuple[bool, ...], ...] | None:
        """Whether KV goes from node to node, by prefill and decode instance; None where no nodes are named."""
        return None if self.nodes is None or self.is_colocated else _crossings(self.pools, self.nodes)

    def with_counts(self, counts: Sequence[int]) -> Placement:
        """Return the placement with so many instances in its pools, packed anew where it was packed."""
        pools = tuple(replace(pool, count=count) for pool, count in zip(self.pools, counts, strict=True))
        return Placement(pools) if self.nodes is None else Placement(pools).on(self.nodes)

    @property
    def is_colocated(self) -> bool:
        """Whether the instances run both phases."""
        return self.pools[0].role is Role.COLOCATED

    def pool(self, role: Role) -> Pool:
        """Return the pool of this role; KeyError if there is none."""
        for pool in self.pools:
            if pool.role is role:
                return pool
        raise KeyError(role)

    def __str__(self) -> str:
        return " + ".join(map(str, self.pools))

    @property
    def label(self) -> str:
        """The notation with policy and token budget."""
        return " + ".join(pool.label for pool in self.pools)


def _limits(text: str, pool: str, where: str) -> dict[str, int]:
    """Return the limits of a batch that `/tokens4096/requests64` says, by attribute."""
    found: dict[str, int] = {}
    for part in text.split("/")[1:]:
        word = part.rstrip("0123456789").lower()
        name = _LIMITS.get(word)
        if name is None or name in found:
            rule = "stands twice" if name in found else "is no limit of a batch"
            raise InputError(where, rule, name=f"/{part}", value=pool, hint="as in 1xP:tp2pp1/tokens4096/requests64")
        found[name] = int(part[len(word) :])
    return found


@functools.lru_cache(maxsize=4096)
def _layout(pools: tuple[Pool, ...], nodes: Nodes) -> Layout | None:
    return layout(nodes, _degrees(pools))


@functools.lru_cache(maxsize=4096)
def _crossings(pools: tuple[Pool, ...], nodes: Nodes) -> tuple[tuple[bool, ...], ...]:
    found = _layout(pools, nodes)
    assert found is not None
    return found.crossings


def _degrees(pools: Sequence[Pool]) -> list[tuple[int, int, int]]:
    return [(pool.parallelism.tp, pool.parallelism.pp, pool.count) for pool in pools]
