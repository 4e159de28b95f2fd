"""A small profile, and a question whose space is searched in a second."""

from __future__ import annotations

from dsim.pools import Policy, Role
from dsim.profile import BatchLimits, Profile
from dsim.slo import Slo
from dsim.workload import Poisson, Uniform, Workload
from placement.search import Question
from tests.reference.systems import every_role, make_profile


def tiny_profile() -> Profile:
    """Return step times at TP 1 and 2, and small limits."""
    return make_profile(
        tps=(1, 2),
        pps=(1,),
        prefill=(8.0, 0.5, 0.0),
        decode=(8.0, 0.002, 0.2),
        limits={
            Role.PREFILL: BatchLimits(512, 16),
            Role.DECODE: BatchLimits(requests=32),
            Role.COLOCATED: BatchLimits(512, 32),
        },
        kv_tokens=8192,
    )


def tiny_question(**changes: object) -> Question:
    """Return a question about two GPUs, with changes of its fields."""
    settings: dict[str, object] = {
        "profiles": every_role(tiny_profile()),
        "workload": Workload(Poisson(), Uniform(200, 40, low=0.2)),
        "slo": Slo(ttft_s=0.3, tpot_s=0.03),
        "num_gpus": 2,
        "policies": (Policy.ORCA,),
        "top": 1,
        "precision": 0.2,
    }
    return Question(**{**settings, **changes})  # type: ignore[arg-type]
