"""The command line: a thin shell around the simulator, the profiles and the search."""

from __future__ import annotations


def main() -> int:
    """Run the command line and return its exit code."""
    return 0
