"""KV cache sizes as the engines find them: what a GPU's memory leaves beside weights, activations and the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dsim.gpu import Gpu
from dsim.model import Model
from dsim.pools import Parallelism
from dsim.profile import BatchLimits

#: Share of `Gpu.memory_bytes` that CUDA offers programs. PyTorch's "total capacity": 79.2 of H100's 80 GiB, 139.8 of
#: H200's 141, 94.97 of RTX PRO 6000's 95.6 (torch.cuda.mem_get_info, as in its out-of-memory messages).
_VISIBLE: Final = 0.99
#: CUDA context, libraries and NCCL buffers; vLLM's start-up logs name 0.1 to 0.6 GiB of "non-torch memory" a GPU.
_CONTEXT_BYTES: Final = 0.5e9
#: Captured graphs; vLLM's start-up logs name 0.5 to 1.5 GiB for 8B to 70B models at the default sizes.
_GRAPH_BYTES: Final = 1e9
#: Bytes of each logit while sampling: 16-bit and 32-bit copies, sorted values, their indices (8), probabilities and
#: their running sums (vLLM's dummy sampler run, which its memory profiling includes).
_SAMPLING_BYTES: Final = 2 + 4 + 4 + 8 + 4 + 4
_ACTIVATION_BYTES: Final = 2
_MIB = 2**20
#: Most pipeline stages looked at.
_MOST_PP: Final = 16


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """How an engine sizes its KV cache.

    Args:
        block_tokens: tokens of a KV block.
        source: where the rule is written.
    """

    block_tokens: int
    source: str

    def kv_bytes(self, model: Model, gpu: Gpu, parallelism: Parallelism, limits: BatchLimits) -> float:
        """Return what is left for KV on the fullest GPU of an instance, <= 0 where nothing is.

        Args:
            limits: tokens and requests of the largest step.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ShareOfAll(MemoryRule):
    """A share of all memory, less weights and what the largest step takes: vLLM."""

    share: float

    def kv_bytes(self, model: Model, gpu: Gpu, parallelism: Parallelism, limits: BatchLimits) -> float:
        """Return what is left for KV on the fullest GPU of an instance."""
        used = weight_bytes(model, parallelism) + step_bytes(model, parallelism.tp, limits)
        return self.share * _VISIBLE * gpu.memory_bytes - used - _CONTEXT_BYTES - _GRAPH_BYTES


@dataclass(frozen=True, slots=True)
class ShareOfFree(MemoryRule):
    """A share of what is free once weights are loaded and the largest step has run: TensorRT-LLM."""

    share: float

    def kv_bytes(self, model: Model, gpu: Gpu, parallelism: Parallelism, limits: BatchLimits) -> float:
        """Return what is left for KV on the fullest GPU of an instance."""
        used = weight_bytes(model, parallelism) + step_bytes(model, parallelism.tp, limits)
        return self.share * (_VISIBLE * gpu.memory_bytes - used - _CONTEXT_BYTES)


@dataclass(frozen=True, slots=True)
class Reserve(MemoryRule):
    """A share of the free memory, less weights: SGLang's `mem_fraction_static`.

    Args:
        share: None for the automatic one, all but a reserve by the size of the GPU.
    """

    share: float | None = None

    def kv_bytes(self, model: Model, gpu: Gpu, parallelism: Parallelism, limits: BatchLimits) -> float:
        """Return what is left for KV on the fullest GPU of an instance."""
        del limits
        share = self._automatic(gpu, parallelism) if self.share is None else self.share
        return share * (_VISIBLE * gpu.memory_bytes - _CONTEXT_BYTES) - weight_bytes(model, parallelism)

    @staticmethod
    def _automatic(gpu: Gpu, parallelism: Parallelism) -> float:
        memory_mib = gpu.memory_bytes / _MIB
        chunk_tokens, few, many = next(row[1:] for row in _SGLANG_SIZES if memory_mib < row[0])
        graph_requests = few if parallelism.tp < _SGLANG_MANY_TP else many
        # At least 10 GiB above 60 GiB, which the chunks of such GPUs come to anyway.
        reserve_mib = 512 + 1.5 * chunk_tokens + 2 * graph_requests + 128 * parallelism.num_gpus
        return 1 - reserve_mib / memory_mib


#: MiB below which a GPU is of a size, its prefill chunk, and the largest batch that graphs are captured for, with few
#: and with many GPUs of an instance.
_SGLANG_SIZES: Final = (
    (20 * 1024, 2048, 8, 8),
    (35 * 1024, 2048, 24, 80),
    (60 * 1024, 4096, 32, 160),
    (160 * 1024, 8192, 256, 512),
    (math.inf, 16384, 512, 512),
)
_SGLANG_MANY_TP: Final = 4


