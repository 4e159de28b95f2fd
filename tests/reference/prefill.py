"""Section 4 of docs/semantics.md: the prefill instance."""

from __future__ import annotations

from collections.abc import Iterator

from dsim.latency import LatencyModel
from dsim.pools import Pool, Role
from dsim.profile import BatchLimits, FirstToken, Profile
from tests.reference.state import (
    KvCache,
    Pipeline,
    Request,
    Step,
    StepRecord,
    cache_blocks,
    computed_tokens,
    host_overhead,
    prefix_within,
)


class PrefillInstance:
    """A FIFO queue before `pp` stages; prompts keep their blocks until their transfer ends."""

    def __init__(
        self,
        *,
        index: int,
        pool: Pool,
        profile: Profile,
        latency: LatencyModel,
        first_token_from: FirstToken,
        token_limit: int | None,
        log: list[StepRecord],
    ) -> None:
        self.index = index
        self.pp = pool.parallelism.pp
        self.latency = latency
        self.host = host_overhead(profile, Role.PREFILL, self.pp)
        self.connector_s = profile.handover.step_s
        limits = profile.limits.get(Role.PREFILL, BatchLimits())
        self.limits = limits if token_limit is None else BatchLimits(tokens=token_limit, requests=limits.requests)
        self.first_token_from = first_token_from
        self.cache = KvCache(
            blocks=cache_blocks(profile, profile.kv_tokens(pool.parallelism)), block_tokens=profile.block_tokens
        )
        self.pipeline = Pipeline(self.pp)
        self.log = log
        self.queue: list[Request] = []
        self.in_flight: list[Step] = []
        #: Prefill ended, blocks still here: on its second hop, waiting to be pulled, or in transfer.
        self.held: list[Request] = []
        #: When stage 1 will have finished its batch; None while it is free.
        self.stage1_busy_until_s: float | None = None

    def pending_s(self) -> Iterator[float]:
        """Instants at which something here will end."""
        yield from (step.end_s for step in self.in_flight)
        if self.stage1_busy_until_s is not None:
            yield self.stage1_busy_until_s

    def end_steps(self, now: float) -> list[Request]:
        """End what ends now; return the requests whose prefill ended, each either finished or held."""
        if self.stage1_busy_until_s is not None and self.stage1_busy_until_s <= now:
            self.stage1_busy_until_s = None
        ended = []
        while self.in_flight and self.in_flight[0].end_s <= now:
            for request in self.in_flight.pop(0).prefills:
                assert request.prefill_due_s == now
                request.prefill_end_s = now
                self.held.append(request)
                if self.first_token_from is FirstToken.PREFILL:
                    request.show_token(now)
                    if request.finished:
                        self.release(request)
                ended.append(request)
        return ended

    def release(self, request: Request) -> None:
        """Free the blocks of a held request."""
        self.held.remove(request)
        request.prefill_kv = self.cache.change(request.prefill_kv, 0)

    def launch(self, now: float) -> list[Request]:
        """Launch a batch if stage 1 is free and the head of the queue fits; return those that will be handed over."""
        if self.stage1_busy_until_s is not None:
            return []
        batch = self._batch()
        if not batch:
            return []
        del self.queue[: len(batch)]
        for request in batch:
            request.prefill_kv = self.cache.change(0, request.prompt)
            request.prefill_start_s = now
        chunks = [(r.prompt - r.cached, r.cached) for r in batch]
        stage_s = self.latency.prefill_s(chunks) / self.pp
        host_s = self.host.launch_s(len(batch), computed_tokens(chunks)) + self.connector_s
        end_s = self.pipeline.enter(now, [host_s + stage_s] + [stage_s] * (self.pp - 1))
        self.stage1_busy_until_s = self.pipeline.left_s[0]
        self.in_flight.append(Step(end_s, [(r, r.prompt - r.cached) for r in batch], []))
        for request in batch:
            request.prefill_due_s = end_s
        self.log.append(StepRecord("P", self.index, 0, now, end_s, tuple(r.id for r in batch), ()))
        return [r for r in batch if not (self.first_token_from is FirstToken.PREFILL and r.output == 1)]

    def _batch(self) -> list[Request]:
        count = prefix_within([r.prompt - r.cached for r in self.queue], self.limits)
        batch: list[Request] = []
        blocks = 0
        for request in self.queue[:count]:
            blocks += self.cache.blocks(request.prompt)
            if blocks > self.cache.free:
                break
            batch.append(request)
        return batch

    def places(self) -> Iterator[tuple[Request, str]]:
        """Every request here (those handed over excepted, which the decode side lists) and its state."""
        yield from ((r, "queued") for r in self.queue)
        for request in self.holders():
            if request.decode_instance < 0:
                yield request, "on its second hop" if request in self.held else "prefilling"

    def holders(self) -> list[Request]:
        """Every request with blocks here."""
        return [*self.held, *(r for step in self.in_flight for r in step.prefills)]

    def check(self) -> None:
        """Recount blocks from the requests' states."""
        for request in self.queue:
            assert request.prefill_kv == 0
        for request in self.holders():
            assert request.prefill_kv == request.prompt
        self.cache.recount(r.prompt for r in self.holders())
        ends = [step.end_s for step in self.in_flight]
        assert ends == sorted(ends)
        assert self.pp > 1 or len(ends) <= 1, "steps overlap"
