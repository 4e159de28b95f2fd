"""The space of placements: parallel degrees, policies and instance counts under a GPU budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.model import Model
from dsim.pools import Parallelism, Placement, Policy

#: Token budgets of the `chunked` policy that are always tried, else the comparison flatters disaggregation.
TOKEN_BUDGETS: Final = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The GPUs that a placement may use.

    Args:
        num_gpus: at most this many.
        gpus_per_node: GPUs of one node; an instance lies within one.
    """

    num_gpus: int
    gpus_per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def largest_instance(self) -> int:
        """GPUs of the largest instance that fits into one node."""
        return min(self.num_gpus, self.gpus_per_node)

    def packs(self, placement: Placement) -> bool:
        """Return whether the instances fit into the nodes, each within one."""
        nodes = [self.gpus_per_node] * (self.num_gpus // self.gpus_per_node)
        if self.num_gpus % self.gpus_per_node:
            nodes.append(self.num_gpus % self.gpus_per_node)
        sizes = [pool.parallelism.num_gpus for pool in placement.pools]
        counts = [pool.count for pool in placement.pools]
        if len(sizes) == 1:
            sizes, counts = [*sizes, 1], [*counts, 0]
        # After each node: for every number of first-pool instances placed, the most second-pool ones beside them.
        most = {0: 0}
        for gpus in nodes:
            step: dict[int, int] = {}
            for placed, others in most.items():
                for here in range(min(gpus // sizes[0], counts[0] - placed) + 1):
                    total = others + (gpus - here * sizes[0]) // sizes[1]
                    step[placed + here] = max(step.get(placed + here, 0), total)
            most = step
        return most.get(counts[0], -1) >= counts[1]


#: Most GPUs of one search: the placements grow with the cube of them.
_MOST_GPUS: Final = 64


def asked_cluster(
    gpu: Gpu, *, gpus: int | None, nodes: int | None, gpus_per_node: int | None, within_node: bool
) -> Cluster:
    """Return the GPUs that a search may use: so many, or whole nodes, or one node.

    Args:
        within_node: pairs of instances stay within a node, which is modelled for one node only.

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
    if asked > _MOST_GPUS:
        hint = "search a part of the cluster and replicate the answer"
        raise InputError(option, f"must be <= {_MOST_GPUS} GPUs in all", value=value, hint=hint)
    if asked > per_node and within_node:
        rule = f"is more than one node of {per_node} GPUs, which --affinity low is not modelled for yet"
        raise InputError(option, rule, value=value, hint=f"ask for at most {per_node} GPUs, or --affinity high")
    return Cluster(asked, per_node)


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


def parallelisms(model: Model, *, max_gpus: int) -> tuple[Parallelism, ...]:
    """Return every (tp, pp) that divides heads and layers on at most `max_gpus` GPUs, in order of size.

    Raises nothing: where nothing divides, tp 1 and pp 1 do.
    """
    found = [
        Parallelism(tp, pp)
        for tp in range(1, max_gpus + 1)
        if divides_heads(model, tp)
        for pp in range(1, max_gpus // tp + 1)
        if model.layers % pp == 0
    ]
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
                        yield placement


def paired(prefill: Sequence[Parallelism], decode: Sequence[Parallelism], *, cluster: Cluster) -> Iterator[Placement]:
    """Yield one prefill and one decode instance side by side in one node: the units that Algorithm 2 replicates."""
    for p in prefill:
        for d in decode:
            if p.num_gpus + d.num_gpus <= cluster.largest_instance:
                yield Placement.disaggregated(prefill=p, num_prefill=1, decode=d, num_decode=1)


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
                    yield placement
