"""What a simulation run is asked for beyond placement, requests and profiles."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from dsim.errors import InputError
from dsim.slo import Slo


class Routing(enum.Enum):
    """How a pool's instances share its requests (docs/semantics.md, section 3)."""

    ROUND_ROBIN = "round-robin"
    JOIN_SHORTEST_QUEUE = "join-shortest-queue"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"


class Evidence(enum.Enum):
    """What step times rest on, best first."""

    MEASURED = "measured"
    KERNELS = "kernels"
    OTHER_KERNELS = "other-kernels"
    ROOFLINE = "roofline"


class ExpertSharing(enum.Enum):
    """How the GPUs of a stage share a layer's experts: a slice of each, or whole ones."""

    TP = "tp"
    EP = "ep"


class KvDtype(enum.Enum):
    """What the KV cache is stored in; `auto`: what the model says."""

    AUTO = "auto"
    BF16 = "bf16"
    FP8 = "fp8"


class PrefillBatching(enum.Enum):
    """What limits the tokens of a prefill batch."""

    ENGINE = "engine"
    LM = "lm"


#: Most prompt tokens of a prefill batch: everywhere, or by tensor parallel degree.
TokenLimit = int | Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of one run.

    Args:
        seed: of the routing stream (arrivals and lengths have their own).
        prefill_routing: also of colocated pools.
        prefill_token_limit: most prompt tokens of a prefill batch instead of the engine's, as in Lm batching; by tensor
            parallel degree where it differs.
        log_steps: keep a record of every launched batch (slower: one event per step).
        track_itl: keep what the ITL statistics need.
        check: verify the laws of docs/semantics.md on the result.
        extrapolate: allow steps outside the latency model's valid range; the result says so.
    """

    seed: int = 0
    prefill_routing: Routing = Routing.JOIN_SHORTEST_QUEUE
    decode_routing: Routing = Routing.LEAST_LOADED
    prefill_token_limit: TokenLimit | None = None
    log_steps: bool = False
    track_itl: bool = True
    check: bool = False
    extrapolate: bool = False

    def __post_init__(self) -> None:
        given = self.prefill_token_limit
        for limit in given.values() if isinstance(given, Mapping) else () if given is None else (given,):
            if limit < 1:
                raise InputError("options", "must be >= 1", name="prefill_token_limit", value=limit)

    def prefill_token_limit_at(self, tp: int) -> int | None:
        """Return the most prompt tokens of a prefill batch at this degree; None for the engine's own limit.

        >>> Options(prefill_token_limit={2: 307, 8: 608}).prefill_token_limit_at(8)
        608
        """
        if isinstance(self.prefill_token_limit, Mapping):
            return self.prefill_token_limit.get(tp)
        return self.prefill_token_limit


@dataclass(frozen=True, slots=True)
class Look:
    """Requests of the warm-up whose misses may end a run, too.

    Args:
        first: number of the first of them, in order of arrival.
        judged: how many they are.
        max_misses: stop as soon as more than this many have certainly missed.
    """

    first: int
    judged: int
    max_misses: float

    def __post_init__(self) -> None:
        for name, value, least in (("first", self.first, 0), ("judged", self.judged, 1)):
            if value < least:
                raise InputError("window", f"must be >= {least}", name=f"look.{name}", value=value)


@dataclass(frozen=True, slots=True)
class Window:
    """Which requests of a run are counted, and when it may stop.

    Requests number `warmup` to `warmup + counted - 1` in order of arrival count; later ones keep arriving, where the
    source has more, until every counted one has finished.

    Args:
        warmup: requests at the start that are simulated and not counted.
        counted: how many count; None: all that the source has.
        stop_slo: with `max_misses`, the limits that a request must meet.
        max_misses: stop as soon as more than this many counted requests have certainly missed `stop_slo`.
        misses_per_request: lower that number by so much for every counted request that comes after the last one known
            to have missed: misses that are far too many for the requests so far end the run, before the rest is seen;
            with `counted` only.
        look: judge some of the warm-up as well, by the same limits and `misses_per_request`.
    """

    warmup: int = 0
    counted: int | None = None
    stop_slo: Slo | None = None
    max_misses: float = math.inf
    misses_per_request: float = 0.0
    look: Look | None = None

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise InputError("window", "must be >= 0", name="warmup", value=self.warmup)
        if self.counted is None and self.misses_per_request:
            raise InputError("window", "needs counted", name="misses_per_request", value=self.misses_per_request)
        if self.look is not None and self.look.first + self.look.judged > self.warmup:
            raise InputError("window", "must lie within the warm-up", name="look", value=self.look)
        if self.counted is not None and self.counted < 1:
            raise InputError("window", "must be >= 1", name="counted", value=self.counted)
