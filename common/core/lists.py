"""Functions on lists and texts: the mean, groups of rows, shuffled epochs, equal questions."""

import random


def mean(values) -> float:
    """Returns the mean, and 0.0 of an empty list. If 0.0 would say something wrong, the caller does
    not log the metric.
    """
    values = list(values)
    return sum(values) / max(1, len(values))


def chunk(values: list, size: int) -> list[list]:
    """Returns a list for each group of `size` adjacent values; the last group may be shorter."""
    return [values[i : i + size] for i in range(0, len(values), size)]


def epochs(items: list, first: int, count: int, key: str) -> list:
    """Returns `count` items of an endless sequence, beginning with number `first`. The sequence is
    epoch after epoch over all items, and each epoch has an order of its own.

    key: decides the orders; equal keys give equal sequences.

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


def stripped(question: str) -> str:
    """Returns the same text for questions that differ only in spaces at the ends of their lines."""
    return "\n".join(line.rstrip() for line in question.strip().splitlines())
