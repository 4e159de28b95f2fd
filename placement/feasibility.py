"""Feasibility: every reason why a placement cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsim.kv import num_blocks
from dsim.nodes import Nodes
from dsim.pools import Placement, Pool, Role
from dsim.profile import Profile
from placement.space import Cluster, divides_heads

_NAMES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.COLOCATED: "colocated"}


@dataclass(frozen=True, slots=True)
class LongestRequest:
    """The longest request that a placement must be able to hold.

    Args:
        prompt_tokens: longest prompt.
        kv_tokens: most KV that one request needs: prompt + output tokens - 1.
    """

    prompt_tokens: int
    kv_tokens: int


def reasons(
    placement: Placement, *, profiles: Mapping[Role, Profile], cluster: Cluster, longest: LongestRequest
) -> tuple[str, ...]:
    """Return all reasons why this placement cannot run there, none if it can."""
    found = [reason for pool in placement.pools for reason in pool_reasons(pool, profiles, cluster, longest)]
    if placement.num_gpus > cluster.num_gpus:
        found.append(f"needs {placement.num_gpus} GPUs, there are {cluster.num_gpus}")
    elif not found and not cluster.packs(placement):
        found.append(f"its instances do not pack into {cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs")
    return tuple(found)


def cannot_run(placement: Placement, profiles: Mapping[Role, Profile]) -> tuple[str, ...]:
    """Return all reasons why a placement that is given cannot run at all, whatever the requests and the nodes are."""
    cluster = Cluster(num_gpus=placement.num_gpus, gpus_per_node=placement.num_gpus)
    longest = LongestRequest(prompt_tokens=1, kv_tokens=1)
    return reasons(placement, profiles=profiles, cluster=cluster, longest=longest)


def pool_reasons(
    pool: Pool, profiles: Mapping[Role, Profile], cluster: Cluster, longest: LongestRequest
) -> tuple[str, ...]:
    """Return all reasons why an instance of this pool cannot run."""
    profile = profiles.get(pool.role)
    where = f"{_NAMES[pool.role]} {pool.parallelism}"
    if profile is None:
        return (f"{where}: no profile for this role",)
    found = [*_division(pool, profile), *_coefficients(pool, profile)]
    if pool.parallelism.num_gpus > cluster.gpus_per_node and not _spans(pool, cluster):
        found.append(f"an instance needs {pool.parallelism.num_gpus} GPUs, a node has {cluster.gpus_per_node}")
    found += _memory(pool, profile, longest)
    return tuple(f"{where}: {reason}" for reason in found)


def _spans(pool: Pool, cluster: Cluster) -> bool:
    """Return whether an instance may lie in several nodes, in equal segments of its stages."""
    segments = Nodes(cluster.num_gpus, cluster.gpus_per_node).segments(pool.parallelism.tp, pool.parallelism.pp)
    return segments is not None


def _division(pool: Pool, profile: Profile) -> list[str]:
    model, tp, pp = profile.model, pool.parallelism.tp, pool.parallelism.pp
    found = []
    if not divides_heads(model, tp):
        heads = f"{model.attention_heads} attention and {model.kv_heads} KV heads"
        found.append(f"tp={tp} does not divide the {heads} of {model.name}")
    if model.layers % pp:
        found.append(f"pp={pp} does not divide the {model.layers} layers of {model.name}")
    return found


def _coefficients(pool: Pool, profile: Profile) -> list[str]:
    tp = pool.parallelism.tp
    if tp in profile.refused:
        return [f"profile {profile.name} refuses tp={tp}: {profile.refused[tp]}"]
    if tp not in profile.latency:
        known = ", ".join(map(str, sorted(profile.latency)))
        return [f"profile {profile.name} has no coefficients for tp={tp} (it has {known})"]
    return []


def _memory(pool: Pool, profile: Profile, longest: LongestRequest) -> list[str]:
    capacity_tokens, weights = profile.kv_tokens(pool.parallelism), profile.model.weight_bytes
    if capacity_tokens <= 0:
        if profile.kv_bytes_per_gpu is None:
            return [f"profile {profile.name} has no KV capacity for {pool.parallelism}"]
        room = profile.kv_bytes_per_gpu * pool.parallelism.num_gpus
        return [f"weights of {weights / 1e9:.1f} GB leave no room for KV in {room / 1e9:.1f} GB of usable memory"]
    loops = pool.parallelism.pp if pool.role is Role.COLOCATED else 1
    blocks = max(0, capacity_tokens) // profile.block_tokens // loops
    needed = longest.prompt_tokens if pool.role is Role.PREFILL else longest.kv_tokens
    if num_blocks(needed, profile.block_tokens) > blocks:
        what = "prompt" if pool.role is Role.PREFILL else "request"
        share = f" in each of {loops} engine loops" if loops > 1 else ""
        held = blocks * profile.block_tokens
        return [f"the KV cache holds {held} tokens{share}, the longest {what} of the workload needs {needed}"]
    return []
