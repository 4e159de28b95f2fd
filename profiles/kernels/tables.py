"""Kernel times by size, interpolated between the sizes that were timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from dsim.errors import InputError
from profiles.kernels.package import ENGINES, KernelPackage, Table

Floats = NDArray[np.float64]

#: The largest n of a GEMM that is asked for whole; a wider one (an output head) is several of them side by side.
_WIDEST = 65536
_MS = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Seconds by one size: linear between timed sizes, never falling, flat below the first.

    Beyond the last size, time is proportional to `size ** power`.
    """

    sizes: Floats
    seconds: Floats
    power: int = 1

    @classmethod
    def fitted(cls, sizes: Sequence[float] | Floats, seconds: Sequence[float] | Floats, *, power: int = 1) -> Curve:
        """Return the curve nearest to the times that never falls (isotonic regression of their logarithms)."""
        order = np.argsort(sizes)
        x, y = np.asarray(sizes, dtype=np.float64)[order], np.asarray(seconds, dtype=np.float64)[order]
        return cls(x, np.exp(np.asarray(isotonic_regression(np.log(y)).x, dtype=np.float64)), power)

    @property
    def largest(self) -> float:
        """The largest timed size."""
        return float(self.sizes[-1])

    def at(self, size: float) -> float:
        """Return the seconds at a size."""
        if size > self.sizes[-1]:
            return float(self.seconds[-1] * (size / self.sizes[-1]) ** self.power)
        return float(np.interp(size, self.sizes, self.seconds))


@dataclass(frozen=True, slots=True)
class Source:
    """Where kernel times are from.

    Args:
        table: path below the package's data directory, and digest.
        note: what was done to the times.
    """

    engine: str
    version: str
    table: str
    note: str = ""

    @classmethod
    def of(cls, table: Table, note: str = "") -> Source:
        """Return the source of a table's times."""
        return cls(table.engine, table.version, f"{table.path} sha256 {table.sha256}", note)

    @property
    def kernels(self) -> str:
        """Engine, version and what was done to the times, in words."""
        return f"{self.engine} {self.version}" + (f", {self.note}" if self.note else "")


def _curves(table: Table, keys: Sequence[str], size: str, *, power: int = 1) -> dict[tuple[float, ...], Curve]:
    """Return a curve by the values of `keys`; where a size stands twice, the faster run counts."""
    columns = [table.numbers(name) for name in (*keys, size)]
    latency = table.numbers("latency") * _MS
    groups: dict[tuple[float, ...], dict[float, float]] = {}
    for *key, at, seconds in zip(*(column.tolist() for column in columns), latency.tolist(), strict=True):
        group = groups.setdefault(tuple(key), {})
        group[at] = min(group.get(at, math.inf), seconds)
    return {key: Curve.fitted(list(g), list(g.values()), power=power) for key, g in groups.items()}


def _one_kernel(table: Table, wanted: Callable[[str], bool] | None = None) -> Table:
    """Return the rows of one kernel source: several stand for one shape, and their mean is nobody's time.

    Args:
        wanted: sources to choose from; the one with most rows is taken.
    """
    sources = [str(s) for s in table.columns["kernel_source"]]
    names = sorted({s for s in sources if wanted is None or wanted(s)})
    if len(names) <= 1 and wanted is None:
        return table
    if not names:
        return table.only(np.zeros(len(table), dtype=np.bool_))
    best = max(names, key=lambda name: (sources.count(name), name))
    return table.only(np.array([s == best for s in sources]))


class Gemms:
    """Times of m x k by k x n matrix products."""

    def __init__(self, table: Table, dtype: str) -> None:
        rows = _one_kernel(table.where(gemm_dtype=dtype))
        if not len(rows):
            known = sorted({str(d) for d in table.columns["gemm_dtype"]})
            raise InputError(table.path, "has no matrix products of this type", value=dtype, hint=f"has {known}")
        self.source = Source.of(rows)
        self._curves = _curves(rows, ("n", "k"), "m")
        self._sizes = [np.unique(rows.numbers(name)) for name in ("n", "k")]

    @property
    def largest_m(self) -> float:
        """Most tokens of which every shape is timed."""
        return min(curve.largest for curve in self._curves.values())

    def seconds(self, m: float, n: int, k: int) -> float:
        """Return the seconds of one product; n and k that were not timed are interpolated bilinearly."""
        if n > _WIDEST:
            parts = math.ceil(n / _WIDEST)
            return parts * self.seconds(m, math.ceil(n / parts), k)
        total = 0.0
        for n_at, n_share in _around(self._sizes[0], n):
            for k_at, k_share in _around(self._sizes[1], k):
                curve = self._curves.get((n_at, k_at))
                if curve is None:
                    # The corner of the largest n and k was not timed: as much work again as half of it.
                    curve = self._curves[self._sizes[0][-2], k_at]
                    total += n_share * k_share * curve.at(m) * n_at / self._sizes[0][-2]
                else:
                    total += n_share * k_share * curve.at(m)
        return total


