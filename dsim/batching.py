"""How a prefill batch is formed from the head of a queue."""

from __future__ import annotations

from collections import deque

from dsim.job import Job
from dsim.kv import KvCache
from dsim.profile import BatchLimits


def take_batch(queue: deque[Job], limits: BatchLimits, kv: KvCache) -> list[Job]:
    """Remove from `queue` and return the next prefill batch, its KV blocks taken; empty if the head does not fit.

    First come first served: requests from the head while the batch keeps within `limits` and the free blocks. A prompt
    over the token limit goes alone.
    """
    batch: list[Job] = []
    tokens = 0
    most_requests, most_tokens = limits.requests, limits.tokens
    while queue and len(batch) < most_requests:
        job = queue[0]
        tokens += job.prompt - job.cached
        if tokens > most_tokens and batch:
            break
        blocks = job.prompt_blocks
        if blocks > kv.free:
            break
        kv.take(blocks)
        batch.append(queue.popleft())
        if tokens > most_tokens:
            break
    return batch
