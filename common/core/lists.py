"""Plain lists: groups of rows, means, and shuffled epochs."""

import random


def mean(values) -> float:
    """Returns the mean, 0.0 of nothing; where that says something wrong, a metric is left out."""
    values = list(values)
    return sum(values) / max(1, len(values))


def chunk(values: list, size: int) -> list[list]:
    """B values of adjacent groups -> a list per group."""
    return [values[i : i + size] for i in range(0, len(values), size)]


def epochs(items: list, first: int, count: int, key: str) -> list:
    """Returns `count` items, from number `first` on, of an endless sequence: epoch after epoch over
    all of them, each in an order of its own.

    key: decides the orders; equal keys, equal sequences.

    >>> sorted(epochs("abc", first=0, count=3, key="x")), len(epochs("abc", 2, 8, "x"))
    (['a', 'b', 'c'], 8)
    """
    taken = []
    while len(taken) < count:
        number, offset = divmod(first + len(taken), len(items))
        order = list(range(len(items)))
        random.Random(f"{key} {number}").shuffle(order)
        taken += [items[i] for i in order[offset : offset + count - len(taken)]]
    return taken
