"""Latency profiles: everything dsim knows about one model on one GPU under one engine."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dsim.errors import InfeasiblePlacementError, InputError
from dsim.gpu import LINK_SHARE, NETWORK_SHARE, NODE_LATENCY_S, Gpu
from dsim.latency import HostOverhead, LatencyModel
from dsim.model import Model
from dsim.options import Evidence, PrefillBatching, TokenLimit
from dsim.pools import Parallelism, Placement, Role
from dsim.profile_fit import FitReport
from dsim.sends import Sends, with_sends


class FirstToken(enum.Enum):
    """Which event shows the first token to the user."""

    PREFILL = "prefill"
    DECODE = "decode"
    TRANSFER_END = "transfer_end"

    @property
    def last_part(self) -> str:
        """Which of queue, prefill, transfer and decode admission the first token waits for last."""
        return {"prefill": "prefill", "decode": "decode_admission", "transfer_end": "transfer"}[self.value]


class HandoverMode(enum.Enum):
    """When the decode side pulls a prompt's KV (docs/semantics.md, section 5)."""

    DIRECT = "direct"
    PULL_AT_STEP = "pull-at-step"
    LAYER_WISE = "layer-wise"


class Preemption(enum.Enum):
    """What happens to the KV of a preempted request."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Most tokens and requests of one step; `math.inf` where nothing limits it.

    For decode `requests` is per micro-batch and `tokens` is not used.
    """

    tokens: float = math.inf
    requests: float = math.inf


