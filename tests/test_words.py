"""Figures and counts as people read them."""

from __future__ import annotations

import pytest

from atma_eval.plots.charts import number_text
from atma_eval.words import number, plural, sentence, signed, span, times


def test_negative_numbers_have_a_minus_sign():
    assert [number(v) for v in (-0.021, -12.5, -3e-7, 0.0, 0.5, 1234.5)] == [
        "−0.021",
        "−12.50",
        "−3e-07",
        "0.000",
        "0.500",
        "1234",
    ]
    assert [signed(v) for v in (-0.5, 0.0, 0.5)] == ["−0.500", "0.000", "+0.500"]
    assert [number_text(v) for v in (-0.021, -0.002, 150.0)] == ["−0.02", "−0.002", "150"]


@pytest.mark.parametrize(
    ("bounds", "text"),
    [((0.207, 0.9), "0.207–0.900"), ((-0.021, 0.477), "−0.021, 0.477"), ((-2.0, -1.0), "−2.000, −1.000")],
)
def test_an_interval_stays_readable_below_zero(bounds, text):
    assert span(*bounds) == text


def test_counts_of_one_are_singular():
    assert [plural(n, "row") for n in (0, 1, 2, 1200, "1", "1 to 3")] == [
        "0 rows",
        "1 row",
        "2 rows",
        "1,200 rows",
        "1 row",
        "1 to 3 rows",
    ]


def test_multiples_have_three_digits():
    assert [times(v) for v in (1.46484, 1.0, 32.0, 0.0125, 2048.0)] == ["1.46", "1", "32", "0.0125", "2,048"]


def test_a_note_becomes_a_sentence():
    assert sentence("models differ") == "Models differ." and sentence("Yes.") == "Yes."
