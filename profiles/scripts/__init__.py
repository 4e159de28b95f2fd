"""Prepared profiling runs."""
