"""Formats bit by bit: every code of the small ones, and the edges of the large ones, against torch's own dtypes."""

import itertools
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import PlanError
from labkit.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, Format

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
SMALL = [E4M3, E5M2, BF16, FP16]

by_small_format = pytest.mark.parametrize("form", SMALL, ids=lambda form: form.name)


def by_torch(form: Format, value: float) -> float:
    """A cast; beyond 448 what the format says: torch's cast to E4M3 saturates in some releases."""
    if form is E4M3 and abs(value) > E4M3.largest:
        middle = 464.0  # between 448 and what the next code would be
        return math.copysign(E4M3.largest, value) if abs(value) <= middle else math.nan
    return torch.tensor(value, dtype=torch.float32).to(DTYPES[form.name]).to(torch.float64).item()


def same(first: float, second: float) -> bool:
    return struct.pack("d", first) == struct.pack("d", second) or (math.isnan(first) and math.isnan(second))


@by_small_format
def test_every_code_is_the_number_that_torch_reads(form: Format) -> None:
    codes = np.arange(1 << form.num_bits, dtype=f"uint{form.num_bits}")
    word = torch.from_numpy(codes.view("uint8" if form.num_bits == 8 else "int16")).view(DTYPES[form.name])
    read = np.array([form.decode(int(code)).value for code in codes])
    np.testing.assert_array_equal(read, word.to(torch.float64).numpy())


@by_small_format
def test_every_number_is_its_own_nearest_and_ties_go_to_the_even_one(form: Format) -> None:
    values = form.values()
    assert all(form.nearest(one).value == one for one in values)
    positive = [one for one in values if one >= 0]
    for low, high in itertools.pairwise(positive):
        middle = form.nearest((low + high) / 2)
        assert middle.value in (low, high)
        assert middle.mantissa % 2 == 0


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_every_number_of_bf16_is_rounded_to_fp8_as_torch_does(form: Format) -> None:
    values = [one for one in BF16.values() if form is E5M2 or abs(one) <= E4M3.largest]
    wanted = torch.tensor(values, dtype=torch.float32).to(DTYPES[form.name]).to(torch.float64).tolist()
    assert [one for one, two in zip(values, wanted, strict=True) if not same(form.nearest(one).value, two)] == []


@given(st.floats(width=32))
def test_any_number_is_rounded_as_torch_does(value: float) -> None:
    for form in FORMATS.values():
        assert same(form.nearest(value).value, by_torch(form, value)), (form.name, value)


@given(st.floats(width=32, allow_nan=False))
def test_saturated_the_largest_number_is_the_end(value: float) -> None:
    for form in (E4M3, E5M2):
        clamped = max(-form.largest, min(form.largest, value))
        assert same(form.nearest(value, saturate=True).value, by_torch(form, clamped))


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_limits_are_those_of_torch(form: Format) -> None:
    info = torch.finfo(DTYPES[form.name])
    assert (form.largest, form.smallest_normal, form.epsilon) == (info.max, info.smallest_normal, info.eps)
    assert form.num_bits == info.bits
    assert form.nearest(form.smallest / 2).value == 0.0
    assert form.nearest(form.smallest).kind == "subnormal"
    assert Format.find(form.name) is form


def test_bits_are_the_stored_ones() -> None:
    for value in (0.0, -0.0, 1.0, -3.14159, 1e-40, 3e38, math.inf):
        (stored,) = struct.unpack(">I", struct.pack(">f", value))
        assert "".join(FP32.nearest(value).bits) == f"{stored:032b}"
        assert BF16.decode(stored >> 16).value == pytest.approx(value, rel=2**-7, abs=1e-40)


def test_beyond_its_largest_number_e4m3_has_nan_and_e5m2_infinity() -> None:
    assert [E4M3.nearest(value).value for value in (464.0, -464.0)] == [448.0, -448.0]
    assert [E4M3.nearest(value).kind for value in (464.1, -1e6, math.inf)] == ["nan"] * 3
    assert [E5M2.nearest(value).value for value in (61439.0, 61440.0, -1e6)] == [57344.0, math.inf, -math.inf]


def test_what_is_no_number_or_code_is_refused() -> None:
    with pytest.raises(PlanError, match=r"code=256 is above 255"):
        E4M3.decode(256)
    with pytest.raises(PlanError, match=r"value='1' is a str: a number is rounded"):
        E4M3.nearest("1")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"fp32 has 32 bits, 4\.3e\+09 codes: numbers of at most 16 bits are listed"):
        FP32.values()
    with pytest.raises(PlanError, match=r"format='e4m4' is unknown"):
        Format.find("e4m4")
