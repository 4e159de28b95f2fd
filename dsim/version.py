"""The version of dsim, in one place, and whether its simulator is compiled."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec

__version__ = "0.1.0"


def is_compiled() -> bool:
    """Return whether the simulator's modules are compiled ones; nothing is imported to find out."""
    found = find_spec("dsim.simulate")
    return found is not None and (found.origin or "").endswith(tuple(EXTENSION_SUFFIXES))
