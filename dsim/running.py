"""A running decode batch: totals that stay exact over thousands of steps without touching its members."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from dsim.cruise import Cruise
from dsim.job import Job
from dsim.kv import KvCache, num_blocks
from dsim.recorder import Gaps


class RunningBatch:
    """Requests that decode together, one token each a launch.

    Contexts are never stored per member: at launch number n a member that joined at launch m with context c has context
    c + n - m. New blocks fall due at launches that are equal modulo the block size, so `due[n % block_tokens]`
    counts them. Members that joined since the last launch are `fresh`; `requests` and `context` are those of the
    launch in flight, or of the next one where none is, without the fresh ones, which `launch` merges.
    Members in `recompute` are prefilled again before they decode (docs/semantics.md, section 5).
    """

    __slots__ = (
        "_finish",
        "block_tokens",
        "context",
        "due",
        "fresh",
        "fresh_context",
        "fresh_due",
        "index",
        "kv",
        "last_end_s",
        "launched",
        "members",
        "newcomers",
        "recompute",
        "recompute_context",
        "requests",
        "reserved",
    )

    def __init__(self, kv: KvCache, index: int = 0) -> None:
        self.kv = kv
        self.block_tokens = kv.block_tokens
        self.index = index
        #: In order of joining.
        self.members: dict[Job, None] = {}
        self.launched = 0
        self.requests = 0
        self.context = 0
        self.fresh: list[Job] = []
        self.fresh_context = 0
        self.fresh_due = 0
        self.reserved = 0
        self.due = [0] * kv.block_tokens
        self.last_end_s = 0.0
        #: Members of the launch in flight whose last token was not this batch's last step: their next gap is their own.
        self.newcomers: list[Job] = []
        self.recompute: dict[Job, None] = {}
        self.recompute_context = 0
        self._finish: list[tuple[int, int, int, Job]] = []

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Job]:
        return iter(self.members)

    def join(self, job: Job, context: int, *, covered: bool = True) -> None:
        """Add a member that takes part from the next launch on, with this context.

        Args:
            covered: its blocks for that context are taken already; otherwise for one token less.
        """
        launched, size = self.launched, self.block_tokens
        launch = launched + 1
        slot = (launch - context + 1) % size
        job.joined_context = context
        job.joined_launch = launch
        job.covered = covered
        self.due[slot] += 1
        if covered and slot == launch % size:
            self.fresh_due += 1
        self.fresh.append(job)
        self.fresh_context += context
        ticket = job.ticket = job.ticket + 1
        heappush(self._finish, (launched + job.output - job.produced, job.index, ticket, job))
        self.members[job] = None

    def join_recompute(self, job: Job) -> None:
        """Add a member that must be prefilled again; its blocks for `job.context` are taken already."""
        self.members[job] = None
        self.recompute[job] = None
        self.recompute_context += job.context

    def recomputed(self, job: Job) -> None:
        """Turn a recompute member, which has just produced a token, into an ordinary one; it keeps its place."""
        del self.recompute[job]
        self.recompute_context -= job.context
        job.produced += 1
        if job.produced < job.output:
            self.join(job, job.context, covered=False)
        else:
            del self.members[job]
            self.kv.release(num_blocks(job.context - 1, self.kv.block_tokens))

    def growth(self) -> int:
        """Blocks that the next launch needs beyond those taken."""
        return self.due[(self.launched + 1) % self.block_tokens] - self.fresh_due - self.reserved

    def reserve(self) -> None:
        """Take the blocks that the next launch needs, before others are given any."""
        growth = self.growth()
        self.kv.take(growth)
        self.reserved += growth

    def preempt_last(self) -> tuple[Job, int]:
        """Remove the member that joined last, before the next launch; return it and its stored KV tokens.

        Its blocks are freed; its `produced` is brought up to date.
        """
        job = next(reversed(self.members))
        del self.members[job]
        size = self.kv.block_tokens
        if job in self.recompute:
            del self.recompute[job]
            self.recompute_context -= job.context
            self.kv.release(num_blocks(job.context, size))
            return job, 0
        launch = self.launched + 1
        context = job.joined_context + launch - job.joined_launch
        slot = (job.joined_launch - job.joined_context + 1) % size
        self.due[slot] -= 1
        job.ticket += 1
        held = context - 1
        if job in self.fresh:
            self.fresh.remove(job)
            self.fresh_context -= context
            if job.covered:
                held = context
                if slot == launch % size:
                    self.fresh_due -= 1
        else:
            job.last_token_s = self.last_end_s
            self.requests -= 1
            self.context -= context
        self.kv.release(num_blocks(held, size))
        job.produced = context - job.prompt
        return job, context - 1 if job.produced else context

    def launch(self) -> None:
        """Begin the next launch: fresh members take part, blocks that fall due are taken."""
        launch = self.launched = self.launched + 1
        growth = self.due[launch % self.block_tokens] - self.fresh_due - self.reserved
        if growth:
            self.kv.take(growth)
        self.reserved = 0
        fresh = self.fresh
        if fresh:
            self.newcomers = fresh
            self.requests += len(fresh)
            self.context += self.fresh_context
            self.fresh = []
            self.fresh_context = self.fresh_due = 0

    def next_finish(self) -> int:
        """Return the number of the launch at whose end the first member finishes."""
        heap = self._finish
        finish, _, ticket, job = heap[0]
        while ticket != job.ticket:
            heappop(heap)
            finish, _, ticket, job = heap[0]
        return finish

    def steps_in_memory(self, steps: int) -> int:
        """Of `steps` launches, the one in flight first, how many find their blocks; at least 1."""
        free, size = self.kv.free, self.block_tokens
        later = steps - 1
        if (later // size + 1) * self.requests <= free:
            return steps
        done = min(later, free // self.requests * size) // size * size
        need = self.requests * (done // size)
        while done < later:
            need += self.due[(self.launched + done + 1) % size]
            if need > free:
                break
            done += 1
        return done + 1

    def advance(self, steps: int) -> None:
        """Move the launch in flight `steps` launches on, all earlier ones completed; their blocks were checked."""
        if not steps:
            return
        size, due, launched, requests = self.block_tokens, self.due, self.launched, self.requests
        need = steps // size * requests
        # The slots of the launches beyond whole rounds, from `first` on and round the end.
        first = (launched + 1) % size
        last = first + steps % size
        need += sum(due[first:last]) if last <= size else sum(due[first:]) + sum(due[: last - size])
        if need:
            self.kv.take(need)
        self.launched = launched + steps
        self.context += steps * requests

    def close_gaps(self, end_s: float, gaps: Gaps | None) -> None:
        """Account for the gaps between tokens that the end of one step closes."""
        newcomers = self.newcomers
        if gaps is not None:
            # What `Gaps.add` does: this comes with every step that is not slept through.
            gap_s, weight = gaps.gap_s, gaps.weight
            old = self.requests - len(newcomers)
            if old:
                gap_s.append(end_s - self.last_end_s)
                weight.append(old)
            for job in newcomers:
                if job.produced:
                    gap_s.append(end_s - job.last_token_s)
                    weight.append(1)
        if newcomers:
            self.newcomers = []
        self.last_end_s = end_s

    def run_on(self, course: Cruise, steps: int, end_s: float, gaps: Gaps | None) -> None:
        """Move on to step number `steps` of a cruise, which ends at `end_s`; the gaps of its first one are closed."""
        if steps > 1:
            if gaps is not None:
                gaps.add_course(course, steps, self.requests)
            self.advance(steps - 1)
            self.last_end_s = end_s

    def complete(self) -> list[Job]:
        """End the launch in flight; remove and return the members that have finished, their blocks freed."""
        self.context += self.requests
        heap, launched = self._finish, self.launched
        finished: list[Job] = []
        if not heap or heap[0][0] > launched:
            return finished
        size, due, members, kv = self.block_tokens, self.due, self.members, self.kv
        while heap and heap[0][0] <= launched:
            _, _, ticket, job = heappop(heap)
            if ticket != job.ticket:
                continue
            finished.append(job)
            tokens = job.prompt + job.output
            del members[job]
            due[(job.joined_launch - job.joined_context + 1) % size] -= 1
            self.requests -= 1
            self.context -= tokens
            kv.release((tokens + size - 2) // size)
            job.produced = job.output
        return finished
