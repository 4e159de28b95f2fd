"""Options from a YAML file (`-c FILE`) and from `--set KEY=VALUE`; the command line's own options win over both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dsim.errors import InputError, nearest

if TYPE_CHECKING:
    from dsim.yamlfile import Field

#: Options that say how a run is started, not what it computes.
_NOT_IN_FILES = {"config", "set", "help", "dry-run"}


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

    def use(self, context: typer.Context, *, file: _Tree | None = None, assigned: _Tree | None = None) -> None:
        """Make these values the defaults of the command's options; assigned ones win over the file's."""
        self._file = self._file if file is None else file
        self._set = self._set if assigned is None else assigned
        self.context = context
        self.places.clear()
        context.default_map = {}
        for key, node in _merged(self._file, self._set).items():
            name = key.replace("-", "_")
            self.places[name] = _first_leaf(node).where
            context.default_map[name] = _value_of(node, key)


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the options from a YAML file; the callback of `--config`."""
    if path is not None and not context.resilient_parsing:
        from dsim.yamlfile import read_yaml

        section = read_yaml(path)
        tree = {key: _tree(value) for key, value in section.fields.items()}
        known = _known(context)
        for key, node in tree.items():
            if key.replace("_", "-") not in known:
                raise InputError(_first_leaf(node).where, "is not a known key", value=key, hint=nearest(key, known))
        _origins(context).use(context, file={key.replace("_", "-"): node for key, node in tree.items()})
    return path


def read_assignments(context: typer.Context, assignments: list[str] | None) -> list[str] | None:
    """Take options from `KEY=VALUE` texts, the value in YAML; the callback of `--set`."""
    if assignments and not context.resilient_parsing:
        from dsim.yamlfile import parse_yaml

        tree: _Tree = {}
        known = _known(context)
        for assignment in assignments:
            path, equals, text = assignment.partition("=")
            keys = [key.strip() for key in path.split(".")]
            if not equals or not all(keys):
                hint = "write KEY=VALUE, as in slo.ttft=0.4"
                raise InputError("--set", "is no assignment", value=assignment, hint=hint)
            keys[0] = keys[0].replace("_", "-")
            if keys[0] not in known:
                raise InputError("--set", "is not a known key", value=keys[0], hint=nearest(keys[0], known))
            try:
                value = parse_yaml(b"value: " + text.encode(), file="--set").need("value")
            except InputError as error:
                raise InputError("--set", error.rule, value=assignment, hint=error.hint) from None
            node: _Tree | _Leaf = _tree(value, where="--set")
            for key in reversed(keys[1:]):
                node = {key: node}
            tree = _merged(tree, {keys[0]: node})
        _origins(context).use(context, assigned=tree)
    return assignments


def _known(context: typer.Context) -> list[str]:
    names = [max(parameter.opts, key=len).removeprefix("--") for parameter in context.command.params]
    return sorted(set(names) - _NOT_IN_FILES)


def _origins(context: typer.Context) -> Origins:
    origins = context.find_object(Origins)
    if origins is None:
        origins = context.obj = Origins()
    return origins


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


def _value_of(node: _Tree | _Leaf, key: str) -> str | bool | list[str] | None:
    """Return what the option's own reader takes: a text, a truth value, or a list of texts."""
    if isinstance(node, _Leaf):
        if isinstance(node.value, list):
            return [_text(item) for item in node.value]
        return node.value if isinstance(node.value, bool) or node.value is None else _text(node.value)
    pairs = []
    for name, item in node.items():
        if isinstance(item, dict):
            raise InputError(_first_leaf(item).where, "is nested too deeply", name=f"{key}.{name}")
        pairs.append(f"{name}={_text(item.value)}")
    return ",".join(pairs)


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)
