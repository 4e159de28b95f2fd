"""GPUs: the datasheet numbers that bound latency, memory and transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Share of a link's line rate that a transfer reaches where nothing says otherwise.
LINK_SHARE: Final = 0.8
#: What a small message between nodes takes over RDMA, and the share of the network that long ones reach; assumed.
NODE_LATENCY_S: Final = 20e-6
NETWORK_SHARE: Final = 0.8


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its datasheet has it.

    Args:
        memory_bytes: device memory that programs can use, as the driver reports it (80 GiB of an A100-80GB).
        hbm_bytes_per_s: memory bandwidth.
        bf16_flops_per_s: dense, not 2:4-sparse.
        fp8_flops_per_s: dense; None where the GPU has no fp8.
        fp4_flops_per_s: dense; None where the GPU has no fp4.
        nvlink_bytes_per_s: intra-node link, one direction, per GPU.
        network_bytes_per_s: scale-out network, one direction, per GPU.
        pcie_bytes_per_s: host link, one direction.
        price_usd_per_h: typical price, and the low and high seen; None where unknown. Always overridable.
        price_source: where and when the prices were seen.
        notes: traps of this GPU's numbers.
    """

    name: str
    vendor: str
    architecture: str
    memory_bytes: int
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    pcie_bytes_per_s: float
    gpus_per_node: int
    scale_up_domain_gpus: int
    tdp_w: float
    source: str
    aliases: tuple[str, ...] = ()
    fp8_flops_per_s: float | None = None
    fp4_flops_per_s: float | None = None
    intra_node_link: str = ""
    price_usd_per_h: tuple[float, float, float] | None = None
    price_source: str = ""
    notes: str = ""
