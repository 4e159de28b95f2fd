"""One HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from experiments.report.figures import Figure
from experiments.report.interactive import bundle, specification
from experiments.report.markup import Content, Html, data_block, details, element, trusted
from experiments.report.static import drawing


def figure(drawn: Figure, listing: Html | None) -> Html:
    """Return a figure: for script, for print and browsers without script, and as the numbers that it shows."""
    return figures((drawn,), drawing(drawn), listing, caption=drawn.caption)


def figures(panels: Sequence[Figure], still: Html, listing: Html | None, *, caption: str) -> Html:
    """Return a figure of several panels with one that does not move, for print and browsers without script."""
    return element(
        "figure",
        [
            element("div", class_="plot", id=f"plot-{drawn.identity}", role="img", aria_label=drawn.summary)
            for drawn in panels
        ],
        still,
        element("figcaption", caption),
        None if listing is None else details("The numbers of this figure", listing),
    )


def page(*, title: str, heading: Content, lead: Content, sections: Sequence[tuple[str, str, Html]],
         figures: Sequence[Figure]) -> str:  # fmt: skip
    """Return the page.

    Args:
        sections: (id, heading, content) in order.
        figures: those in the content, drawn by plotly.js; none of it is loaded where there are none.
    """
    scripts = [bundle(), _asset("page.js")] if figures else []
    contents = element(
        "nav",
        element("ul", [element("li", element("a", name, href=f"#{identity}")) for identity, name, _ in sections]),
        aria_label="Contents",
    )
    body = [
        element("section", element("h2", name, id=f"{identity}-heading"), content, id=identity,
                aria_labelledby=f"{identity}-heading")
        for identity, name, content in sections
    ]  # fmt: skip
    inlined = [
        data_block("figures", {drawn.identity: specification(drawn) for drawn in figures}),
        *(element("script", trusted(script)) for script in scripts),
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", trusted(_asset("page.css"))),
    )
    shown = element(
        "body",
        element("a", "Skip to the content", href="#content", class_="skip"),
        element("header", element("h1", heading), lead),
        contents,
        element("main", body, id="content", tabindex="-1"),
        element("footer", element("p", "Made by dsim. This page loads nothing from any network.")),
        inlined if figures else None,
    )
    return f"<!DOCTYPE html>\n{element('html', head, shown, lang='en')}\n"


def picture(content: bytes, *, kind: str, description: str, class_: str | None = None) -> Html:
    """Return an image that is part of the page.

    Args:
        kind: its media type.
    """
    encoded = base64.b64encode(content).decode("ascii")
    return element("img", src=f"data:{kind};base64,{encoded}", alt=description, class_=class_)


def _policy(scripts: Sequence[str]) -> str:
    """Return what the browser may load and run: this page's own scripts by their digests, its styles and images."""
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode('ascii')}'" for script in scripts
    ]
    return (
        f"default-src 'none'; script-src {' '.join(digests) or chr(39) + 'none' + chr(39)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (files("experiments.report") / "assets" / name).read_text(encoding="utf-8")
