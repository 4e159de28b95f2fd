"""Options from a YAML file (`-c FILE`) and from `--set KEY=VALUE`; the command line's own options win over both."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dsim.errors import InputError, nearest

if TYPE_CHECKING:
    from dsim.yamlfile import Field

#: Options that say how a run is started, not what it computes.
_NOT_IN_FILES = {"config", "set", "help", "dry-run"}
#: Options that change where results go, not what they are.
_NOT_THE_RUN = {"format", "step-log", "output-dir", "overwrite", "quiet", "no-color", "jobs"}
_NOT_THE_RUN |= {"dask", "time-limit", "resume", "retry-failed", "cache", "shard", "merge"}


@dataclass(frozen=True, slots=True)
class _Leaf:
    where: str
    value: object


_Tree = dict[str, "_Tree | _Leaf"]


@dataclass(slots=True)
class Origins:
    """Where the options of one run of the command line came from.

    Args:
        places: `file:line` or `--set` by parameter name.
    """

    places: dict[str, str] = field(default_factory=dict)
    context: typer.Context | None = None
    _file: _Tree = field(default_factory=dict)
    _set: _Tree = field(default_factory=dict)

    def of_option(self, option: str) -> str | None:
        """Return the place that `--option`'s value came from; None if from the command line or a default."""
        if self.context is None or not option.startswith("--"):
            return None
        for parameter in self.context.command.params:
            if option in parameter.opts and parameter.name in self.places:
                source = self.context.get_parameter_source(parameter.name)
                return self.places[parameter.name] if source is not None and source.name == "DEFAULT_MAP" else None
        return None

    def use(self, context: typer.Context, *, file: _Tree | None, assigned: _Tree | None) -> None:
        """Make these values the defaults of the command's options; assigned ones win over the file's."""
        self._file = self._file if file is None else file
        self._set = self._set if assigned is None else assigned
        self.context = context
        self.places.clear()
        context.default_map = {}
        parameters = {
            max(parameter.opts, key=len).removeprefix("--"): parameter for parameter in context.command.params
        }
        known = sorted(set(parameters) - _NOT_IN_FILES)
        for key, node in _merged(self._file, self._set).items():
            option = key.replace("_", "-")
            place = _first_leaf(node).where
            if option not in known:
                hint = nearest(option, known)
                hint = hint if hint.startswith("did") else f"see {context.command_path} --help"
                raise InputError(place, "is not a known key", value=key, hint=hint)
            parameter = parameters[option]
            self.places[parameter.name] = place
            context.default_map[parameter.name] = _value_of(
                node,
                option,
                flag=getattr(parameter, "is_flag", False),
                many=getattr(parameter, "multiple", False),
            )


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the options from a YAML file; the callback of `--config`."""
    if path is not None and not context.resilient_parsing:
        from dsim.yamlfile import read_yaml

        section = read_yaml(path)
        _use(context, file={key: _tree(value) for key, value in section.fields.items()})
    return path


def read_assignments(context: typer.Context, assignments: list[str] | None) -> list[str] | None:
    """Take options from `KEY=VALUE` texts, the value in YAML; the callback of `--set`."""
    if assignments and not context.resilient_parsing:
        from dsim.yamlfile import parse_yaml

        tree: _Tree = {}
        for assignment in assignments:
            path, equals, text = assignment.partition("=")
            keys = [key.strip() for key in path.split(".")]
            if not equals or not all(keys):
                hint = "write KEY=VALUE, as in slo.ttft=0.4"
                raise InputError("--set", "is no assignment", value=assignment, hint=hint)
            try:
                value = parse_yaml(b"value: " + text.encode(), file="--set").need("value")
                node = _tree(value, where="--set")
            except InputError as error:
                raise InputError("--set", error.rule, value=assignment, hint=error.hint) from None
            for key in reversed(keys):
                node = {key: node}
            assert isinstance(node, dict)
            tree = _merged(tree, node)
        _use(context, assigned=tree)
    return assignments


def rerun_text(context: typer.Context) -> str:
    """Return the YAML that `--config` takes to run the same again."""
    import yaml

    from dsim.version import __version__

    options: dict[str, object] = {}
    for parameter in context.command.params:
        key = max(parameter.opts, key=len).removeprefix("--")
        value = context.params.get(parameter.name)
        if key not in _NOT_IN_FILES | _NOT_THE_RUN and value is not None and value is not False and value != []:
            options[key] = _plain(value)
    return f"# dsim {__version__}\n" + yaml.safe_dump(options, sort_keys=False, allow_unicode=True)


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else str(value) if isinstance(value, Path) else value


def _use(context: typer.Context, *, file: _Tree | None = None, assigned: _Tree | None = None) -> None:
    origins = context.find_object(Origins)
    if origins is None:
        origins = context.obj = Origins()
    origins.use(context, file=file, assigned=assigned)


def _tree(value: Field, *, where: str | None = None) -> _Tree | _Leaf:
    if isinstance(value.value, dict):
        if not value.value:
            raise value.error("must not be empty")
        return {key: _tree(item, where=where) for key, item in value.value.items()}
    if isinstance(value.value, tuple):
        items = [_tree(item, where=where) for item in value.value]
        if not all(isinstance(item, _Leaf) for item in items):
            raise value.error("must be a list of plain values")
        return _Leaf(where or value.where, [item.value for item in items if isinstance(item, _Leaf)])
    return _Leaf(where or value.where, value.value)


def _merged(below: _Tree, above: _Tree) -> _Tree:
    merged = dict(below)
    for key, node in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, node) if isinstance(old, dict) and isinstance(node, dict) else node
    return merged


def _first_leaf(node: _Tree | _Leaf) -> _Leaf:
    while isinstance(node, dict):
        node = next(iter(node.values()))
    return node


def _value_of(node: _Tree | _Leaf, key: str, *, flag: bool, many: bool) -> str | bool | list[str] | None:
    """Return what the option's own reader takes; None where it says null.

    Args:
        flag: the option is a truth value, else it is a text.
        many: the option may be repeated, so a list of texts.
    """
    if isinstance(node, _Leaf):
        if node.value is None:
            return None
        if many:
            return [_text(item) for item in (node.value if isinstance(node.value, list) else [node.value])]
        if isinstance(node.value, list):
            raise InputError(node.where, "must be one value, not a list", name=key)
        if flag != isinstance(node.value, bool):
            rule = "must be true or false" if flag else "must not be a truth value"
            raise InputError(node.where, rule, name=key, value=node.value)
        return node.value if isinstance(node.value, bool) else _text(node.value)
    pairs = []
    for name, item in node.items():
        if isinstance(item, dict) or isinstance(item.value, list):
            raise InputError(_first_leaf(item).where, "must be a plain value", name=f"{key}.{name}")
        pairs.append(f"{name}={_text(item.value)}")
    if flag:
        raise InputError(_first_leaf(node).where, "must be true or false", name=key)
    return ",".join(pairs)


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)
