"""Pipeline stages in series, each serving one batch at a time in order of arrival."""

from __future__ import annotations


class Stages:
    """When each of the stages of one instance becomes free."""

    __slots__ = ("free_s",)

    def __init__(self, count: int) -> None:
        self.free_s = [0.0] * count

    def pass_through(self, start_s: float, first_s: float, other_s: float) -> float:
        """Send a batch in at `start_s`; return when it leaves the last stage.

        Args:
            first_s: time in the first stage.
            other_s: time in every other stage.
        """
        free_s = self.free_s
        leave_s = max(start_s, free_s[0]) + first_s
        free_s[0] = leave_s
        for stage in range(1, len(free_s)):
            leave_s = max(leave_s, free_s[stage]) + other_s
            free_s[stage] = leave_s
        return leave_s
