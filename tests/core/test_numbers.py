"""Numbers as people write them, compared with exact decimal arithmetic; divisors and multiples, with brute force."""

from __future__ import annotations

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.core.errors import ConfigError
from batchwright.core.numbers import (
    LARGEST_COUNT,
    count,
    divisors,
    format_bytes,
    fraction,
    human,
    nearest_divisors,
    nearest_multiples,
    parse_bytes,
    percentage,
    positive,
)

POWERS = {"": 0, "K": 1, "k": 1, "M": 2, "m": 2, "B": 3, "G": 3, "g": 3, "b": 3, "T": 4, "t": 4}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4M", 4_000_000),
        ("4Mi", 4_194_304),
        ("4 Mi", 4_194_304),
        ("1Ki", 1024),
        ("2.4B", 2_400_000_000),
        ("1T", 10**12),
        ("1_000_000", 10**6),
        ("1,000,000", 10**6),
        ("+8", 8),
        ("1e6", 10**6),
        ("1.5e3", 1500),
        (".5K", 500),
        ("8.", 8),
        (" 16\n", 16),
        (64, 64),
        (64.0, 64),
        (Fraction(12, 3), 4),
    ],
)
def test_counts_as_people_write_them(text, number):
    assert count(text) == number


@given(st.integers(1, 10**6), st.sampled_from(sorted(POWERS)), st.booleans())
def test_suffixes_are_exact_powers(number, suffix, binary):
    factor = (1024 if binary and suffix else 1000) ** POWERS[suffix]
    assert fraction(f"{number}{suffix}{'i' * (binary and bool(suffix))}") == number * factor


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=6))
def test_a_decimal_is_read_exactly_and_never_through_a_float(number):
    assert fraction(format(number, "f")) == Fraction(number)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_counts_as_the_decimal_it_prints_as(number):
    assert fraction(number) == Fraction(Decimal(repr(number)))


def test_large_numbers_lose_nothing():
    assert fraction("9007199254740993") == 2**53 + 1  # no float holds it
    assert count("999999999999999") == 999_999_999_999_999


@pytest.mark.parametrize(
    "junk",
    [
        "",
        " ",
        "x",
        "4X",
        "4MM",
        "4Mib",
        "--4",
        "4e",
        "e4",
        "1/0",
        "1,5",
        "0,5",
        "1,00",
        ",1",
        "1,",
        "1__0",
        "_1",
        "nan",
        "inf",
        "-inf",
        "0x10",
        "٤",
        "４",
        "½",
        "4\x00",
        "4\n5",
        "1e9999",
        "⅓",
        "🦊",
        "9" * 5000,
        "1" + "0" * 4300,
    ],
)
def test_junk_is_refused_by_name(junk):
    with pytest.raises(ConfigError) as caught:
        fraction(junk, "field_name")
    assert caught.value.field == "field_name"
    assert "field_name" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("junk", [None, True, False, [], {}, (), object(), b"4", 1j, float("nan"), float("inf")])
def test_text_that_is_not_a_number_is_refused(junk):
    with pytest.raises(ConfigError):
        fraction(junk)


def test_a_list_is_not_spelled_out_in_the_message():
    knot: list[object] = []
    for _ in range(60):
        knot = [knot, knot]  # 2^60 elements when printed
    with pytest.raises(ConfigError, match="number=list is not a number"):
        fraction(knot)  # type: ignore[arg-type]


def test_an_integer_too_long_to_print_is_refused_and_not_printed():
    with pytest.raises(ConfigError, match="more than 1000 digits"):
        count(10**5000, "n")
    with pytest.raises(ConfigError, match="more than 1000 digits"):
        count(-(10**5000), "n")


@given(st.fractions(min_value=-10, max_value=100), st.integers(0, 5), st.integers(20, 60))
def test_nearest_counts_equal_brute_force(value, least, most):
    if value.denominator == 1 and least <= value <= most:
        assert count(value, least=least, most=most) == value
        return
    with pytest.raises(ConfigError) as caught:
        count(value, least=least, most=most)
    whole = range(least, most + 1)
    if value.denominator != 1 and least < value < most:
        expected = [max(n for n in whole if n < value), min(n for n in whole if n > value)]
    else:
        expected = [min(whole, key=lambda n: abs(n - value))]
    assert list(caught.value.nearest) == expected
    assert all(count(n, least=least, most=most) == n for n in caught.value.nearest)