@dataclass(frozen=True, slots=True)
class DistServe(MemoryRule):
    """A share of all memory, less the layers' matrices and what a hidden unit takes of the largest step.

    Both numbers are fitted to the capacities that DistServe published, in which embeddings are not counted.
    """

    share: float
    hidden_unit_bytes: float

    def kv_bytes(self, model: Model, gpu: Gpu, parallelism: Parallelism, limits: BatchLimits) -> float:
        """Return what is left for KV on the fullest GPU of an instance."""
        del limits
        layers = model.layer_matrix_bytes(0 if model.experts is None else model.experts.experts)
        left = self.share * gpu.memory_bytes - self.hidden_unit_bytes * model.hidden_size
        return left - layers / parallelism.num_gpus


RULES: Final[Mapping[str, MemoryRule]] = MappingProxyType(
    {
        "vllm": ShareOfAll(
            16,
            "vLLM from 0.19: gpu_memory_utilization 0.92 of the memory (0.9 before), less weights, the largest step "
            "with its sampling, CUDA and graphs",
            0.92,
        ),
        "sglang": Reserve(
            1, "SGLang 0.5: mem_fraction_static of server_args.py (a reserve for chunks, graphs and GPUs), less weights"
        ),
        "trtllm": ShareOfFree(
            32,
            "TensorRT-LLM 1.0: free_gpu_memory_fraction 0.9 of what weights, the largest step and CUDA leave",
            0.9,
        ),
        "distserve": DistServe(
            16, "DistServe's release: its max_num_tokens.csv, OPT on A100-80GB, within 0.2 %", 0.93, 1.06e5
        ),
    }
)


def kv_capacities(
    model: Model, gpu: Gpu, engine: str, degrees: Iterable[int], *, limits: BatchLimits
) -> dict[Parallelism, int]:
    """Return KV tokens of an instance, whole blocks, at every degree and number of stages; 0 where there is no room.

    >>> from dsim.catalog import find_gpu, find_model
    >>> found = kv_capacities(find_model("qwen3-8b"), find_gpu("h100"), "vllm", [1], limits=BatchLimits(8192, 1024))
    >>> found[Parallelism(1, 1)] // 16
    23867

    Args:
        limits: tokens and requests of the largest step.

    Raises:
        KeyError: no rule is known for the engine.
    """
    rule = RULES[engine]
    stages = [pp for pp in range(1, _MOST_PP + 1) if model.layers % pp == 0]
    found = {}
    for parallelism in (Parallelism(tp, pp) for tp in degrees for pp in stages):
        kv_bytes = rule.kv_bytes(model, gpu, parallelism, limits)
        block_bytes = rule.block_tokens * gpu_token_bytes(model, parallelism)
        found[parallelism] = max(math.floor(kv_bytes / block_bytes), 0) * rule.block_tokens
    return found


def usable_bytes(model: Model, gpu: Gpu, engine: str, *, limits: BatchLimits) -> float:
    """Return what an engine has on one GPU for weights and KV together."""
    alone = Parallelism(1, 1)
    return RULES[engine].kv_bytes(model, gpu, alone, limits) + weight_bytes(model, alone)


def gpu_token_bytes(model: Model, parallelism: Parallelism) -> float:
    """Return bytes of a token's KV on one GPU."""
    return model.kv_bytes_per_token * model.kv_copies(parallelism.tp) / parallelism.num_gpus


def weight_bytes(model: Model, parallelism: Parallelism) -> float:
    """Return bytes of the weights on the fullest GPU of an instance.

    Layers are shared out over stages, their matrices over the GPUs of a stage; what those hold whole is added: keys and
    values of heads fewer than GPUs, the compressions of latent attention, routers. The first stage has the embedding,
    the last one the output head.
    """
    tp, pp, h = parallelism.tp, parallelism.pp, model.hidden_size
    experts, latent = model.experts, model.latent_attention
    layers = model.layer_matrix_bytes(0 if experts is None else experts.experts) / tp
    if latent is None:
        whole = 2 * h * model.head_dim * (max(model.kv_heads / tp, 1) - model.kv_heads / tp)
    else:
        whole = h * (latent.q_lora_rank + latent.kv_width) * (1 - 1 / tp)
    layers += model.layers * whole * model.matrix_weight_bytes
    if experts is not None:
        layers += model.expert_layers * h * experts.experts * (1 - 1 / tp) * model.dtype_bytes
    table = model.vocabulary * h / tp
    ends = table if pp > 1 or model.tied_embeddings else 2 * table
    tables = model.vocabulary * h * (1 if model.tied_embeddings else 2)
    vectors = model.parameters - model.layer_matrix_parameters - tables
    return layers / pp + (ends + vectors / pp) * model.dtype_bytes


def step_bytes(model: Model, tp: int, limits: BatchLimits) -> float:
    """Return bytes of the activations of the largest step, or of its sampling where that takes more."""
    h, experts = model.hidden_size, model.experts
    width = 3 * model.ffn_size / tp
    if experts is not None:
        routed = experts.per_token * (max(2 * experts.ffn_size / tp, h) + experts.ffn_size / tp)
        width = max(width, routed + 3 * experts.shared_ffn_size / tp)
    activations = limits.tokens * (4 * h + width) * _ACTIVATION_BYTES
    return max(activations, limits.requests * model.vocabulary * _SAMPLING_BYTES)