def _around(sizes: Floats, size: float) -> list[tuple[float, float]]:
    """Return the timed sizes around one, with their shares; beyond the ends, the last one scaled."""
    if size <= sizes[0]:
        return [(float(sizes[0]), 1.0)]
    if size >= sizes[-1]:
        return [(float(sizes[-1]), size / float(sizes[-1]))]
    high = int(np.searchsorted(sizes, size))
    if sizes[high] == size:
        return [(float(size), 1.0)]
    share = float((size - sizes[high - 1]) / (sizes[high] - sizes[high - 1]))
    return [(float(sizes[high - 1]), 1 - share), (float(sizes[high]), share)]


class Attention:
    """Times of one layer's attention for batches of equal sequences.

    Args:
        curves: by batch.
        source: where the times are from.
    """

    def __init__(self, curves: dict[int, Curve], source: Source) -> None:
        self._curves = curves
        self.source = source

    def seconds(self, batch: float, length: float) -> float:
        """Return the seconds of `batch` sequences of `length`.

        Larger batches were timed at shorter lengths only: beyond those, the time of the largest batch that reaches
        this length is multiplied.
        """
        reaching = [b for b, curve in self._curves.items() if curve.largest >= length]
        if not reaching:
            reaching = [max(self._curves, key=lambda b: self._curves[b].largest)]
        reaching.sort()
        if batch >= reaching[-1]:
            return self._curves[reaching[-1]].at(length) * batch / reaching[-1]
        for low, high in pairwise(reaching):
            if low <= batch <= high:
                share = (batch - low) / (high - low)
                return (1 - share) * self._curves[low].at(length) + share * self._curves[high].at(length)
        return self._curves[reaching[0]].at(length)


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention kernels depend on beside batch and length, of one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0


def find_attention(package: KernelPackage, engine: str, *, decode: bool, heads: Heads) -> Attention:
    """Return attention times of an engine, interpolated between head counts or of another engine where it has none.

    Preferred in this order: these heads; neighbouring counts with the same queries per KV head, interpolated; both
    again with other engines.

    Raises:
        InputError: no engine has any.
    """
    file = f"{'generation' if decode else 'context'}_attention_perf.parquet"
    for name in _with_substitutes(engine):
        for version in package.versions("attention", name, file)[:1]:
            table = package.table("attention", name, version, file)
            found = _attention(table, decode=decode, heads=heads)
            if found is not None:
                return found
    raise InputError(
        package.system,
        f"has no attention times for {heads.heads} heads and {heads.kv_heads} KV heads of {heads.head_dim}",
        hint="choose another tensor parallel degree",
    )


def _attention(table: Table, *, decode: bool, heads: Heads) -> Attention | None:
    rows = table.where(
        head_dim=heads.head_dim, window_size=heads.window, attn_dtype="bfloat16", kv_cache_dtype="bfloat16"
    )
    if not len(rows):
        return None
    known = sorted(
        {*zip(rows.columns["num_heads"].tolist(), rows.columns["num_key_value_heads"].tolist(), strict=True)}
    )
    if (heads.heads, heads.kv_heads) in known:
        curves = _heads_curves(rows, heads.heads, heads.kv_heads, decode=decode)
        return Attention(curves, Source.of(table))
    group = heads.heads // heads.kv_heads
    alike = sorted(kv for h, kv in known if h == group * kv)
    low = [kv for kv in alike if kv < heads.kv_heads]
    high = [kv for kv in alike if kv > heads.kv_heads]
    if low and high:
        pair = (low[-1] * group, low[-1]), (high[0] * group, high[0])
        share = (heads.kv_heads - low[-1]) / (high[0] - low[-1])
    else:
        same = sorted(h for h, kv in known if kv == heads.kv_heads)
        low, high = [h for h in same if h < heads.heads], [h for h in same if h > heads.heads]
        if not low or not high:
            return None
        pair = (low[-1], heads.kv_heads), (high[0], heads.kv_heads)
        share = (heads.heads - low[-1]) / (high[0] - low[-1])
    below, above = (_heads_curves(rows, *one, decode=decode) for one in pair)
    curves = {
        batch: _mixed(below[batch], above[batch], share)
        for batch in below
        if batch in above and len(_common(below[batch], above[batch])) > 1
    }
    between = " and ".join(f"{h}/{kv}" for h, kv in pair)
    return Attention(curves, Source.of(table, f"interpolated between {between} heads"))


def _heads_curves(rows: Table, heads: int, kv_heads: int, *, decode: bool) -> dict[int, Curve]:
    chosen = _one_kernel(rows.where(num_heads=heads, num_key_value_heads=kv_heads))
    length = chosen.numbers("isl") + chosen.numbers("step")
    lengths = Table(chosen.path, chosen.sha256, chosen.engine, chosen.version, {**chosen.columns, "length": length})
    # Within a batch the longest prompts are compute-bound (quadratic); decode reads its context (linear).
    found = _curves(lengths, ("batch_size",), "length", power=1 if decode else 2)
    return {int(batch): curve for (batch,), curve in found.items()}