@dataclass(frozen=True, slots=True)
class Handover:
    """How a prompt's KV gets from the prefill to the decode side.

    Args:
        stalls_decode: a pull holds the decode instance's driver until it ends; only with mode `direct`.
        latency_s: constant of one transfer.
        bandwidth_bytes_per_s: reached rate of one link; a transfer uses min(GPUs of sender, GPUs of receiver) links.
        node_bandwidth_bytes_per_s: the same of a link to another node, where nodes are named; None: 80 % of the
            network's line rate, no more than `bandwidth_bytes_per_s`.
        watermark: pulls stop while blocks pulled but not yet joined reach this share of the decode KV cache.
        hop_s: from a prompt's last prefill step to its handover; not with mode `layer-wise`, which begins before.
        post_s: driver time of posting one pull.
        post_block_s: the same for each KV block of the prompt.
        step_s: driver time that the connector adds to each launch of a prefill or decode instance.
    """

    first_token_from: FirstToken = FirstToken.PREFILL
    stalls_decode: bool = True
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    watermark: float = 0.05
    mode: HandoverMode = HandoverMode.DIRECT
    hop_s: float = 0.0
    post_s: float = 0.0
    post_block_s: float = 0.0
    step_s: float = 0.0
    node_bandwidth_bytes_per_s: float | None = field(default=None, repr=False)

    def reached_bytes_per_s(self, gpu: Gpu, *, crosses: bool) -> float:
        """Return what one link reaches, within a node or to another one."""
        if not crosses:
            return self.bandwidth_bytes_per_s
        if self.node_bandwidth_bytes_per_s is not None:
            return self.node_bandwidth_bytes_per_s
        return min(self.bandwidth_bytes_per_s, LINK_SHARE * gpu.network_bytes_per_s)

    def __post_init__(self) -> None:
        if not 0 < self.watermark <= 1:
            raise InputError("handover", "must be > 0 and <= 1", name="watermark", value=self.watermark)
        for name in ("latency_s", "hop_s", "post_s", "post_block_s", "step_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError("handover", "must be >= 0 and finite", name=name, value=value)
        if self.stalls_decode and self.mode is not HandoverMode.DIRECT:
            raise InputError(
                "handover",
                "does not go with stalls_decode=true",
                name="mode",
                value=self.mode.value,
                hint="set stalls_decode: false, or mode: direct",
            )
        if self.hop_s and self.mode is HandoverMode.LAYER_WISE:
            raise InputError(
                "handover",
                "does not go with mode=layer-wise, which starts before a prefill ends",
                name="hop_s",
                value=self.hop_s,
                hint="set hop_s: 0, or another mode",
            )


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """How activations pass from one pipeline stage to the next; nothing by default.

    Args:
        latency_s: of one send.
        bandwidth_bytes_per_s: reached rate of one GPU's link to another of the node.
        node_latency_s: of one send to another node.
        node_bandwidth_bytes_per_s: reached rate of one GPU's link to another node.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    node_latency_s: float = 0.0
    node_bandwidth_bytes_per_s: float = math.inf

    @property
    def knows_nodes(self) -> bool:
        """Whether it says what sends from node to node take."""
        return self.node_latency_s > 0 or self.node_bandwidth_bytes_per_s < math.inf

    def sends(self, *, within: int, across: int, token_bytes: float) -> Sends:
        """Return what a step's sends take.

        Args:
            within: sends within a node.
            across: sends from node to node.
            token_bytes: activations of a token.
        """
        token_s = (
            within * token_bytes / self.bandwidth_bytes_per_s + across * token_bytes / self.node_bandwidth_bytes_per_s
        )
        return Sends(within * self.latency_s + across * self.node_latency_s, token_s)


class KvSource(enum.Enum):
    """Where an instance's number of KV blocks comes from."""

    GIVEN = "given"
    LISTED = "listed"
    MEMORY = "memory"
    RANGE = "range"


#: KV blocks by parallelism; those of None are meant where a parallelism has none of its own.
KvBlocks = Mapping[Parallelism | None, int]


@dataclass(frozen=True, slots=True)
class Profile:
    """One latency profile file (docs/profiles.md has its form).

    Args:
        latency: kernel times by tensor parallel degree.
        refused: reason by tensor parallel degree for which coefficients exist but are unusable.
        host: driver overhead by role, for pp = 1.
        host_pipelined: driver overhead by role where pp > 1 and it differs.
        request_s: per-request front-end time before a request is queued.
        limits: batch limits by role.
        admission_watermark: share of a colocated instance's KV cache kept free when a prompt is admitted.
        kv_capacity_tokens: KV capacity in tokens by parallelism, where known.
        kv_bytes_per_gpu: memory per GPU for weights and KV cache together, for parallelisms not listed.
        kv_blocks: KV blocks of an instance that stand instead of all of that.
        p2p: how activations pass between pipeline stages.
        swap_bytes_per_s: host link rate per GPU, each way.
        saturation_tokens: Lm (of the smallest degree, where it differs), None where unknown.
        saturation_tokens_at: Lm by tensor parallel degree, where it differs.
        violations: what the numbers are known to get wrong (dsim/contract.py).
        reasons: why a section has the values it has, by dotted path.
        fit: how the numbers were fitted and how well, None where nobody said.
        evidence: what the step times rest on.
        expected_error: how far they may be off, in words; empty where nobody said.
        sha256: digest of the file it was read from, or of what it was estimated from, for provenance.
        within_range: KV caches hold no more than the most context that a decode step was measured with.
    """

    name: str
    model: Model
    gpu: Gpu
    engine: str
    engine_version: str
    source: str
    latency: Mapping[int, LatencyModel]
    host: Mapping[Role, HostOverhead]
    limits: Mapping[Role, BatchLimits]
    kv_capacity_tokens: Mapping[Parallelism, int]
    kv_bytes_per_gpu: float | None = None
    refused: Mapping[int, str] = field(default_factory=dict)
    host_pipelined: Mapping[Role, HostOverhead] = field(default_factory=dict)
    request_s: float = 0.0
    handover: Handover = Handover()
    admission_watermark: float = 0.01
    preemption: Preemption = Preemption.SWAP
    swap_bytes_per_s: float = math.inf
    saturation_tokens: int | None = None
    saturation_tokens_at: Mapping[int, int] = field(default_factory=dict)
    block_tokens: int = 16
    violations: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    fit: FitReport | None = None
    evidence: Evidence = Evidence.MEASURED
    expected_error: str = ""
    sha256: str = ""
    within_range: bool = False
    kv_blocks: KvBlocks = field(default_factory=dict)
    p2p: PointToPoint = PointToPoint()

    def latency_at(self, tp: int) -> LatencyModel:
        """Return the kernel times at this tensor parallel degree.

        Raises:
            InfeasiblePlacementError: the profile has no (usable) coefficients for it.
        """
        reason = self.refused.get(tp)
        if reason is None and tp not in self.latency:
            known = ", ".join(str(n) for n in sorted(self.latency))
            reason = f"profile {self.name} has no coefficients for tp={tp} (it has tp {known})"
        if reason is not None:
            raise InfeasiblePlacementError(f"tp{tp}", [reason])
        return self.latency[tp]

    def latency_of(self, parallelism: Parallelism) -> LatencyModel:
        """Return the step times of an instance: `latency_at` its tp, and what its stages send each other.

        Stages lie in as many nodes as the parallelism says. Where it does not, they fill one node after the other, as
        many as it has GPUs for, and what nobody says of sends takes no time.

        Raises:
            InfeasiblePlacementError: as `latency_at`.
        """
        latency = self.latency_at(parallelism.tp)
        named = parallelism.inter_node_pp > 1
        p2p = self.sends_across_nodes if named else self.p2p
        if parallelism.pp == 1 or p2p == PointToPoint():
            return latency
        across = parallelism.inter_node_pp - 1
        if not named:
            node_gpus = max(self.gpu.gpus_per_node, self.gpu.scale_up_domain_gpus)
            across = math.ceil(parallelism.pp / max(node_gpus // parallelism.tp, 1)) - 1
        token_bytes = self.model.hidden_size * self.model.dtype_bytes
        return with_sends(
            latency, p2p.sends(within=parallelism.pp - 1 - across, across=across, token_bytes=token_bytes)
        )

    @property
    def sends_across_nodes(self) -> PointToPoint:
        """`p2p`, with what the GPU's network does where it does not know nodes: derived, nobody timed it."""
        if self.p2p.knows_nodes:
            return self.p2p
        return replace(
            self.p2p,
            node_latency_s=NODE_LATENCY_S,
            node_bandwidth_bytes_per_s=NETWORK_SHARE * self.gpu.network_bytes_per_s,
        )

    def host_of(self, role: Role, pp: int) -> HostOverhead:
        """Return the driver overhead of one launch of this role, the KV connector's work included."""
        own = self.host_pipelined.get(role) if pp > 1 else None
        host = own or self.host.get(role, HostOverhead())
        if not self.handover.step_s or role is Role.COLOCATED:
            return host
        return replace(host, step_s=host.step_s + self.handover.step_s)

    def kv_tokens(self, parallelism: Parallelism) -> int:
        """Return the KV capacity in tokens: given, listed, or memory minus weights, <= 0 where the model does not fit.

        GPUs that hold copies of the same KV (multi-head latent attention, few KV heads) hold fewer tokens together.
        With `within_range` it ends where the latency model's range of context does.
        """
        return self._kv(parallelism)[0]

    def kv_source(self, parallelism: Parallelism) -> KvSource:
        """Return where the KV capacity comes from."""
        return self._kv(parallelism)[1]

    def _kv(self, parallelism: Parallelism) -> tuple[int, KvSource]:
        tokens, source = self._memory_tokens(parallelism)
        if not self.within_range or parallelism.tp not in self.latency:
            return tokens, source
        most = self.latency[parallelism.tp].valid_range.context_tokens
        return (int(most), KvSource.RANGE) if most < tokens else (tokens, source)

    def _memory_tokens(self, parallelism: Parallelism) -> tuple[int, KvSource]:
        """Return the tokens whose KV the memory holds, and where that comes from."""
        parallelism = parallelism.degrees
        given = self.kv_blocks.get(parallelism, self.kv_blocks.get(None))
        if given is not None:
            return given * self.block_tokens, KvSource.GIVEN
        listed = self.kv_capacity_tokens.get(parallelism)
        if listed is not None:
            return listed, KvSource.LISTED
        if self.kv_bytes_per_gpu is None:
            return 0, KvSource.MEMORY
        free_bytes = self.kv_bytes_per_gpu * parallelism.num_gpus - self.model.weight_bytes
        token_bytes = self.model.kv_bytes_per_token * self.model.kv_copies(parallelism.tp)
        return math.floor(free_bytes / token_bytes), KvSource.MEMORY

    def with_kv_blocks(self, placement: Placement, kv_blocks: int) -> Profile:
        """Return the profile with this KV capacity, in blocks, of every instance of the placement."""
        given: KvBlocks = {pool.parallelism.degrees: kv_blocks for pool in placement.pools}
        return replace(self, kv_blocks={**self.kv_blocks, **given})

    def prefill_token_limit(self, batching: PrefillBatching) -> TokenLimit | None:
        """Return the most tokens of a prefill batch, None for the engine's own limit.

        By tensor parallel degree where Lm is; degrees without one have the engine's.

        Raises:
            InputError: the profile has no Lm.
        """
        if batching is PrefillBatching.ENGINE:
            return None
        if self.saturation_tokens is None:
            raise InputError(
                "--prefill-batching",
                f"needs Lm, which profile {self.name} does not have",
                value=batching.value,
                hint="add saturation_tokens to the profile, or use engine",
            )
        return self.saturation_tokens_at or self.saturation_tokens


def profiles_by_role(profiles: Profile | Mapping[Role, Profile], *, extrapolate: bool) -> dict[Role, Profile]:
    """Return the profile of each role; where prompts are decoded, one whose KV caches end with its valid range.

    So no decode step has more context than was measured, as batch limits see to it that none has more requests.

    Args:
        extrapolate: KV caches as large as the memory allows.
    """
    by_role = dict.fromkeys(Role, profiles) if isinstance(profiles, Profile) else dict(profiles)
    if extrapolate:
        return by_role
    return {role: p if role is Role.PREFILL else replace(p, within_range=True) for role, p in by_role.items()}


def range_remarks(profiles: Mapping[Role, Profile], placements: Iterable[Placement]) -> list[str]:
    """Return which KV caches of the placements `within_range` makes smaller than the memory, a line each."""
    found = {}
    for pool in (pool for placement in placements for pool in placement.pools):
        profile = profiles[pool.role]
        full, used = (
            replace(profile, within_range=False).kv_tokens(pool.parallelism),
            profile.kv_tokens(pool.parallelism),
        )
        if used < full:
            where = f"{pool.role.name.lower()} {pool.parallelism}"
            found[where] = (
                f"{where}: KV cache of {used} tokens instead of {full}, as profile {profile.name} was not measured "
                "with more context; --extrapolate uses all of it"
            )
    return list(found.values())
