"""How columns are called on axes: words, unit, and the factor from the unit of the data to that of the axis."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantity:
    """What an axis shows.

    Args:
        label: in words, without the unit.
        unit: as printed; empty for counts and names.
        factor: axis value / value in the data.
    """

    label: str
    unit: str = ""
    factor: float = 1.0

    @property
    def axis(self) -> str:
        """Words and unit, as on an axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


_PER_GPU = "requests/s per GPU"

#: Columns by their whole name, without what names the statistic.
_NAMED = {
    "attainment": Quantity("requests within all limits", "%", 100),
    "attainment.both": Quantity("requests within all limits", "%", 100),
    "attainment.ttft": Quantity("requests within the TTFT limit", "%", 100),
    "attainment.tpot": Quantity("requests within the TPOT limit", "%", 100),
    "ttft_s": Quantity("TTFT", "s"),
    "tpot_s": Quantity("TPOT", "ms", 1e3),
    "itl_s": Quantity("ITL", "ms", 1e3),
    "e2e_s": Quantity("end-to-end latency", "s"),
    "transfer_s": Quantity("KV transfer", "ms", 1e3),
    "queue_s": Quantity("wait for prefill", "s"),
    "prefill_s": Quantity("prefill", "s"),
    "throughput_per_s": Quantity("throughput", "requests/s"),
    "good_throughput_per_s": Quantity("requests within all limits", "requests/s"),
    "goodput_per_gpu_per_s": Quantity("goodput", _PER_GPU),
    "total_per_s": Quantity("goodput of all copies", "requests/s"),
    "goodput_per_s": Quantity("goodput", "requests/s"),
    "rate": Quantity("arrival rate", "requests/s"),
    "rate_per_s": Quantity("arrival rate", "requests/s"),
    "rate_per_gpu": Quantity("arrival rate", _PER_GPU),
    "rate_per_gpu_per_s": Quantity("arrival rate", _PER_GPU),
    "slo_scale": Quantity("SLO scale", "multiple of the limits"),
    "slo.ttft": Quantity("TTFT limit", "s"),
    "slo.tpot": Quantity("TPOT limit", "ms", 1e3),
    "slo.e2e": Quantity("E2E limit", "s"),
    "num_gpus": Quantity("GPUs"),
    "num_requests": Quantity("requests"),
    "max_gpus": Quantity("GPUs at most"),
    "best.ratio": Quantity("goodput, disaggregated / colocated"),
    "cost_usd_per_h": Quantity("cost", "USD/h"),
    "kernel_s": Quantity("kernels of a step", "ms", 1e3),
    "host_s": Quantity("host overhead of a step", "ms", 1e3),
    "added_s": Quantity("added to a step", "ms", 1e3),
    "longest_step_s": Quantity("longest step", "ms", 1e3),
    "slowdown": Quantity("slow-down", "multiple"),
    "tokens": Quantity("tokens of a step"),
    "chunks": Quantity("chunks of a prompt"),
    "reread_chunks": Quantity("chunks whose KV is read again"),
    "reread_tokens": Quantity("KV read again", "tokens"),
    "reread_bytes": Quantity("KV read again", "GB", 1e-9),
    "reread_s": Quantity("time to read KV again", "ms", 1e3),
    "decode_s": Quantity("decode", "s"),
    "search.gpus": Quantity("GPUs"),
    "search.nodes": Quantity("nodes"),
    "step_s": Quantity("step", "ms", 1e3),
    "tokens_per_s": Quantity("throughput", "tokens/s"),
    "output_tokens_per_s": Quantity("output throughput", "tokens/s"),
    "tokens_per_s_per_gpu": Quantity("throughput", "tokens/s per GPU"),
    "output_tokens_per_s_per_gpu": Quantity("output throughput", "tokens/s per GPU"),
    "tokens_per_gpu_per_s": Quantity("throughput", "tokens/s per GPU"),
    "output_tokens_per_gpu_per_s": Quantity("output throughput", "tokens/s per GPU"),
    "tokens_per_user_per_s": Quantity("speed of one user", "tokens/s"),
    "output_tokens_per_user_per_s": Quantity("speed of one user", "tokens/s"),
    "step.batch": Quantity("batch", "requests"),
    "step.prompt_tokens": Quantity("prompt", "tokens"),
    "step.context_tokens": Quantity("context of a request", "tokens"),
    "step.chunk_tokens": Quantity("chunk", "tokens"),
    "step.tp": Quantity("tensor parallel degree", "GPUs"),
    "step.pp": Quantity("pipeline parallel degree", "GPUs"),
    "token_budget": Quantity("token budget of a step", "tokens"),
    "kv_blocks": Quantity("KV blocks of an instance"),
    "saturation_tokens": Quantity("Lm", "tokens"),
    "queueing.tp_speedup": Quantity("speed-up K"),
    "elapsed_s": Quantity("search time", "s"),
    "cpu_s": Quantity("CPU time", "s"),
}

