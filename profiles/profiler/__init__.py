"""Times real transformer steps with torch; nothing else in dsim imports torch."""

from __future__ import annotations

from profiles.profiler.device import open_device
from profiles.profiler.timer import TorchTimer

__all__ = ["TorchTimer", "open_device"]
