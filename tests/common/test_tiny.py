"""The small models' tasks against an oracle of their own, and what the first one believes."""

import random
import re
from fractions import Fraction

from common.tasks.answers import split_steps
from common.tiny import programs, repairs, tasks

import pytest

QUESTION = "((42/5)+9)*7 mod 61"


def value_of(expression: str) -> int:
    """Modulo 61: what a fraction is there is found by trying all numbers."""
    exact = eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression), {"Fraction": Fraction})
    return next(x for x in range(61) if x * exact.denominator % 61 == exact.numerator % 61)


def printed(program: str, x: int) -> list[int]:
    """What Python prints when it reads x."""
    said = []
    exec(program, {"input": lambda: str(x), "print": said.append})
    return said


# ------------------------------------------------------------------ questions and their labels
@pytest.mark.parametrize("seed", range(30))
def test_questions_and_solutions_are_true_arithmetic(seed):
    count = 1 + seed % 10
    question = tasks.make_question(random.Random(seed), count)
    expression = question.removesuffix(" mod 61")
    assert tasks.gold_answer(question) == value_of(expression)
    assert expression.count("(") == count - 1 and len(tasks.parse_question(question)[1]) == count
    solution = tasks.gold_solution(question)
    steps = split_steps(solution)
    assert all(value_of(left) == int(right) for left, right in (s.split("=") for s in steps))
    assert tasks.step_labels(question, steps) == [True] * len(steps) == [True] * count
    assert solution.endswith(f"<answer>\\boxed{{{value_of(expression)}}}</answer>")


def test_the_first_questions_do_not_depend_on_how_many_there_are_nor_their_lengths_on_a_period():
    """A player that is trained in every second or third step must meet all lengths."""
    questions, rows = (
        tasks.sample_questions(3, 600, held_out=False),
        repairs.sample_rows(3, 90, False),
    )
    for count in (1, 2, 40):
        assert tasks.sample_questions(3, count, held_out=False) == questions[:count]
        assert repairs.sample_rows(3, count, False) == rows[:count]
    lengths = [len(tasks.parse_question(question)[1]) for question in questions]
    for period in (1, 2, 3, 4, 5):
        for start in range(period):
            some = lengths[start::period]
            assert some.count(3) / len(some) == pytest.approx(0.5, abs=0.15), (period, start)


def test_of_questions_that_are_used_up_there_are_as_many_as_there_are():
    """And of tasks, whose short ones are used up first."""
    make = lambda rng, steps: f"{rng.randrange(3)}+1 mod 61"  # noqa: E731
    sample = tasks.sample_different
    found = [sample(random.Random(0), 100, held_out, make, (2,)) for held_out in (0, 1)]
    assert sorted(sum(found, [])) == ["0+1 mod 61", "1+1 mod 61", "2+1 mod 61"]
    many, fewer = (programs.sample_tasks(1, count, held_out=False) for count in (2000, 1200))
    assert len({*many}) == 2000 and many[:1200] == fewer
    assert len({*programs.sample_tasks(0, 256, held_out=True)}) == 256


@pytest.mark.parametrize(
    "steps, labels, faulty",
    [
        (["42/5=45!", "45+9=54", "54*7=12"], "111", []),  # tone is no arithmetic
        (["42/5=28", "28+9=37", "37*7=15"], "011", [1]),  # carried on: charged once
        (["42/5=28!", "45+9=54", "54*7=12"], "001", [1]),  # a slip
        (["42/5=28", "27+9=36", "36*7=8"], "001", [1, 2]),  # neither
        (["42/5=45", "45-9=36", "36*7=8"], "101", [2]),  # another operation
        (["42/5=45", "45+9=54", "54*7=12", "12+1=13"], "1110", [4]),
        # what cannot be read is wrong, and the number that it ends with is carried on
        (["it is 45!", "45+9=54", "what?"], "010", [1, 3]),
        (["it is 145", "45+9=54", "54*7=12"], "001", [1, 2]),
        (["42/0=45", "45+9=54", "54*7=12"], "011", [1]),
        (["42/5=45!!", "45+9=54"], "00", [1, 2]),
    ],
)
def test_a_mistake_is_charged_once(steps, labels, faulty):
    assert tasks.step_labels(QUESTION, steps) == [label == "1" for label in labels]
    assert tasks.faulty_steps(QUESTION, steps) == faulty
    assert tasks.faulty_steps("2+2", ["2+2=4"]) is None


# ------------------------------------------------------------------ programming tasks
@pytest.mark.parametrize("make_task", [programs.make_program_task, programs.make_testing_task])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_programs_compute_what_the_task_says(make_task, steps):
    """The oracle is Python's own reading of the words: `add minus 4` is `+ - 4`."""
    rng = random.Random(steps)
    for _ in range(20):
        task = make_task(rng, steps)
        shown = programs.format_program(programs.parse_program_task(task))
        program = shown.removeprefix("```python\n").removesuffix("\n```")
        words = task.removeprefix("Read x. Then ").removesuffix(". Print x mod 100.").split(", ")
        assert len(words) == steps
        for x in range(0, 100, 7):
            value = x
            for word in words:
                symbols = word.replace("add", "+").replace("minus", "-").replace("times", "*")
                value = eval(f"({value}) {symbols}")
            assert printed(program, x) == [programs.program_output(task, x)] == [value % 100]


def test_a_programs_tests_are_what_it_prints():
    train, held_out = (repairs.sample_rows(0, 200, held) for held in (False, True))
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    for row in train[:50]:
        for x, expected in row["tests"]:
            assert printed(row["reference"], int(x)) == [*map(int, expected.split())]
