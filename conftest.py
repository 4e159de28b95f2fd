"""Keeps the collection of doctests out of modules that cannot be imported where torch is missing."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["profiles/profiler/*"]
