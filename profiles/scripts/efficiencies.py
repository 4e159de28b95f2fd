"""Fits what kernels reach of a GPU's datasheet: `python3 -m profiles.scripts.efficiencies DIR > timed.yaml`.

DIR is `aiconfigurator_core/systems/data` of PyPI's `aiconfigurator-core`; it needs pandas with pyarrow. It prints the
`timed` part of `dsim/catalog/efficiencies.yaml`: a few numbers for each GPU's kernels under vLLM, and their errors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from dsim.catalog import find_gpu
from dsim.gpu import Gpu

Floats = NDArray[np.float64]

#: Folder of the package, our name.
GPUS = {
    "a100_sxm": "a100-80g",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200-sxm",
    "b300_sxm": "b300-sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000-server",
}
#: Engine and version of each kind's tables, where they are not the newest of vLLM. On L40S vLLM's rows are its custom
#: all-reduce, which it does not use between more than two PCIe GPUs.
CHOSEN = {("a100_sxm", "gemm"): "vllm/0.14.0", ("l40s", "comm"): "sglang/0.5.12"}
_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625, "int4_wo": 0.52, "w4a16_mxfp4": 0.53125}
#: Nothing longer is a decode step or an engine's chunk of a prompt.
_MOST_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Fitted:
    """Constants of one kind of kernel, with the mean relative error and the rows behind it."""

    names: Sequence[str]
    values: Sequence[float]
    error: float

    def text(self) -> str:
        """Return them as one YAML mapping."""
        numbers = {name: f"{round(value, 9):.3g}" for name, value in zip(self.names, self.values, strict=True)}
        for name, value in zip(self.names, self.values, strict=True):
            if name.endswith("_s"):
                numbers[name] = f"{value * 1e6:.2f}e-6"
        return "{" + ", ".join(f"{k}: {v}" for k, v in {**numbers, "error": f"{self.error:.3f}"}.items()) + "}"


def fit(
    names: Sequence[str],
    predict: Callable[[Floats], Floats],
    seconds: Floats,
    bounds: Sequence[tuple[float, float, float]],
) -> Fitted:
    """Return the constants whose predictions are nearest in ratio; `bounds` are (start, least, most), times in µs."""
    start, least, most = (np.array(column) for column in zip(*bounds, strict=True))

    def residuals(x: Floats) -> Floats:
        off: Floats = np.log(predict(x) / seconds)
        return off

    found = least_squares(residuals, start, bounds=(least, most), loss="soft_l1", f_scale=0.1).x
    error = float(np.mean(np.abs(predict(found) / seconds - 1)))
    values = [value * 1e-6 if name.endswith("_s") else float(value) for name, value in zip(names, found, strict=True)]
    return Fitted(names, values, error)


def table(root: Path, gpu: str, kind: str, name: str) -> tuple[pd.DataFrame, str]:
    """Return a table and the engine and version it is of: the chosen one, else vLLM's newest."""
    chosen = CHOSEN.get((gpu, kind))
    files = [root / gpu / kind / chosen / f"{name}.parquet"] if chosen else []
    files += sorted((root / gpu / kind).glob(f"vllm/*/{name}.parquet"), key=lambda f: _version(f.parent.name))[::-1]
    file = next(file for file in files if file.exists())
    return pd.read_parquet(file), f"{file.parent.parent.name} {file.parent.name}"


def _version(text: str) -> list[int]:
    return [int(part) if part.isdigit() else -1 for part in text.split(".")]


