"""docs/gallery.md and its pictures are what the program draws."""

from __future__ import annotations

import re

import matplotlib
import pytest

from experiments.plots import Kind
from tests import gallery


@pytest.fixture(scope="module")
def drawn() -> dict[str, bytes]:
    return {path.name: content for path, content in gallery.files().items()}


def _texts(svg: bytes) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.decode())


def test_every_kind_is_shown(drawn: dict[str, bytes]) -> None:
    assert set(drawn) == {"gallery.md", *(f"{kind.value}.svg" for kind in Kind)}
    assert {path.name for path in gallery.FOLDER.iterdir()} == set(drawn) - {"gallery.md"}


def test_the_page_and_its_pictures_are_up_to_date(drawn: dict[str, bytes]) -> None:
    shipped = {path.name: path.read_bytes() for path in (gallery.PAGE, *gallery.FOLDER.iterdir())}
    version = re.search(rb"drawn with matplotlib\s+([0-9.]+)\)", shipped["gallery.md"])
    assert version is not None
    if version[1].decode() == matplotlib.__version__:
        stale = [name for name, content in drawn.items() if shipped[name] != content]
    else:
        # Another matplotlib may set letters a little apart: the words and numbers are still the same.
        stale = [name for name, content in drawn.items() if _texts(shipped[name]) != _texts(content)]
    assert stale == [], "python -m tests.gallery draws them anew"


def test_pictures_are_small_and_their_texts_can_be_read(drawn: dict[str, bytes]) -> None:
    for name, content in drawn.items():
        assert len(content) < 300_000, name
        if name.endswith(".svg"):
            assert len(_texts(content)) > 10, name
