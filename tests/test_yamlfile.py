"""The strict YAML reader: what it accepts, and one line with place, value and remedy for everything else."""

from __future__ import annotations

import enum
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dsim.errors import InputError
from dsim.yamlfile import MAX_FILE_BYTES, Section, parse_yaml, read_yaml


def parse(text: str) -> Section:
    return parse_yaml(text.encode(), file="f.yaml")


def message(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text.isprintable()
    return text


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def test_every_value_knows_its_line_and_path() -> None:
    top = parse("a: 1\n\nb:\n  c:\n    - x\n    - d: 2\n")
    assert top.need("a").where == "f.yaml:1"
    assert top.need("b").line == 3
    item = top.section("b").need("c").items()[1]
    assert (item.name, item.line) == ("b.c[1]", 6)
    assert item.section().need("d").name == "b.c[1].d"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1.0),
        ("-2", -2.0),
        ("+3", 3.0),
        ("1e-5", 1e-5),
        ("2E+3", 2000.0),
        ("1.5e9", 1.5e9),
        (".5", 0.5),
        ("5.", 5.0),
        ("010", 10.0),
        ("0.0000679770397053775", 0.0000679770397053775),
    ],
)
def test_numbers_are_those_of_yaml_1_2(text: str, value: float) -> None:
    """YAML 1.1 would read `1e-5` as a text and `010` as 8."""
    assert parse(f"a: {text}").number("a") == value


@pytest.mark.parametrize(
    "text", ["yes", "on", "2024-01-01", "1:30", "0x10", "1_000", "12abc", "inf", "nan", "1e", ".", "nULL", "tRUE"]
)
def test_other_plain_words_are_texts(text: str) -> None:
    assert parse(f"a: {text}").text("a") == text


@pytest.mark.parametrize(("text", "value"), [("2048", 2048), ("80e9", 80_000_000_000), ("16.0", 16)])
def test_whole_numbers(text: str, value: int) -> None:
    number = parse(f"a: {text}").integer("a")
    assert number == value
    assert isinstance(number, int)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", "f.yaml:1: a=True must be a number; write a number"),
        ("x", "f.yaml:1: a='x' must be a number; write a number"),
        ("'3'", "f.yaml:1: a='3' must be a number; remove the quotes"),
        ("[1]", "f.yaml:1: a=[...] must be a number; write a number"),
        ("{b: 1}", "f.yaml:1: a={...} must be a number; write a number"),
        ("", "f.yaml:1: a=nothing must be a number; write a number"),
        (".nan", "f.yaml:1: a=nan must be a finite number; write a number"),
        ("-.INF", "f.yaml:1: a=-inf must be a finite number; write a number"),
        ("1e999", "f.yaml:1: a=inf must be a finite number; write a number"),
        ("9" * 5000, "f.yaml:1: a=inf must be a finite number; write a number"),
        ("-1", "f.yaml:1: a=-1 must be >= 0; write a value in that range"),
    ],
)
def test_what_is_no_number(text: str, expected: str) -> None:
    assert message(lambda: parse(f"a: {text}").number("a", at_least=0)) == expected


@pytest.mark.parametrize("text", ["2.5", "true", "x", "'3'", ".inf", ".nan", "9" * 5000, "1e300", "0", "null"])
def test_what_is_no_whole_number_of_at_least_one(text: str) -> None:
    assert message(lambda: parse(f"a: {text}").integer("a", at_least=1)).startswith("f.yaml:1: a=")


def test_bounds() -> None:
    field = parse("a: 3").need("a")
    assert field.number(above=2, at_least=3, below=4, at_most=3) == 3
    assert "must be > 3" in message(lambda: field.number(above=3))
    assert "must be < 3" in message(lambda: field.number(below=3))
    assert "must be <= 2.5" in message(lambda: field.number(at_most=2.5))
    assert "must be >= 123456789" in message(lambda: field.integer(at_least=123456789))


