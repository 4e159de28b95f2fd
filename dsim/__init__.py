"""Simulator of LLM serving on GPUs."""

from dsim.version import __version__

__all__ = ["__version__"]
