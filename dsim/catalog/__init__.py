"""The models and GPUs that dsim knows by name."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from dsim.errors import InputError, nearest
from dsim.gpu import Gpu
from dsim.model import Experts, LatentAttention, Model, Quantization, SlidingWindow, WeightDtype
from dsim.yamlfile import Field, Section, read_yaml

MODEL_KEYS = (
    "hugging_face",
    "aliases",
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
    "kv_dtype_bytes",
    "experts",
    "latent_attention",
    "sliding_window",
    "quantization",
    "nominal",
    "caveat",
    "source",
)
GPU_KEYS = (
    "vendor",
    "architecture",
    "aliases",
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
    "price",
    "source",
    "notes",
)

#: Bytes that an element of weights or KV may have.
_ELEMENT_BYTES = (1, 2, 4)
#: No memory, link or GPU is slower: smaller numbers are GB/s or TFLOP/s.
_MIN_PER_S = 1e6


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


T = TypeVar("T", bound=_Named)


@functools.cache
def models() -> tuple[Model, ...]:
    """Return every model of the catalog, in its order."""
    entries = _top("models.yaml", "models", "not_modelled").section("models")
    return tuple(read_model(entries.section(name), name=name) for name in entries)


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """Return every GPU of the catalog, in its order."""
    entries = _top("gpus.yaml", "gpus").section("gpus")
    return tuple(read_gpu(entries.section(name), name=name) for name in entries)


def find_model(name: str, *, where: str = "--model") -> Model:
    """Return the model of this name or alias; case, `_` and `-` make no difference.

    >>> find_model("13B").name
    'opt-13b'

    Args:
        where: named in the error, such as an option or `file:line`.

    Raises:
        InputError: no model or several have this name.
    """
    reason = not_modelled().get(_normal(name))
    if reason is not None:
        raise InputError(where, reason, value=name, hint="choose a model that `dsim models` lists")
    return _find(name, models(), _model_index(), where=where, kind="model")


def find_gpu(name: str, *, where: str = "--gpu") -> Gpu:
    """Return the GPU of this name or alias; case, `_` and `-` make no difference.

    >>> find_gpu("A100_SXM").name
    'a100-80g'

    Args:
        where: named in the error, such as an option or `file:line`.

    Raises:
        InputError: no GPU or several have this name.
    """
    return _find(name, gpus(), _gpu_index(), where=where, kind="GPU")


def read_model(section: Section, *, name: str | None = None) -> Model:
    """Return the model whose shape stands in `section`; docs/profiles.md has the form.

    Args:
        name: None where the section itself has the key `name`.

    Raises:
        InputError: a key is unknown, missing or impossible.
    """
    section.only(MODEL_KEYS if name is not None else ("name", *MODEL_KEYS))
    if name is None:
        name = section.text("name")
    attention_heads = section.integer("attention_heads", at_least=1)
    kv_heads = section.integer("kv_heads", attention_heads, at_least=1)
    if attention_heads % kv_heads:
        raise section.need("kv_heads").error(f"must divide attention_heads={attention_heads}")
    hidden_size = section.integer("hidden_size", at_least=1)
    if section.get("head_dim") is None and hidden_size % attention_heads:
        raise section.need("hidden_size").error(
            f"must be a multiple of attention_heads={attention_heads}", "or give head_dim"
        )
    layers = section.integer("layers", at_least=1)
    experts = read_experts(section.get("experts"), layers=layers)
    if experts is not None and not experts.dense_layers:
        unused = section.get("ffn_size")
        if unused is not None:
            raise unused.error("is of no layer: every layer has experts", "give the width of an expert under experts")
    nominal = section.section("nominal").only(("parameters", "active_parameters")) if "nominal" in section else None
    dtype_bytes = _element_bytes(section, "dtype_bytes")
    return Model(
        name=name,
        hugging_face=section.text("hugging_face", name),
        layers=layers,
        hidden_size=hidden_size,
        attention_heads=attention_heads,
        kv_heads=kv_heads,
        head_dim=section.integer("head_dim", max(hidden_size // attention_heads, 1), at_least=1),
        ffn_size=section.integer("ffn_size", None if experts is None or experts.dense_layers else 0, at_least=1),
        vocabulary=section.integer("vocabulary", at_least=1),
        context_tokens=section.integer("context_tokens", at_least=2),
        gated_mlp=section.flag("gated_mlp", default=True),
        learned_positions=section.flag("learned_positions", default=False),
        biases=section.flag("biases", default=False),
        tied_embeddings=section.flag("tied_embeddings", default=False),
        source=section.text("source"),
        aliases=section.texts("aliases"),
        dtype_bytes=2 if dtype_bytes is None else dtype_bytes,
        kv_dtype_bytes=_element_bytes(section, "kv_dtype_bytes"),
        experts=experts,
        latent_attention=_latent_attention(section.get("latent_attention")),
        sliding_window=_sliding_window(section.get("sliding_window"), layers=layers),
        quantization=_quantization(section.get("quantization"), experts=experts),
        nominal_parameters=None if nominal is None else nominal.number("parameters", above=0),
        nominal_active_parameters=(
            nominal.number("active_parameters", above=0)
            if nominal is not None and "active_parameters" in nominal
            else None
        ),
        caveat=section.text("caveat") if "caveat" in section else "",
    )


def _element_bytes(section: Section, key: str) -> int | None:
    field = section.get(key)
    if field is None:
        return None
    size = field.integer(at_least=1)
    if size not in _ELEMENT_BYTES:
        raise field.error("must be 1, 2 or 4")
    return size


def read_experts(field: Field | None, *, layers: int | None = None) -> Experts | None:
    """Return the experts that a section describes; None without one.

    Args:
        layers: of the model, of which some may have none; None: the section does not say which.
    """
    if field is None:
        return None
    dense = () if layers is None else ("dense_layers",)
    section = field.section().only(("experts", "per_token", "ffn_size", "shared_ffn_size", *dense))
    experts = section.integer("experts", at_least=1)
    return Experts(
        experts=experts,
        per_token=section.integer("per_token", at_least=1, at_most=experts),
        ffn_size=section.integer("ffn_size", at_least=1),
        shared_ffn_size=section.integer("shared_ffn_size", 0, at_least=0),
        dense_layers=0 if layers is None else section.integer("dense_layers", 0, at_least=0, at_most=layers - 1),
    )


def _latent_attention(field: Field | None) -> LatentAttention | None:
    if field is None:
        return None
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    section = field.section().only((*names, "q_lora_rank"))
    return LatentAttention(
        **{name: section.integer(name, at_least=1) for name in names},
        q_lora_rank=section.integer("q_lora_rank", 0, at_least=0),
    )


def _sliding_window(field: Field | None, *, layers: int) -> SlidingWindow | None:
    if field is None:
        return None
    section = field.section().only(("tokens", "layers"))
    return SlidingWindow(
        tokens=section.integer("tokens", at_least=1), layers=section.integer("layers", at_least=1, at_most=layers)
    )


def _quantization(field: Field | None, *, experts: Experts | None) -> Quantization | None:
    if field is None:
        return None
    section = field.section().only(("dtype", "experts_only"))
    experts_only = section.flag("experts_only", default=False)
    if experts_only and experts is None:
        raise section.need("experts_only").error("needs experts", "leave it out for a dense model")
    return Quantization(dtype=section.need("dtype").choice(WeightDtype), experts_only=experts_only)


def model_entry(model: Model) -> dict[str, object]:
    """Return what `read_model` reads as this model."""
    names = (
        "name hugging_face layers hidden_size attention_heads kv_heads head_dim vocabulary context_tokens "
        "gated_mlp learned_positions biases tied_embeddings dtype_bytes"
    )
    entry: dict[str, object] = {key: getattr(model, key) for key in names.split()}
    if model.dense_layers:
        entry["ffn_size"] = model.ffn_size
    if model.kv_dtype_bytes is not None:
        entry["kv_dtype_bytes"] = model.kv_dtype_bytes
    for key in ("experts", "latent_attention", "sliding_window"):
        noun = getattr(model, key)
        if noun is not None:
            entry[key] = dataclasses.asdict(noun)
    if model.quantization is not None:
        entry["quantization"] = {
            "dtype": model.quantization.dtype.value,
            "experts_only": model.quantization.experts_only,
        }
    if model.caveat:
        entry["caveat"] = model.caveat
    return {**entry, "source": model.source}


def read_gpu(section: Section, *, name: str | None = None) -> Gpu:
    """Return the GPU whose numbers stand in `section`; docs/profiles.md has the form.

    Args:
        name: None where the section itself has the key `name`.

    Raises:
        InputError: a key is unknown, missing or impossible.
    """
    section.only(GPU_KEYS if name is not None else ("name", *GPU_KEYS))
    if name is None:
        name = section.text("name")
    price, price_source = None, ""
    if "price" in section:
        prices = section.section("price").only(("typical_usd_per_h", "low_usd_per_h", "high_usd_per_h", "source"))
        typical = prices.number("typical_usd_per_h", at_least=0)
        low = prices.number("low_usd_per_h", typical, at_least=0, at_most=typical)
        high = prices.number("high_usd_per_h", typical, at_least=typical)
        price, price_source = (typical, low, high), prices.text("source")
    gpus_per_node = section.integer("gpus_per_node", 8, at_least=1)

    def optional(key: str) -> float | None:
        field = section.get(key)
        return None if field is None else field.number(at_least=_MIN_PER_S)

    pcie_bytes_per_s = section.number("pcie_bytes_per_s", at_least=_MIN_PER_S)
    return Gpu(
        name=name,
        vendor=section.text("vendor", "unknown"),
        architecture=section.text("architecture", "unknown"),
        memory_bytes=section.integer("memory_bytes", at_least=1e9),
        hbm_bytes_per_s=section.number("hbm_bytes_per_s", at_least=_MIN_PER_S),
        bf16_flops_per_s=section.number("bf16_flops_per_s", at_least=_MIN_PER_S),
        fp8_flops_per_s=optional("fp8_flops_per_s"),
        fp4_flops_per_s=optional("fp4_flops_per_s"),
        nvlink_bytes_per_s=section.number("nvlink_bytes_per_s", pcie_bytes_per_s, at_least=_MIN_PER_S),
        intra_node_link=section.text("intra_node_link", "unknown"),
        network_bytes_per_s=section.number("network_bytes_per_s", at_least=_MIN_PER_S),
        pcie_bytes_per_s=pcie_bytes_per_s,
        gpus_per_node=gpus_per_node,
        scale_up_domain_gpus=section.integer("scale_up_domain_gpus", gpus_per_node, at_least=1),
        tdp_w=section.number("tdp_w", above=0),
        price_usd_per_h=price,
        price_source=price_source,
        source=section.text("source"),
        aliases=section.texts("aliases"),
        notes=section.text("notes", "-") if "notes" in section else "",
    )


@functools.cache
def not_modelled() -> Mapping[str, str]:
    """Return why a model that is known by name is not modelled, by every name it has."""
    listed = _top("models.yaml", "models", "not_modelled").section("not_modelled")
    reasons = {}
    for name in listed:
        entry = listed.section(name).only(("aliases", "architecture", "reason", "source"))
        for alias in (name, *entry.texts("aliases")):
            reasons[_normal(alias)] = (
                f"has {entry.text('reason')} ({entry.text('architecture')}), which is not modelled"
            )
    return reasons


def _top(file: str, *kinds: str) -> Section:
    top = read_yaml(Path(__file__).with_name(file)).only(("dsim_catalog", *kinds))
    version = top.need("dsim_catalog")
    if version.integer() != 1:
        raise version.error("must be 1")
    return top


@functools.cache
def _model_index() -> Mapping[str, Model]:
    return _index(models())


@functools.cache
def _gpu_index() -> Mapping[str, Gpu]:
    return _index(gpus())


def _index(nouns: tuple[T, ...]) -> dict[str, T]:
    index: dict[str, T] = {}
    for noun in nouns:
        for name in (noun.name, *noun.aliases):
            if index.setdefault(_normal(name), noun) is not noun:
                raise InputError("catalog", f"names both {index[_normal(name)].name} and {noun.name}", value=name)
    return index


def _normal(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def _find(name: str, nouns: tuple[T, ...], index: Mapping[str, T], *, where: str, kind: str) -> T:
    word = _normal(name)
    found = index.get(word)
    if found is not None:
        return found
    if not word:
        raise InputError(where, f"needs the name of a {kind}", value=name, hint=f"such as {nouns[0].name}")
    # Half a name, such as `70b` or `a100`: several models or GPUs have it, and guessing one would mislead.
    parts = set(word.split("-"))
    partial = [noun.name for noun in nouns if parts <= set(_normal(noun.name).split("-"))]
    if partial:
        hint = ("write one of " if len(partial) > 1 else "did you mean ") + ", ".join(partial)
        raise InputError(where, f"names no {kind} by itself", value=name, hint=hint)
    hint = nearest(word, index)
    if hint.startswith("expected"):
        hint = nearest("", [noun.name for noun in nouns])
    raise InputError(where, f"is not a known {kind}", value=name, hint=hint)
