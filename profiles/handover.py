"""The handover that a command or a sweep asks for, in place of the profile's own."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from dsim.errors import InputError
from dsim.gpu import LINK_SHARE, NETWORK_SHARE
from dsim.handovers import Link, find_preset, parse_kv_link, parse_nic, presets
from dsim.profile import Profile
from dsim.profile_file import read_handover
from dsim.yamlfile import Section, parse_yaml, read_yaml


def parse_handover(text: str, where: str = "--handover", *, folder: Path = Path()) -> Section:
    """Return the section that `text` says: a preset, a YAML file, or `key=value` pairs, which may follow either.

    >>> parse_handover("vllm-nixl,hop_s=0.02").need("preset").text()
    'vllm-nixl'

    Args:
        folder: that a file's path starts from.

    Raises:
        InputError: it is none of them, or the file cannot be read.
    """
    first, *rest = [part.strip() for part in text.split(",")]
    pairs = [first, *rest] if "=" in first else rest
    top = None if "=" in first or not first.endswith((".yaml", ".yml")) else read_yaml(folder / first)
    if top is not None and set(top.fields) == {"handover"}:
        top = top.section("handover")
    lines = [] if top is not None or "=" in first else [f"preset: {find_preset(first, where=where).name}"]
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or not value.strip():
            hint = f"a preset ({', '.join(presets())}), a .yaml file, or pairs as in preset=vllm-nixl,hop_s=0.02"
            raise InputError(where, "is no KEY=VALUE", value=pair, hint=hint)
        lines.append(f"{key.strip()}: {value.strip()}")
    if not lines:
        assert top is not None
        return top
    try:
        given = parse_yaml("\n".join(lines).encode(), file=where)
    except InputError as error:
        raise InputError(where, error.rule, name=error.name, value=error.value or text, hint=error.hint) from None
    if top is None:
        return given
    for key, field in given.fields.items():
        top = top.changed(key, field)
    return top


def with_handover(
    profile: Profile,
    section: Section | None = None,
    *,
    kv_link: Link | float | None = None,
    crosses_nodes: bool = False,
) -> Profile:
    """Return the profile with the handover of a section, over a link; itself where neither is asked for.

    Args:
        section: as `read_handover` takes it; what it does not say is as the preset, or as the profile has it.
        kv_link: a link, of whose line rate a share is reached, or what one link reaches in bytes per second.
        crosses_nodes: KV goes from node to node: over the NIC unless a link is given, else over NVLink.

    Raises:
        InputError: a key or a value cannot be used.
    """
    if section is None and kv_link is None:
        return profile
    handover, gpu = profile.handover, profile.gpu
    link = kv_link if isinstance(kv_link, Link) else Link.NIC if crosses_nodes else Link.NVLINK
    if isinstance(kv_link, Link) and (section is None or not {"preset", "link"} & set(section.fields)):
        handover = replace(handover, bandwidth_bytes_per_s=LINK_SHARE * link.line_bytes_per_s(gpu))
    if section is not None:
        handover = read_handover(section, gpu, base=handover, link=link)
    if isinstance(kv_link, float):
        handover = replace(handover, bandwidth_bytes_per_s=kv_link)
    if kv_link is not None:
        # That link it is, wherever KV goes.
        handover = replace(handover, node_bandwidth_bytes_per_s=handover.bandwidth_bytes_per_s)
    digest = hashlib.sha256(f"{profile.sha256}\n{handover!r}".encode())
    return replace(profile, handover=handover, sha256=digest.hexdigest())


def with_nic(profile: Profile, bytes_per_s: float) -> Profile:
    """Return the profile with what one GPU's link to another node reaches: KV, and what stages send each other."""
    p2p = profile.sends_across_nodes
    usual = NETWORK_SHARE * profile.gpu.network_bytes_per_s
    return replace(
        profile,
        handover=replace(profile.handover, node_bandwidth_bytes_per_s=bytes_per_s),
        p2p=replace(p2p, node_bandwidth_bytes_per_s=p2p.node_bandwidth_bytes_per_s * bytes_per_s / usual),
        sha256=hashlib.sha256(f"{profile.sha256}\nnic {bytes_per_s!r}".encode()).hexdigest(),
    )


def asked_handover(
    profile: Profile, handover: str | None, kv_link: str | None, *, nic: str | None = None, crosses_nodes: bool = False
) -> Profile:
    """Return the profile with what the options `--handover`, `--kv-link` and `--nic` ask for.

    Raises:
        InputError: `--handover`, `--kv-link` or `--nic`, what is wrong with it and what to do.
    """
    link = None if kv_link is None else parse_kv_link(kv_link)
    section = None if handover is None else parse_handover(handover)
    reached = None if nic is None else parse_nic(nic)
    try:
        used = with_handover(profile, section, kv_link=link, crosses_nodes=crosses_nodes)
        return used if reached is None else with_nic(used, reached)
    except InputError as error:
        if not error.where.startswith("--handover:"):
            raise
        # Lines count in files; here there is one.
        raise InputError("--handover", error.rule, name=error.name, value=error.value, hint=error.hint) from None


def handover_line(profile: Profile, *, across: bool = False) -> str:
    """Return the handover in words.

    Args:
        across: also what a link to another node reaches.

    >>> from profiles.choice import best_profile
    >>> handover_line(best_profile("13b", "a100-80g", engine="distserve"))
    'handover: direct, token 1 from prefill, 1 ms + bytes / 200 GB/s a link, pulls stall the decode loop'
    """
    h = profile.handover
    parts = [
        f"handover: {h.mode.value}",
        f"token 1 from {h.first_token_from.value.replace('_', ' ')}",
        f"{1e3 * h.latency_s:.3g} ms + bytes / {h.bandwidth_bytes_per_s / 1e9:.3g} GB/s a link",
    ]
    if across:
        derived = ", derived" if h.node_bandwidth_bytes_per_s is None else ""
        reached = h.reached_bytes_per_s(profile.gpu, crosses=True)
        parts[-1] += f" ({reached / 1e9:.3g} GB/s to another node{derived})"
    if h.stalls_decode:
        parts.append("pulls stall the decode loop")
    if h.hop_s:
        parts.append(f"second hop {1e3 * h.hop_s:.3g} ms")
    if h.post_s or h.post_block_s:
        parts.append(f"posting {1e3 * h.post_s:.3g} ms + {1e6 * h.post_block_s:.3g} µs a block")
    if h.step_s:
        parts.append(f"{1e3 * h.step_s:.3g} ms a launch")
    return ", ".join(parts)
