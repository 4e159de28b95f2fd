"""Models and GPUs as rows files and profiles write them: a catalog name, or the sizes."""

from __future__ import annotations

from dataclasses import replace

from dsim import catalog
from dsim.gpu import Gpu
from dsim.model import Model


def model_entry(model: Model, *, dtype_bytes: int | None = None) -> str | dict[str, object]:
    """Return the catalog's name where that says everything, else the shape.

    >>> from dsim.catalog import find_model
    >>> model_entry(find_model("13b")), model_entry(find_model("13b"), dtype_bytes=4)["dtype_bytes"]
    ('opt-13b', 4)

    Args:
        dtype_bytes: of one weight, where it is not the model's own.
    """
    used = model if dtype_bytes is None else replace(model, dtype_bytes=dtype_bytes)
    return used.name if used in catalog.models() else catalog.model_entry(used)


def gpu_entry(gpu: Gpu) -> str | dict[str, object]:
    """Return the catalog's name where that says everything, else the datasheet."""
    if gpu in catalog.gpus():
        return gpu.name
    keys = ("name", *(key for key in catalog.GPU_KEYS if key not in ("aliases", "price", "notes")))
    return {key: value for key in keys if (value := getattr(gpu, key)) not in (None, "")}
