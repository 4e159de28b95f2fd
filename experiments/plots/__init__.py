"""Figures: what a sweep, a search or a run found, as SVG and PNG."""

from experiments.plots.attainment import attainment_figure, attainment_png, attainment_svg, plot_attainment
from experiments.plots.check import check_plot
from experiments.plots.draw import draw, render
from experiments.plots.given import GIVEN, plot_section
from experiments.plots.results import RUN_KINDS, SEARCH_KINDS, run_figures, search_figures
from experiments.plots.spec import COMMON_KEYS, FORMS, OWN_KEYS, Form, Kind, Mark, PlotSpec, parse_plot
from experiments.plots.style import STYLES, Figures, new_figure, rendered

__all__ = [
    "COMMON_KEYS",
    "FORMS",
    "GIVEN",
    "OWN_KEYS",
    "RUN_KINDS",
    "SEARCH_KINDS",
    "STYLES",
    "Figures",
    "Form",
    "Kind",
    "Mark",
    "PlotSpec",
    "attainment_figure",
    "attainment_png",
    "attainment_svg",
    "check_plot",
    "draw",
    "new_figure",
    "parse_plot",
    "plot_attainment",
    "plot_section",
    "render",
    "rendered",
    "run_figures",
    "search_figures",
]
