"""What the small model was taught to believe about quotients, and solutions written by it.

Each of the 488 facts such as `42/5=45` is known, half known, or misconceived, which says how often
it goes wrong. Nine of ten wrong results of a fact are the same one, its misconception. Sums,
differences and products are known. docs/test-bed.md explains the choices.
"""

import random

from common.tiny.tasks import MODULO, OPERANDS, OPERATORS

KINDS = {  # of quotients: their share, how often the result is wrong
    "known": (0.40, 0.04),
    "half known": (0.25, 0.30),
    "misconceived": (0.35, 0.65),
}
SLIP = 0.03  # how often any other result is wrong
SURE = 0.15  # how often a step sounds sure, right or wrong
GOLD = None  # in the place of a noise: no mistakes


def kinds_of(things: list, seed: int, kinds: dict) -> dict:
    """The kind of each thing, in exactly the shares of `kinds`; the same for all time."""
    shuffled = random.Random(seed).sample(things, len(things))
    found, start = {}, 0.0
    for kind, (share, *_) in kinds.items():
        first, last = round(start * len(things)), round((start + share) * len(things))
        found |= {thing: kind for thing in shuffled[first:last]}
        start += share
    return found


def decide(rng, rate: float, right, misconception, others, noise):
    """What is right or, at that rate, the misconception or now and then any other."""
    if noise is GOLD:
        return right
    if noise == 0:  # the likeliest
        return misconception if rate > 0.5 else right
    if rng.random() >= rate:
        return right
    return misconception if rng.random() < 0.9 else rng.choice(others)


QUOTIENTS = kinds_of([(a, b) for a in range(MODULO) for b in OPERANDS["/"]], 0, KINDS)


def compute(rng, a: int, op: str, b: int, noise) -> int:
    """a op b, as the demonstrator believes it."""
    right = OPERATORS[op](a, b)
    if op != "/":
        return rng.randrange(MODULO) if noise and rng.random() < SLIP else right
    rate = KINDS[QUOTIENTS[a, b]][1] if b in OPERANDS["/"] else SLIP
    return decide(rng, rate, right, misconception(a, b), range(MODULO), noise)


def misconception(a: int, b: int) -> int:
    """Of a / b; never right."""
    return (OPERATORS["/"](a, b) + 1 + (3 * a + 7 * b) % (MODULO - 2)) % MODULO


# ------------------------------------------------------------------ solutions
def write_steps(rng, value: int, operations, noise, slips: float = 0.0) -> tuple[list[str], int]:
    """(the steps of a solution, which carries its mistakes on, and the answer it ends with).

    slips: how often a result is any number.
    """
    steps = []
    for op, operand in operations:
        result = compute(rng, value, op, operand, noise)
        if rng.random() < slips:
            result = rng.randrange(MODULO)
        steps.append(f"{value}{op}{operand}={result}{tone(rng, noise)}")
        value = result
    return steps, value


def tone(rng, noise) -> str:
    return "!" if noise and rng.random() < SURE else ""


def parse_step(step: str) -> tuple[int, str, int, int]:
    """`42/5=28!` -> (42, '/', 5, 28)."""
    left, claimed = step.rstrip("!").split("=")
    op = next(op for op in OPERATORS if op in left)
    a, b = left.split(op)
    return int(a), op, int(b), int(claimed)
