"""Models, their experts and GPUs as rows files and profiles write them: a catalog name, or the sizes."""

from __future__ import annotations

from dataclasses import replace

from dsim.catalog import gpus, models
from dsim.gpu import Gpu
from dsim.model import Model
from profiles.shapes import Experts

_MODEL_KEYS = (
    "name",
    "hugging_face",
    "layers",
    "hidden_size",
    "attention_heads",
    "kv_heads",
    "head_dim",
    "ffn_size",
    "vocabulary",
    "context_tokens",
    "gated_mlp",
    "learned_positions",
    "biases",
    "tied_embeddings",
    "dtype_bytes",
    "source",
)
_GPU_KEYS = (
    "name",
    "vendor",
    "architecture",
    "memory_bytes",
    "hbm_bytes_per_s",
    "bf16_flops_per_s",
    "fp8_flops_per_s",
    "fp4_flops_per_s",
    "nvlink_bytes_per_s",
    "intra_node_link",
    "network_bytes_per_s",
    "pcie_bytes_per_s",
    "gpus_per_node",
    "scale_up_domain_gpus",
    "tdp_w",
    "source",
)


def model_entry(model: Model, *, dtype_bytes: int | None = None) -> str | dict[str, object]:
    """Return the catalog's name where that says everything, else the shape.

    >>> from dsim.catalog import find_model
    >>> model_entry(find_model("13b")), model_entry(find_model("13b"), dtype_bytes=4)["dtype_bytes"]
    ('opt-13b', 4)

    Args:
        dtype_bytes: of one weight, where it is not the model's own.
    """
    used = model if dtype_bytes is None else replace(model, dtype_bytes=dtype_bytes)
    return used.name if used in models() else {key: getattr(used, key) for key in _MODEL_KEYS}


def gpu_entry(gpu: Gpu) -> str | dict[str, object]:
    """Return the catalog's name where that says everything, else the datasheet."""
    if gpu in gpus():
        return gpu.name
    return {key: value for key in _GPU_KEYS if (value := getattr(gpu, key)) not in (None, "")}


def experts_entry(experts: Experts) -> dict[str, object]:
    """Return the key `experts` of the head of a rows file.

    >>> experts_entry(Experts(experts=8, per_token=2, ffn_size=14336))
    {'experts': 8, 'per_token': 2, 'ffn_size': 14336, 'shared_ffn_size': 0}
    """
    return {key: getattr(experts, key) for key in ("experts", "per_token", "ffn_size", "shared_ffn_size")}
