"""HTML as values: whatever is not markup already is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

#: Elements that have no end tag.
_VOID = frozenset({"meta", "br", "link", "img", "col", "hr"})


#: What may stand in a text although it is not printable.
_SPACES = "\n\t\u00a0"


class Html(str):
    """Text that is markup already; only the functions here make it."""

    __slots__ = ()


#: What an element may hold: markup, or text that gets escaped.
Content: TypeAlias = "Html | str | Iterable[Content] | None"


def escaped(text: str) -> Html:
    """Return a text as markup, safe as an element's content and in a quoted attribute.

    >>> escaped('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return Html(
        html.escape("".join(c if c.isprintable() or c in _SPACES else "\N{REPLACEMENT CHARACTER}" for c in text))
    )


def joined(content: Content) -> Html:
    """Return all parts one after the other, texts escaped."""
    if content is None:
        return Html()
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return escaped(content)
    return Html("".join(joined(part) for part in content))


def element(tag: str, *content: Content, **attributes: str | float | bool | None) -> Html:
    """Return an element; `_` in an attribute's name stands for `-`, one at its end keeps it off Python's keywords.

    An attribute that is true has no value, one that is false or None is left out.

    >>> element("p", "1 < 2", class_="note", hidden=True)
    '<p class="note" hidden>1 &lt; 2</p>'
    """
    written = []
    for name, value in attributes.items():
        key = name.rstrip("_").replace("_", "-")
        if value is True:
            written.append(f" {key}")
        elif value is not None and value is not False:
            written.append(f' {key}="{escaped(str(value))}"')
    start = f"<{tag}{''.join(written)}>"
    return Html(start if tag in _VOID else f"{start}{joined(content)}</{tag}>")


def trusted(text: str) -> Html:
    """Return text of dsim's own files (styles, scripts) as it is."""
    return Html(text)


def data_block(identity: str, value: object) -> Html:
    """Return JSON that a script of the page reads; nothing in it can end the block."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    safe = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return Html(f'<script type="application/json" id="{escaped(identity)}">{safe}</script>')


def table(
    caption: Content,
    headings: Sequence[Content],
    rows: Iterable[Sequence[Content]],
    *,
    texts: Collection[int] = (),
    marked: int | None = None,
) -> Html:
    """Return a table whose first column names its rows; it scrolls by itself where the page is narrow.

    Args:
        texts: columns beyond the first that hold text; the others hold numbers, which are aligned to the right.
        marked: the row that stands out.
    """
    head = element("tr", [element("th", h, scope="col", class_=_side(i, texts)) for i, h in enumerate(headings)])
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            [element("td", cell, class_=_side(i, texts)) for i, cell in enumerate(row[1:], 1)],
            class_="marked" if number == marked else None,
        )
        for number, row in enumerate(rows)
    ]
    inner = element("table", element("caption", caption), element("thead", head), element("tbody", body))
    label = "".join(caption) if isinstance(caption, str) and not isinstance(caption, Html) else "table"
    return element("div", inner, class_="scroll", role="region", aria_label=label, tabindex="0")


def _side(column: int, texts: Collection[int]) -> str | None:
    return None if column == 0 or column in texts else "number"


def definitions(pairs: Iterable[tuple[Content, Content]]) -> Html:
    """Return terms with what they mean or are."""
    return element("dl", [element("div", element("dt", term), element("dd", value)) for term, value in pairs])


def bullets(items: Iterable[Content]) -> Html:
    """Return a list."""
    return element("ul", [element("li", item) for item in items])


def details(summary: Content, *content: Content) -> Html:
    """Return content that is folded away at first."""
    return element("details", element("summary", summary), *content)


def number(value: float, shown: str) -> Html:
    """Return a number as it is shown, the exact one in the element's value."""
    return element("data", shown, value=repr(value))
