"""Numbers drawn bit by bit, and what formats can hold: the pictures say what the values say."""

import math

import pytest

from labkit import formats, show
from labkit.errors import PlanError


def test_every_bit_is_a_box_in_the_row_of_its_number() -> None:
    numbers = [formats.FP32.nearest(-0.1), formats.BF16.nearest(-0.1), formats.E4M3.nearest(0.003)]
    figure = show.bits(numbers)
    assert [part.name for part in figure.data] == ["sign", "exponent", "mantissa"]
    for part, boxes in enumerate(figure.data):
        for row, number in enumerate(numbers):
            drawn = [bit for bit, y in zip(boxes.text, boxes.y, strict=True) if y == row]
            assert "".join(drawn) == number.bits[part]
    assert list(figure.layout.yaxis.ticktext) == ["fp32", "bf16", "e4m3"]
    texts = [one.text for one in figure.layout.annotations]
    assert "<b>-0.100097656</b>" in texts[1]
    assert "2^(1 - 7) x 2/8" in texts[2]


def test_exponents_of_all_formats_end_where_mantissas_begin() -> None:
    figure = show.bits([one.nearest(1.0) for one in formats.FORMATS.values()])
    _, exponent, mantissa = figure.data
    for row in range(len(formats.FORMATS)):
        ends = max(base + 1 for base, y in zip(exponent.base, exponent.y, strict=True) if y == row)
        begins = min(base for base, y in zip(mantissa.base, mantissa.y, strict=True) if y == row)
        assert ends < begins < ends + 0.5


def test_a_bar_goes_from_the_smallest_number_to_the_largest() -> None:
    drawn = list(formats.FORMATS.values())
    normal, subnormal = show.ranges().data
    for row, one in enumerate(drawn):
        assert subnormal.base[row] == math.log2(one.smallest)
        assert subnormal.base[row] + subnormal.x[row] == pytest.approx(normal.base[row])
        assert normal.base[row] + normal.x[row] == pytest.approx(math.log2(one.largest))
    assert len(show.ranges([formats.E4M3]).data[0].y) == 1


def test_what_is_no_number_of_a_format_is_refused() -> None:
    with pytest.raises(PlanError, match=r"3\.14 is no number of a format: round it to one"):
        show.bits([3.14])  # type: ignore[list-item]
    with pytest.raises(PlanError, match=r"0 numbers are given: 1 to 40 fit"):
        show.bits([])
    with pytest.raises(PlanError, match=r"'bf16' is no format: take them from lk\.formats"):
        show.ranges(["bf16"])  # type: ignore[list-item]
