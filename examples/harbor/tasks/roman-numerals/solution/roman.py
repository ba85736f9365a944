"""Roman numerals from 1 to 3999."""

_SIGNS = {
    1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC",
    50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I",
}  # fmt: skip


def write(number: int) -> str:
    """The numeral of a number: 1994 is MCMXCIV. Raises ValueError outside of 1 to 3999."""
    if not 1 <= number <= 3999:
        raise ValueError(number)
    numeral = ""
    for value, sign in _SIGNS.items():
        count, number = divmod(number, value)
        numeral += sign * count
    return numeral


_NUMBERS = {write(number): number for number in range(1, 4000)}


def read(numeral: str) -> int:
    """The number of a numeral, in any case. Raises ValueError for IIII, IC, VX and the like."""
    try:
        return _NUMBERS[numeral.upper()]
    except KeyError:
        raise ValueError(numeral) from None


def add(left: str, right: str) -> str:
    """The numeral of a sum."""
    return write(read(left) + read(right))


def longest(up_to: int) -> str:
    """The longest numeral of the numbers from 1 to `up_to`; of several, the one of the smallest."""
    return max((write(number) for number in range(1, up_to + 1)), key=len)
