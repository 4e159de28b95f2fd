"""The reference's event loop: the order within one instant, arrivals, routing and the result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsim.pools import Placement, Role
from dsim.profile import FirstToken, HandoverMode, Profile
from dsim.trace import Trace
from tests.reference.colocated import ColocatedInstance
from tests.reference.decode import DecodeInstance, Network
from tests.reference.nodes import crossings, step_times
from tests.reference.prefill import PrefillInstance
from tests.reference.state import Request, Router, StepRecord

#: One request of a closed-loop user: (prompt tokens, output tokens).
Lengths = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ReferenceResult:
    """What happened: one row per request in order of arrival (closed loop: of sending), NaN where it did not happen.

    Args:
        prefill_instance: -1 for a rejected request.
        decode_instance: -1 for a request that never reached one; colocated: as prefill_instance.
        token_times: every token's time, per request.
        steps: in order of launch.
    """

    arrival_s: NDArray[np.float64]
    prefill_start_s: NDArray[np.float64]
    prefill_end_s: NDArray[np.float64]
    transfer_start_s: NDArray[np.float64]
    transfer_end_s: NDArray[np.float64]
    decode_start_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    last_token_s: NDArray[np.float64]
    prefill_instance: NDArray[np.int64]
    decode_instance: NDArray[np.int64]
    preemptions: NDArray[np.int64]
    rejected: NDArray[np.bool_]
    token_times: list[list[float]]
    steps: list[StepRecord]


def run_reference(
    placement: Placement,
    trace: Trace,
    profiles: Mapping[Role, Profile],
    *,
    seed: int = 0,
    prefill_router: str = "join-shortest-queue",
    decode_router: str = "least-loaded",
    colocated_router: str = "join-shortest-queue",
    prefill_token_limit: int | None = None,
) -> ReferenceResult:
    """Return what the placement does with the trace, drained.

    Args:
        prefill_token_limit: replaces the token limit of the prefill instances' batches.
    """
    requests = [
        Request(id=i, arrival_s=float(arrival_s), prompt=int(prompt), output=int(output), cached=int(cached))
        for i, (arrival_s, prompt, output, cached) in enumerate(
            zip(trace.arrival_s, trace.prompt_tokens, trace.output_tokens, trace.cached_prompt_tokens, strict=True)
        )
    ]
    system = _system(placement, profiles, seed, prefill_router, decode_router, colocated_router, prefill_token_limit)
    return _Run(system, _OpenLoop(requests)).result()


def run_reference_closed(
    placement: Placement,
    users: Sequence[Sequence[Lengths]],
    start_s: Sequence[float],
    num_requests: int,
    profiles: Mapping[Role, Profile],
    *,
    seed: int = 0,
    prefill_router: str = "join-shortest-queue",
    decode_router: str = "least-loaded",
    colocated_router: str = "join-shortest-queue",
    prefill_token_limit: int | None = None,
) -> ReferenceResult:
    """Return what the placement does with users who send their next request when their last one has finished.

    Args:
        users: each user's requests, in order; a user with none left stops.
        start_s: when each user sends its first.
        num_requests: nothing is sent after this many.
    """
    system = _system(placement, profiles, seed, prefill_router, decode_router, colocated_router, prefill_token_limit)
    return _Run(system, _ClosedLoop(users, start_s, num_requests, system.request_s)).result()


class _OpenLoop:
    """Requests that arrive when their trace says."""

    def __init__(self, requests: list[Request]) -> None:
        self.unsent = list(requests)

    def next_s(self) -> float:
        return self.unsent[0].arrival_s if self.unsent else math.inf

    def send(self, now: float) -> list[Request]:
        due = [r for r in self.unsent if r.arrival_s <= now]
        del self.unsent[: len(due)]
        return due

    def finished(self, now: float, request: Request) -> None:
        """Nobody waits for it."""


class _ClosedLoop:
    """Users with one request at a time and no think time."""

    def __init__(
        self, users: Sequence[Sequence[Lengths]], start_s: Sequence[float], num_requests: int, request_s: float
    ) -> None:
        self.request_s = request_s
        self.lengths = [list(lengths) for lengths in users]
        #: (instant of sending, user) of each request that is not queued yet.
        self.due = [(start, user) for user, start in enumerate(start_s)]
        self.num_requests = num_requests
        self.sent = 0

    def next_s(self) -> float:
        if self.sent == self.num_requests:
            return math.inf
        return min((at_s + self.request_s for at_s, user in self.due if self.lengths[user]), default=math.inf)

    def send(self, now: float) -> list[Request]:
        requests = []
        for at_s, user in sorted(self.due, key=lambda item: item[1]):
            if at_s + self.request_s <= now and self.lengths[user] and self.sent < self.num_requests:
                self.due.remove((at_s, user))
                prompt, output = self.lengths[user].pop(0)
                requests.append(Request(id=self.sent, arrival_s=at_s, prompt=prompt, output=output, user=user))
                self.sent += 1
        return requests

    def finished(self, now: float, request: Request) -> None:
        """Have its user send the next one at this instant."""
        self.due.append((now, request.user))


class _Disaggregated:
    """A prefill and a decode pool with the network between them."""

    def __init__(
        self,
        placement: Placement,
        profiles: Mapping[Role, Profile],
        routers: tuple[Router, Router],
        token_limit: int | None,
    ) -> None:
        self.prefill_router, self.decode_router = routers
        self.steps: list[StepRecord] = []
        pool, profile = placement.pool(Role.PREFILL), profiles[Role.PREFILL]
        decode_pool, decode_profile = placement.pool(Role.DECODE), profiles[Role.DECODE]
        self.request_s = profile.request_s
        self.first_token_from = decode_profile.handover.first_token_from
        self.layer_wise = decode_profile.handover.mode is HandoverMode.LAYER_WISE
        self.hop_s = decode_profile.handover.hop_s
        self.network = Network(
            decode_profile,
            sender_gpus=pool.parallelism.num_gpus,
            receiver_gpus=decode_pool.parallelism.num_gpus,
            crossings=crossings(placement, decode_profile.model.layers),
        )
        self.prefills = [
            PrefillInstance(
                index=i,
                pool=pool,
                profile=profile,
                latency=step_times(placement, pool, profile),
                first_token_from=self.first_token_from,
                token_limit=token_limit,
                log=self.steps,
            )
            for i in range(pool.count)
        ]
        self.decodes = [
            DecodeInstance(
                index=i,
                pool=decode_pool,
                profile=decode_profile,
                latency=step_times(placement, decode_pool, decode_profile),
                senders=self.prefills,
                network=self.network,
                log=self.steps,
            )
            for i in range(decode_pool.count)
        ]
        self.instances: list[PrefillInstance | DecodeInstance] = [*self.prefills, *self.decodes]
        #: (instant of handover, request).
        self.to_hand_over: list[tuple[float, Request]] = []

    def pending_s(self) -> Iterator[float]:
        for instance in self.instances:
            yield from instance.pending_s()
        yield from (transfer.end_s for transfer in self.network.transfers)
        yield from (at_s for at_s, _ in self.to_hand_over)

    def never_fits(self, request: Request) -> bool:
        prefill, decode = self.prefills[0].cache, self.decodes[0].cache
        if prefill.blocks(request.prompt) > prefill.capacity:
            return True
        if self.first_token_from is FirstToken.PREFILL and request.output == 1:
            return False
        return decode.blocks(request.most_kv) > decode.capacity

    def route(self, request: Request) -> None:
        request.prefill_instance = self.prefill_router.route(request)
        self.prefills[request.prefill_instance].queue.append(request)

    def end_steps(self, now: float) -> list[Request]:
        finished = []
        for prefill in self.prefills:
            for request in prefill.end_steps(now):
                if request.finished:
                    self.prefill_router.finish(request, prefill.index)
                    finished.append(request)
                elif not self.layer_wise:
                    self.to_hand_over.append((now + self.hop_s, request))
        for decode in self.decodes:
            for request in decode.end_steps(now):
                self.decode_router.finish(request, decode.index)
                finished.append(request)
        return finished

    def end_transfers(self, now: float) -> list[Request]:
        finished = []
        for transfer in [t for t in self.network.transfers if t.end_s <= now]:
            request = transfer.request
            self.network.transfers.remove(transfer)
            transfer.sender.release(request)
            self.prefill_router.finish(request, transfer.sender.index)
            transfer.receiver.end_transfer(now, request)
            if request.finished:
                self.decode_router.finish(request, transfer.receiver.index)
                finished.append(request)
        return finished

    def hand_over_and_admit(self, now: float) -> None:
        due = [request for at_s, request in self.to_hand_over if at_s <= now]
        self.to_hand_over = [(at_s, request) for at_s, request in self.to_hand_over if at_s > now]
        for request in sorted(due, key=lambda r: r.id):
            self.decodes[self.decode_router.route(request)].hand_over(request)
        for decode in self.decodes:
            decode.pull_and_admit(now)

    def a_transfer_ends(self, now: float) -> bool:
        return any(transfer.end_s <= now for transfer in self.network.transfers)

    def launch(self, now: float) -> bool:
        for prefill in self.prefills:
            launched = prefill.launch(now)
            if self.layer_wise:
                self.to_hand_over += [(now, request) for request in launched]
        for decode in self.decodes:
            decode.launch(now)
        return any(at_s <= now for at_s, _ in self.to_hand_over)

    def check(self) -> dict[int, str]:
        """Recount every instance; return the state of each unfinished request."""
        states: dict[int, str] = {}
        for instance in self.instances:
            instance.check()
            for request, state in instance.places():
                assert request.id not in states, f"request {request.id} is {states[request.id]} and {state}"
                states[request.id] = state
        sending = [r.id for prefill in self.prefills for r in prefill.holders() if r.decode_instance >= 0]
        assert sorted(sending) == sorted(i for i, state in states.items() if state in {"unpulled", "in transfer"})
        assert sorted(t.request.id for t in self.network.transfers) == sorted(
            i for i, state in states.items() if state == "in transfer"
        )
        hopping = sorted(i for i, state in states.items() if state == "on its second hop")
        assert sorted(request.id for _, request in self.to_hand_over) == hopping
        routed = [r.id for requests in self.prefill_router.unfinished for r in requests]
        routed += [r.id for requests in self.decode_router.unfinished for r in requests]
        assert sorted(routed) == sorted([*states, *sending]), "routers and instances disagree"
        return states


class _Colocated:
    """One colocated pool."""

    def __init__(self, placement: Placement, profiles: Mapping[Role, Profile], router: Router) -> None:
        self.router = router
        self.steps: list[StepRecord] = []
        pool, profile = placement.pool(Role.COLOCATED), profiles[Role.COLOCATED]
        self.request_s = profile.request_s
        self.instances = [
            ColocatedInstance(
                index=i, pool=pool, profile=profile, latency=step_times(placement, pool, profile), log=self.steps
            )
            for i in range(pool.count)
        ]

    def pending_s(self) -> Iterator[float]:
        for instance in self.instances:
            yield from instance.pending_s()

    def never_fits(self, request: Request) -> bool:
        cache = self.instances[0].loops[0].cache
        return cache.blocks(request.most_kv) > cache.capacity

    def route(self, request: Request) -> None:
        request.prefill_instance = request.decode_instance = self.router.route(request)
        self.instances[request.prefill_instance].queue(request)

    def end_steps(self, now: float) -> list[Request]:
        finished = []
        for instance in self.instances:
            for request in instance.end_steps(now):
                self.router.finish(request, instance.index)
                finished.append(request)
        return finished

    def end_transfers(self, now: float) -> list[Request]:
        return []

    def hand_over_and_admit(self, now: float) -> None:
        """Nothing is handed over, and admissions are part of a launch."""

    def a_transfer_ends(self, now: float) -> bool:
        return False

    def launch(self, now: float) -> bool:
        for instance in self.instances:
            instance.launch(now)
        return False

    def check(self) -> dict[int, str]:
        """Recount every instance; return the state of each unfinished request."""
        states: dict[int, str] = {}
        for instance in self.instances:
            instance.check()
            for request, state in instance.places():
                assert request.id not in states, f"request {request.id} is {states[request.id]} and {state}"
                states[request.id] = state
        routed = [r.id for requests in self.router.unfinished for r in requests]
        assert sorted(routed) == sorted(states), "routers and instances disagree"
        return states


def _system(
    placement: Placement,
    profiles: Mapping[Role, Profile],
    seed: int,
    prefill_router: str,
    decode_router: str,
    colocated_router: str,
    prefill_token_limit: int | None,
) -> _Disaggregated | _Colocated:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 3])))
    if placement.is_colocated:
        count = placement.pool(Role.COLOCATED).count
        return _Colocated(placement, profiles, Router(colocated_router, count, generator))
    routers = (
        Router(prefill_router, placement.pool(Role.PREFILL).count, generator),
        Router(decode_router, placement.pool(Role.DECODE).count, generator),
    )
    return _Disaggregated(placement, profiles, routers, prefill_token_limit)


class _Run:
    """One run from the first arrival until nothing is left to happen."""

    def __init__(self, system: _Disaggregated | _Colocated, source: _OpenLoop | _ClosedLoop) -> None:
        self.system = system
        self.source = source
        self.requests: list[Request] = []
        #: Sent, and not yet queued because of the front end's time: (instant, request), in order.
        self.in_front_end: list[tuple[float, Request]] = []
        #: Routed and unfinished.
        self.live: set[int] = set()

    def result(self) -> ReferenceResult:
        now = 0.0
        while (next_s := self._next_s()) < math.inf:
            assert next_s >= now, "time runs backwards"
            now = next_s
            self._instant(now)
            assert set(self.system.check()) == self.live, "requests not conserved"
        assert not self.live, f"deadlock: requests {sorted(self.live)} wait for ever"
        return _result(self.requests, self.system.steps)

    def _next_s(self) -> float:
        front_end_s = self.in_front_end[0][0] if self.in_front_end else math.inf
        return min(self.source.next_s(), front_end_s, *self.system.pending_s(), math.inf)

    def _instant(self, now: float) -> None:
        """Section 2: the order within one instant."""
        self._finish(now, self.system.end_steps(now))
        launches_hand_over = True
        while launches_hand_over:
            self._finish(now, self.system.end_transfers(now))
            self._arrivals(now)
            self.system.hand_over_and_admit(now)
            if not self.system.a_transfer_ends(now):
                launches_hand_over = self.system.launch(now)

    def _arrivals(self, now: float) -> None:
        while self.source.next_s() <= now or (self.in_front_end and self.in_front_end[0][0] <= now):
            for request in self.source.send(now):
                self.requests.append(request)
                self.in_front_end.append((request.arrival_s + self.system.request_s, request))
            while self.in_front_end and self.in_front_end[0][0] <= now:
                _, request = self.in_front_end.pop(0)
                if self.system.never_fits(request):
                    request.rejected = True
                    self.source.finished(now, request)
                else:
                    self.live.add(request.id)
                    self.system.route(request)

    def _finish(self, now: float, requests: list[Request]) -> None:
        for request in requests:
            self.live.remove(request.id)
            self.source.finished(now, request)


def _check_steps(steps: list[StepRecord]) -> None:
    ends: dict[tuple[str, int, int], float] = {}
    for step in steps:
        assert step.launch_s <= step.end_s
        if step.role != "P":
            key = step.role, step.instance, step.index
            assert step.launch_s >= ends.get(key, 0.0), "steps of one micro-batch or loop overlap"
            ends[key] = step.end_s


def _result(requests: list[Request], steps: list[StepRecord]) -> ReferenceResult:
    def column(name: str) -> NDArray[np.float64]:
        return np.array([getattr(r, name) for r in requests], dtype=np.float64)

    def integers(name: str) -> NDArray[np.int64]:
        return np.array([getattr(r, name) for r in requests], dtype=np.int64)

    _check_steps(steps)
    for request in requests:
        assert request.rejected or (request.finished and len(request.token_times) == request.output)
        assert request.prefill_kv == request.kv == 0
    return ReferenceResult(
        arrival_s=column("arrival_s"),
        prefill_start_s=column("prefill_start_s"),
        prefill_end_s=column("prefill_end_s"),
        transfer_start_s=column("transfer_start_s"),
        transfer_end_s=column("transfer_end_s"),
        decode_start_s=column("decode_start_s"),
        first_token_s=np.array([r.token_times[0] if r.token_times else math.nan for r in requests], dtype=np.float64),
        last_token_s=np.array([r.token_times[-1] if r.token_times else math.nan for r in requests], dtype=np.float64),
        prefill_instance=integers("prefill_instance"),
        decode_instance=integers("decode_instance"),
        preemptions=integers("preemptions"),
        rejected=np.array([r.rejected for r in requests], dtype=np.bool_),
        token_times=[r.token_times for r in requests],
        steps=steps,
    )
