"""Host work of engines beside their kernels, where somebody's measurements tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class HostConstants:
    """What an engine's driver and front end take; at most four numbers of an engine.

    Args:
        step_s: of a launch.
        sequence_s: of each sequence of a launch.
        prompt_s: of each prompt of a launch; goes to the profile's `prefill.per_request_s`.
        request_s: of a request before it is queued.
        source: what they were fitted to, and how.
    """

    step_s: float
    sequence_s: float
    prompt_s: float
    request_s: float
    source: str


_VLLM_SOURCE = (
    "fitted to 8 closed-loop runs (workload chat: 128 prompt and 128 output tokens, 1 to 512 users) of vLLM 0.30 with "
    "Qwen3-8B in bf16 on one H100 (tgarg01/silybench-data, CC BY 4.0)"
)

#: By engine.
HOSTS: Final[Mapping[str, HostConstants]] = MappingProxyType(
    {
        "vllm": HostConstants(1.9e-4, 5.2e-6, 0.0, 6.7e-3, f"host work: {_VLLM_SOURCE}"),
        "sglang": HostConstants(
            1.9e-4, 5.2e-6, 0.0, 6.7e-3, f"host work: vLLM's, assumed, for want of SGLang's own; {_VLLM_SOURCE}"
        ),
        "trtllm": HostConstants(
            9.7e-4,
            1.7e-5,
            1.63e-3,
            5.6e-3,
            "host work: fitted to 6 open-loop runs (467 prompt and 256 output tokens, 2 requests a second up to all at "
            "once) of TensorRT-LLM 0.14 under Triton with Llama-3.1-8B in bf16 on one H100 (TensorRT-LLM's performance "
            "overview, Apache-2.0); 1.63 ms of each prompt are in prefill.per_request_s",
        ),
    }
)
NOTHING: Final = HostConstants(0.0, 0.0, 0.0, 0.0, "none: kernels only; add what your engine takes a launch")
