"""Divisors and multiples compared with brute force."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from batchwright.core.numbers import divisors, nearest_divisors, nearest_multiples


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
