"""cure.py: rewards and theorem 3.1's rates against for-loops, hostile completions, a step and the
evaluation with completions that are given.
"""

import functools
import math
import random
from collections import defaultdict
from itertools import product
from statistics import mean

import cure  # not its names: pytest would collect tester_rewards as a test

import numpy as np
import pytest
import torch
from trainers import answering, logged, without_model


# ------------------------------------------------------------------ rewards and advantages
def test_a_tests_reward_is_its_estimate_of_mu():
    """mu = p_u (1 - p01) - (1 - p_u) p00 with the estimators of section 3.2, in plain loops."""
    both = 0
    for seed in range(500):
        rng = np.random.default_rng(seed)
        N, t, M = rng.integers(1, 9), rng.integers(1, 5), rng.integers(1, 9)
        own = torch.tensor(rng.random((N, t)) < rng.choice([0.3, 0.7, 0.95]))
        unit = torch.tensor(rng.random((N, M)) < rng.choice([0.2, 0.5, 0.9]))
        right = [j for j in range(len(own)) if all(own[j])]
        wrong = [j for j in range(len(own)) if j not in right]
        rewards, simple = (cure.tester_rewards(own, unit, k) for k in ("precision", "simple"))
        assert cure.coder_rewards(own).tolist() == pytest.approx([sum(r) / len(r) for r in own])
        if not right:
            assert rewards.isnan().all() and simple.isnan().all()
            continue
        both += bool(wrong)
        for k in range(unit.shape[1]):
            p_u = float(all(unit[j, k] for j in right))
            passing = sum(float(unit[j, k]) for j in wrong) / max(1, len(wrong))
            mu = p_u * (1 - passing) - (1 - p_u) * passing if wrong else 2 * p_u - 1
            assert rewards[k].item() == pytest.approx(mu, abs=1e-12) and simple[k] == p_u
    assert both > 100


def by_hand(rewards):
    r = np.array(rewards)
    return pytest.approx((r - r.mean()) / r.std(), abs=1e-6)


def test_advantages_are_normalised_with_the_population_std_and_no_epsilon():
    rng = np.random.default_rng(0)
    for _ in range(100):
        r = rng.integers(0, 4, size=rng.integers(1, 9)) / 3
        expected = by_hand(r) if len(set(r)) > 1 else [0.0] * len(r)
        assert cure.normalised(torch.tensor(r)).tolist() == expected
    assert cure.normalised(torch.tensor([-0.0, 0.0])).tolist() == [0.0] * 2


