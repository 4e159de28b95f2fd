"""Sweeps over many runs, their results, plots and reports."""
