"""Handovers of serving engines by name, and the links that KV may take."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsim.errors import InputError, nearest
from dsim.gpu import Gpu
from dsim.profile import FirstToken, Handover, HandoverMode
from dsim.units import parse_bytes_per_s
from dsim.yamlfile import Field, Section, read_yaml

_FILE = Path(__file__).parent / "catalog" / "handovers.yaml"
#: No link is slower: smaller numbers are gigabytes per second.
MIN_BYTES_PER_S: Final = 1e6
#: Numbers of a preset that are those of `Handover`.
_SECONDS = ("latency_s", "hop_s", "post_s", "post_block_s", "step_s")


class Link(enum.Enum):
    """What KV goes over from a prefill to a decode instance."""

    NVLINK = "nvlink"
    NIC = "nic"
    PCIE = "pcie"

    def line_bytes_per_s(self, gpu: Gpu) -> float:
        """Return the datasheet's rate of one GPU's link, one direction."""
        return {
            Link.NVLINK: gpu.nvlink_bytes_per_s,
            Link.NIC: gpu.network_bytes_per_s,
            Link.PCIE: gpu.pcie_bytes_per_s,
        }[self]


@dataclass(frozen=True, slots=True)
class Preset:
    """The handover of an engine.

    Args:
        about: which engine, in words.
        share: of the line rate that a transfer reaches.
        most_bytes_per_s: that one link reaches at most, whatever its line rate; infinite where nobody says so.
        rest: everything else, at no bandwidth of its own.
        sources: where each number comes from, by key; what is assumed says so.
    """

    name: str
    about: str
    share: float
    most_bytes_per_s: float
    rest: Handover
    sources: Mapping[str, str]

    def reached_bytes_per_s(self, line_bytes_per_s: float) -> float:
        """Return the rate that one link of this line rate reaches."""
        return min(self.share * line_bytes_per_s, self.most_bytes_per_s)


@functools.cache
def presets() -> Mapping[str, Preset]:
    """Return the handovers that have a name.

    >>> list(presets())
    ['distserve', 'vllm-nixl', 'sglang-mooncake', 'dynamo']
    """
    return read_presets(read_yaml(_FILE))


def read_presets(top: Section) -> Mapping[str, Preset]:
    """Return the handovers that a file of them has, by name.

    Raises:
        InputError: a number is missing, impossible, or without a source.
    """
    top.only(("dsim_handovers", "handovers"))
    return {name: _preset(name, field.section()) for name, field in top.section("handovers").fields.items()}


def find_preset(name: str, *, where: str) -> Preset:
    """Return the handover of this name.

    Raises:
        InputError: there is none.
    """
    found = presets().get(name.strip().lower())
    if found is None:
        raise InputError(where, "is no handover that dsim knows", value=name, hint=nearest(name, presets()))
    return found


def parse_kv_link(text: str, where: str = "--kv-link") -> Link | float:
    """Return the link, or the rate that one link reaches in bytes per second, that `text` says.

    >>> parse_kv_link("nic"), parse_kv_link("25GB/s")
    (<Link.NIC: 'nic'>, 25000000000.0)

    Raises:
        InputError: it is neither.
    """
    for link in Link:
        if text.strip().lower() == link.value:
            return link
    hint = "nvlink, nic, pcie, or what one link reaches, as in 25GB/s"
    if not text.strip()[:1].isdigit():
        raise InputError(where, "is neither a link nor a rate", value=text, hint=hint)
    return _rate(text, where, hint)


def parse_nic(text: str, where: str = "--nic") -> float:
    """Return what one GPU's link to another node reaches, bytes per second.

    Raises:
        InputError: it is no such rate.
    """
    return _rate(text, where, "what one GPU's link to another node reaches, as in 20GB/s")


def _rate(text: str, where: str, hint: str) -> float:
    rate = parse_bytes_per_s(text, where)
    if not MIN_BYTES_PER_S <= rate < math.inf:
        raise InputError(where, f"must be >= {MIN_BYTES_PER_S:g} bytes per second", value=text, hint=hint)
    return rate


def _preset(name: str, section: Section) -> Preset:
    sources: dict[str, str] = {}
    keys = (*_SECONDS, "first_token_from", "mode", "stalls_decode", "link_share", "watermark")
    section.only(("about", *keys, "most_bytes_per_s"))

    def value(key: str) -> Field:
        entry = section.need(key).section().only(("value", "source", "assumed"))
        if ("source" in entry) == ("assumed" in entry):
            raise entry.field.error("must have a source, or say what is assumed, and not both")
        sources[key] = entry.text("source") if "source" in entry else f"assumed: {entry.text('assumed')}"
        return entry.need("value")

    numbers: dict[str, Any] = {key: value(key).number(at_least=0) for key in _SECONDS}
    most = value("most_bytes_per_s").number(at_least=MIN_BYTES_PER_S) if "most_bytes_per_s" in section else math.inf
    return Preset(
        name=name,
        about=section.text("about"),
        share=value("link_share").number(above=0, at_most=1),
        most_bytes_per_s=most,
        rest=Handover(
            first_token_from=value("first_token_from").choice(FirstToken),
            mode=value("mode").choice(HandoverMode),
            stalls_decode=value("stalls_decode").flag(),
            watermark=value("watermark").number(above=0, at_most=1),
            **numbers,
        ),
        sources=sources,
    )
