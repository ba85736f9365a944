"""Where the middle of some values is."""


def mean(values):
    """The sum of the values by their number."""
    return sum(values) / len(values)


def median(values):
    """The value in the middle."""
    values.sort()
    return values[len(values) // 2]
