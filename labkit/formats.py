"""Floating-point formats bit by bit: fp32, fp16, bf16 and the two of FP8, without torch.

FP8 is that of Micikevicius et al. 2022 (arXiv 2209.05433): E5M2 follows IEEE 754; E4M3 has no infinities and takes back
their codes, and all but one of each sign's NaNs, for numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from labkit.errors import PlanError
from labkit.spec.checks import choice, flag, shown, whole

__all__ = ["BF16", "E4M3", "E5M2", "FORMATS", "FP16", "FP32", "Format", "Number"]

MOST_LISTED_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of one sign bit, then exponent bits, then mantissa bits.

    Attributes:
        name: what people call it.
        exponent_bits: bits of the exponent, stored with a bias of 2**(exponent_bits - 1) - 1.
        mantissa_bits: bits after the point.
        infinities: whether the largest exponent is kept for infinities and NaN, as IEEE 754 does; without them only its
            last code is NaN.

    Raises:
        PlanError: a field of the wrong type, or more than 64 bits.

    >>> BF16.num_bits, BF16.bias, BF16.largest, BF16.epsilon
    (16, 127, 3.3895313892515355e+38, 0.0078125)
    >>> E4M3.largest, E5M2.largest
    (448.0, 57344.0)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    infinities: bool = True

    def __post_init__(self) -> None:
        whole("exponent_bits", self.exponent_bits, minimum=2, maximum=11)
        whole("mantissa_bits", self.mantissa_bits, maximum=52)
        flag("infinities", self.infinities)

    @classmethod
    def find(cls, name: str) -> "Format":
        """Return a format by name; `FORMATS` lists them.

        Raises:
            PlanError: no such format.

        >>> Format.find("e5m2").mantissa_bits
        2
        """
        return FORMATS[choice("format", name, tuple(FORMATS))]

    @property
    def num_bits(self) -> int:
        """All bits of a number."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest finite number."""
        top, all_ones = (1 << self.exponent_bits) - 1, (1 << self.mantissa_bits) - 1
        exponent, mantissa = (top - 1, all_ones) if self.infinities else (top, all_ones - 1)
        return self._value(exponent, mantissa)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number that has all mantissa bits."""
        return self._value(1, 0)

    @property
    def smallest(self) -> float:
        """The smallest positive number of all: one mantissa bit is left of it."""
        return self._value(0, 1)

    @property
    def epsilon(self) -> float:
        """From 1 to the next number above; half of it is the largest relative error of rounding."""
        return 2.0**-self.mantissa_bits

    def decode(self, code: int) -> "Number":
        """Return the number that a bit pattern stands for.

        Raises:
            PlanError: the code is negative or has more bits than the format.

        >>> E4M3.decode(0b0_0111_100).value
        1.5
        """
        whole("code", code, minimum=0, maximum=(1 << self.num_bits) - 1)
        return Number(format=self, code=code)

    def nearest(self, value: float, *, saturate: bool = False) -> "Number":
        """Round to the nearest number of the format, of two equally near ones to the even one.

        Args:
            value: any number, also an infinity or NaN.
            saturate: whether what is too large becomes the largest number of its sign. If not, it becomes infinite, or
                NaN where the format has no infinities.

        Raises:
            PlanError: the value is no number.

        >>> BF16.nearest(1.001).value, E4M3.nearest(500).value, E4M3.nearest(500, saturate=True).value
        (1.0, nan, 448.0)
        """
        given: object = value
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise PlanError(f"value={shown(value)} is a {type(given).__name__}: a number is rounded.")
        sign = int(math.copysign(1.0, value) < 0) << (self.num_bits - 1)
        return Number(format=self, code=sign | self._magnitude(abs(float(value)), saturate))

    def values(self) -> tuple[float, ...]:
        """Return every finite number of the format in order, zero once.

        Raises:
            PlanError: the format has more than 16 bits.

        >>> len(E4M3.values()), len(E5M2.values())
        (253, 247)
        """
        if self.num_bits > MOST_LISTED_BITS:
            raise PlanError(
                f"{self.name} has {self.num_bits} bits, {2.0**self.num_bits:.2g} codes: numbers of at most "
                f"{MOST_LISTED_BITS} bits are listed."
            )
        found = {self.decode(code).value for code in range(1 << self.num_bits)}
        return tuple(sorted(one for one in found if math.isfinite(one)))

    def _value(self, exponent: int, mantissa: int) -> float:
        """The finite number with these fields: implicit leading one, except below the smallest normal number."""
        if exponent == 0:
            return math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        return math.ldexp(mantissa + (1 << self.mantissa_bits), exponent - self.bias - self.mantissa_bits)

    def _magnitude(self, value: float, saturate: bool) -> int:
        """The code of a value of no sign."""
        top = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        infinite = top if self.infinities else top | ((1 << self.mantissa_bits) - 1)
        largest = infinite - 1
        if math.isnan(value):
            return (1 << (self.num_bits - 1)) - 1
        if math.isinf(value):
            return largest if saturate else infinite
        # Codes count up with the numbers: a mantissa that rounds up to the next power of two carries into the exponent.
        exponent = max(math.frexp(value)[1] - 1, 1 - self.bias) if value else 1 - self.bias
        steps = round(math.ldexp(value, self.mantissa_bits - exponent))
        code = steps + ((exponent + self.bias - 1) << self.mantissa_bits)
        if code > largest:
            return largest if saturate else infinite
        return code


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A bit pattern, read as a number of its format.

    >>> one = BF16.nearest(-1.5)
    >>> one.bits, one.value, one.kind
    (('1', '01111111', '1000000'), -1.5, 'normal')
    """

    format: Format
    code: int

    @property
    def sign(self) -> int:
        """The sign bit."""
        return self.code >> (self.format.num_bits - 1)

    @property
    def exponent(self) -> int:
        """The exponent as it is stored, with the bias in it."""
        return (self.code >> self.format.mantissa_bits) & ((1 << self.format.exponent_bits) - 1)

    @property
    def mantissa(self) -> int:
        """The bits after the point, as a whole number."""
        return self.code & ((1 << self.format.mantissa_bits) - 1)

    @property
    def bits(self) -> tuple[str, str, str]:
        """Sign, exponent and mantissa, each as binary digits."""
        form = self.format
        return (str(self.sign), f"{self.exponent:0{form.exponent_bits}b}", f"{self.mantissa:0{form.mantissa_bits}b}")

    @property
    def kind(self) -> str:
        """One of "zero", "subnormal", "normal", "infinite" and "nan"."""
        form = self.format
        if self.exponent == (1 << form.exponent_bits) - 1:
            if form.infinities:
                return "nan" if self.mantissa else "infinite"
            if self.mantissa == (1 << form.mantissa_bits) - 1:
                return "nan"
        if self.exponent:
            return "normal"
        return "subnormal" if self.mantissa else "zero"

    @property
    def value(self) -> float:
        """What the bits stand for."""
        kind = self.kind
        if kind == "nan":
            return math.nan
        size = math.inf if kind == "infinite" else self.format._value(self.exponent, self.mantissa)
        return -size if self.sign else size

    @property
    def formula(self) -> str:
        """How the value comes about.

        >>> E4M3.nearest(0.4).formula
        '2^(5 - 7) x (1 + 5/8)'
        >>> E4M3.nearest(-0.004).formula
        '-2^(1 - 7) x 2/8'
        """
        if self.kind in ("nan", "infinite", "zero"):
            return str(self.value)
        form, minus = self.format, "-" * self.sign
        part = f"{self.mantissa}/{1 << form.mantissa_bits}"
        if self.kind == "subnormal":
            return f"{minus}2^(1 - {form.bias}) x {part}"
        return f"{minus}2^({self.exponent} - {form.bias}) x (1 + {part})"


FP32 = Format(name="fp32", exponent_bits=8, mantissa_bits=23)
FP16 = Format(name="fp16", exponent_bits=5, mantissa_bits=10)
BF16 = Format(name="bf16", exponent_bits=8, mantissa_bits=7)
E4M3 = Format(name="e4m3", exponent_bits=4, mantissa_bits=3, infinities=False)
E5M2 = Format(name="e5m2", exponent_bits=5, mantissa_bits=2)

FORMATS: Mapping[str, Format] = MappingProxyType({one.name: one for one in (FP32, FP16, BF16, E4M3, E5M2)})
"""The formats by name."""
