"""Reports to test with, and an HTML page taken apart."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from dsim.cli import main
from tests.cli import QUICK

#: Elements without an end tag.
_VOID = {"meta", "img", "br", "link", "hr", "col"}


def searched(folder: Path, *options: str, code: int = 0) -> Path:
    """Run a quick search into a folder and return it."""
    quick = list(QUICK)
    if "disaggregated" in options:
        # Policies are of colocated placements.
        del quick[(at := quick.index("--policy")) : at + 2]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main([*quick, "-q", *options, "-o", str(folder)]) == code
    return folder


def reported(folder: Path, *options: str, page: Path | None = None) -> str:
    """Return the page that `dsim report` makes of a folder."""
    path = page or folder / "report.html"
    with contextlib.redirect_stderr(io.StringIO()):
        assert main(["report", str(folder), "-o", str(path), "-j", "1", "-q", "--overwrite", *options]) == 0
    return path.read_text(encoding="utf-8")


def answer_of(folder: Path) -> dict[str, Any]:
    """Return a search's result.json."""
    answer: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return answer


@dataclass
class Element:
    """An element of a page."""

    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        """Return the elements of this tag below this one, in order."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                found += [child] if child.tag == tag else []
                found += child.all(tag)
        return found

    def identified(self, identity: str) -> Element:
        """Return the element with this id."""
        found = [e for e in self.everything() if e.attributes.get("id") == identity]
        assert len(found) == 1, identity
        return found[0]

    def everything(self) -> list[Element]:
        """Return all elements below this one."""
        below = [child for child in self.children if isinstance(child, Element)]
        return [element for child in below for element in (child, *child.everything())]

    @property
    def text(self) -> str:
        """All text below, white space collapsed, scripts left out."""
        return " ".join(self._raw().split())

    def _raw(self) -> str:
        parts = [child if isinstance(child, str) else child._raw() for child in self.children]
        return "" if self.tag in ("script", "style") else "".join(parts)

    @property
    def source(self) -> str:
        """The text of a script or style."""
        return "".join(child for child in self.children if isinstance(child, str))

    @property
    def values(self) -> list[float]:
        """The exact numbers below."""
        return [float(element.attributes["value"]) for element in self.all("data")]

    def table(self, caption: str) -> list[list[Element]]:
        """Return the body cells of the table with this caption."""
        for table in self.all("table"):
            if table.all("caption")[0].text == caption:
                rows = table.all("tbody")[0].all("tr")
                return [[c for c in row.children if isinstance(c, Element)] for row in rows]
        raise AssertionError([table.all("caption")[0].text for table in self.all("table")])


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), attrs
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, (self.open[-1].tag, tag)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parsed(html: str) -> Element:
    """Return the page's root; every element must be closed in order."""
    builder = _Builder()
    builder.feed(html)
    builder.close()
    assert len(builder.open) == 1, builder.open[-1].tag
    return builder.root
