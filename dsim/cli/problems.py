"""Errors as the one line that a user reads."""

from __future__ import annotations

import re

import typer

from dsim.cli.config import Origins
from dsim.errors import InputError, nearest


def describe(error: Exception, origins: Origins) -> str:
    """Return `where: name=value rule; hint`, on one line and without control characters."""
    if isinstance(error, InputError):
        text = str(_relocated(error, origins))
    elif isinstance(error, typer.TyperException):
        text = _usage(error, origins)
    elif isinstance(error, OSError):
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        text = str(error)
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def _relocated(error: InputError, origins: Origins) -> InputError:
    """Return the error with the place of the config file where the option's value came from there."""
    place = origins.of_option(error.where)
    if place is None:
        return error
    key = error.where.removeprefix("--")
    name = key if error.name is None else f"{key}.{error.name}"
    return InputError(place, error.rule, name=name, value=error.value, hint=error.hint)


def _usage(error: typer.TyperException, origins: Origins) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "dsim"
    see = f"see {command} --help"
    message = error.message.rstrip(".").removeprefix("Value error, ")
    unknown = getattr(error, "option_name", None)
    if unknown is not None:
        if "No such option" not in message:
            return f"{unknown}: {_lower(message).removeprefix(f'option {unknown!r} ')}; {see}"
        known = [name for parameter in context.command.params for name in parameter.opts] if context else []
        hint = nearest(unknown, known)
        return f"{unknown}: is no option of {command}; {hint if hint.startswith('did') else see}"
    parameter = getattr(error, "param", None)
    if parameter is None:
        no_command = re.match("No such command '(.*?)'", message)
        if no_command is not None:
            word = no_command[1]
            commands = list(getattr(context.command, "commands", {})) if context else []
            return f"{command}: {word!r} is no command; {nearest(word, commands)}"
        return f"{command}: {_lower(message)}; {see}"
    where = max(parameter.opts, key=len)
    where = where if where.startswith("-") else where.upper()
    place = origins.of_option(where)
    if place is not None:
        where = f"{place}: {where.removeprefix('--')}"
    if hasattr(error, "param_type"):
        return f"{where}: is needed; {see}"
    return f"{where}: {_lower(message)}; {see}"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
