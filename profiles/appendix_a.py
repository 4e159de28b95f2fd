"""The form of DistServe's appendix A, fitted to the same rows for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from dsim.model import Model
from dsim.profile_fit import AppendixA
from profiles.curve import solve
from profiles.rows import Phase, Row
from profiles.timed import Floats, timed

#: FlashAttention block of appendix A.
BLOCK: Final = 16


def fit_appendix_a(rows: Sequence[Row], tp: int, model: Model) -> AppendixA | None:
    """Return C1 to C5 of the paper's appendix A for one degree; None with fewer than 3 points of a phase.

    Source:
        arXiv 2401.09670v3, appendix A: T_prefill = C1·(4·t·h² + 2·t·h·m) + C2·3·h·t2/b + C3,
        T_decode = C4·(4h² + 2hm) + C5·3·h·t, with h and m divided by the tensor parallel degree.
    """
    prefill, decode = timed(rows, Phase.PREFILL, tp), timed(rows, Phase.DECODE, tp)
    if min(len(prefill.points), len(decode.points)) < 3:
        return None
    h, m = model.hidden_size, model.ffn_size if model.experts is None else model.experts.active_ffn_size
    weights, width = (4 * h * h + 2 * h * m) / tp, 3 * h / tp
    tokens, each, cached = prefill.tokens, prefill.column("prompt_tokens"), prefill.column("cached_tokens")
    total = decode.column("requests") * decode.column("context_tokens")
    (c1, c2, c3), prefill_error = _fitted(
        [tokens * weights, width * tokens * (each + 2 * cached) / BLOCK, np.ones_like(tokens)], prefill.step_s
    )
    (c4, c5), decode_error = _fitted([np.full_like(total, weights), width * total], decode.step_s)
    return AppendixA(tp, (c1, c2, c3, c4, c5), prefill_error, decode_error)


def _fitted(columns: Sequence[Floats], step_s: Floats) -> tuple[list[float], float]:
    """Return constants >= 0 and the mean relative error."""
    matrix = np.stack(columns, 1) / step_s[:, None]
    solved = solve(matrix, np.ones(len(step_s)), np.zeros((0, len(columns))))
    return solved.values.tolist(), float(np.abs(solved.residuals).mean())
