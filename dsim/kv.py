"""Paged KV cache accounting: blocks taken and freed."""

from __future__ import annotations

from collections.abc import Callable


def num_blocks(tokens: int, block_tokens: int) -> int:
    """Return how many blocks hold `tokens`.

    >>> [num_blocks(t, 16) for t in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-tokens // block_tokens)


class KvCache:
    """Blocks of one instance's KV cache."""

    __slots__ = ("block_tokens", "capacity", "free", "least_free")

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.capacity = max(0, capacity_tokens) // block_tokens
        self.free = self.capacity
        self.least_free = self.capacity

    def take(self, blocks: int) -> None:
        """Take blocks; the caller has checked that they are free."""
        self.free -= blocks
        if self.free < self.least_free:
            self.least_free = self.free

    def release(self, blocks: int) -> None:
        """Free blocks."""
        self.free += blocks

    @property
    def peak(self) -> float:
        """Largest share of the cache ever taken, 0 to 1."""
        return 1.0 - self.least_free / self.capacity if self.capacity else 0.0


class LoggedKvCache(KvCache):
    """A cache that tells how many blocks are taken after each change."""

    __slots__ = ("_tell",)

    def __init__(self, capacity_tokens: int, block_tokens: int, tell: Callable[[int], None]) -> None:
        super().__init__(capacity_tokens, block_tokens)
        self._tell = tell

    def take(self, blocks: int) -> None:
        """Take blocks."""
        super().take(blocks)
        if blocks:
            self._tell(self.capacity - self.free)

    def release(self, blocks: int) -> None:
        """Free blocks."""
        super().release(blocks)
        if blocks:
            self._tell(self.capacity - self.free)