def _common(a: Curve, b: Curve) -> Floats:
    return np.intersect1d(a.sizes, b.sizes)


def _mixed(a: Curve, b: Curve, share: float) -> Curve:
    sizes = _common(a, b)
    seconds = [(1 - share) * a.at(size) + share * b.at(size) for size in sizes.tolist()]
    return Curve(sizes, np.array(seconds), a.power)


class AllReduce:
    """Times of the all-reduce of one number of GPUs, by elements (not bytes) of 2 bytes.

    Args:
        graph: as replayed in a captured graph.
        eager: as launched one by one; its floor is the launch, which other kernels hide.
    """

    def __init__(self, graph: Curve, eager: Curve | None, source: Source) -> None:
        self._graph = graph
        self._eager = eager
        self.source = source

    def seconds(self, elements: float, *, captured: bool) -> float:
        """Return the seconds of one all-reduce."""
        graph_s = self._graph.at(elements)
        if captured or self._eager is None or elements < _EAGER_ELEMENTS:
            return graph_s
        return max(graph_s, self._eager.at(elements))


#: Smaller messages take less than a launch, and eager times are launches.
_EAGER_ELEMENTS = 4194304


def find_all_reduce(package: KernelPackage, engine: str, tp: int) -> AllReduce:
    """Return the all-reduce times of an engine, else of another.

    Raises:
        InputError: no engine has times for this number of GPUs.
    """
    file = "custom_allreduce_perf.parquet"
    for name in _with_substitutes(engine):
        for version in package.versions("comm", name, file):
            table = package.table("comm", name, version, file).where(num_gpus=tp)
            graph = _one_kernel(table, lambda s: not s.endswith("_eager"))
            if not len(graph):
                continue
            eager = _one_kernel(table, lambda s: s.endswith("_eager"))
            return AllReduce(
                _curves(graph, (), "message_size")[()],
                _curves(eager, (), "message_size")[()] if len(eager) else None,
                Source.of(table),
            )
    raise InputError(package.system, f"has no all-reduce times of {tp} GPUs", hint="leave out this degree")


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """What the times of a layer's experts depend on beside tokens."""

    hidden_size: int
    ffn_size: int
    per_token: int
    experts: int
    tp: int
    ep: int = 1


#: How tokens spread over experts, most wanted first: mildly uneven, as routers are.
_SPREADS = ("power_law_1.01", "power_law_1.2", "balanced")


def find_experts(package: KernelPackage, engine: str, sizes: ExpertSizes, *, dtype: str) -> tuple[Curve, Source]:
    """Return the times of a layer's experts by tokens, and where they are from: of an engine, else of another.

    Raises:
        InputError: no engine has times for such experts.
    """
    file = "moe_perf.parquet"
    for name in _with_substitutes(engine):
        for version in package.versions("moe", name, file):
            table = package.table("moe", name, version, file).where(
                moe_dtype=dtype,
                hidden_size=sizes.hidden_size,
                inter_size=sizes.ffn_size,
                topk=sizes.per_token,
                num_experts=sizes.experts,
                moe_tp_size=sizes.tp,
                moe_ep_size=sizes.ep,
            )
            for spread in _SPREADS:
                rows = _one_kernel(table.where(distribution=spread)) if len(table) else table
                if len(rows):
                    return _curves(rows, (), "num_tokens")[()], Source.of(table, f"tokens spread as {spread}")
    raise InputError(
        package.system,
        f"has no times for {sizes.experts} experts of {sizes.hidden_size} x {sizes.ffn_size}, "
        f"{sizes.per_token} a token, at tp {sizes.tp}",
        hint="choose another model, or leave out this degree",
    )


def find_gemms(package: KernelPackage, engine: str, *, dtype: str, tokens: int) -> Gemms:
    """Return the matrix products of an engine; of another if only that one was timed up to `tokens`.

    Raises:
        InputError: no engine has products of this type.
    """
    file = "gemm_perf.parquet"
    found: list[Gemms] = []
    for name in _with_substitutes(engine):
        for version in package.versions("gemm", name, file)[:1]:
            table = package.table("gemm", name, version, file)
            if len(table.where(gemm_dtype=dtype)):
                found.append(Gemms(table, dtype))
    if not found:
        raise InputError(package.system, f"has no {dtype} matrix products", hint="choose another --dtype")
    return next((gemms for gemms in found if gemms.largest_m >= tokens), found[0])


def _with_substitutes(engine: str) -> list[str]:
    """Return the engine and those that stand in for it.

    SGLang is last: on an A100 its decode attention with as many KV heads as heads takes three times as long as others'.
    """
    return [engine, *(other for other in ENGINES if other != engine)]
