"""Tests input specs, bounds, model arguments and widepack.toml."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widepack.errors import UsageError
from widepack.spec.config import parse_model_args, read_toml
from widepack.spec.input_spec import (
    DTYPES,
    DimExpr,
    InputSpec,
    parse_input,
    parse_inputs,
    parse_type,
    type_text,
)

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
DIMS = st.one_of(st.integers(1, 2**62), st.builds(DimExpr, NAMES, st.integers(1, 512)))


@st.composite
def specs(draw: st.DrawFn) -> InputSpec:
    dtype = draw(st.sampled_from(list(DTYPES)))
    low = high = None
    limits = DTYPES[dtype]
    if limits is not None and draw(st.booleans()):
        low, high = sorted([draw(st.integers(*limits)), draw(st.integers(*limits))])
    return InputSpec(draw(NAMES), dtype, tuple(draw(st.lists(DIMS, max_size=5))), low, high)


@given(specs())
def test_a_printed_spec_is_parsed_unchanged(spec: InputSpec) -> None:
    assert parse_input(str(spec)) == spec
    assert parse_type(type_text(spec)) == (spec.dtype, spec.dims)


@given(st.lists(specs(), max_size=4, unique_by=lambda s: s.name), st.data())
def test_specs_and_bounds_in_one_text_or_in_many(inputs: list[InputSpec], data: st.DataObject) -> None:
    letters = sorted({letter for spec in inputs for letter in spec.letters})
    bounded = data.draw(st.lists(st.sampled_from(letters), unique=True)) if letters else []
    bounds = {}
    for letter in bounded:
        low = data.draw(st.integers(0, 100))
        bounds[letter] = (low, data.draw(st.none() | st.integers(low + 1, 1000)))
    texts = [str(s) for s in inputs] + [
        f"{k}={low}..{'' if high is None else high}" for k, (low, high) in bounds.items()
    ]
    texts = data.draw(st.permutations(texts))
    found = parse_inputs(texts)
    assert ({s.name: s for s in found[0]}, found[1]) == ({s.name: s for s in inputs}, bounds)
    if texts:
        assert parse_inputs([data.draw(st.sampled_from([",", ";", " ; ", ", "])).join(texts)]) == found


@given(st.text(max_size=40) | st.text(alphabet="xT=float32[]*,;:. 0123", max_size=40))
def test_any_text_is_parsed_or_refused_with_a_message(text: str) -> None:
    for parse in (parse_input, parse_type, lambda t: parse_inputs([t])):
        try:
            parse(text)
        except UsageError as error:
            lines = str(error).split("\n")
            assert len(lines) == 4
            assert set(lines[2].strip()) == {"^"}


def test_a_weight_may_have_a_dtype_that_no_input_has() -> None:
    assert parse_type("uint16[3]") == ("uint16", (3,))
    with pytest.raises(UsageError, match="unknown dtype 'uint16'"):
        parse_input("x=uint16[B]")


def test_examples_of_specs() -> None:
    b, t, h, w = (DimExpr(c) for c in "BTHW")
    assert parse_input("x=float32[B,3,32,32]") == InputSpec("x", "float32", (b, 3, 32, 32))
    assert parse_input("ids=int64[B,T]:0..30521") == InputSpec("ids", "int64", (b, t), 0, 30521)
    assert parse_input("v=int8[B]:-3..-1") == InputSpec("v", "int8", (b,), -3, -1)
    assert parse_input(" img = float32[ B, 3, 32*H, W * 8 ] ").dims == (
        b,
        3,
        DimExpr("H", 32),
        DimExpr("W", 8),
    )
    assert parse_input("t=float64[]").dims == ()
    assert parse_inputs("ids=int64[B,T]:0..9;T=2..512") == (
        [InputSpec("ids", "int64", (b, t), 0, 9)],
        {"T": (2, 512)},
    )
    assert parse_inputs(["T=2..", "x=bool[T]"])[1] == {"T": (2, None)}
    assert parse_inputs([]) == ([], {})
    assert parse_input("x=float32[B,T,2*T,B]").letters == ("B", "T")
    assert (str(h), str(DimExpr("W", 4)), w.factor) == ("H", "4*W", 1)


@pytest.mark.parametrize(
    ("text", "words", "under"),
    [
        ("x=flaot32[B,3]", "unknown dtype 'flaot32', did you mean float32?", "flaot32"),
        ("x=float[B,3]", "did you mean float32?", "float"),
        ("x=long[B,3]", "did you mean int64?", "long"),
        ("x=zzz[B]", "known: float16", "zzz"),
        ("x=[B]", "unknown dtype ''", "["),
        (
            "x=float32",
            "the shape is missing; write float32[B,3], or float32[] for a single number",
            "float32",
        ),
        ("x=float32[B,3", "one pair of brackets", "[B,3"),
        ("x=float32[B,3]]", "one pair of brackets", "[B,3]]"),
        ("x=float32[B,,3]", "a size is missing", ","),
        ("x=float32[B,3.5]", "'3.5' is not a size", "3.5"),
        ("x=float32[B,-1]", "-1 is not a size", "-1"),
        ("x=float32[B,0]", "a size must be at least 1", "0"),
        ("x=float32[B,H*W]", "'W' is not a size", "W"),
        ("x=float32[B,2*3]", "a product is a number times a letter", "2*3"),
        ("x=float32[B,0*H]", "the factor of a dim must be at least 1", "0"),
        ("x=float32[B,99999999999999999999]", "is not a size", "99999999999999999999"),
        ("x float32[B]", "there is no NAME= in it", "x float32[B]"),
        ("=float32[B]", "the name before = is missing", "="),
        ("a-b=float32[B]", "'a-b' is not the name of a parameter", "a-b"),
        ("", "it is empty", ""),
        ("ids=int64[B]:0..", "a number is missing at one end", ""),
        ("ids=int64[B]:0-9", "values are written low..high", "0-9"),
        ("ids=int64[B]:5..1", "the range is empty: 5 is over 1", ":5..1"),
        ("ids=int64[B]0..1", "after the shape has no meaning", "0..1"),
        ("ids=uint8[B]:0..256", "uint8 holds 0 to 255 only", ":0..256"),
        ("x=float32[B]:0..1", "float32 has none", ":0..1"),
        ("x=float32[B],Q=2..5", "no input has the dim Q; the dims are B", "Q=2..5"),
        ("T=2..9", "no input has a letter", "T=2..9"),
        ("x=float32[T],T=2..9;T=3..4", "the dim T has bounds already", "T=3..4"),
        ("x=float32[T],T=3..3", "T can have one size only; write 3 in the shape", "T=3..3"),
        ("x=float32[T],T=9..2", "the bounds are empty: 9 is over 2", "T=9..2"),
        ("x=float32[T],T=..9", "'' is not a size", "9"),
        ("x=float32[B];x=int64[B]", "the input x is given twice", "x=int64[B]"),
    ],
)
def test_an_error_points_at_the_mistake(text: str, words: str, under: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_inputs([text])
    first, shown, carets, example = str(caught.value).split("\n")
    assert words in first
    assert shown == "    " + text
    assert "The right form: x=float32[B,3,32,32]" in example
    assert caught.value.exit_code == 2
    at = carets.index("^")
    if len(under) > 1:
        assert shown[at : at + carets.count("^")].strip() == under


def test_model_arguments_are_json_where_they_parse() -> None:
    items = [
        "width=64",
        "name=small",
        "sizes=[1, 2]",
        'quoted="64"',
        "on=true",
        "rate=1e-3",
        "empty=",
        "path=a=b",
        "nothing=null",
    ]
    assert parse_model_args(items) == {
        "width": 64,
        "name": "small",
        "sizes": [1, 2],
        "quoted": "64",
        "on": True,
        "rate": 1e-3,
        "empty": "",
        "path": "a=b",
        "nothing": None,
    }
    with pytest.raises(UsageError, match="write NAME=VALUE"):
        parse_model_args(["width"])
    with pytest.raises(UsageError, match="width is given twice"):
        parse_model_args(["width=1", "width=2"])


def test_toml_next_to_the_checkpoints_is_read(tmp_path: Path) -> None:
    assert read_toml(tmp_path) == {}
    file = tmp_path / "widepack.toml"
    file.write_text('model = "net:Net"\ninput = "x=float32[B,3]"\nkey = "ema"\n[model_arg]\nwidth = 64\n')
    assert read_toml(tmp_path) == {
        "model": "net:Net",
        "input": ["x=float32[B,3]"],
        "key": "ema",
        "model_arg": {"width": 64},
    }
    file.write_text('input = ["a=float32[B]", "b=float32[B]"]')
    assert read_toml(str(tmp_path)) == {"input": ["a=float32[B]", "b=float32[B]"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'modle = "x"', "unknown key 'modle', did you mean model? Known keys: model, input, key, model_arg"),
        (b"zzz = 1", "unknown key 'zzz'. Known keys"),
        (b"model = 3", "model is of type int; it must be a string"),
        (b"key = [1]", "key is a list; it must be a string"),
        (b"input = [1]", "input must be a string or a list of strings"),
        (b"model_arg = 3", "it must be a table"),
        (b"model = ", "is not TOML"),
        (b"model = '\xff'", "is not TOML"),
    ],
)
def test_invalid_toml_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / "widepack.toml").write_bytes(text)
    with pytest.raises(UsageError) as caught:
        read_toml(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path / "widepack.toml") in str(caught.value)


def test_a_folder_named_widepack_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "widepack.toml").mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        read_toml(tmp_path)


def test_specs_need_no_torch() -> None:
    # The test is not about widepack/__init__.py, so the module is imported without it.
    code = (
        "import sys, types, importlib.util as u\n"
        "package = types.ModuleType('widepack')\n"
        "package.__path__ = list(u.find_spec('widepack').submodule_search_locations)\n"
        "sys.modules['widepack'] = package\n"
        "import widepack.spec.input_spec\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