def test_a_count_has_bounds():
    for wrong in (0, -1, "-4M", LARGEST_COUNT + 1, "1e400", "1" + "0" * 400):
        with pytest.raises(ConfigError) as caught:
            count(wrong, "n")
        assert caught.value.nearest in ((1,), (LARGEST_COUNT,))


def test_percentages():
    assert percentage("10%") == percentage(0.1) == percentage("0.1") == percentage("1/10") == Fraction(1, 10)
    assert percentage("0%") == 0
    assert percentage("100%") == percentage(1) == 1
    for wrong in ("101%", "-1%", "10", 2, "%", "ten%", "nan%", "10%%", None):
        with pytest.raises(ConfigError) as caught:
            percentage(wrong)
        assert caught.value.field == "tolerance"


def test_positive_keeps_within_what_a_float_can_divide_by():
    assert positive("1e-3", "x") == 0.001
    assert positive("2.5K", "x") == 2500.0
    for wrong in (0, -1, "1e-320", "1e400", "-0.0", "nan"):
        with pytest.raises(ConfigError):
            positive(wrong, "x")


@given(st.integers(0, 10**14))
def test_human_is_exact(number):
    assert count(human(number), least=0) == number


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80 GiB", 80 * 2**30),
        ("80Gib", 80 * 2**30),
        ("80Gi", 80 * 2**30),
        ("2.5GB", 2_500_000_000),
        ("2.5gb", 2_500_000_000),
        ("1.5G", 1_500_000_000),
        ("1B", 1),
        ("1 b", 1),
        ("1e3B", 1000),
        ("16_000B", 16_000),
        ("512Mi", 2**29),
        (" 1kB\n", 1000),
        ("1TiB", 2**40),
        (7, 7),
    ],
)
def test_bytes_as_people_write_them(text, size):
    assert parse_bytes(text, "memory") == size


@pytest.mark.parametrize(
    "text",
    [
        "much",
        "",
        "B",
        "GiB",
        "-1GiB",
        "0",
        "0B",
        "1.5B",
        "1.5B B",
        "1GiBB",
        "1Bi",
        "1BiB",
        "1" + "0" * 400,
        "1e400B",
        None,
        True,
    ],
)
def test_text_that_is_not_a_number_of_bytes_is_refused(text):
    with pytest.raises(ConfigError, match=r"^margin") as caught:
        parse_bytes(text, "margin")
    assert caught.value.field == "margin"


def test_zero_bytes_where_they_are_allowed():
    assert parse_bytes("0", "margin", least=0) == 0 == parse_bytes("0MiB", "margin", least=0)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (2**30, "1.00 GiB"),
        (2**40, "1.00 TiB"),
        (-(2**30), "-1.00 GiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (Fraction(2**30, 3), "341.3 MiB"),
        (None, "-"),
    ],
)
def test_bytes_are_printed_in_binary_units(size, text):
    assert format_bytes(size) == text


@given(st.integers(1, 5000))
def test_divisors_equal_brute_force(number):
    assert divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


@given(st.integers(1, 2000), st.integers(1, 3000))
def test_nearest_divisors_equal_brute_force(number, wanted):
    every = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in every if n <= wanted][-1:]
    above = [n for n in every if n > wanted][:1]
    assert nearest_divisors(number, wanted) == (*below, *above)


@given(st.integers(1, 500), st.integers(1, 5000))
def test_nearest_multiples_equal_brute_force(quantum, wanted):
    every = range(quantum, wanted + 2 * quantum + 1, quantum)
    if wanted in every:
        assert nearest_multiples(quantum, wanted) == (wanted,)
    else:
        below, above = [n for n in every if n < wanted][-1:], [n for n in every if n > wanted][:1]
        assert nearest_multiples(quantum, wanted) == (*below, *above)


def test_the_largest_batch_is_still_divided_quickly():
    start = time.process_time()
    assert divisors(999_999_999_989) == (1, 999_999_999_989)
    assert len(divisors(963_761_198_400)) == 6720  # the number below 10^12 with the most divisors
    assert time.process_time() - start < 1
