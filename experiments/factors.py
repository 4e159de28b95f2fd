"""Factors of a sweep: listed choices, ranges in exact decimals, and choices that set several keys at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from fractions import Fraction

from dsim.errors import InputError
from dsim.units import parse_bytes_per_s, parse_duration_s, parse_rate_per_s
from dsim.yamlfile import Field, Scalar, Section

#: Keys of a factor and of its range, and what they mean.
FACTOR_KEYS = {
    "choices": "list of values; or of mappings, each a `label` and the keys of `base` that it sets together",
    "range": "values at equal distances, both ends included",
}
RANGE_KEYS = {
    "min": "first value",
    "max": "last value",
    "step": "distance of two values; it divides max − min exactly (linear scale)",
    "num": "instead of step: how many values, at least 2",
    "scale": "`linear` (default) or `log`: equal ratios, with num",
}

#: More values of one factor, or more tasks of a sweep, are a mistake.
MOST_TASKS = 1_000_000

#: Digits kept of values that are not exact decimals: those of equal ratios.
_LOG_DIGITS = 12
_EXACT = Context(prec=40)
_QUANTITY = re.compile(r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(\S*[^\W\d]\S*|%)")


@dataclass(frozen=True, slots=True)
class Choice:
    """One value of a factor.

    Args:
        value: what rows call it: a number in base units where it is one, else a text.
        settings: what it sets, by dotted path in `base`.
        place: where it stands.
    """

    value: Scalar
    settings: tuple[tuple[str, Field], ...]
    place: Field


@dataclass(frozen=True, slots=True)
class Factor:
    """One dimension of a sweep.

    Args:
        key: dotted path in `base`, or the name of a linked factor; also the name of its column.
        field: where it stands.
    """

    key: str
    field: Field
    choices: tuple[Choice, ...]

    @property
    def paths(self) -> frozenset[str]:
        """The dotted paths that some choice sets."""
        return frozenset(path for choice in self.choices for path, _ in choice.settings)


def parse_factors(section: Section) -> tuple[Factor, ...]:
    """Return the factors in the file's order.

    Raises:
        InputError: a factor without values, a value twice, a range that is none, or two factors that set one key.
    """
    factors = tuple(_factor(key, field) for key, field in section.fields.items())
    for number, factor in enumerate(factors):
        for other in factors[:number]:
            _check_apart(factor, other)
    return factors


def check_count(file: Section) -> None:
    """Refuse a sweep file with more tasks than it can mean, before any value is made.

    What else is wrong with factors or replications is found when they are read.

    Raises:
        InputError: values of factors times replications are more than `MOST_TASKS`.
    """
    field = file.get("factors")
    try:
        replications = file.integer("replications", 1, at_least=1)
        factors = {} if field is None or field.value is None else field.section().fields
        counts = [_count(factor.section()) for factor in factors.values()]
    except InputError:
        return
    if math.prod(counts) * replications > MOST_TASKS:
        where = field if field is not None and counts else file.need("replications")
        count = f"{math.prod(counts)} combinations x {replications} replications"
        raise where.error_of_key(f"makes more than {MOST_TASKS} tasks ({count})", "take fewer values")


def _count(section: Section) -> int:
    """Return how many values a factor has; 1 where it is wrong."""
    if "choices" in section:
        return len(section.need("choices").items())
    if "range" not in section:
        return 1
    ends = section.need("range").section()
    if "num" in ends:
        return ends.need("num").integer(at_least=2)
    if not {"min", "max", "step"} <= set(ends.fields):
        return 1
    (low, _), (high, _), (step, _) = (_decimal(ends.need(key)) for key in ("min", "max", "step"))
    count = (Fraction(high) - Fraction(low)) / Fraction(step) if step > 0 else 0
    return 1 + math.floor(count) if 0 <= count < MOST_TASKS else 1


def row_value(field: Field) -> Scalar:
    """Return what rows say for a value: quantities with a unit in seconds, per second, bytes per second, or a share.

    >>> row_value(Field("a.yaml", 1, "slo.ttft", "200ms")), row_value(Field("a.yaml", 1, "model", "13b"))
    (0.2, '13b')
    """
    value = field.value
    if isinstance(value, tuple):
        return ", ".join(str(row_value(item)) for item in value)
    if isinstance(value, dict):
        raise field.error("must be a plain value or a list of them", "give it a label and the keys that it sets")
    if not isinstance(value, str):
        return value
    text = " ".join(value.split())
    quantity = _QUANTITY.fullmatch(text)
    if quantity is None:
        return text
    if quantity[2] == "%":
        return float(Decimal(quantity[1]) / 100)
    for parse in (parse_duration_s, parse_rate_per_s, parse_bytes_per_s):
        try:
            number = parse(text, field.where)
        except InputError:
            continue
        # Bytes alone: 13B and 7B are models.
        return number if "/" in text or parse is not parse_bytes_per_s else text
    return text


def _factor(key: str, field: Field) -> Factor:
    section = field.section().only(FACTOR_KEYS)
    if ("choices" in section) == ("range" in section):
        rule = "has both choices and range" if "choices" in section else "has neither choices nor range"
        raise field.error_of_key(rule, "give one of the two, as in {choices: [1, 2]} or {range: {min: 1, max: 3}}")
    if "range" in section:
        choices = tuple(Choice(row_value(value), ((key, value),), value) for value in _range(section.need("range")))
    else:
        choices = _choices(key, section.need("choices"))
    seen: dict[object, Choice] = {}
    for choice in choices:
        # 1 and 1.0 are the same, true and 1 are not.
        identity = (isinstance(choice.value, bool), choice.value)
        if identity in seen:
            raise choice.place.error(
                "stands twice", f"line {seen[identity].place.line} has it too; keep one of the two"
            )
        seen[identity] = choice
    return Factor(key, field, choices)


def _choices(key: str, field: Field) -> tuple[Choice, ...]:
    items = field.items()
    if not items:
        raise field.error("must not be empty", "list at least one value, or leave the factor out")
    linked = [isinstance(item.value, dict) for item in items]
    if any(linked) and not all(linked):
        odd = items[linked.index(False)]
        raise odd.error("stands among mappings", "give every choice a label and the keys that it sets")
    if any(linked):
        return tuple(_linked(item.section()) for item in items)
    return tuple(Choice(row_value(item), ((key, item),), item) for item in items)


def _linked(section: Section) -> Choice:
    label = section.need("label")
    if not isinstance(label.value, str | int | float) or label.value == "":
        raise label.error("must be a text or a number")
    settings = tuple((key, field) for key, field in section.fields.items() if key != "label")
    if not settings:
        raise section.field.error("sets no key of base", "add the keys that this choice sets, as in engine: vllm")
    return Choice(label.value if not isinstance(label.value, str) else label.text(), settings, label)


def _check_apart(factor: Factor, other: Factor) -> None:
    for path in sorted(factor.paths):
        for taken in sorted(other.paths):
            if f"{path}.".startswith(f"{taken}.") or f"{taken}.".startswith(f"{path}."):
                rule = f"sets {path}, and so does the factor {other.key} on line {other.field.line}"
                raise factor.field.error_of_key(rule, "let one factor set it, or link the two")


@dataclass(frozen=True, slots=True)
class _Range:
    low: Decimal
    high: Decimal
    unit: str
    whole: bool
    field: Field

    def value(self, number: Decimal | Fraction) -> Field:
        """Return one value of the range as if it stood in the file."""
        exact = number if isinstance(number, Decimal) else Fraction(number)
        is_whole = exact == int(exact)
        plain: Scalar = int(exact) if self.whole and is_whole else float(exact)
        if self.unit:
            plain = f"{exact:f}{self.unit}" if isinstance(exact, Decimal) else f"{float(exact)!r}{self.unit}"
        return replace(self.field, name=self.field.name.removesuffix(".range"), value=plain)


def _range(field: Field) -> Iterator[Field]:
    section = field.section().only(RANGE_KEYS)
    (low, unit), (high, high_unit) = _decimal(section.need("min")), _decimal(section.need("max"))
    if unit != high_unit:
        raise section.need("max").error(f"must have the unit of min, {unit or 'none'}", "write both in one unit")
    if high <= low:
        raise section.need("max").error("must be > min", "a single value is {choices: [value]}")
    ends = [section.need(key).value for key in ("min", "max", "step") if key in section]
    span = _Range(low, high, unit, all(isinstance(end, int) for end in ends), field)
    logarithmic = _is_log(section, low)
    if ("step" in section) == ("num" in section):
        rule = "has both step and num" if "step" in section else "needs step or num"
        raise field.error_of_key(rule, "give one of the two, as in {min: 0.5, max: 3, step: 0.5} or {..., num: 6}")
    if "step" in section:
        yield from _stepped(span, section.need("step"))
        return
    num = section.need("num")
    if isinstance(num.value, int) and not isinstance(num.value, bool) and num.value < 2:
        raise num.error("must be >= 2", "both ends are included; a single value is {choices: [value]}")
    count = num.integer(at_least=2, at_most=MOST_TASKS)
    yield from _geometric(span, count) if logarithmic else _linear(span, count)


def _is_log(section: Section, low: Decimal) -> bool:
    scale = section.get("scale")
    if scale is None or scale.value == "linear":
        return False
    if scale.value != "log":
        raise scale.error("is not known", "expected linear or log")
    if low <= 0:
        raise section.need("min").error("must be > 0 on a logarithmic scale", "start above 0, or use scale: linear")
    if "step" in section:
        raise section.need("step").error("does not go with scale: log", "give num instead")
    return True


def _decimal(field: Field) -> tuple[Decimal, str]:
    """Return the number as it is written, and its unit."""
    value = field.value
    if isinstance(value, str) and (quantity := _QUANTITY.fullmatch(value.strip())) is not None:
        if row_value(field) == value.strip():
            raise field.error("has an unknown unit", "as in 0.4, 400ms, 90/min or 25GB/s")
        return Decimal(quantity[1]), quantity[2]
    # The shortest text that reads back as the float is what stands in the file.
    return Decimal(repr(field.number())) if isinstance(value, float) else Decimal(int(field.number())), ""


def _stepped(span: _Range, field: Field) -> Iterator[Field]:
    step, unit = _decimal(field)
    if step <= 0:
        raise field.error("must be > 0", "the values go up from min to max")
    if unit != span.unit:
        raise field.error(f"must have the unit of min, {span.unit or 'none'}", "write all three in one unit")
    count = (Fraction(span.high) - Fraction(span.low)) / Fraction(step)
    if count >= MOST_TASKS:
        raise field.error(f"makes more than {MOST_TASKS} values", "take a larger step")
    if count.denominator != 1:
        last = _EXACT.add(span.low, _EXACT.multiply(step, Decimal(int(count))))
        raise field.error(
            "does not divide max - min", f"both ends are included: write max: {last.normalize():f}, or num"
        )
    for i in range(int(count) + 1):
        yield span.value(_EXACT.add(span.low, _EXACT.multiply(step, Decimal(i))))


def _linear(span: _Range, count: int) -> Iterator[Field]:
    low, width = Fraction(span.low), Fraction(span.high) - Fraction(span.low)
    for i in range(count):
        yield span.value(low + width * i / (count - 1))


def _geometric(span: _Range, count: int) -> Iterator[Field]:
    ratio = _EXACT.ln(_EXACT.divide(span.high, span.low))
    rounding = Context(prec=_LOG_DIGITS)
    yield span.value(span.low)
    for i in range(1, count - 1):
        share = _EXACT.divide(_EXACT.multiply(ratio, Decimal(i)), Decimal(count - 1))
        yield span.value(rounding.create_decimal(_EXACT.multiply(span.low, _EXACT.exp(share))))
    yield span.value(span.high)
