"""The commands, and how what goes wrong in them becomes one line and an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from dsim.cli import lists, plot, profile, report, search, simulate, size, sweep, validate
from dsim.cli.config import Origins
from dsim.cli.problems import describe
from dsim.errors import DsimError, InfeasiblePlacementError, InternalError
from dsim.version import __version__, is_compiled

app = typer.Typer(
    name="dsim",
    help="Which placement of an LLM on these GPUs serves the most requests per GPU within the latency targets?",
    # Plain help: importing rich would double the time of `dsim --help`.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


@app.callback(invoke_without_command=True)
def dsim(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Hold what stands before the command."""
    if version:
        typer.echo(f"dsim {__version__} ({'compiled' if is_compiled() else 'pure Python'})")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("search")(search.search)
app.command("size")(size.size)
app.command("simulate")(simulate.simulate)
app.command("sweep")(sweep.sweep)
app.command("validate")(validate.validate)
app.command("plot")(plot.plot)
app.command("report")(report.report)
app.add_typer(profile.app, name="profile")
app.command("models")(lists.models)
app.command("gpus")(lists.gpus)
app.command("profiles")(lists.profiles)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; what the user can mend is one line on stderr."""
    origins = Origins()
    try:
        code = app(
            args=None if arguments is None else list(arguments), prog_name="dsim", standalone_mode=False, obj=origins
        )
    except (DsimError, typer.TyperException, OSError) as error:
        typer.echo(f"error: {describe(error, origins)}", err=True)
        if isinstance(error, InfeasiblePlacementError):
            return 3
        return 1 if isinstance(error, OSError | InternalError) else 2
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0
