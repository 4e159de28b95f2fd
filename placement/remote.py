"""Remote: workers of a Dask cluster (extra `dask`), which must run the same code."""

from __future__ import annotations

import errno
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from dsim.errors import InputError
from placement.cache import code_id
from placement.crew import other_code
from placement.worker import OtherCode

#: Longest wait for the scheduler, and for the first worker.
_CONNECT_S: Final = 10.0
#: How long the number of workers is taken to stay the same.
_COUNTED_S: Final = 5.0


class DaskPool(Executor):
    """Workers of a Dask cluster, through its client's own executor; the cluster replaces those that die.

    Args:
        client: of `distributed`.
        where: names the cluster in errors.
    """

    def __init__(self, client: Any, where: str) -> None:  # noqa: ANN401 its package may be missing
        self.code: str | None = code_id()
        self._client = client
        self._where = where
        self._executor = client.get_executor(pure=False)
        self._jobs = 0
        self._counted_s = -_COUNTED_S

    @property
    def jobs(self) -> int:
        """Calls that can run at once."""
        now_s = time.monotonic()
        if now_s - self._counted_s >= _COUNTED_S:
            self._jobs, self._counted_s = max(sum(self._client.nthreads().values()), 1), now_s
        return self._jobs

    def submit(self, function: Callable[..., Any], /, *arguments: object, **named: object) -> Future[Any]:
        """Run a call in a worker."""
        future: Future[Any] = self._executor.submit(function, *arguments, **named)
        return future

    def has_died(self, error: BaseException) -> bool:
        """Return whether the cluster gave a call up because its workers died, one after the other."""
        from distributed import KilledWorker

        return isinstance(error, KilledWorker)

    def explained(self, error: BaseException) -> BaseException:
        """Return what to raise where a call failed otherwise."""
        if isinstance(error, ImportError | AttributeError):
            return other_code(OtherCode("another release"))
        if isinstance(error, CancelledError | OSError):
            return OSError(errno.ECONNRESET, "the connection to the Dask cluster is lost", self._where)
        return error

    def renew(self, jobs: int) -> None:
        """Do nothing: the cluster has new workers already."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End what was sent."""
        self._executor.shutdown(wait=wait and not cancel_futures)

    def check(self) -> None:
        """See that every worker that is there has the same code.

        Raises:
            InputError: one has not.
        """

        # Sent as it is, not by its name: it must run where there is no such module.
        def report() -> tuple[str, str] | None:
            try:
                from dsim.version import __version__
                from placement.cache import code_id
            except ImportError:
                return None
            return __version__, code_id()

        for address, found in sorted(self._client.run(report).items()):
            if found is None or found[1] != self.code:
                raise other_code(OtherCode("no dsim of this kind" if found is None else found[0]), str(address))


def _address_in(scheduler_file: Path) -> str:
    """Return the address in a scheduler file, as `dask scheduler --scheduler-file` writes it."""
    return str(json.loads(scheduler_file.read_text(encoding="utf-8"))["address"])


def _check_answers(host: str, port: int, *, speaks_first: bool) -> None:
    """See that somebody is there; a client would wait for ever for one who takes a connection and says nothing.

    Args:
        speaks_first: whoever is there says something first, as a scheduler does over tcp.

    Raises:
        OSError: nobody is there, or stays silent.
    """
    with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
        if speaks_first and not connection.recv(1):
            raise ConnectionResetError


@contextmanager
def dask_cluster(address: str) -> Iterator[DaskPool]:
    """Provide the workers of a cluster.

    Args:
        address: of its scheduler, as tcp://host:8786, or a scheduler file.

    Raises:
        InputError: there is none, it has no workers, or they are of another dsim.
    """
    try:
        from distributed import Client
        from distributed.comm import get_address_host_port
    except ImportError:
        raise InputError("--dask", "needs distributed", hint="install it: pip install 'dsim[dask]'") from None
    # What goes wrong is told in one line.
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "distributed":
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        place = _address_in(Path(address)) if Path(address).is_file() else address
        # A client that finds nobody complains on stderr long after.
        host, port = get_address_host_port(place)
        _check_answers(host, port, speaks_first=place.startswith("tcp://") or "://" not in place)
        client = Client(place, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError, KeyError, TypeError):
        hint = "give the scheduler's address, as tcp://host:8786, or its scheduler file"
        raise InputError("--dask", "has no scheduler that answers", value=address, hint=hint) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=_CONNECT_S)
        except TimeoutError:
            raise InputError("--dask", "has no workers", value=address, hint="start some with dask worker") from None
        pool = DaskPool(client, address)
        pool.check()
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
