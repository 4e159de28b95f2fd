"""Named random streams: one run seed, independent generators."""

from __future__ import annotations

import operator
import zlib
from typing import Final

import numpy as np

from dsim.errors import InputError

CODES: Final = {"arrivals": 1, "lengths": 2, "routing": 3}
"""Stream names with a fixed code; any other name is coded by its CRC-32."""

_LIMIT: Final = 2**32


def stream(seed: int, name: str, index: int = 0) -> np.random.Generator:
    """Return the PCG64 generator seeded by `SeedSequence([seed, code of the name, index])`.

    The same numbers come out in every process and on every platform. Index 0 is the same as no index (numpy pads
    entropy with zeros), so `stream(seed, "routing")` is `Generator(PCG64(SeedSequence([seed, 3])))`.

    Args:
        seed: 0 <= seed < 2**32. A larger one would fill two of numpy's 32-bit words and could meet another stream.
        name: `arrivals`, `lengths`, `routing`, or any other word.
        index: 0 <= index < 2**32, for streams that come in numbers, such as one for each user.

    Raises:
        InputError: if seed or index is outside its range.
    """
    check_seed(seed)
    if not 0 <= index < _LIMIT:
        raise InputError("stream", f"must be >= 0 and below {_LIMIT}", name="index", value=index)
    code = CODES.get(name)
    if code is None:
        code = zlib.crc32(name.encode())
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, code, index])))


def replication_seed(seed: int, replication: int) -> int:
    """Return the run seed of a replication: the seed itself for 0, then seeds spawned from it.

    >>> replication_seed(7, 0), replication_seed(7, 1) != replication_seed(8, 1)
    (7, True)
    """
    check_seed(seed)
    if replication == 0:
        return seed
    entropy = np.random.SeedSequence([seed, zlib.crc32(b"replication"), replication])
    return int(entropy.generate_state(1)[0])


def check_seed(seed: int) -> None:
    """Check that the seed is a whole number with 0 <= seed < 2**32.

    Raises:
        InputError: if it is not.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number < _LIMIT:
        raise InputError("seed", f"must be a whole number >= 0 and below {_LIMIT}", value=seed)
