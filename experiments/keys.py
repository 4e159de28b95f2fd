"""Keys: every key of a sweep file's `base`, what is written there and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dsim.workload import DEFAULT_REQUESTS, DEFAULT_WARMUP
from placement.space import TOKEN_BUDGETS
from profiles.shipped import DEFAULT_GPU

#: Times of a request whose quantiles a run can give.
QUANTILES: Final = ("ttft_s", "tpot_s", "e2e_s", "queue_s", "prefill_s", "transfer_s", "decode_s")


@dataclass(frozen=True, slots=True)
class Key:
    """One key of `base`.

    Args:
        name: dotted path.
        form: what is written, in words.
        unit: of a number, or a dash.
        default: what holds where the key is not given.
        meaning: one line.
    """

    name: str
    form: str
    unit: str
    default: str
    meaning: str


_NONE = "–"

#: Every key of `base`, in the order of the documentation; a key that a measure has no use for is read and not used.
KEYS: Final = (
    Key("measure", "simulate, goodput, search, step or queueing", _NONE, "simulate", "what a task does"),
    Key("model", "name", _NONE, "that of profile", "the model, as `dsim models` lists them"),
    Key("gpu", "name", _NONE, DEFAULT_GPU, "the GPU, as `dsim gpus` lists them"),
    Key("engine", "name", _NONE, "that with the best evidence", "the serving engine that step times are of"),
    Key(
        "evidence",
        "measured, kernels, other-kernels or roofline",
        _NONE,
        "the best there is",
        "what step times must rest on",
    ),
    Key(
        "profile", "file", _NONE, "shipped, or an estimate", "a latency profile of your own, relative to the sweep file"
    ),
    Key("profile_set", "mapping", _NONE, "none", "values that stand instead of those of the profiles, by dotted key"),
    Key(
        "colocated_engine",
        "name",
        _NONE,
        "engine; a search: vllm beside distserve",
        "the engine of colocated placements",
    ),
    Key("colocated_profile", "file", _NONE, "none", "a profile of your own for colocated placements"),
    Key("prefill_gpu", "name, of a search names", _NONE, "gpu", "of prefill pools, as in `h100` or `h100,h20`"),
    Key("decode_gpu", "name, of a search names", _NONE, "gpu", "of decode pools"),
    Key("colocated_gpu", "name, of a search names", _NONE, "those of the others", "of colocated placements"),
    Key("prefill_profile", "file", _NONE, "none", "a profile of your own for prefill pools"),
    Key("decode_profile", "file", _NONE, "none", "a profile of your own for decode pools"),
    Key("placement", "pools", _NONE, "needed", "as in `1xP:tp2pp1 + 1xD:tp1pp1` or `1xC:tp1pp1`"),
    Key("policy", "policy", _NONE, "prefill-first", "scheduling of colocated instances, only with these"),
    Key("token_budget", "whole number", "tokens", "2048", "tokens of a step of policy chunked, only with it"),
    Key("nodes", "whole number", "nodes", "none", "that the placement is packed onto; none: fast links join all GPUs"),
    Key("gpus_per_node", "whole number", "GPUs", "the GPU's", "GPUs of each of these nodes"),
    Key("affinity", "high or low", _NONE, "high", "where instances lie on these nodes, as `--affinity`"),
    Key("phase", "prefill or decode", _NONE, "both", "simulate one pool of a disaggregated placement alone"),
    Key("workload", "lengths", _NONE, "sharegpt", "prompt and output lengths, as `--workload`"),
    Key("arrivals", "process", _NONE, "poisson", "poisson, gamma:cv=2, constant or a trace file, as `--arrivals`"),
    Key("rate", "number or text", "1/s", "needed", "requests per second of the whole placement"),
    Key("rate_per_gpu", "number or text", "1/s/GPU", "none", "requests per second per GPU, instead of rate"),
    Key("trace", "file", _NONE, "none", "requests to replay, instead of workload, arrivals and rate"),
    Key("requests", "whole number", "requests", str(DEFAULT_REQUESTS), "requests that count in a run"),
    Key("warmup", "whole number", "requests", f"{DEFAULT_WARMUP}; finite: 0", "requests before them"),
    Key("finite", "true or false", _NONE, "false", "stop arrivals after the last counted request: a transient"),
    Key("slo", "mapping or text", "s", "none", "limits ttft, tpot, e2e; goodput and search need some"),
    Key("slo.ttft", "number or text", "s", "none", "limit on the time to the first token"),
    Key("slo.tpot", "number or text", "s", "none", "limit on the time per output token"),
    Key("slo.e2e", "number or text", "s", "none", "limit on the time to the last token"),
    Key("slo_scale", "number", _NONE, "1", "multiplies every limit"),
    Key("attainment", "number or text", "share", "0.9", "share of requests within the limits that goodput asks for"),
    Key("prefill_batching", "engine or lm", _NONE, "engine", "what limits a prefill batch"),
    Key("prefill_routing", "routing", _NONE, "join-shortest-queue", "of prefill and colocated instances"),
    Key("decode_routing", "routing", _NONE, "least-loaded", "of decode instances"),
    Key("kv_blocks", "whole number", "blocks", "profile", "KV blocks of every instance"),
    Key("handover", "mapping, name or file", _NONE, "profile", "how KV gets to the decode side, as `--handover`"),
    Key("kv_link", "nvlink, nic, pcie or rate", "B/s", "profile", "what KV goes over, as `--kv-link`"),
    Key("nic", "rate", "B/s", "derived", "what one GPU's link to another node reaches, as `--nic`"),
    Key("extrapolate", "true or false", _NONE, "false", "go beyond the profile's valid range"),
    Key("check", "true or false", _NONE, "false", "verify the conservation laws on every run"),
    Key("seed", "whole number", _NONE, "0", "seed of the first replication"),
    Key("quantiles", "list", _NONE, "none", "times whose 101 quantiles are kept: " + ", ".join(QUANTILES)),
    Key("search", "mapping", _NONE, "none", "what a search, or a goodput, is asked"),
    Key("search.gpus", "whole number or text", "GPUs", "one node", "GPUs at most, as `--gpus`"),
    Key("search.nodes", "whole number", "nodes", "none", "whole nodes, instead of gpus"),
    Key("search.gpus_per_node", "whole number", "GPUs", "the GPU's", "GPUs of a node"),
    Key(
        "search.affinity",
        "high or low",
        _NONE,
        "high",
        "each instance by itself, or stages of prefill and decode side by side in a node",
    ),
    Key("search.mode", "disaggregated, colocated or both", _NONE, "both", "which placements compete"),
    Key("search.policies", "list", _NONE, "all", "policies of colocated instances that are tried"),
    Key("search.token_budgets", "list", "tokens", ", ".join(map(str, TOKEN_BUDGETS)), "budgets of chunked tried"),
    Key("search.max_batch_tokens", "text", "tokens", "engine", "limits of a batch tried, as `--max-batch-tokens`"),
    Key("search.max_batch_requests", "text", "requests", "engine", "the same, as `--max-batch-requests`"),
    Key("search.top", "whole number", _NONE, "3", "placements with an interval"),
    Key("search.precision", "number or text", "share", "0.03", "half width of the best intervals that is aimed for"),
    Key("search.requests", "whole number", "requests", "none", "goodput of finite runs of so many, a transient"),
    Key("search.method", "full or authors", _NONE, "full", "authors: 300 requests, five rates, one seed, as DistServe"),
    Key("search.timing", "true or false", _NONE, "false", "also give elapsed_s and cpu_s, which differ between runs"),
    Key("search.jobs", "whole number", "processes", "1", "processes of one search"),
    Key("step", "mapping", _NONE, "none", "which step of the latency profile is evaluated"),
    Key("step.phase", "prefill, decode, mixed or chunked", _NONE, "needed", "what the step does"),
    Key("step.tp", "whole number", "GPUs", "1", "tensor parallel degree"),
    Key("step.pp", "whole number", "stages", "1", "pipeline parallel degree"),
    Key("step.batch", "whole number", "requests", "1", "prompts of a prefill step; decoding requests of the others"),
    Key("step.prompt_tokens", "whole number", "tokens", "needed to prefill", "of each prompt"),
    Key("step.context_tokens", "whole number", "tokens", "needed to decode", "of each decoding request"),
    Key("step.chunk_tokens", "whole number", "tokens", "needed by chunked", "prompt tokens of a chunk"),
    Key("queueing", "mapping", _NONE, "none", "which formula is evaluated"),
    Key("queueing.formula", "md1, two-stage or speedup", _NONE, "needed", "DistServe's equations 1, 2 and 3"),
    Key("queueing.prefill_s", "number or text", "s", "needed", "execution time D on one GPU"),
    Key("queueing.tp_speedup", "number", "ratio", "needed by speedup", "K of two GPUs, 1 < K <= 2"),
)
