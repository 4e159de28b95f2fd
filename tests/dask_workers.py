"""A local Dask cluster of two workers: `python -m tests.dask_workers` tells its address and takes commands on stdin."""

from __future__ import annotations

import os
import sys

#: What the cluster's user may ask for.
PIDS, OTHER_CODE, SAME_CODE = "pids", "other code", "same code"


def main() -> None:
    """Serve until stdin ends."""
    from distributed import Client, LocalCluster

    def change(code: str | None) -> None:
        from placement import cache

        cache.code_id.cache_clear()
        if code is not None:
            cache.code_id.__wrapped__.__globals__["__version__"] = code

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        say(cluster.scheduler_address)
        for line in sys.stdin:
            # One that was killed takes a while to come back.
            client.wait_for_workers(2)
            if line.strip() == PIDS:
                say(" ".join(map(str, client.run(os.getpid).values())))
            else:
                from dsim.version import __version__

                one = sorted(client.nthreads())[:1]
                client.run(change, "0.0.1" if line.strip() == OTHER_CODE else __version__, workers=one)
                say("changed")


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