def test_texts_flags_choices_and_lists() -> None:
    top = parse("t: ' a\n  b '\nf: false\nc: blue\nl: [x, y]\n")
    assert top.text("t") == "a b"
    assert top.flag("f") is False
    assert top.need("c").choice(Colour) is Colour.BLUE
    assert top.texts("l") == ("x", "y")
    assert top.texts("absent") == ()
    assert "put it in quotes" in message(lambda: parse("t: 0.14").text("t"))
    assert "must not be empty" in message(lambda: parse("t: '  '").text("t"))
    assert "must be true or false" in message(lambda: parse("f: yes").flag("f"))
    assert "must be true or false" in message(lambda: parse("f: 1").flag("f"))
    assert message(lambda: parse("c: bleu").need("c").choice(Colour)) == (
        "f.yaml:1: c='bleu' is not known; did you mean 'blue'?"
    )
    assert "expected one of red, blue" in message(lambda: parse("c: 1").need("c").choice(Colour))
    assert "must be a list" in message(lambda: parse("l: x").texts("l"))
    assert "must be a mapping" in message(lambda: parse("s: 3").section("s"))


def test_defaults_serve_absent_keys_only() -> None:
    top = parse("n: null")
    assert top.number("x", 0.5) == 0.5
    assert top.integer("x", 2) == 2
    assert top.text("x", "y") == "y"
    assert top.flag("x", default=True) is True
    assert top.get("x") is None
    assert "n=nothing must be a number" in message(lambda: top.number("n", 0.5))
    assert message(lambda: top.number("x")) == "f.yaml:1: x is missing; add this key"


def test_unknown_keys_name_the_nearest() -> None:
    top = parse("a: 1\nprefil: 2\n")
    assert message(lambda: top.only(("a", "prefill", "decode"))) == (
        "f.yaml:2: 'prefil' is not a known key; did you mean 'prefill'?"
    )
    section = parse("a:\n  zzz: 1\n").section("a")
    assert message(lambda: section.only(("b", "c"))) == (
        "f.yaml:2: 'zzz' is not a known key in a; expected one of b, c"
    )


def test_integer_keys() -> None:
    assert {k: v.integer() for k, v in parse("1: 10\n'2': 20\n").by_integer().items()} == {1: 10, 2: 20}
    for text in ("x: 1", "0: 1", "1.5: 1", "-1: 1", "99999999999: 1", "'': 1"):
        assert "must be a whole number >= 1" in message(lambda text=text: parse(text).by_integer())  # type: ignore[misc]
    assert "stands twice" in message(lambda: parse("1: 1\n01: 2").by_integer())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "f.yaml: is empty; expected a mapping of keys to values"),
        (b"# only a comment\n", "f.yaml: is empty"),
        (b"- 1\n", "f.yaml:1: [...] must be a mapping"),
        (b"x\n", "f.yaml:1: 'x' must be a mapping"),
        (b"a: 1\nb:\n  c: 1\n  c: 2\n", "f.yaml:4: b.c stands twice; it also stands on line 3; keep one of the two"),
        (b"a: 1\n'a': 2\n", "f.yaml:2: a stands twice"),
        (b"a: 1\nb: \xe9\n", "f.yaml:2: is not UTF-8 text; save the file as UTF-8"),
        ("a: 1\n".encode("utf-16"), "f.yaml:1: is not UTF-8 text"),
        (b"a: \x00\n", "f.yaml:1: is not YAML: control characters are not allowed"),
        (b"a: 'x\nb: 1\n", "is not YAML: found unexpected end of stream; check quotes, brackets and indentation"),
        (b"a: [1, 2\n", "is not YAML: "),
        (b"a: 1\nlatenc", "is not YAML: could not find expected ':'"),
        (b"a:\n\tb: 1\n", "f.yaml:2: is not YAML: found character"),
        (b"a: 1\n---\nb: 2\n", "f.yaml:2: is not YAML: but found another document"),
        (b"a: !!python/object/apply:os.system [ls]\n", "uses the YAML tag '!!python/object/apply:os.system'"),
        (b"!!python/object/apply:os.system [ls]\n", "f.yaml:1: uses the YAML tag"),
        (b"%TAG ! tag:yaml.org,2002:python/\n---\na: !name:os.system 3\n", "f.yaml:3: a uses the YAML tag"),
        (b"a: !!binary x\n", "uses the YAML tag '!!binary', which is not allowed; write the plain value"),
        (b"a: !custom x\n", "uses the YAML tag '!custom'"),
        (b"a: &x [1]\nb: *x\n", "f.yaml:2: b uses a YAML alias (*), which is not supported; write the value out"),
        (b"a: &x {b: 1}\nc:\n  <<: *x\n", "f.yaml:3: c.<< uses a YAML alias"),
        (b"a: &a [*a]\n", "a[0] uses a YAML alias"),
        (b"a: &x y\n*x : 2\n", "has a key that is not a plain word"),
        (b"? [a, b]\n: 2\n", "has a key that is not a plain word"),
        (b'"\\e[31m": 1\n"\\e[31m": 1\n', "'\\x1b[31m' stands twice"),
        (b"[" * 100_000, "f.yaml"),
        (b"- " * 100_000, "f.yaml"),
        (b"? " * 100_000, "f.yaml"),
        (b"{a: " * 900 + b"1" + b"}" * 900, "f.yaml: is nested deeper than 100 levels"),
        (b"[" * 102 + b"]" * 102, "f.yaml: is nested deeper than 100 levels"),
    ],
)
def test_malformed_files(data: bytes, expected: str) -> None:
    text = message(lambda: parse_yaml(data, file="f.yaml"))
    assert text.startswith("f.yaml")
    assert expected in text


