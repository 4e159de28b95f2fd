"""Reports in a real browser: drawn, quiet, offline, usable by keyboard, legible, printable."""

from __future__ import annotations

import dataclasses
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsim.slo import parse_slo
from experiments.report.answer import read_answer
from experiments.report.search_page import render_search
from experiments.report.sections import Report
from profiles.shipped import find_profile
from tests.browser import Browser, find_browser, running
from tests.report_pages import reported, searched

PROGRAM = find_browser()
if PROGRAM is None:
    pytest.skip("needs a chromium, as in Debian's package `chromium`", allow_module_level=True)

FIGURES = ("curves", "breakdown", "utilisation", "rates", "cases")
#: Lowest contrast of each text with what lies behind it (WCAG's ratio), with its text.
CONTRAST = """
(() => {
  const rgb = (text) => {
    const m = text.match(/[\\d.]+/g).map(Number);
    return [m[0], m[1], m[2], m.length > 3 ? m[3] : 1];
  };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour[3] > 0) return colour;
    }
    throw new Error("nothing behind");
  };
  const seen = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest("script, style") || !parent.checkVisibility()) continue;
    const style = getComputedStyle(parent);
    const colour = rgb(parent.closest("svg") ? style.fill : style.color);
    const [a, b] = [colour, behind(parent)].map(light).sort((x, y) => y - x);
    seen.push([(a + 0.05) / (b + 0.05), node.textContent.trim().slice(0, 60)]);
  }
  return [seen.length, ...seen.sort((x, y) => x[0] - y[0])[0]];
})()
"""
#: What has the focus: its tag, its first words, whether it shows that it has it.
FOCUS = """
(() => {
  const e = document.activeElement, style = getComputedStyle(e);
  return [e.tagName, (e.getAttribute("href") ?? e.getAttribute("aria-label") ?? e.textContent).slice(0, 40),
          style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
          e.getBoundingClientRect().left >= 0];
})()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = searched(tmp_path_factory.mktemp("browser") / "result")
    reported(folder)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with running(PROGRAM, tmp_path_factory.mktemp("chromium")) as found:
        yield found


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.1)


def drawn(browser: Browser, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
    browser.open(page, width=width, height=height, dark=dark)
    wait_for(lambda: browser.value("document.documentElement.dataset.drawn") == "yes")


@pytest.mark.parametrize("width", [1280, 390])
def test_figures_are_drawn_without_complaint_and_without_the_network(
    browser: Browser, folder: Path, width: int
) -> None:
    page = folder / "report.html"
    drawn(browser, page, width=width)
    assert browser.complaints == []
    assert {url for url in browser.requests if not url.startswith(("data:", "blob:"))} == {page.as_uri()}
    for name in FIGURES:
        visible = f"""[...document.querySelectorAll("#plot-{name} svg.main-svg")].filter((svg) => {{
            const box = svg.getBoundingClientRect();
            return svg.checkVisibility() && box.width > 250 && box.height > 100 && box.right <= innerWidth;
        }}).length"""
        assert browser.value(visible) >= 1, name
        assert browser.value(f'document.querySelector("#plot-{name}").textContent.length') > 20
    marks = 'document.querySelectorAll("#plot-curves .scatterlayer .points path").length'
    assert browser.value(marks) == 18
    errors = 'document.querySelectorAll("#plot-curves .errorbar").length'
    assert browser.value(errors) == 18
    # The page itself never scrolls sideways; wide tables do.
    assert browser.value("document.documentElement.scrollWidth") == width
    assert browser.screenshot().startswith(b"\x89PNG")


def test_a_point_tells_its_numbers_under_the_mouse(browser: Browser, folder: Path) -> None:
    drawn(browser, folder / "report.html")
    browser.value('document.getElementById("plot-curves").scrollIntoView({block: "center"})')
    point = 'document.querySelectorAll("#plot-curves .scatterlayer .points path")[4].getBoundingClientRect()'
    x, y = browser.value(f"(() => {{ const b = {point}; return [b.x + b.width / 2, b.y + b.height / 2]; }})()")
    browser.move(x - 3, y)
    browser.move(x, y)
    wait_for(lambda: browser.value('document.querySelectorAll("#plot-curves .hovertext").length'))
    told = browser.value('document.querySelector("#plot-curves .hoverlayer").textContent')
    assert re.search(r"\d\.\d{3} requests/s per GPU", told)
    assert re.search(r"\d+\.\d % \(\d+\.\d – \d+\.\d %\)", told)
    assert browser.complaints == []


def test_keyboard(browser: Browser, folder: Path) -> None:
    """Tab goes through the page in its order, each stop shows itself; the first one skips to the content."""
    drawn(browser, folder / "report.html")
    order = """[...document.querySelectorAll("a[href], summary, [tabindex='0'], button, input")]
        .filter((e) => e.checkVisibility()).map((e) => e.tagName)"""
    wanted = browser.value(order)
    seen = []
    for _ in wanted:
        browser.press("Tab")
        tag, words, shown, on_screen = browser.value(FOCUS)
        assert shown, (tag, words)
        assert on_screen, (tag, words)
        seen.append(tag)
    assert seen == wanted
    assert wanted.count("SUMMARY") >= 4
    drawn(browser, folder / "report.html")
    browser.press("Tab")
    assert browser.value(FOCUS)[:2] == ["A", "#content"]
    browser.press("Enter")
    wait_for(lambda: browser.value("document.activeElement.id") == "content")
    browser.press("Tab")
    assert browser.value('document.activeElement.closest("main") !== null')
    assert browser.complaints == []


def test_details_open_by_keyboard(browser: Browser, folder: Path) -> None:
    drawn(browser, folder / "report.html")
    browser.value('document.querySelector("#curves summary").focus()')
    browser.press("Enter")
    wait_for(lambda: browser.value('document.querySelector("#curves details").open'))
    assert browser.value('document.querySelector("#curves details table").checkVisibility()')


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(browser: Browser, folder: Path, dark: bool) -> None:
    drawn(browser, folder / "report.html", dark=dark)
    browser.value('document.querySelectorAll("details").forEach((e) => { e.open = true; })')
    count, contrast, words = browser.value(CONTRAST)
    assert count > 300
    assert contrast >= 4.5, words


def test_screen_readers_hear_names(browser: Browser, folder: Path) -> None:
    """From the accessibility tree that the browser hands to them."""
    drawn(browser, folder / "report.html")
    nodes = browser.command("Accessibility.getFullAXTree")["nodes"]
    heard = [
        (node.get("role", {}).get("value"), node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"]
    ]
    assert ("navigation", "Contents") in heard
    assert [name for role, name in heard if role == "image" and "chart" in name.lower()] != []
    for role in ("image", "table", "region", "link", "heading", "DisclosureTriangle"):
        names = [name for found, name in heard if found == role]
        assert all(names), role
        assert names, role
    assert sum(role == "image" for role, _ in heard) == len(FIGURES)
    assert ("heading", "Recommendation") in heard


def test_print(browser: Browser, folder: Path) -> None:
    drawn(browser, folder / "report.html")
    browser.command("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        visible = '[...document.querySelectorAll("{}")].map((e) => e.checkVisibility())'
        assert browser.value(visible.format("svg.static")) == [True] * len(FIGURES)
        assert browser.value(visible.format(".plot")) == [False] * len(FIGURES)
        assert browser.value(visible.format("nav")) == [False]
        pdf = browser.pdf()
    finally:
        browser.command("Emulation.setEmulatedMedia", {"media": ""})
    assert pdf.startswith(b"%PDF")
    assert 3 <= pages(pdf) <= 12
    assert browser.complaints == []


def pages(pdf: bytes) -> int:
    """Return the number of pages, from the objects and the compressed ones."""
    text = pdf
    for match in re.finditer(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        try:
            text += zlib.decompress(match[1])
        except zlib.error:
            continue
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", text))


def test_without_script(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.html", script=False)
    try:
        shot = browser.screenshot()
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", {"value": False})
    assert shot.startswith(b"\x89PNG")
    # Scripts of the test itself run all the same.
    static = '[...document.querySelectorAll("figure svg.static")].map((e) => e.getBoundingClientRect().height)'
    heights = browser.value(static)
    assert len(heights) == len(FIGURES)
    assert min(heights) > 80
    assert browser.value('document.querySelectorAll("svg.main-svg").length') == 0


def test_hostile_texts_run_nothing(browser: Browser, folder: Path, tmp_path: Path) -> None:
    bad = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"><svg onload=hacked=1>"
    answer = read_answer(folder)
    trial = dataclasses.replace(answer.trials[0], reasons=(bad,), state="FAILED")
    profile = dataclasses.replace(find_profile("13b", "a100-80g", engine="distserve"), source=bad, engine=bad)
    answer = dataclasses.replace(answer, model=bad, gpu=bad, workload=bad, arrivals=bad, warnings=(bad,), version=bad)
    report = Report(
        answer=dataclasses.replace(answer, trials=(*answer.trials, trial), options={"workload": bad}),
        model_name=bad,
        slo=parse_slo("ttft=0.4,tpot=0.1"),
        profiles=dict.fromkeys(("prefill", "decode", "colocated"), profile),
        shipped={},
    )
    page = tmp_path / "bad.html"
    page.write_text(render_search(report), encoding="utf-8")
    drawn(browser, page)
    assert browser.value("window.hacked") is None
    assert browser.value('document.querySelectorAll("img").length') == 0
    assert browser.complaints == []
    assert set(browser.requests) == {page.as_uri()}


def test_the_policy_stops_what_would_be_added(browser: Browser, folder: Path, tmp_path: Path) -> None:
    """Were a text ever written unescaped, its script would not run and its image not be fetched."""
    page = tmp_path / "added.html"
    text = (folder / "report.html").read_text(encoding="utf-8")
    added = '<script>window.hacked=1</script><img src="http://127.0.0.1:9/x.png" onerror="window.hacked=1">'
    page.write_text(text.replace("<main", f"{added}<main", 1), encoding="utf-8")
    drawn(browser, page)
    assert browser.value("window.hacked") is None
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
