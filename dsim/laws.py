"""Laws that hold for every run, whatever the placement and the workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsim.errors import DsimError

if TYPE_CHECKING:
    from dsim.result import Result

