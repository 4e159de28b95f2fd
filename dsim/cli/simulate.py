"""`dsim simulate`: one placement under one workload."""

from __future__ import annotations

import typer


def simulate() -> int:
    """Simulate."""
    typer.echo("x")
    return 0