def test_alias_bombs_are_harmless() -> None:
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30))
    assert "alias" in message(lambda: parse("a0: &a0 [x]\n" + levels))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert message(lambda: read_yaml(tmp_path / "no.yaml")) == f"{tmp_path}/no.yaml: does not exist; check the path"
    assert message(lambda: read_yaml(tmp_path)) == f"{tmp_path}: is a directory; give a file"
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    assert "is larger than" in message(lambda: read_yaml(big))
    assert message(lambda: read_yaml("")).startswith("''")
    with pytest.raises(InputError):
        read_yaml("a\0b")


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert read_yaml(path).integer("b") == 2


def outcome(data: bytes) -> str:
    try:
        parse_yaml(data, file="f.yaml")
    except InputError as error:
        return str(error)
    return "a mapping"


@given(st.binary(max_size=200))
def test_any_bytes_give_a_mapping_or_one_line(data: bytes) -> None:
    assert "\n" not in outcome(data)


@given(st.text(alphabet="ab:[]{}#&*!|>'\"%@`,?- \n\t01.~\\", max_size=60))
def test_any_punctuation_gives_a_mapping_or_one_line(text: str) -> None:
    assert "\n" not in outcome(text.encode())


def _plain(section: Section) -> dict[str, object]:
    return {key: field.value for key, field in section.fields.items()}


#: Without digits: PyYAML writes the text `1e5` bare, and that is a number in YAML 1.2.
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Nd"]), max_size=20)


@given(
    st.dictionaries(
        st.text(alphabet="abcdefgh_", min_size=1, max_size=8),
        st.one_of(st.integers(-(10**12), 10**12), st.booleans(), st.floats(allow_nan=False), TEXTS),
        min_size=1,
    )
)
def test_what_pyyaml_writes_is_read_back(values: dict[str, object]) -> None:
    assert _plain(parse(yaml.safe_dump(values))) == values


def test_a_pyyaml_without_its_c_parser_reads_the_same() -> None:
    code = (
        "import yaml; del yaml.CBaseLoader\n"
        "from dsim.yamlfile import parse_yaml\n"
        "assert parse_yaml(b'a: [1e-5, x]', file='f').need('a').items()[0].number() == 1e-5\n"
        "import dsim.catalog; assert dsim.catalog.find_model('13b').layers == 40\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
