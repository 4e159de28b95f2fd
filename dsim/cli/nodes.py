"""Nodes that a placement is packed onto, as options and in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dsim.cli.inputs import whole
from dsim.cli.options import AffinityChoice, GpusPerNode, whole_number
from dsim.errors import InfeasiblePlacementError, InputError

if TYPE_CHECKING:
    from dsim.gpu import Gpu
    from dsim.pools import Placement
    from dsim.profile import Profile

Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        parser=whole_number,
        metavar="N",
        help="Pack the instances onto N nodes: KV crosses them over the NIC. [default: fast links everywhere]",
    ),
]
PackedAffinity = Annotated[
    AffinityChoice | None,
    typer.Option(
        "--affinity",
        help="With --nodes. high: each instance by itself; low: stages of prefill and decode side by side.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The nodes that a placement is packed onto."""

    nodes: Nodes = None
    gpus_per_node: GpusPerNode = None
    affinity: PackedAffinity = None


def on_nodes(placement: Placement, gpu: Gpu, asked: NodeOptions) -> Placement:
    """Return the placement packed onto the nodes that the options name.

    Raises:
        InputError: it does not fit, or options that need others.
    """
    nodes, gpus_per_node, affinity = asked.nodes, asked.gpus_per_node, asked.affinity
    if nodes is None:
        for option, value in (("--gpus-per-node", gpus_per_node), ("--affinity", affinity and affinity.value)):
            if value is not None:
                raise InputError(option, "belongs to --nodes", value=value, hint="add --nodes N")
        return placement
    from placement.space import cluster_of

    whole("--nodes", nodes, at_least=1, at_most=10_000)
    per_node = gpu.gpus_per_node if gpus_per_node is None else gpus_per_node
    whole("--gpus-per-node", per_node, at_least=1, at_most=1024)
    low = affinity is AffinityChoice.LOW
    cluster = cluster_of(gpu, num_gpus=nodes * per_node, gpus_per_node=per_node, side_by_side=low)
    try:
        if not cluster.packs(placement):
            rule = f"its instances do not pack into {nodes} nodes of {per_node} GPUs"
            raise InfeasiblePlacementError(str(placement), [rule])
        return cluster.on(placement)
    except InfeasiblePlacementError as error:
        hint = "give more nodes, or smaller instances"
        raise InputError("--nodes", "; ".join(error.reasons), value=nodes, hint=hint) from None


def layout_lines(placement: Placement, profile: Profile) -> list[str]:
    """Return where the instances lie and what crosses nodes, in words; nothing where no nodes are named."""
    found, nodes = placement.layout, placement.nodes
    if found is None or nodes is None:
        return []
    held: dict[int, list[str]] = {}
    for pool, instances in zip(placement.pools, found.pools, strict=True):
        for index, at in enumerate(instances):
            for segment, node in enumerate(at):
                part = f" (segment {segment} of {len(at)})" if len(at) > 1 else ""
                held.setdefault(node, []).append(f"{pool.role.value}{index}{part}")
    where = "; ".join(f"node {node}: {', '.join(names)}" for node, names in sorted(held.items()))
    lines = [f"nodes of {nodes.gpus_per_node} GPUs: {where}"]
    crossings = placement.crossings
    if crossings is not None:
        pairs = [crosses for row in crossings for crosses in row]
        rate = profile.handover.reached_bytes_per_s(profile.gpu, crosses=True)
        derived = ", derived" if profile.handover.node_bandwidth_bytes_per_s is None else ""
        lines.append(
            f"KV crosses nodes between {sum(pairs)} of {len(pairs)} pairs"
            + (f", at {rate / 1e9:.3g} GB/s a link{derived}" if any(pairs) else "")
        )
    if any(pool.parallelism.inter_node_pp > 1 for pool in placement.pools):
        sends = profile.sends_across_nodes
        derived = "" if profile.p2p.knows_nodes else ", derived"
        lines.append(
            f"activations cross nodes in {1e6 * sends.node_latency_s:.3g} µs + bytes / "
            f"{sends.node_bandwidth_bytes_per_s / 1e9:.3g} GB/s{derived}"
        )
    return lines