def test_shorter_is_better_against_the_printed_formula():
    rng, shaped_groups = np.random.default_rng(0), 0
    for longest in [8, 60] * 200:  # with many equal lengths, too
        M = rng.integers(2, 12)
        r, length = rng.normal(size=M), rng.integers(5, longest, size=M)
        r -= r.mean()
        good = sorted(length[r > 0])
        T = (good[(len(good) - 1) // 2] + good[len(good) // 2]) / 2
        rhat = [T - length[i] if r[i] > 0 else T - good[-1] for i in range(M)]
        gains, losses = sum(x for x in rhat if x > 0), -sum(x for x in rhat if x < 0)
        ours = cure.shorter_is_better(torch.tensor(r), torch.tensor(length))
        if gains == 0 or losses == 0:
            assert ours.tolist() == r.tolist()
            continue
        shaped_groups += 1
        scaled = np.array([losses / gains * x if x > 0 else x for x in rhat])
        assert np.allclose(ours.numpy(), scaled / scaled.std(), atol=1e-9)
    assert shaped_groups > 150
    none_good = torch.zeros(3)
    assert torch.equal(cure.shorter_is_better(none_good, torch.tensor([1, 2, 3])), none_good)


# ------------------------------------------------------------------ parsing: tests/data/texts.txt
def written_test(given: str, expected: str) -> str:
    return f"**Test Input:**\n```\n{given}\n```\n**Test Output:**\n```\n{expected}\n```"


def test_completions_of_one_piece_repeated_end_in_something_sound():
    """At any length every search goes through the text once."""
    pieces = "**Test Input:**,**Test Output:**,**Explanation:,```,```python,plaintext,\n,\r\n,\\n, "
    for first, piece in product(["", *pieces.split(",")], pieces.split(",")):
        text = first + piece * (60_000 // len(piece))
        program = cure.parse_program(text)
        assert program is None or program in text and program.strip()
        for test in (cure.parse_test(text), cure.parse_test(text + written_test("3", "7"))):
            assert test is None or test[1].strip() and all(part[-1] == "\n" for part in test)


# ------------------------------------------------------------------ tables
def bare(sandbox, texts=(), **change):
    """A trainer without a model, which logs as a real one."""
    cfg = cure.Args(group_size=3, **change)
    trainer = without_model(cure.Cure, cfg, texts, sandbox=sandbox)
    trainer.log_mean = functools.partial(cure.Cure.log_mean, trainer)
    return trainer


def test_what_passes(sandbox):
    """Not an expected output that reads like an error, by a program that fails; not a flood; not
    the right output of a program that fails after it.
    """
    trainer = bare(sandbox, time_limit=0.5)
    assert not trainer.run_tables([(["print(7)\n1/0"], [("", "7")])], {})[0].any()
    programs = ["1/0", "while True: pass", "import sys; sys.exit(1)", "print('7 ' * 10**5)"]
    expected = ["error: division by zero", "Timeout Error", "ZeroDivisionError", "7 " * 10**5]
    assert not trainer.run_tables([(programs, [("", text) for text in expected])], {})[0].any()


# ------------------------------------------------------------------ the step
def play(sandbox, programs: list[str], tests: list[str], **change):
    """`step` on the task x + 2, own tests 1 -> 3 and 2 -> 4, with these completions."""
    trainer = bare(sandbox, {"coder": programs, "tester": tests}, **change)
    row = {"question": "x+2", "tests": [("1\n", "3\n"), ("2\n", "4")]}
    coder, tester = trainer.step([row | {"prompt": cure.code_prompt("x+2")}] * 3)
    assert (coder.player, tester.player) == ("coder", "tester")
    asked = [("coder", "Task: x+2\nWrite a program.")] * 3
    assert trainer.asked == asked + [("tester", "Task: x+2\nWrite a test.")] * 3
    return trainer, coder, tester


def code(expression):
    return f"```python\nx=int(input())\nprint({expression})\n```"


# one correct program, one that is correct at 2 only, one that cannot be read
PROGRAMS = [code("x+2"), code("x*2"), "print(x+2)"]
RIGHT, WEAK = written_test("5", "7"), written_test("2", "4")


def test_a_step_on_real_runs(sandbox):
    trainer, coder, tester = play(sandbox, PROGRAMS, [RIGHT, WEAK, "no test"])
    assert coder.rewards.tolist() == [1.0, 0.5, 0.0]
    assert coder.advantages.tolist() == by_hand([1.0, 0.5, 0.0])
    # right, and both wrong programs fail; right, passed by one of two; not readable: the worst
    assert tester.rewards.tolist() == [1.0, 0.5, -1.0]
    assert tester.advantages.tolist() == by_hand([1.0, 0.5, -1.0])
    assert coder.advantages.dtype == tester.advantages.dtype == torch.float32
    # the report's table is what was measured: an unreadable test is passed by nobody
    passes = [[1, 1, 1, 1, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]
    for batch in (coder, tester):
        tables = [note.get("table") for note in batch.notes]
        assert tables == [{"passes": passes, "own": 2}, None, None]
        assert [note["rewards"]["total"] for note in batch.notes] == batch.rewards.tolist()
    # of what can be read: x*2 fails 5 -> 7 and passes 2 -> 4
    expected = {"coder/accuracy": 1 / 3, "coder/parsed": 2 / 3, "coder/total_reward": 0.5}
    expected |= {"tester/accuracy": 2 / 3, "tester/parsed": 2 / 3, "tester/total_reward": 0.5 / 3}
    expected |= {"coder/frac_reward_zero_std": 0, "tester/frac_reward_zero_std": 0}
    expected |= {"tester/p01": 0.5, "co/tasks_with_a_right_program": 1}
    assert logged(trainer) == pytest.approx(expected)


def test_flat_groups_and_a_task_without_a_correct_program_teach_nothing(sandbox):
    trainer, coder, tester = play(sandbox, [code("x*2"), code("x"), code("x")], [RIGHT] * 3)
    assert coder.advantages.tolist() == by_hand([0.5, 0.0, 0.0])
    assert tester.rewards.isnan().all() and tester.advantages.tolist() == [0.0] * 3
    assert logged(trainer)["co/tasks_with_a_right_program"] == 0.0
    assert not {"tester/accuracy", "tester/p01", "tester/p00"} & logged(trainer).keys()
    tests = [RIGHT, written_test("5", "8"), "no test"]
    _, coder, tester = play(sandbox, [code("x+2")] * 3, tests)
    assert coder.rewards.tolist() == [1.0] * 3 and coder.advantages.tolist() == [0.0] * 3
    assert tester.advantages.tolist() == by_hand([1.0, -1.0, -1.0])
    # nothing can be read
    trainer, coder, _ = play(sandbox, ["no program"] * 3, ["no test"] * 3)
    assert coder.rewards.tolist() == coder.advantages.tolist() == [0.0] * 3
    assert logged(trainer)["coder/parsed"] == logged(trainer)["tester/parsed"] == 0


def test_the_ablations_reach_the_advantages(sandbox):
    tests = [RIGHT, WEAK, written_test("2", "5")]
    simple = play(sandbox, PROGRAMS, tests, tester_reward="simple")[2]
    assert simple.rewards.tolist() == [1.0, 1.0, 0.0]
    assert simple.advantages.tolist() == by_hand([1.0, 1.0, 0.0])
    # a good test that is 6 tokens longer than the other: rhat = (-3, 3, -3), the gain doubled
    short = play(sandbox, PROGRAMS, [RIGHT + " " * 6, RIGHT, tests[2]], short_tests=True)[2]
    assert short.rewards.tolist() == [1.0, 1.0, 0.0]
    assert short.advantages.tolist() == by_hand([-3, 6, -3])


# ------------------------------------------------------------------ functions
TASK = "Add 2.\nassert add(1) == 3"
ADD = {"question": TASK, "tests": ["assert add(1) == 3", "assert add(2) == 4"]}


def test_a_step_on_functions(sandbox):
    """One correct program, one that knows the test which is shown, one that equals everything. A
    test that repeats the shown one counts as unreadable, so it earns the worst.
    """
    equal = "class E(int):\n    __eq__ = lambda *_: True\ndef add(x): return E()"
    bodies = ["def add(x): return x + 2", "def add(x): return 3", equal]
    tests = ["Try 5.\nassert add(5) == 7", "assert add(9) == 3", "assert add( 1 ) == 3"]
    texts = {"coder": [f"```python\n{body}\n```" for body in bodies], "tester": tests}
    trainer = bare(sandbox, texts)
    coder, tester = trainer.step([ADD | {"prompt": cure.code_prompt(TASK)}] * 3)
    asked = [("coder", f"Task: {TASK}\nWrite the function.")] * 3
    assert trainer.asked == asked + [("tester", f"Task: {TASK}\nWrite a test.")] * 3
    assert coder.rewards.tolist() == [1.0, 0.5, 0.0]
    assert tester.rewards.tolist() == [1.0, -0.5, -1.0]
    passes = [[1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    assert coder.notes[0]["table"] == {"passes": passes, "own": 2}


def test_worked_examples_are_right(sandbox):
    """Read by the script's own parsers: each program and each test of it holds."""
    for asked, (_, program), (question, test) in zip(
        (cure.SPREAD, cure.INITIAL), cure.PROGRAMS, cure.TESTS
    ):
        task = asked.removeprefix("Task: ")
        assert question == cure.test_prompt(task)[-1]["content"]
        tests = [task.splitlines()[-1], cure.parse_test(test, task)]
        (table,) = bare(sandbox).run_tables([([cure.parse_program(program)], tests)], {})
        assert table.tolist() == [[True, True]]


# ------------------------------------------------------------------ evaluation
def figures_by_loops(found, row, now, base, tests, passes):
    """Adds a task's values to `found`. What is None cannot be read, and passes nothing. mu is the
    mean of X over pairs of a wrong program and a test: 1 where it fails a right one, -1 where it
    passes a wrong one.
    """

    def is_right(program) -> bool:
        return all(passes(program, given) for given, _ in row["tests"][:2])

    def score(program, size: int) -> int:
        return sum(passes(program, test) for test in tests[:size])

    n, right = len(now), [p for p in base if is_right(p)]
    wrong = [p for p in base if not is_right(p)]
    found["co/precision"] += [score(p, n) > score(q, n) for p in right for q in wrong]
    for size in {min(4, n), n}:
        best = max(now[:size], key=lambda program: score(program, size))
        found[f"co/best_of_{size}"].append(is_right(best))
    found["coder/accuracy"] += map(is_right, now)
    found["coder/parsed"] += [program is not None for program in now]
    found["tester/parsed"] += [test is not None for test in tests]
    judges = [row["reference"]] if is_right(row["reference"]) else right
    found["co/tasks_with_an_oracle"].append(bool(judges))
    if not judges:
        return
    good = [all(passes(program, test) for program in judges) for test in tests]
    found["tester/accuracy"] += good
    for programs, of in ((now, ""), (base, "_base")):
        wrong = [p for p in programs if p is not None and not is_right(p)]
        pairs = [(passes(p, t), t, g) for p in wrong for t, g in zip(tests, good)]
        found[f"tester/p01{of}"] += [passed for passed, _, g in pairs if g]
        found[f"tester/p00{of}"] += [passed for passed, t, g in pairs if t and not g]
    if wrong:  # of the base
        mu = mean([1 - passed if g else -passed for passed, _, g in pairs])
        found["co/mu"].append(mu)
        found["co/precision_bound"].append(1 - math.exp(-(max(0, mu) ** 2) * n / 8))


@pytest.mark.parametrize("seed", range(60))
def test_figures_equal_the_loops(seed):
    """On three tasks. The first programs are the base's, of which only those of now differ; which
    tests are right does not depend on them. What is not defined is not shown.
    """
    rng = random.Random(seed)
    n, share = rng.randint(2, 6), rng.choice([0.5, 0.8, 0.95])

    def written(name: str) -> list[list]:
        return [[rng.choice([f"{name} {i} {k}"] * 4 + [None]) for k in range(n)] for i in range(3)]

    def passes(program, test) -> bool:
        return bool(program and test) and random.Random(f"{seed} {program} {test}").random() < share

    def run_tables(tasks, runs):
        return [
            torch.tensor([[passes(p, t and t[0].strip()) for t in tests] for p in programs]).bool()
            for programs, tests in tasks
        ]

    def say(player, user, greedy, before):
        item = texts[player][int(user[7])][before]  # Task: q0
        form = "```python\n%s\n```" if player == "coder" else "**Test Input:**%s**Test Output:**1"
        return form % item if item else "?"

    rows = [{"question": f"q{i}"} for i in range(3)]
    for i, row in enumerate(rows):
        row["reference"] = rng.choice(["", f"reference {i}"])
        row["tests"] = [(f"own {i} {k}", "1") for k in range(3)]
    trainer = answering(say, eval_samples=n, own_tests=2)
    trainer.run_tables, base, tests = run_tables, written("base"), written("test")
    for now in (base, written("now")):
        texts = {"coder": now, "tester": tests}
        figures, found = cure.evaluate(trainer, rows), defaultdict(list)
        for task in zip(rows, now, base, tests):
            figures_by_loops(found, *task, passes)
        assert figures == pytest.approx({name: mean(v) for name, v in found.items() if v})
        assert trainer.saved == {"base_programs": base}
