"""Roman numerals from 1 to 3999."""


def write(number: int) -> str:
    """The numeral of a number: 1994 is MCMXCIV. Raises ValueError outside of 1 to 3999."""
    raise NotImplementedError


def read(numeral: str) -> int:
    """The number of a numeral, in any case. Raises ValueError for IIII, IC, VX and the like."""
    raise NotImplementedError


def add(left: str, right: str) -> str:
    """The numeral of a sum."""
    raise NotImplementedError


def longest(up_to: int) -> str:
    """The longest numeral of the numbers from 1 to `up_to`; of several, the one of the smallest."""
    raise NotImplementedError
