"""`dsim models`, `dsim gpus` and `dsim profiles`: what is known by name."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from dsim.cli.options import Format, FormatOption, NoColor
from dsim.cli.output import Table, print_rows


def models(*, output_format: FormatOption = Format.TABLE, no_color: NoColor = False) -> int:
    """List the models that are known by name."""
    from dsim.catalog import models as all_models

    known = all_models()
    table = Table(
        ["<name", "<Hugging Face", "parameters", "active", "layers", "hidden", "heads", "KV heads", "context",
         "KV B/token", "weights GiB", "<also"]
    )  # fmt: skip
    for model in known:
        table.rows.append(
            [
                model.name,
                model.hugging_face,
                f"{model.parameters / 1e9:.2f}e9",
                "" if model.experts is None else f"{model.active_parameters / 1e9:.2f}e9",
                str(model.layers),
                str(model.hidden_size),
                str(model.attention_heads),
                str(model.kv_heads),
                str(model.context_tokens),
                f"{model.kv_bytes_per_token:,}",
                f"{model.weight_bytes / 2**30:.1f}",
                _some(model.aliases),
            ]
        )
    rows = [
        {
            "name": model.name,
            "aliases": list(model.aliases),
            "hugging_face": model.hugging_face,
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            "layers": model.layers,
            "hidden_size": model.hidden_size,
            "attention_heads": model.attention_heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "context_tokens": model.context_tokens,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "weight_bytes": model.weight_bytes,
            "caveat": model.caveat,
            "source": model.source,
        }
        for model in known
    ]
    return print_rows(rows, table, output_format=output_format, no_color=no_color)


def gpus(*, output_format: FormatOption = Format.TABLE, no_color: NoColor = False) -> int:
    """List the GPUs that are known by name."""
    from dsim.catalog import gpus as all_gpus

    known = all_gpus()
    table = Table(
        ["<name", "memory GiB", "HBM TB/s", "bf16 TFLOP/s", "fp8 TFLOP/s", "NVLink GB/s", "network GB/s", "GPUs/node",
         "USD/h", "<also"]
    )  # fmt: skip
    for gpu in known:
        table.rows.append(
            [
                gpu.name,
                f"{gpu.memory_bytes / 2**30:.0f}",
                f"{gpu.hbm_bytes_per_s / 1e12:.2f}",
                f"{gpu.bf16_flops_per_s / 1e12:.0f}",
                "-" if gpu.fp8_flops_per_s is None else f"{gpu.fp8_flops_per_s / 1e12:.0f}",
                f"{gpu.nvlink_bytes_per_s / 1e9:.0f}",
                f"{gpu.network_bytes_per_s / 1e9:.0f}",
                str(gpu.gpus_per_node),
                "-" if gpu.price_usd_per_h is None else f"{gpu.price_usd_per_h[0]:.2f}",
                _some(gpu.aliases),
            ]
        )
    rows = [
        {
            "name": gpu.name,
            "aliases": list(gpu.aliases),
            "vendor": gpu.vendor,
            "architecture": gpu.architecture,
            "memory_bytes": gpu.memory_bytes,
            "hbm_bytes_per_s": gpu.hbm_bytes_per_s,
            "bf16_flops_per_s": gpu.bf16_flops_per_s,
            "fp8_flops_per_s": gpu.fp8_flops_per_s,
            "fp4_flops_per_s": gpu.fp4_flops_per_s,
            "nvlink_bytes_per_s": gpu.nvlink_bytes_per_s,
            "network_bytes_per_s": gpu.network_bytes_per_s,
            "pcie_bytes_per_s": gpu.pcie_bytes_per_s,
            "gpus_per_node": gpu.gpus_per_node,
            "scale_up_domain_gpus": gpu.scale_up_domain_gpus,
            "tdp_w": gpu.tdp_w,
            "price_usd_per_h": dict(
                zip(("typical", "low", "high"), gpu.price_usd_per_h or (None, None, None), strict=True)
            ),
            "price_source": gpu.price_source,
            "source": gpu.source,
        }
        for gpu in known
    ]
    return print_rows(rows, table, output_format=output_format, no_color=no_color)


def profiles(*, output_format: FormatOption = Format.TABLE, no_color: NoColor = False) -> int:
    """List the latency profiles that come with dsim."""
    from dsim.profile_file import load_profile
    from profiles.shipped import shipped_profiles

    known = [(path.name, load_profile(path)) for _, path in shipped_profiles()]
    table = Table(["<name", "<engine version", "<TP", "<refused TP", "Lm tokens", "<source"])
    rows = []
    for file, profile in known:
        refused = {str(tp): reason for tp, reason in sorted(profile.refused.items())}
        capacity = {str(p): tokens for p, tokens in sorted(profile.kv_capacity_tokens.items())}
        degrees = sorted(tp for tp in profile.latency if tp not in profile.refused)
        table.rows.append(
            [
                profile.name,
                profile.engine_version,
                ", ".join(map(str, degrees)),
                ", ".join(refused) or "-",
                "-" if profile.saturation_tokens is None else str(profile.saturation_tokens),
                textwrap.shorten(profile.source, 60, placeholder="..."),
            ]
        )
        rows.append(
            {
                "name": profile.name,
                "file": file,
                "model": profile.model.name,
                "gpu": profile.gpu.name,
                "engine": profile.engine,
                "engine_version": profile.engine_version,
                "tp": degrees,
                "refused_tp": refused if output_format is Format.JSON else list(refused),
                "kv_capacity_tokens": capacity if output_format is Format.JSON else list(capacity),
                "saturation_tokens": profile.saturation_tokens,
                "violations": list(profile.violations),
                "sha256": profile.sha256,
                "source": profile.source,
            }
        )
    return print_rows(rows, table, output_format=output_format, no_color=no_color)


def _some(aliases: Sequence[str]) -> str:
    return ", ".join(sorted(aliases, key=len)[:2])
