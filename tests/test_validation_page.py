"""docs/validation.md says what the code gives today: its figures are those of `python -m tests.validation`."""

from __future__ import annotations

import re

import pytest

from tests import validation
from tests.distserve import needs_data
from tests.truth.common import needs_truth

pytestmark = [needs_truth, needs_data, pytest.mark.slow]


def page() -> str:
    return validation.PAGE.read_text(encoding="utf-8")


def test_every_block_is_on_the_page_once() -> None:
    names = re.findall(r"<!-- ([a-z, ]+) -->", page())
    assert [name for name in names if name != "end"] == list(validation.BLOCKS)
    assert names.count("end") == len(validation.BLOCKS)
    assert list(validation.written(page())) == list(validation.BLOCKS)


@pytest.mark.parametrize("name", [name for name in validation.BLOCKS if name not in validation.SLOW])
def test_figures_are_those_of_the_code(name: str) -> None:
    hint = "run python -m tests.validation, and say in CHANGELOG.md which numbers changed"
    assert validation.written(page())[name] == validation.BLOCKS[name](), hint


def test_a_block_that_is_out_of_date_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "before\n\n<!-- summary -->\n\nold\n\n<!-- end -->\n\nafter\n\n<!-- splitwise -->\n\nkept\n\n<!-- end -->\n"
    monkeypatch.setattr(validation, "BLOCKS", {"summary": lambda: "new", "splitwise": lambda: "other"})
    assert validation.updated(text, ["summary"]) == text.replace("old", "new")
