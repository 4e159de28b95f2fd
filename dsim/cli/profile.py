"""`dsim profile`: from timed kernels to a latency profile."""

from __future__ import annotations

import typer

from dsim.cli import profile_fit, profile_import, profile_kernels, profile_layers, profile_run, profile_show

app = typer.Typer(
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def profile(context: typer.Context) -> None:
    """Time kernels, fit latency profiles to the times, and look at them."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("run")(profile_run.run)
app.command("fit")(profile_fit.fit)
app.command("from-kernels")(profile_kernels.from_kernels)
app.command("from-layers")(profile_layers.from_layers)
app.command("import")(profile_import.import_rows)
app.command("show")(profile_show.show)
app.command("compare")(profile_show.compare)
