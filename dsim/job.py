"""A request on its way through the deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsim.prefill import PrefillInstance


class Job:
    """Mutable state of one request while it is in the system; its row of the recorder's columns outlives it.

    `index` is its number in order of arrival and `row` its place in the columns. `prompt_blocks` is what its prompt
    needs. `joined_context` is the context of the first step that the job takes part in since it joined its running
    batch, and `joined_launch` the number of that launch: what it holds at any later launch follows from the two.
    `ticket` tells its current entry in the batch's finish heap from stale ones. `prefilled_s` is the end of its
    prefill, known at its launch to layer-wise handovers. Those that are not set at birth are set before they are read.
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
        "prompt_blocks",
        "row",
        "ticket",
        "user",
    )

    blocks: int
    covered: bool
    joined_context: int
    joined_launch: int
    last_token_s: float
    prefilled_s: float
    prefiller: PrefillInstance | None
    user: int

    def __init__(self, index: int, row: int, prompt: int, output: int, cached: int, prompt_blocks: int) -> None:
        self.index = index
        self.row = row
        self.prompt = prompt
        self.output = output
        self.cached = cached
        self.prompt_blocks = prompt_blocks
        self.produced = 0
        self.computed = cached
        self.ticket = 0
        self.missed = False
        self.prefiller = None

    @property
    def context(self) -> int:
        """Prompt and the tokens produced so far, as known at the last time the job changed hands."""
        return self.prompt + self.produced
