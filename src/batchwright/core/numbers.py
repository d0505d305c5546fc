"""Numbers as people write them: `4M` is 4,000,000 and `4Mi` is 4,194,304; exact, never through a float."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

from .errors import ConfigError

SUFFIXES: dict[str, int] = {"": 1} | {
    letter + binary: (1024 if binary else 1000) ** power
    for power, letters in enumerate(("kK", "mM", "gGbB", "tT"), start=1)
    for letter in letters
    for binary in ("", "i")
}
# A larger count is a typing error, and listing its divisors would take long.
LARGEST_COUNT = 10**15
# Python itself refuses numbers of more than 4300 digits, with a traceback.
LONGEST = 1000

# Commas separate groups of three digits only: 1,5 is not 15.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)"
_NUMBER = re.compile(rf"([+-]?(?:{_DIGITS}\.?\d*|\.\d+)(?:[eE][+-]?\d{{1,3}})?)\s*([a-zA-Z]{{0,2}})", re.ASCII)


def fraction(value: int | float | str | Fraction, field: str = "number") -> Fraction:
    """The exact number that `value` stands for; a float stands for the decimal that it prints as.

    >>> fraction("2.5M"), fraction(0.1), fraction("1/8")
    (Fraction(2500000, 1), Fraction(1, 10), Fraction(1, 8))
    """
    if isinstance(value, Fraction):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{field}={_brief(value)} is not a number.", field=field, given=_brief(value))
    if (value.bit_length() / 4 if isinstance(value, int) else len(str(value))) > LONGEST:
        raise ConfigError(f"{field} has more than {LONGEST} digits.", field=field)
    text = str(value).strip()
    match = _NUMBER.fullmatch(text)
    if match and match[2] in SUFFIXES:
        return Fraction(match[1].replace(",", "").replace("_", "")) * SUFFIXES[match[2]]
    if re.fullmatch(r"\d{1,15}/0*[1-9]\d{0,14}", text, re.ASCII):
        return Fraction(text)
    if "$" in text:
        raise ConfigError(
            f"{field}={text[:40]!r} is known only when the job runs. Give the number, such as {field}=1024.",
            field=field,
            given=value,
        )
    raise ConfigError(
        f"{field}={text[:40]!r} is not a number. Write it as 1024, 1_000_000, 4M (4,000,000) or 4Mi (4,194,304).",
        field=field,
        given=value,
    )


def count(
    value: int | float | str | Fraction, field: str = "count", *, least: int = 1, most: int = LARGEST_COUNT
) -> int:
    """A whole number from `least` to `most`, from an int or from text with a suffix.

    >>> count("4M"), count("4Mi"), count("1e6"), count("2.4B")
    (4000000, 4194304, 1000000, 2400000000)
    """
    number = fraction(value, field)
    if number.denominator != 1:
        below = min(max(number.__floor__(), least), most)
        above = min(max(number.__ceil__(), least), most)
        near = sorted({below, above})
        raise ConfigError(
            f"{field}={str(value)[:40]} is not a whole number. Nearest: {' or '.join(f'{n:,}' for n in near)}.",
            field=field,
            given=value,
            nearest=near,
        )
    if number < least:
        raise ConfigError(
            f"{field}={str(value)[:40]}: must be at least {least}.",
            field=field,
            given=str(value)[:40],
            nearest=[least],
        )
    if number > most:
        raise ConfigError(
            f"{field}={str(value)[:40]}: must be at most {most:,}.",
            field=field,
            given=str(value)[:40],
            nearest=[most],
        )
    return int(number)


def percentage(value: int | float | str | Fraction, field: str = "tolerance") -> Fraction:
    """A share between 0 and 1, from `10%` or `0.1`.

    >>> percentage("10%"), percentage(0.25)
    (Fraction(1, 10), Fraction(1, 4))
    """
    text = value.strip() if isinstance(value, str) else ""
    share = fraction(text[:-1], field) / 100 if text.endswith("%") else fraction(value, field)
    if not 0 <= share <= 1:
        meant = f"{value}%" if 1 < share <= 100 and not text.endswith("%") else "10%"
        raise ConfigError(
            f"{field}={str(value)[:40]} is not between 0% and 100%. Did you mean {meant}?",
            field=field,
            given=str(value)[:40],
            nearest=[meant],
        )
    return share


def positive(value: int | float | str | Fraction, field: str) -> float:
    """A number above zero, such as a throughput or a time, that a float can hold.

    >>> positive("2.5", "step_seconds")
    2.5
    """
    number = fraction(value, field)
    if not Fraction(1, 10**18) <= number <= 10**18:
        problem = "must be above zero" if number <= 0 else f"is too {'large' if number > 1 else 'small'}"
        raise ConfigError(f"{field}={str(value)[:40]} {problem}.", field=field, given=str(value)[:40])
    return float(number)


def _brief(value: object) -> str:
    """A value that is not a number, for a message: only its type, since a list from a file may be very long."""
    return repr(value) if value is None or isinstance(value, bool) else type(value).__name__


def short(number: float, digits: int = 4) -> str:
    """A rounded number with a suffix, for an axis or a chart; `human` is exact.

    >>> short(10**7), short(1083, 3), short(0.25), short(999.96, 3)
    ('10M', '1.08K', '0.25', '1K')
    """
    for factor, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if float(f"{number:.{digits}g}") >= factor:
            return f"{number / factor:.{digits}g}{suffix}"
    return f"{number:.{digits}g}"


def human(number: int) -> str:
    """A short form if it is exact (`50M`), else the number with commas.

    >>> human(50_000_000), human(9_765_625), human(1024), human(2_400_000_000)
    ('50M', '9,765,625', '1024', '2.4B')
    """
    for suffix, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= factor and number % (factor // 10) == 0:
            return f"{number / factor:g}{suffix}"
    return f"{number:,}" if number >= 10_000 else str(number)


def decimal(number: Fraction) -> str:
    """A fraction as text that `fraction` reads again: a decimal of up to six digits, else numerator/denominator.

    >>> decimal(Fraction(3, 2)), decimal(Fraction(3)), decimal(Fraction(1, 3))
    ('1.5', '3', '1/3')
    """
    short = f"{float(number):g}"
    return short if fraction(short) == number else str(number)


def arrows(counts: Sequence[int]) -> str:
    """Counts in their order, such as the nodes of each launch; in a long list the middle is left out.

    >>> arrows([8, 10, 12])
    '8 -> 10 -> 12'
    """
    shown = [str(count) for count in counts]
    return " -> ".join(shown if len(shown) <= 12 else [*shown[:6], "…", *shown[-3:]])


def parse_bytes(value: int | float | str | Fraction, name: str = "memory", *, least: int = 1) -> int:
    """A number of bytes: `80GiB`, `80Gi`, `80GB` (decimal), `512B` or a plain number.

    >>> parse_bytes("2GiB"), parse_bytes("1.5G"), parse_bytes("500MB"), parse_bytes("12B"), parse_bytes(1024)
    (2147483648, 1500000000, 500000000, 12, 1024)
    """
    if not isinstance(value, str):
        return count(value, name, least=least)
    text = re.sub(r"(?<=[\d.\skKmMgGtTi])[bB]$", "", value.strip())
    # In every other number a B means billions: here it means bytes.
    if re.search(r"[bB]", text):
        raise ConfigError(
            f"{name}={value[:40]!r} is not a number of bytes. Write it as 512B, 80GiB (binary) or 80GB (decimal).",
            field=name,
            given=value[:40],
        )
    return count(text, name, least=least)


def format_bytes(size: int | float | Fraction | None) -> str:
    """A number of bytes in binary units; `-` if it is unknown.

    >>> format_bytes(85 * 2**30), format_bytes(-1536), format_bytes(12), format_bytes(None)
    ('85.00 GiB', '-1.5 KiB', '12 B', '-')
    """
    if size is None:
        return "-"
    for unit, scale, digits in (("TiB", 2**40, 2), ("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if abs(size) >= scale:
            return f"{float(size) / scale:.{digits}f} {unit}"
    return f"{float(size):.0f} B"


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending. Trial division by 2, 3 and 6k ± 1: 30 ms for a prime near 10^12.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    found = [1]
    rest = number

    def take(prime: int) -> None:
        nonlocal rest, found
        powers = [1]
        while rest % prime == 0:
            rest //= prime
            powers.append(powers[-1] * prime)
        if len(powers) > 1:
            found = [d * p for d in found for p in powers]

    take(2)
    take(3)
    candidate = 5
    while candidate * candidate <= rest:
        if rest % candidate == 0:
            take(candidate)
        if rest % (candidate + 2) == 0:
            take(candidate + 2)
        candidate += 6
    if rest > 1:
        take(rest)
    return tuple(sorted(found))


def nearest_divisors(number: int, wanted: int) -> tuple[int, ...]:
    """The largest divisor of `number` not above `wanted` and the smallest above it, if there is one.

    >>> nearest_divisors(12, 5)
    (4, 6)
    """
    found = divisors(number)
    at = bisect_right(found, wanted)
    return found[max(0, at - 1) : at + 1]


def nearest_of(candidates: Sequence[int], wanted: int) -> tuple[int, ...]:
    """The largest candidate below `wanted` and the smallest above it, if there are any; `candidates` ascend.

    >>> nearest_of((1, 2, 4, 8), 4), nearest_of((1, 2), 4)
    ((2, 8), (2,))
    """
    return (*[n for n in candidates if n < wanted][-1:], *[n for n in candidates if n > wanted][:1])


def nearest_multiples(quantum: int, wanted: int) -> tuple[int, ...]:
    """The multiples of `quantum` next to `wanted` on both sides, none below `quantum`; only `wanted` if it is one.

    >>> nearest_multiples(192, 1000), nearest_multiples(192, 100), nearest_multiples(192, 384)
    ((960, 1152), (192,), (384,))
    """
    below = wanted // quantum * quantum
    if below == wanted:
        return (wanted,)
    return tuple(n for n in (below, below + quantum) if n)
