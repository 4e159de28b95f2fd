"""`dsim search --dask`: a local cluster of two workers answers as local processes do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from dsim.errors import InputError
from placement import remote
from tests.dask_workers import OTHER_CODE, PIDS, SAME_CODE

pytestmark = pytest.mark.skipif(find_spec("distributed") is None, reason="needs distributed: pip install 'dsim[dask]'")

QUICK = (
    *("search", "-m", "13b", "--slo", "ttft=0.4,tpot=0.1", "--gpus", "3", "-n", "100", "--precision", "30%"),
    *("--top", "1", "--policy", "orca", "-w", "fixed:512,16", "-q"),
)
ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


class Cluster:
    """A cluster in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.dask_workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=ENVIRONMENT,
            cwd=ROOT,
        )
        self.address = self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.answer()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    yield found
    assert found.process.stdin is not None
    assert found.process.stdout is not None
    found.process.stdin.close()
    with found.process.stdout:
        assert found.process.wait(timeout=60) == 0


def search(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dsim", *QUICK, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def local() -> str:
    code, out, _ = ended(search("-j", "1"))
    assert code == 0
    return out


def test_a_cluster_answers_as_local_processes_do(cluster: Cluster, local: str) -> None:
    assert ended(search("--dask", cluster.address)) == (0, local, "")


def test_a_killed_worker_changes_nothing(cluster: Cluster, local: str) -> None:
    victim, _ = cluster.ask(PIDS).split()
    process = search("--dask", cluster.address)
    time.sleep(2.5)
    os.kill(int(victim), signal.SIGKILL)
    assert ended(process) == (0, local, "")


def test_a_worker_of_another_dsim_is_refused(cluster: Cluster) -> None:
    assert cluster.ask(OTHER_CODE) == "changed"
    code, out, err = ended(search("--dask", cluster.address))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: --dask: tcp://")
    assert "has another build of dsim 0.1.0, or another Python or numpy; here is dsim 0.1.0; install the same on" in err
    assert cluster.ask(SAME_CODE) == "changed"


def test_who_says_nothing_is_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client would wait for ever."""
    monkeypatch.setattr(remote, "_CONNECT_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(InputError, match="has no scheduler that answers"), remote.dask_cluster(address):
            pass


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1:1", str(ROOT / "pyproject.toml")])
def test_where_no_scheduler_answers_one_line_says_so(address: str) -> None:
    code, out, err = ended(search("--dask", address))
    assert (code, out) == (2, "")
    assert err == (
        f"error: --dask: {address!r} has no scheduler that answers; give the scheduler's address, as tcp://host:8786, "
        "or its scheduler file\n"
    )
