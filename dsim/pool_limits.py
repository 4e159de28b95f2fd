"""What a pool says of its own: limits of a batch instead of the engine's, and the GPU that it lies on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dsim.errors import InfeasiblePlacementError, InputError
from dsim.options import Options
from dsim.pools import Placement, Pool, Role
from dsim.profile import BatchLimits, Profile


def as_placed(
    placement: Placement, profiles: Mapping[Role, Profile], options: Options
) -> tuple[Mapping[Role, Profile], Options]:
    """Return profiles with the limits of the pools in place of the engine's, and the options that go with them.

    A prefill pool's own limit stands before `options.prefill_token_limit`, too.

    Raises:
        InputError: a pool lies on another GPU than its profile is of.
        InfeasiblePlacementError: a limit is beyond what was measured, and extrapolation was not asked for.
    """
    changed: dict[Role, Profile] = {}
    for pool in placement.pools:
        profile = profiles[pool.role]
        if pool.gpu is not None and pool.gpu != profile.gpu.name:
            hint = f"give a profile of {pool.gpu}, or leave @{pool.gpu} out"
            raise InputError("placement", f"has a profile of {profile.gpu.name}", value=str(pool), hint=hint)
        if pool.max_batch_tokens is None and pool.max_batch_requests is None:
            continue
        beyond = () if options.extrapolate else beyond_range(pool, profile)
        if beyond:
            raise InfeasiblePlacementError(pool.label, beyond)
        changed[pool.role] = with_limits(profile, pool)
    if not changed:
        return profiles, options
    if any(pool.role is Role.PREFILL and pool.max_batch_tokens is not None for pool in placement.pools):
        options = replace(options, prefill_token_limit=None)
    return {**profiles, **changed}, options


def with_limits(profile: Profile, pool: Pool) -> Profile:
    """Return the profile with the limits of a batch that the pool has of its own."""
    engine = profile.limits.get(pool.role, BatchLimits())
    tokens = engine.tokens if pool.max_batch_tokens is None else pool.max_batch_tokens
    requests = engine.requests if pool.max_batch_requests is None else pool.max_batch_requests
    return replace(profile, limits={**profile.limits, pool.role: BatchLimits(tokens, requests)})


def beyond_range(pool: Pool, profile: Profile) -> tuple[str, ...]:
    """Return which of a pool's own limits are beyond what its profile was measured with, in words."""
    unlimited = pool.max_batch_tokens is None and pool.max_batch_requests is None
    if unlimited or pool.parallelism.tp not in profile.latency:
        return ()
    valid = profile.latency[pool.parallelism.tp].valid_range
    limits = [("max_batch_tokens", pool.max_batch_tokens, valid.prefill_tokens, "prefill tokens")]
    if pool.role is not Role.PREFILL:
        limits.append(("max_batch_requests", pool.max_batch_requests, valid.decode_requests, "decoding requests"))
    return tuple(
        f"{name}={value} is beyond profile {profile.name}'s {most:g} {what} a step"
        for name, value, most, what in limits
        if value is not None and value > most
    )
