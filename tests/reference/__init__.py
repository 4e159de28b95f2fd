"""The slow reference twin: docs/semantics.md written out a second time, one event per step."""

from tests.reference.simulator import ReferenceResult, run_reference, run_reference_closed
from tests.reference.state import StepRecord

__all__ = ["ReferenceResult", "StepRecord", "run_reference", "run_reference_closed"]
