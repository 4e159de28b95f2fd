"""A request on its way through the deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsim.prefill import PrefillInstance


class Job:
    """Mutable state of one request while it is in the system; the columns of the recorder outlive it.

    `joined_context` is the context of the first step that the job takes part in since it joined its running batch, and
    `joined_launch` the number of that launch: what it holds at any later launch follows from the two. `ticket` tells
    its current entry in the batch's finish heap from stale ones. `prefilled_s` is the end of its prefill, known at
    its launch to layer-wise handovers.
    """

    __slots__ = (
        "blocks",
        "cached",
        "covered",
        "computed",
        "index",
        "joined_context",
        "joined_launch",
        "last_token_s",
        "missed",
        "output",
        "prefilled_s",
        "prefiller",
        "produced",
        "prompt",
        "ticket",
        "user",
    )

    def __init__(self, index: int, prompt: int, output: int, cached: int) -> None:
        self.index = index
        self.prompt = prompt
        self.output = output
        self.cached = cached
        self.produced = 0
        self.computed = cached
        self.blocks = 0
        self.joined_context = 0
        self.joined_launch = 0
        self.covered = True
        self.ticket = 0
        self.last_token_s = 0.0
        self.missed = False
        self.user = -1
        self.prefilled_s = 0.0
        self.prefiller: PrefillInstance | None = None

    @property
    def context(self) -> int:
        """Prompt and the tokens produced so far, as known at the last time the job changed hands."""
        return self.prompt + self.produced
