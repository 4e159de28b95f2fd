"""The space of placements: parallel degrees, policies and instance counts under a GPU budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.model import Model
from dsim.nodes import Nodes
from dsim.pools import Parallelism, Placement, Policy, Role

#: Token budgets of the `chunked` policy that are always tried, else the comparison flatters disaggregation.
TOKEN_BUDGETS: Final = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The GPUs that a placement may use.

    Args:
        num_gpus: at most this many.
        gpus_per_node: GPUs of one node; tensor parallelism stays within one, and so does an instance that fits.
        domain_gpus: GPUs that a fast link joins, where they are more than a node's.
        side_by_side: the stages of a prefill and a decode instance lie side by side (DistServe's Algorithm 2).
        by_role: most of a role's pools, of all copies together; a role that is not there has no limit of its own.
    """

    num_gpus: int
    gpus_per_node: int
    domain_gpus: int = 0
    side_by_side: bool = False
    by_role: Mapping[Role, int] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def largest_node(self) -> int:
        """GPUs of the largest node."""
        return min(self.num_gpus, self.gpus_per_node)

    @property
    def joined_gpus(self) -> int:
        """GPUs that a fast link joins: those of a node, or of a rack."""
        return max(self.gpus_per_node, self.domain_gpus)

    def nodes(self, placement: Placement) -> Nodes:
        """Return the nodes that a placement is packed onto."""
        return Nodes(self.num_gpus, self.gpus_per_node, side_by_side=self.side_by_side and not placement.is_colocated)

    def packs(self, placement: Placement) -> bool:
        """Return whether the instances fit into the nodes."""
        return placement.packs(self.nodes(placement))

    def on(self, placement: Placement) -> Placement:
        """Return a placement that packs where it lies; as it is where fast links join all of it anyway."""
        if placement.num_gpus <= self.joined_gpus:
            return placement
        nodes = self.nodes(placement)
        return placement.on(nodes if not self.domain_gpus else replace(nodes, gpus_per_node=self.domain_gpus))

    def copies(self, placement: Placement) -> int:
        """Return how many copies of a placement there is room for, each of which lies as the one that is simulated."""
        of_roles = [self.by_role[pool.role] // pool.num_gpus for pool in placement.pools if pool.role in self.by_role]
        return min([self._room(placement), *of_roles])

    def _room(self, placement: Placement) -> int:
        """Return the copies that the nodes hold."""
        each, joined, found = placement.num_gpus, self.joined_gpus, placement.layout
        whole = self.num_gpus // joined
        if found is not None and not placement.is_colocated:
            if self.side_by_side:
                # Segments go to nodes in turn: those of one copy to different ones.
                return max(whole * (joined * found.nodes_used // each) // found.nodes_used, 1)
            return max(whole // found.nodes_used, 1)
        copies = self.num_gpus // each
        if not placement.is_colocated and each <= joined:
            copies = whole * (joined // each) + self.num_gpus % joined // each
            if joined == self.gpus_per_node:
                return copies
        # It does not matter which instances share a node.
        while copies > 1 and not self.packs(times(placement, copies)):
            copies -= 1
        return copies


def times(placement: Placement, copies: int) -> Placement:
    """Return a placement with so many times the instances."""
    return Placement(tuple(replace(pool, count=pool.count * copies) for pool in placement.pools))


#: Most GPUs of one search: with instances apart the placements grow with the square of them.
_MOST_GPUS: Final = 128
_MOST_GPUS_SIDE_BY_SIDE: Final = 1024


def asked_cluster(
    gpu: Gpu, *, gpus: int | None, nodes: int | None, gpus_per_node: int | None, side_by_side: bool
) -> Cluster:
    """Return the GPUs that a search may use: so many, or whole nodes, or one node.

    Args:
        side_by_side: as `Cluster` has it.

    Raises:
        InputError: both numbers, or more GPUs than can be searched.
    """
    per_node = gpu.gpus_per_node if gpus_per_node is None else gpus_per_node
    if nodes is not None and gpus is not None:
        raise InputError("--nodes", "does not go with --gpus", value=nodes, hint="leave one of the two out")
    if nodes is not None:
        option, value, asked = "--nodes", nodes, nodes * per_node
    elif gpus is not None:
        option, value, asked = "--gpus", gpus, gpus
    else:
        option, value, asked = "--gpus-per-node", per_node, per_node
    most = _MOST_GPUS_SIDE_BY_SIDE if side_by_side else _MOST_GPUS
    if asked > most:
        hint = "search a part of the cluster and replicate the answer"
        raise InputError(option, f"must be <= {most} GPUs in all", value=value, hint=hint)
    return cluster_of(gpu, num_gpus=asked, gpus_per_node=per_node, side_by_side=side_by_side)


def cluster_of(gpu: Gpu, *, num_gpus: int, gpus_per_node: int, side_by_side: bool = False) -> Cluster:
    """Return GPUs in nodes; fast links of rack-scale systems join more than one of them."""
    rack = gpu.scale_up_domain_gpus
    return Cluster(num_gpus, gpus_per_node, rack if rack > max(gpu.gpus_per_node, gpus_per_node) else 0, side_by_side)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How colocated instances mix their phases: a policy and, for `chunked`, its tokens per step."""

    policy: Policy
    token_budget: int | None = None


def schedulings(
    policies: Sequence[Policy] = tuple(Policy), *, token_budgets: Sequence[int] = TOKEN_BUDGETS
) -> tuple[Scheduling, ...]:
    """Return the policies, `chunked` once for each token budget.

    >>> [s.token_budget for s in schedulings([Policy.ORCA, Policy.CHUNKED])]
    [None, 512, 2048, 8192]
    """
    return tuple(
        Scheduling(policy, budget)
        for policy in policies
        for budget in (token_budgets if policy is Policy.CHUNKED else (None,))
    )


def divides_heads(model: Model, tp: int) -> bool:
    """Return whether `tp` GPUs can share the heads: query heads equally, KV heads equally or replicated."""
    return model.attention_heads % tp == 0 and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)


def parallelisms(model: Model, *, max_gpus: int, cluster: Cluster | None = None) -> tuple[Parallelism, ...]:
    """Return every (tp, pp) that divides heads and layers on at most `max_gpus` GPUs, in order of size.

    Raises nothing: where nothing divides, tp 1 and pp 1 do.

    Args:
        cluster: whose nodes hold tensor parallel groups, and an instance in equal segments; None: one node.
    """
    found = [
        Parallelism(tp, pp)
        for tp in range(1, (max_gpus if cluster is None else cluster.largest_node) + 1)
        if divides_heads(model, tp)
        for pp in range(1, max_gpus // tp + 1)
        if model.layers % pp == 0
    ]
    if cluster is not None:
        nodes = Nodes(cluster.num_gpus, cluster.gpus_per_node)
        found = [p for p in found if nodes.segments(p.tp, p.pp) is not None]
    return tuple(sorted(found, key=lambda p: (p.num_gpus, p.pp)))


def disaggregated(
    prefill: Sequence[Parallelism], decode: Sequence[Parallelism], *, cluster: Cluster
) -> Iterator[Placement]:
    """Yield n prefill and m decode instances for every pair of parallelisms and every n, m >= 1 within the cluster."""
    budget = cluster.num_gpus
    for p in prefill:
        for d in decode:
            for n in range(1, (budget - d.num_gpus) // p.num_gpus + 1):
                for m in range(1, (budget - n * p.num_gpus) // d.num_gpus + 1):
                    placement = Placement.disaggregated(prefill=p, num_prefill=n, decode=d, num_decode=m)
                    if cluster.packs(placement):
                        yield cluster.on(placement)


def paired(prefill: Sequence[Parallelism], decode: Sequence[Parallelism], *, cluster: Cluster) -> Iterator[Placement]:
    """Yield one prefill and one decode instance side by side: the units that Algorithm 2 replicates.

    In one node where they fit; else in the fewest nodes with equally many of the stages of each in every one.
    """
    for p in prefill:
        for d in decode:
            if p.num_gpus + d.num_gpus <= cluster.num_gpus:
                placement = Placement.disaggregated(prefill=p, num_prefill=1, decode=d, num_decode=1)
                if cluster.packs(placement):
                    yield cluster.on(placement)


def colocated(
    degrees: Sequence[Parallelism], variants: Sequence[Scheduling], *, cluster: Cluster
) -> Iterator[Placement]:
    """Yield every number of equal colocated instances within the cluster, under each policy."""
    for parallelism in degrees:
        for count in range(1, cluster.num_gpus // parallelism.num_gpus + 1):
            for variant in variants:
                placement = Placement.colocated(
                    parallelism=parallelism, count=count, policy=variant.policy, token_budget=variant.token_budget
                )
                if cluster.packs(placement):
                    yield cluster.on(placement)
