"""The report of a search."""

from __future__ import annotations

from experiments.report.page import page
from experiments.report.sections import Report, sections, summary


def render_search(report: Report) -> str:
    """Return the page; the same report gives the same bytes."""
    report.figures.clear()
    parts = sections(report)
    return page(
        title=f"Placement of {report.model_name} on {report.answer.gpu}",
        heading=f"Placement of {report.model_name} on {report.answer.gpu}",
        lead=summary(report),
        sections=[(part.identity, part.heading, part.content) for part in parts],
        figures=report.figures,
    )
