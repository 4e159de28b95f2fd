"""Simulate a placement under a workload."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dsim.clock import ARRIVAL, Wake
from dsim.deployment import Deployment, longest_prompt
from dsim.errors import InputError, InternalError
from dsim.job import Job
from dsim.kv import num_blocks
from dsim.options import Options, Window
from dsim.pool_limits import as_placed
from dsim.pools import Placement, Role
from dsim.profile import Profile, profiles_by_role
from dsim.recorder import Recorder
from dsim.result import Result
from dsim.slo import Slo
from dsim.trace import Trace
from dsim.workload import ClosedLoop

if TYPE_CHECKING:
    import simpy

    from dsim.aggregates import Aggregates

Source = Trace | Iterator[Trace] | ClosedLoop

#: Arrival, row, prompt, output and cached tokens, blocks of the prompt, and whether it can never fit.
_Row = tuple[float, int, int, int, int, int, bool]
#: Requests that are taken in at once.
_PART = 4096


def simulate(
    placement: Placement,
    source: Source,
    *,
    profiles: Profile | Mapping[Role, Profile],
    options: Options = Options(),
    window: Window = Window(),
    phase: Role | None = None,
) -> Result:
    """Play the requests of `source` through `placement` and return what happened to each.

    Args:
        source: a trace, blocks of an endless one, or a closed loop.
        profiles: one latency profile, or one by role.
        window: which requests count; an endless source needs a number.
        phase: simulate only the prefill or only the decode pool (see `Deployment`).

    Raises:
        InputError: a request is longer than the model's context, or a step leaves the latency model's valid range.
        InfeasiblePlacementError: the placement cannot run.
    """
    by_role, options = as_placed(placement, profiles_by_role(profiles, extrapolate=options.extrapolate), options)
    if not isinstance(source, Trace | ClosedLoop) and window.counted is None:
        raise InputError("window", "must be given for an endless source", name="counted")
    recorder = Recorder(window, track_itl=options.track_itl, log_steps=options.log_steps)
    deployment = _play(placement, source, by_role, options=options, recorder=recorder, phase=phase)
    result = Result.of(deployment, placement, by_role, options=options, window=window, phase=phase)
    if options.check:
        from dsim.laws import check_laws

        check_laws(result)
    return result


def aggregate(
    placement: Placement,
    source: Source,
    *,
    profiles: Profile | Mapping[Role, Profile],
    slo: Slo | None = None,
    options: Options = Options(),
    window: Window = Window(),
    phase: Role | None = None,
    num_requests: int | None = None,
) -> Aggregates:
    """Play the requests of `source` as `simulate` does, and keep what they add up to instead of the requests.

    Memory grows with the requests in the system at one time, not with those that were: give blocks of requests
    (`Workload.blocks`, `finite`, `steady`) for as many as there are to be.

    Args:
        slo: limits that attainment and good throughput are about; without, every finished request meets them.
        num_requests: that blocks hold which end without a number in `window`.

    Raises:
        InputError: as `simulate` does; or something was asked for that needs every request.
    """
    from dsim.aggregator import Aggregator

    for name in ("check", "log_steps"):
        if getattr(options, name):
            raise InputError("options", "needs every request, of which only aggregates are kept", name=name, value=True)
    by_role, options = as_placed(placement, profiles_by_role(profiles, extrapolate=options.extrapolate), options)
    if isinstance(source, Trace | ClosedLoop):
        num_requests = len(source) if isinstance(source, Trace) else source.num_requests
    recorder = Aggregator(
        window,
        num_requests=num_requests,
        slo=slo or Slo(),
        phase=phase,
        colocated=placement.is_colocated,
        track_itl=options.track_itl,
    )
    deployment = _play(placement, source, by_role, options=options, recorder=recorder, phase=phase)
    return recorder.aggregates(deployment, placement, by_role, options=options)


def _play(
    placement: Placement,
    source: Source,
    by_role: Mapping[Role, Profile],
    *,
    options: Options,
    recorder: Recorder,
    phase: Role | None,
) -> Deployment:
    """Play requests until the recorder has what it needs, and return the deployment as it is then."""
    _check_match(placement, by_role)
    deployment = Deployment(placement, by_role, options=options, recorder=recorder, phase=phase)
    front = by_role[placement.pools[0].role]
    context_tokens = front.model.context_tokens
    longest = context_tokens if options.extrapolate else min(context_tokens, longest_prompt(by_role, placement))
    if isinstance(source, ClosedLoop):
        _Users(deployment, source, seed=options.seed, context_tokens=context_tokens, request_s=front.request_s)
    else:
        blocks = iter((source,)) if isinstance(source, Trace) else source
        _Feeder(deployment, blocks, request_s=front.request_s, model_context=context_tokens, longest_prompt=longest)
    deployment.run()
    if not recorder.done and deployment.leaked_blocks:
        raise InternalError(f"{placement} stopped with {deployment.leaked_blocks} KV blocks in use")
    return deployment


def _check_match(placement: Placement, profiles: Mapping[Role, Profile]) -> None:
    """Refuse pools whose profiles are of different models or count KV in different blocks."""
    used = [profiles[pool.role] for pool in placement.pools]
    for name, values in (
        ("model", [profile.model.name for profile in used]),
        ("block_tokens", [profile.block_tokens for profile in used]),
    ):
        if len(set(values)) > 1:
            raise InputError(
                "profiles",
                "must be the same for all pools",
                name=name,
                value=" and ".join(map(str, values)),
                hint="choose profiles of one model and engine family",
            )


class _Feeder:
    """Lets the requests of a trace arrive, one event per instant."""

    def __init__(
        self,
        deployment: Deployment,
        blocks: Iterator[Trace],
        *,
        request_s: float,
        model_context: int,
        longest_prompt: float,
    ) -> None:
        self._deployment = deployment
        self._clock = deployment.clock
        self._blocks = blocks
        self._request_s = request_s
        self._model_context = model_context
        self._longest_prompt = longest_prompt
        self._wake = Wake(self._on_arrival)
        self._index = 0
        self._parts = self._read()
        self._rows: Iterator[_Row] = iter(())
        self._next = self._next_part()
        self._schedule()

    def _next_part(self) -> _Row | None:
        """Go on to the next part that has requests and return its first one; None if there is none."""
        for rows in self._parts:
            request = next(rows, None)
            if request is not None:
                self._rows = rows
                return request
        return None

    def _read(self) -> Iterator[Iterator[_Row]]:
        """Yield the requests in parts, taken in one at a time: Python's numbers take several times numpy's memory."""
        recorder, deployment = self._deployment.recorder, self._deployment
        size, read = deployment.block_tokens, 0
        for block in self._blocks:
            self._check(block, read)
            read += len(block)
            for start in range(0, len(block), _PART):
                part = block.part(start, start + _PART)
                yield zip(
                    part.arrival_s.tolist(),
                    recorder.enter(part),
                    part.prompt_tokens.tolist(),
                    part.output_tokens.tolist(),
                    part.cached_prompt_tokens.tolist(),
                    (-(-part.prompt_tokens // size)).tolist(),
                    deployment.never_fits(part.prompt_tokens, part.output_tokens).tolist(),
                    strict=True,
                )

    def _check(self, block: Trace, first: int) -> None:
        total = block.prompt_tokens + block.output_tokens
        beyond = ", or go beyond it (--extrapolate), or take estimates (--evidence roofline)"
        for values, limit, rule, otherwise in (
            (total, self._model_context, "tokens of prompt and output exceed the model's context of", ""),
            (block.prompt_tokens, self._longest_prompt, "prompt tokens exceed the profile's valid range of", beyond),
        ):
            if len(block) and int(values.max()) > limit:
                row = int(values.argmax())
                raise InputError(
                    "trace",
                    f"{rule} {limit:g}",
                    name=f"request {first + row}",
                    value=int(values[row]),
                    hint=f"drop or truncate such requests{otherwise}",
                )

    def _schedule(self) -> None:
        if self._next is not None:
            self._clock.wake(self._next[0] + self._request_s, ARRIVAL, self._wake)

    def _on_arrival(self, _event: simpy.Event) -> None:
        request = self._next
        assert request is not None
        instant_s = request[0]
        deployment, rows, index = self._deployment, self._rows, self._index
        recorder, arrive = deployment.recorder, deployment.arrive
        while request is not None and request[0] == instant_s:
            _, row, prompt, output, cached, prompt_blocks, never_fits = request
            job = Job(index, row, prompt, output, cached, prompt_blocks)
            index += 1
            recorder.arrived = index
            if never_fits:
                deployment.reject(job)
            else:
                arrive(job)
            request = next(rows, None)
            if request is None:
                request = self._next_part()
                rows = self._rows
        self._index = index
        self._next = request
        if request is not None:
            # What `_schedule` does.
            self._clock.wake(request[0] + self._request_s, ARRIVAL, self._wake)


class _Users:
    """A closed loop: every user sends the next request when the one before has left the system."""

    def __init__(
        self, deployment: Deployment, loop: ClosedLoop, *, seed: int, context_tokens: int, request_s: float
    ) -> None:
        self._deployment = deployment
        self._lengths = [
            loop.user_lengths(user, seed=seed, context_tokens=context_tokens) for user in range(loop.users)
        ]
        self._request_s = request_s
        self._pauses_s = [loop.user_pauses_s(user, seed=seed) for user in range(loop.users)]
        self._unsent = loop.num_requests
        self._index = 0
        #: (queued at, round, user, sent at): of one instant, what a rejection there causes is one round later.
        self._due: list[tuple[float, int, int, float]] = []
        self._next_round = 0
        deployment.on_finish = self._on_finish
        for user in range(loop.users):
            self._send(user, loop.start_s(user))

    def _send(self, user: int, now_s: float) -> None:
        queued_s = now_s + self._request_s
        number = self._next_round if queued_s == self._deployment.clock.now_s else 0
        heapq.heappush(self._due, (queued_s, number, user, now_s))
        self._deployment.clock.at(queued_s, ARRIVAL, self._on_arrival)

    def _on_finish(self, job: Job) -> None:
        if self._unsent:
            self._send(job.user, self._deployment.clock.now_s + next(self._pauses_s[job.user]))

    def _on_arrival(self, _event: simpy.Event) -> None:
        _, number, user, sent_s = heapq.heappop(self._due)
        if not self._unsent:
            return
        self._next_round = number + 1
        self._unsent -= 1
        prompt, output = next(self._lengths[user])
        deployment = self._deployment
        row = deployment.recorder.enter_one(sent_s, prompt, output)
        job = Job(self._index, row, prompt, output, 0, num_blocks(prompt, deployment.block_tokens))
        job.user = user
        self._index += 1
        deployment.recorder.arrived = self._index
        if deployment.never_fits(prompt, output):
            deployment.reject(job)
        else:
            deployment.arrive(job)
        self._next_round = 0