def _fastest(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return the rows with the shortest time of every size."""
    return rows.sort_values("latency").drop_duplicates(keys).sort_values(keys)


def roofline(x: Floats, memory_s: Floats, compute_s: Floats) -> Floats:
    """Return seconds of kernels, as `dsim.analytic.Roofline` has them; x is fixed (µs), memory, compute, sharpness."""
    a, b, p = memory_s / x[1], compute_s / x[2], x[3]
    seconds: Floats = x[0] * 1e-6 + (a**p + b**p) ** (1 / p)
    return seconds


def gemm(rows: pd.DataFrame, gpu: Gpu, dtype: str) -> Fitted:
    """Return the roofline of matrix products."""
    rows = rows[(rows.gemm_dtype == dtype) & rows.m.between(1, _MOST_TOKENS)]
    rows = rows[rows.n.between(1024, 32768) & rows.k.between(1024, 32768)]
    rows = _fastest(rows, ["m", "n", "k"])
    # Every power of two of tokens counts alike.
    parts = rows.groupby(np.floor(np.log2(rows.m)))
    rows = pd.concat([part.sample(min(len(part), 300), random_state=1) for _, part in parts])
    m, n, k = (rows[key].to_numpy(np.float64) for key in ("m", "n", "k"))
    width = _BYTES[dtype]
    moved = width * (n * k + m * k) + 2 * m * n
    peak = {"fp8": gpu.fp8_flops_per_s, "nvfp4": gpu.fp4_flops_per_s}.get(dtype) or gpu.bf16_flops_per_s
    memory_s, compute_s = moved / gpu.hbm_bytes_per_s, 2 * m * n * k / peak
    names = ("fixed_s", "memory", "compute", "sharpness")
    bounds = [(3, 0.5, 20), (0.8, 0.3, 1), (0.7, 0.2, 1), (3, 1, 6)]
    return fit(names, lambda x: roofline(x, memory_s, compute_s), rows.latency.to_numpy() * 1e-3, bounds)


def experts(rows: pd.DataFrame, gpu: Gpu, dtype: str) -> Fitted:
    """Return the roofline of fused experts with a little uneven routing."""
    rows = rows[(rows.moe_dtype == dtype) & rows.num_tokens.between(1, _MOST_TOKENS)]
    rows = rows[rows.distribution.isin(["balanced", "power_law_1.01"])]
    keys = ["num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
    rows = _fastest(rows, [*keys, "distribution"])
    tokens, hidden, width, topk, number, tp, ep = (rows[key].to_numpy(np.float64) for key in keys)
    width = width / tp
    distinct = number / ep * (1 - (1 - topk / number) ** tokens)
    computed = tokens * topk / ep
    moved = 3 * hidden * width * _BYTES[dtype] * distinct + 2 * computed * (2 * hidden + 3 * width)
    peak = {"fp8_block": gpu.fp8_flops_per_s, "nvfp4": gpu.fp4_flops_per_s}.get(dtype) or gpu.bf16_flops_per_s
    memory_s, compute_s = moved / gpu.hbm_bytes_per_s, 6 * hidden * width * computed / peak
    names = ("fixed_s", "memory", "compute", "sharpness")
    bounds = [(20, 1, 120), (0.7, 0.1, 1), (0.4, 0.05, 1), (1.2, 1, 6)]
    return fit(names, lambda x: roofline(x, memory_s, compute_s), rows.latency.to_numpy() * 1e-3, bounds)


def attention(rows: pd.DataFrame, gpu: Gpu, *, decode: bool) -> Fitted:
    """Return what attention over heads of 128 reaches, grouped queries and not."""
    rows = rows[(rows.head_dim == 128) & (rows.kv_cache_dtype == "bfloat16") & (rows.attn_dtype == "bfloat16")]
    if "window_size" in rows:
        rows = rows[rows.window_size == 0]
    rows = rows.assign(kv=rows.num_key_value_heads.where(rows.num_key_value_heads > 0, rows.num_heads))
    rows = rows.assign(context=rows.isl + rows.step if decode else rows.isl)
    rows = rows[(rows.context >= 64) & (rows.batch_size <= 512)]
    if not decode:
        rows = rows[rows.context * rows.batch_size <= 4 * _MOST_TOKENS]
    rows = _fastest(rows, ["batch_size", "context", "num_heads", "kv"])
    batch, context, heads, kv = (rows[key].to_numpy(np.float64) for key in ("batch_size", "context", "num_heads", "kv"))
    if decode:
        token_s, squares = kv * 128 * 4 / gpu.hbm_bytes_per_s, context
    else:
        token_s, squares = 4 * heads * 128 * context / gpu.bf16_flops_per_s, context / 2
    names = ("fixed_s", "share", "padding_tokens")
    bounds = [(8, 0.5, 40), (0.6, 0.1, 1), (60, 0, 600)]

    def predict(x: Floats) -> Floats:
        seconds: Floats = x[0] * 1e-6 + batch * token_s * (squares + x[2]) / x[1]
        return seconds

    return fit(names, predict, rows.latency.to_numpy() * 1e-3, bounds)


def all_reduce(rows: pd.DataFrame, gpu: Gpu) -> Fitted:
    """Return what all-reduces captured in graphs reach, from 2 KiB to 256 MiB."""
    rows = rows[~rows.kernel_source.str.contains("eager") & rows.message_size.between(1 << 10, 1 << 27)]
    rows = _fastest(rows, ["num_gpus", "message_size"])
    gpus, elements = (rows[key].to_numpy(np.float64) for key in ("num_gpus", "message_size"))
    moved_s = 2 * (gpus - 1) / gpus * 2 * elements / gpu.nvlink_bytes_per_s

    def predict(x: Floats) -> Floats:
        seconds: Floats = (x[0] + x[1] * gpus) * 1e-6 + moved_s / x[2]
        return seconds

    bounds = [(4, 0, 60), (0.3, 0, 10), (0.6, 0.05, 1)]
    return fit(("fixed_s", "per_gpu_s", "share"), predict, rows.latency.to_numpy() * 1e-3, bounds)


def entry(root: Path, folder: str) -> list[str]:
    """Return the lines of one GPU."""
    gpu = find_gpu(GPUS[folder])
    print(gpu.name, file=sys.stderr)  # noqa: T201, where the run is
    lines = [f"  {gpu.name}:"]
    rows, of_gemm = table(root, folder, "gemm", "gemm_perf")
    lines.append("    gemm:")
    for dtype, name in (("bfloat16", "bf16"), ("fp8", "fp8"), ("nvfp4", "nvfp4")):
        if dtype in set(rows.gemm_dtype):
            lines.append(f"      {name}: {gemm(rows, gpu, dtype).text()}")
    rows, of_experts = table(root, folder, "moe", "moe_perf")
    lines.append("    experts:")
    kinds = {"bfloat16": "bf16", "fp8_block": "fp8", "int4_wo": "int4", "w4a16_mxfp4": "mxfp4", "nvfp4": "nvfp4"}
    for dtype, name in kinds.items():
        if dtype in set(rows.moe_dtype):
            lines.append(f"      {name}: {experts(rows, gpu, dtype).text()}")
    rows, of_attention = table(root, folder, "attention", "generation_attention_perf")
    lines.append(f"    decode_attention: {attention(rows, gpu, decode=True).text()}")
    rows, _ = table(root, folder, "attention", "context_attention_perf")
    lines.append(f"    prefill_attention: {attention(rows, gpu, decode=False).text()}")
    rows, of_comm = table(root, folder, "comm", "custom_allreduce_perf")
    lines.append(f"    all_reduce: {all_reduce(rows, gpu).text()}")
    lines.append("    elementwise: {fixed_s: 2.5e-6, memory: 0.8}")
    versions = f"GEMM {of_gemm}, experts {of_experts}, attention {of_attention}, all-reduce {of_comm}"
    lines.append(f'    source: "aiconfigurator-core 0.12.0 (Apache-2.0) {folder}: {versions}"')
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the `timed` part of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("gpus", nargs="*", default=list(GPUS))
    options = parser.parse_args(arguments)
    for folder in options.gpus:
        print("\n".join(entry(options.root, folder)))  # noqa: T201, this is the output
    return 0


if __name__ == "__main__":
    sys.exit(main())