#: The end of a name to unit and factor, longest first.
_SUFFIXES = (
    ("_per_gpu_per_s", _PER_GPU, 1.0),
    ("_bytes_per_s", "GB/s", 1e-9),
    ("_tokens_per_s", "tokens/s", 1.0),
    ("_usd_per_h", "USD/h", 1.0),
    ("_per_s", "requests/s", 1.0),
    ("_bytes", "GB", 1e-9),
    ("_tokens", "tokens", 1.0),
    ("_requests", "requests", 1.0),
    ("_s", "s", 1.0),
)

_CAPITALS = {
    "tp": "TP",
    "pp": "PP",
    "gpu": "GPU",
    "gpus": "GPUs",
    "kv": "KV",
    "slo": "SLO",
    "ttft": "TTFT",
    "tpot": "TPOT",
}
_STATISTIC = re.compile(r"\.(mean|best|p[0-9]+)$")
#: What a column of a search's best trials is about.
_OF = {
    "best.disaggregated.": "best disaggregated",
    "best.colocated.": "best colocated",
    "most_total.": "most in total",
}
_SHARES = {
    "utilization": "busy share",
    "kv_peak": "KV cache taken at most",
}
_PARTS = {
    "queue": "queue",
    "prefill_queue": "prefill queue",
    "decode_queue": "decode queue",
    "prefill": "prefill",
    "transfer": "transfer",
    "decode_admission": "decode admission",
    "decode": "decode",
}
#: In the parts of the time before decoding it runs from the end of the prompt, in those of all the time from its start.
_WITH_WAIT = {"transfer": "transfer and the wait for it"}


def quantity(column: str) -> Quantity:
    """Return how a column is shown on an axis.

    >>> quantity("tpot_s.p90").axis, quantity("attainment.both").axis
    ('TPOT, p90 (ms)', 'requests within all limits (%)')
    >>> quantity("profile_set.handover.bandwidth_bytes_per_s").axis
    'handover bandwidth (GB/s)'
    """
    if column in _NAMED:
        return _NAMED[column]
    found = _STATISTIC.search(column)
    if found:
        base = quantity(column[: found.start()])
        statistic = "" if found[1] == "best" else f", {found[1]}"
        return Quantity(base.label + statistic, base.unit, base.factor)
    parent, _, last = column.rpartition(".")
    if parent in _SHARES:
        return Quantity(f"{_SHARES[parent]}, {_words(last)}", "%", 100)
    for prefix, about in _OF.items():
        if column.startswith(prefix):
            base = quantity(column.removeprefix(prefix))
            return Quantity(f"{base.label}, {about}", base.unit, base.factor)
    if parent == "ttft_parts_s":
        return Quantity((_PARTS | _WITH_WAIT).get(last, _words(last)), "s")
    if parent == "parts_s":
        return Quantity(_PARTS.get(last, _words(last)), "s")
    if parent == "parts_share":
        return Quantity(_PARTS.get(last, _words(last)), "%", 100)
    if parent == "kv_blocks":
        return Quantity(f"KV blocks, {_words(last)}")
    if parent in {"quantiles", "profile_set", "search", "queueing", "step"} and last in _NAMED:
        return _NAMED[last]
    for suffix, unit, factor in _SUFFIXES:
        if last.endswith(suffix):
            context = parent.removeprefix("profile_set").removeprefix(".")
            words = _words(f"{context} {last.removesuffix(suffix)}".strip())
            return Quantity(words, unit, factor)
    return Quantity(_words(last))


def short(column: str) -> str:
    """Return what tells a column from others of the same unit: its words without the unit."""
    return quantity(column).label


def brief(column: str) -> str:
    """Return what stands before a number in a legend.

    >>> brief("step.tp"), brief("slo_scale"), brief("search.gpus")
    ('TP', 'SLO scale', 'GPUs')
    """
    return _words(column.rpartition(".")[2].removesuffix("_s"))


def _words(name: str) -> str:
    words = name.replace("_", " ").replace(".", " ").split()
    return " ".join(_CAPITALS.get(word, word) for word in words)
