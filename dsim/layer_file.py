"""The `layer_tables` form of step times in profile files (docs/profiles.md): tables of one layer's kernels."""

from __future__ import annotations

from dataclasses import replace

from dsim.latency import ValidRange
from dsim.layer_latency import AttentionTimes, KernelTimes, LayerLatency
from dsim.yamlfile import Field, Section, relocated

#: No kernel of one layer takes longer: larger numbers are milliseconds or microseconds.
_MAX_S = 1.0
#: What errors of the tables themselves begin with.
_PARTS = ("kernel ", "attention")


def read_layers(section: Section, valid_range: ValidRange) -> LayerLatency:
    """Return the latency model of one tensor parallel degree that has `layer_tables`.

    Args:
        valid_range: what is wanted; InputError where the tables end before.
    """
    field = section.need("layer_tables")
    layers = field.section().only(("kernels", "attention_layers", "attention"))
    kernels = tuple(_kernel(item) for item in layers.need("kernels").items())
    attention_field = layers.need("attention")
    attention = tuple(_attention(item) for item in attention_field.items())
    names = [kernel.name for kernel in kernels]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise layers.need("kernels").items()[i].error_of_key(f"is the second kernel of the name {name}")
    repeats = layers.integer("attention_layers", at_least=1)
    reach = relocated(attention_field, _PARTS, lambda: LayerLatency.range_of(kernels, attention))
    for name in ("chunk_tokens", "prefill_tokens", "decode_requests"):
        wanted, most = getattr(valid_range, name), getattr(reach, name)
        if wanted > most:
            raise field.error_of_key(
                f"must reach valid_range.{name}={wanted:g}, and ends at {most:g}", "lower valid_range"
            )
    # A limit of the total context need not be given: then the tables have one.
    within = replace(valid_range, context_tokens=min(valid_range.context_tokens, reach.context_tokens))
    return relocated(attention_field, _PARTS, lambda: LayerLatency(kernels, repeats, attention, within))


def _kernel(field: Field) -> KernelTimes:
    entry = field.section().only(("name", "times", "tokens", "sequences", "kernel_s"))
    by = [name for name in ("tokens", "sequences") if name in entry]
    if len(by) != 1:
        raise field.error("must have either tokens or sequences, which its time depends on")
    return relocated(
        field,
        _PARTS,
        lambda: KernelTimes(
            name=entry.text("name"),
            times=entry.integer("times", 1, at_least=1),
            by=by[0],
            amounts=entry.need(by[0]).integers(at_least=0),
            kernel_s=_times_s(entry.need("kernel_s")),
        ),
    )


def _attention(field: Field) -> AttentionTimes:
    entry = field.section().only(("tokens", "cached_tokens", "requests", "request_context_tokens", "kernel_s"))
    return relocated(
        field,
        _PARTS,
        lambda: AttentionTimes(
            tokens=entry.integer("tokens", at_least=0),
            cached_tokens=entry.integer("cached_tokens", at_least=0),
            requests=entry.need("requests").integers(at_least=0),
            request_context_tokens=entry.need("request_context_tokens").integers(at_least=0),
            kernel_s=tuple(map(_times_s, entry.need("kernel_s").items())),
        ),
    )


def _times_s(field: Field) -> tuple[float, ...]:
    return field.numbers(above=0, at_most=_MAX_S)
