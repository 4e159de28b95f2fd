"""Groups of options: what a command takes, and what it is given."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from dsim.cli.groups import grouped, taken


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    name: Annotated[str, typer.Option("--name", "-n")]
    colour: Annotated[Colour, typer.Option("--colour")] = Colour.RED


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    before: Annotated[int, typer.Option("--before")] = 1
    inner: Inner
    after: Annotated[bool, typer.Option("--after")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Other(Outer):
    """With a default of its own, where the option stands in the other."""

    before: Annotated[int, typer.Option("--before", help="Of the other.")] = 7


def seen(group: type[Outer], *arguments: str) -> list[object]:
    """Return what a command is given, the name in its context, its group and its own option, else what is printed."""
    found: list[object] = []

    def command(context: typer.Context, *, options: Outer, own: Annotated[int, typer.Option("--own")] = 5) -> int:
        found.extend([context.info_name, options, own])
        return 0

    command.__annotations__["options"] = group
    app = typer.Typer()
    app.command("command")(grouped(command))
    result = CliRunner().invoke(app, list(arguments), prog_name="command")
    return found or [result.output]


def test_a_command_gets_its_groups() -> None:
    inner = Inner(name="x", colour=Colour.BLUE)
    arguments = ["-n", "x", "--colour", "blue", "--after", "--own", "6"]
    assert seen(Outer, *arguments) == ["command", Outer(inner=inner, after=True), 6]
    assert seen(Outer, "--name", "x", "--before", "2") == ["command", Outer(before=2, inner=Inner(name="x")), 5]
    assert seen(Other, "--name", "x") == ["command", Other(before=7, inner=Inner(name="x")), 5]


def test_options_stand_where_their_fields_do() -> None:
    (text,) = seen(Other, "--help")
    places = [str(text).index(option) for option in ("--before", "--name", "--colour", "--after", "--own")]
    assert places == sorted(places)
    assert "Of the other." in str(text)


def test_what_a_group_needs_is_needed() -> None:
    (text,) = seen(Outer)
    assert "Missing option" in str(text)
    assert "--name" in str(text)


def test_a_group_is_taken_of_what_another_command_line_gave() -> None:
    given = {"name": "x", "colour": Colour.BLUE, "before": 3, "after": True, "foreign": 1}
    assert taken(Outer, given) == Outer(before=3, inner=Inner(name="x", colour=Colour.BLUE), after=True)
    with pytest.raises(KeyError, match="after"):
        taken(Outer, {"name": "x", "colour": Colour.BLUE, "before": 3})


def test_an_option_that_two_groups_have_is_a_mistake() -> None:
    def command(*, one: Outer, other: Inner) -> int:
        del one, other
        return 0

    with pytest.raises(ValueError, match="duplicate parameter name: 'name'"):
        grouped(command)
