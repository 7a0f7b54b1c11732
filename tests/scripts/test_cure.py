"""cure.py: both rewards against for-loops, the theorem against simulation, hostile completions, the
step with completions that are given, runs."""

import json
import math
from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import cure  # not its names: pytest would collect tester_rewards as a test
from common.cotrainer import Player
from common.sandbox import Sandbox

import numpy as np
import pytest
import torch
from conftest import refused, small, weights


def table(text: str) -> torch.Tensor:
    """ "101 010" -> two programs, three tests."""
    return torch.tensor([[c == "1" for c in row] for row in text.split()])


def random_tables(seed: int):
    rng = np.random.default_rng(seed)
    N, t, M = rng.integers(1, 9), rng.integers(1, 5), rng.integers(1, 9)
    own = torch.tensor(rng.random((N, t)) < rng.choice([0.3, 0.7, 0.95]))
    return own, torch.tensor(rng.random((N, M)) < rng.choice([0.2, 0.5, 0.9]))


# ------------------------------------------------------------------ the tester's reward
def test_reward_is_the_estimate_of_mu_test_by_test():
    """mu = p_u (1 - p01) - (1 - p_u) p00 with the estimators of section 3.2, in plain loops."""
    both = 0
    for seed in range(1000):
        own, unit = random_tables(seed)
        right = [j for j in range(len(own)) if all(own[j])]
        wrong = [j for j in range(len(own)) if j not in right]
        rewards = cure.tester_rewards(own, unit)
        if not right:
            assert rewards is None
            continue
        if not wrong:
            assert rewards.tolist() == [
                1.0 if all(unit[j, k] for j in right) else -1.0 for k in range(unit.shape[1])
            ]
            continue
        both += 1
        for k in range(unit.shape[1]):
            p_u = float(all(unit[j, k] for j in right))
            failing = sum(not unit[j, k] for j in wrong) / len(wrong)
            passing = sum(bool(unit[j, k]) for j in wrong) / len(wrong)
            assert rewards[k].item() == pytest.approx(
                p_u * failing - (1 - p_u) * passing, abs=1e-12
            )
    assert both > 200


def test_equation_4_as_printed_would_never_be_positive():
    """The product over ALL programs is zero as soon as one is wrong: so it is over correct ones."""
    positive = 0
    for seed in range(300):
        own, unit = random_tables(seed)
        right = own.all(1)
        if right.all() or not right.any():
            continue
        product = (right[:, None] & unit).all(0)  # I_l * B[l, k] over all l
        assert not product.any()
        positive += bool((cure.tester_rewards(own, unit) > 0).any())
    assert positive > 50


# programs 0 and 1 are right, 2 and 3 are wrong
OWN = table("11 11 10 00")


@pytest.mark.parametrize(
    ("column", "reward"),
    [
        ("1100", 1.0),  # all right ones pass, no wrong one does
        ("1110", 0.5),
        ("1111", 0.0),  # right, but tells nothing apart
        ("0000", 0.0),  # wrong, and nobody is misled
        ("0010", -0.5),
        ("0011", -1.0),
        ("1011", -1.0),  # one right program fails: wrong
        ("1000", 0.0),
    ],
)
def test_edge_cases_of_one_test(column, reward):
    unit = torch.tensor([[c == "1"] for c in column])
    assert cure.tester_rewards(OWN, unit).tolist() == [reward]
    assert cure.tester_rewards(OWN, unit, "simple").tolist() == [float(column.startswith("11"))]


def test_edge_cases_of_a_task():
    unit = table("10 10 10")
    assert cure.tester_rewards(table("10 01 00"), unit) is None  # nobody is right
    assert cure.tester_advantages(table("10 01 00"), unit) is None
    assert cure.tester_rewards(table("1 1 1"), unit).tolist() == [1.0, -1.0]  # everybody is right
    assert cure.tester_advantages(table("1 1 1"), unit).tolist() == [1.0, -1.0]
    assert (
        cure.tester_advantages(table("1 1 0"), table("11 11 11")) is None
    )  # all tests equally good
    assert (
        cure.tester_advantages(table("1 1 0"), table("00 00 00")) is None
    )  # -0.0 and 0.0 are equal
    assert (
        cure.coder_advantages(table("1 1 1")) is None
        and cure.coder_advantages(table("10 01 10")) is None
    )


def test_advantages_are_normalised_with_the_population_std_and_no_epsilon():
    for seed in range(200):
        own, unit = random_tables(seed)
        for advantages, rewards in (
            (cure.coder_advantages(own), cure.coder_rewards(own)),
            (cure.tester_advantages(own, unit), cure.tester_rewards(own, unit)),
        ):
            if rewards is None or len(set(rewards.tolist())) == 1:
                assert advantages is None
                continue
            r = rewards.numpy()
            expected = (r - sum(r) / len(r)) / math.sqrt(
                sum((x - sum(r) / len(r)) ** 2 for x in r) / len(r)
            )
            assert np.allclose(advantages.numpy(), expected, atol=1e-12)


def test_p01_and_p00_carry_the_right_names():
    right, good = torch.tensor([True, False, False]), torch.tensor([True, True, False])
    unit = table("110 101 001")
    # programs 1 and 2 are wrong: of 4 cells on right tests one is passed, of 2 on the wrong both
    found = cure.reward_precision(unit, right, good, ["p"] * 3, ["t"] * 3)
    assert found["p01"] == [True, False, False, False] and found["p00"] == [True, True]
    none_wrong = cure.reward_precision(unit, torch.tensor([True] * 3), good, ["p"] * 3, ["t"] * 3)
    assert none_wrong == {"p01": [], "p00": [], "mu": []}
    # what cannot be read is left out: program 2, and test 2 of the wrong ones
    found = cure.reward_precision(unit, right, good, ["p", "p", None], ["t", "t", None])
    assert found["p01"] == [True, False] and found["p00"] == []


def test_mu_is_the_margin_of_theorem_3_1():
    """The mean of X over pairs of a wrong program and a test, in plain loops: 1 where it fails a
    right one, -1 where it passes a wrong one. It is p_u (1 - p01) - (1 - p_u) p00."""
    checked = 0
    for seed in range(300):
        own, unit = random_tables(seed)
        rng = np.random.default_rng(seed + 1)
        N, M = unit.shape
        good = torch.tensor(rng.random(M) < 0.5)
        found = cure.reward_precision(unit, own.all(1), good, ["p"] * N, ["t"] * M)
        wrong = [j for j in range(N) if not all(own[j])]
        X = [
            (1 - int(unit[j, k])) if good[k] else -int(unit[j, k]) for j in wrong for k in range(M)
        ]
        assert len(found["mu"]) == (M if wrong else 0)
        if wrong:
            mu = sum(found["mu"]) / M
            assert mu == pytest.approx(sum(X) / len(X), abs=1e-12)
        if found["p01"] and found["p00"]:
            checked += 1
            p_u, (p01, p00) = good.double().mean(), (np.mean(found[n]) for n in ("p01", "p00"))
            assert mu == pytest.approx(float(p_u * (1 - p01) - (1 - p_u) * p00), abs=1e-12)
    assert checked > 150


def test_theorem_3_1_holds_for_the_mu_that_is_measured():
    """P(a right program passes more of m tests than a wrong one) >= 1 - exp(-mu^2 m / 8)."""
    rng, many = np.random.default_rng(0), 20_000
    for p_u, p01, p00, m in ((0.8, 0.3, 0.1, 16), (0.6, 0.5, 0.2, 64), (0.9, 0.2, 0.3, 8)):
        good = rng.random(many) < p_u  # what the right program passes
        wrong = rng.random(many) < np.where(good, p01, p00)
        unit, right = torch.tensor(np.stack([good, wrong])), torch.tensor([True, False])
        found = cure.reward_precision(unit, right, torch.tensor(good), ["p"] * 2, ["t"] * many)
        mu = np.mean(found["mu"])
        assert mu == pytest.approx(p_u * (1 - p01) - (1 - p_u) * p00, abs=0.02)
        drawn = rng.integers(many, size=(many, m))
        measured = (good[drawn].sum(1) > wrong[drawn].sum(1)).mean()
        assert 0 < 1 - math.exp(-(mu**2) * m / 8) <= measured


# ------------------------------------------------------------------ long reasoning
def test_shorter_is_better_against_the_printed_formula():
    rng, shaped_groups = np.random.default_rng(0), 0
    for _ in range(300):
        M = rng.integers(2, 12)
        r, length = rng.normal(size=M), rng.integers(5, 60, size=M)
        r -= r.mean()
        if not (r > 0).any():
            continue
        good = sorted(length[j] for j in range(M) if r[j] > 0)
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
        assert abs(ours.sum().item()) < 1e-9
    assert shaped_groups > 150


# ------------------------------------------------------------------ parsing
@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("a\n```python\nprint(1)\n``` no\n```python\nprint(2)\n```\nend", "print(2)"),  # the last
        ("```python\nprint(1)\n```\n```python\nprint(2)", "print(1)"),  # cut at the length limit
        ("use ```python print(1)```, so", "print(1)"),  # inside of a line
        ("1.\n   ```python\n   print(1)\n   ```", "print(1)"),  # indented
        ("```python\r\nx = 1\r\nprint(x)\r\n```", "x = 1\r\nprint(x)"),
        ("```python\nprint('```')\n```", "print('"),  # the next fence ends it, wherever it stands
        ("```\n```python\nprint(1)\n```\n```", "print(1)"),  # nested
        ("```python  \nx\n```", "x"),
        ("```\nprint(1)\n```", None),
        ("```Python\nprint(1)\n```", None),
        ("``` python\nprint(1)\n```", None),
        ("print(1)", None),
        ("```python\n   \n```", None),
        ("```python```", None),
        ("```python\nprint(1)", None),
        ("", None),
    ],
)
def test_parse_program(text, program):
    assert cure.parse_program(text) == program


def written_test(given="3\n", expected="7\n", mark=""):
    fence = f"```{mark}\n"
    return (
        f"**Test Input:**\n{fence}{given}```\n**Test Output:**\n{fence}{expected}```\n"
        f"**Explanation:** x"
    )


@pytest.mark.parametrize(
    ("text", "test"),
    [
        (written_test(), ("3\n", "7\n")),
        (written_test(mark="plaintext"), ("3\n", "7\n")),
        (written_test(mark="text"), ("3\n", "7\n")),
        (written_test("1\n") + "\nbetter:\n" + written_test("2\n"), ("2\n", "7\n")),  # the last one
        (written_test(given=""), ("\n", "7\n")),  # a program may read nothing
        (written_test(given="1\\n2"), ("1\n2\n", "7\n")),  # a written backslash-n is a new line
        (written_test().replace("\n", "\r\n"), ("3\n", "7\n")),
        (written_test().replace("```", "  ```"), ("3\n  \n", "7\n  \n")),  # indented
        (written_test().replace("**Test O", "---\nthen\n**Test O"), ("3\n", "7\n")),
        ("**Test Input:** ```3``` **Test Output:** ```7```", ("3\n", "7\n")),  # inside of a line
        (written_test().replace("```\n", ""), ("3\n", "7\n")),  # without fences
        ("**Test Input:**\n1\n2\n\n**Test Output:** 3", ("1\n2\n", "3\n")),  # to the end
        (written_test(given="```\n3\n```\n"), ("\n", "7\n")),  # nested: the next fence ends it
        # a heading that is only spoken of, and a second test that is cut: with fences the last
        # block counts, and an input belongs to the output behind it
        (written_test() + " so the **Test Output:** is 7", ("3\n", "7\n")),
        (written_test() + "\n**Test Input:**\n```\n5\n```\n", ("3\n", "7\n")),
        ("**Test Input:** 1 **Test Output:** 2 **Test Input:** 3", ("1\n", "2\n")),
        # a fence that is not closed, or that is hidden in prose
        ("**Test Input:** 1\n**Test Output:**\n```\n7\n", None),
        (written_test().replace("Input:**\n", "Input:**\nHere it is:\n"), None),
        (written_test(expected=""), None),  # programs that print nothing would pass
        (written_test(expected=" \n \n"), None),
        (written_test().replace("Output", "Result"), None),
        (written_test().replace("**", ""), None),
        (written_test().split("**Test Output")[0], None),
        ("**Test Output:**\n```\n7\n```\n**Test Input:**\n```\n3\n```", None),
        (written_test()[:-25], None),  # cut at the length limit
        ("Timeout Error", None),
        ("", None),
        (
            "**Test Input:** ```1``` hm, no. " + written_test("2\n", "3\n"),
            ("2\n", "3\n"),
        ),  # a draft is not part of it
        (
            "**Test Input:**\n```\n1\n```\n**Test Output:**\n4, so\n" + written_test("2\n", "3\n"),
            ("2\n", "3\n"),
        ),
    ],
)
def test_parse_test(text, test):
    assert cure.parse_test(text) == test


def test_completions_of_one_piece_repeated_end_in_something_sound():
    """At any length every search goes through the text once."""
    pieces = "**Test Input:**,**Test Output:**,**Explanation:,```,```python,plaintext,\n,\r\n,\\n, "
    for first, piece in product(["", *pieces.split(",")], pieces.split(",")):
        text = first + piece * (60_000 // len(piece))
        program = cure.parse_program(text)
        assert program is None or program in text and program.strip()
        for test in (cure.parse_test(text), cure.parse_test(text + written_test())):
            assert test is None or test[1].strip() and all(part[-1] == "\n" for part in test)


# ------------------------------------------------------------------ the table and the step
@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(2, unsafe=True) as sandbox:
        yield sandbox


def bare(sandbox, **change):
    """A trainer without a model: what `step` needs beside rollouts."""
    trainer = cure.Cure.__new__(cure.Cure)
    trainer.cfg, trainer.sandbox = cure.Args(group_size=3, **change), sandbox
    trainer.runs, trainer.memory, trainer._means = {}, {}, defaultdict(list)
    trainer.players = {name: Player([], 1e-3, 64, 3, 1.0, "policy") for name in ("coder", "tester")}
    trainer.accelerator = SimpleNamespace(process_index=0, num_processes=1)
    trainer.gather = lambda values: values
    return trainer


def play(trainer, programs: list[str], tests: list[str], lengths=(4, 4, 4)):
    """`step` on the task x + 2, own tests 1 -> 3 and 2 -> 4, with these completions."""
    prompts, texts = {}, {"coder": programs, "tester": tests}

    def rollout(name, rows):
        prompts[name] = [row["prompt"] for row in rows]
        return {
            "player": name,
            "texts": texts[name],
            "rewards": torch.zeros(len(rows)),
            "completion_mask": (torch.arange(9) < torch.tensor(lengths)[:, None]).long(),
            "notes": [{"player": name, "rewards": {}} for _ in rows],
        }

    trainer.rollout = rollout
    row = {"question": "x+2", "test_input": ["1\n", "2\n"], "test_output": ["3\n", "4"]}
    coder, tester = trainer.step([{**row, "prompt": cure.code_prompt("x+2")}] * 3)
    assert (coder["player"], tester["player"]) == ("coder", "tester")
    assert prompts == {
        "coder": [cure.code_prompt("x+2")] * 3,
        "tester": [cure.test_prompt("x+2")] * 3,
    }
    return coder, tester


def code(expression):
    return f"```python\nx=int(input())\nprint({expression})\n```"


def by_hand(rewards):
    r = np.array(rewards)
    return pytest.approx((r - r.mean()) / r.std(), abs=1e-6)


# one correct program, one that is correct at 2 only, one that cannot be read
PROGRAMS = [code("x+2"), code("x*2"), "print(x+2)"]


def test_a_step_on_real_runs(sandbox):
    trainer = bare(sandbox)
    tests = [written_test("5\n", "7\n"), written_test("2\n", "4\n"), "no test"]
    coder, tester = play(trainer, PROGRAMS, tests)
    assert coder["rewards"].tolist() == [1.0, 0.5, 0.0]
    assert coder["advantages"].tolist() == by_hand([1.0, 0.5, 0.0])
    # right, and both wrong programs fail; right, passed by one of two; not readable: the worst
    assert tester["rewards"].tolist() == [1.0, 0.5, -1.0]
    assert tester["advantages"].tolist() == by_hand([1.0, 0.5, -1.0])
    assert coder["advantages"].dtype == tester["advantages"].dtype == torch.float32
    # the report's table is what was measured: an unreadable test is passed by nobody
    passes = [[1, 1, 1, 1, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]
    for batch in (coder, tester):
        assert [note.get("table") for note in batch["notes"]] == [
            {"passes": passes, "own": 2},
            None,
            None,
        ]
        assert [note["rewards"]["total"] for note in batch["notes"]] == batch["rewards"].tolist()
    assert "passes 100% of the task's tests" in trainer.example and "reward 1.00" in trainer.example
    wrong = written_test("2\n", "5\n")
    assert play(trainer, PROGRAMS, [tests[0]] * 2 + [wrong])[1]["rewards"].tolist() == [1, 1, 0]


def test_a_task_without_a_correct_program_teaches_the_tester_nothing(sandbox):
    trainer = bare(sandbox)
    coder, tester = play(trainer, [code("x*2"), code("x"), code("x")], [written_test("5\n")] * 3)
    assert coder["advantages"].tolist() == by_hand([0.5, 0.0, 0.0])
    assert tester["rewards"].tolist() == tester["advantages"].tolist() == [0.0] * 3
    assert trainer._means["co/tasks_with_a_right_program"] == [0.0]
    assert not {"tester/accuracy", "tester/p01", "tester/p00"} & trainer._means.keys()


def test_equally_good_programs_teach_the_coder_nothing(sandbox):
    tests = [written_test("5\n", "7\n"), written_test("5\n", "8\n"), "no test"]
    coder, tester = play(bare(sandbox), [code("x+2")] * 3, tests)
    assert coder["rewards"].tolist() == [1.0] * 3 and coder["advantages"].tolist() == [0.0] * 3
    assert tester["advantages"].tolist() == by_hand([1.0, -1.0, -1.0])


def test_the_ablations_reach_the_advantages(sandbox):
    tests = [written_test("5\n", "7\n"), written_test("2\n", "4\n"), written_test("2\n", "5\n")]
    simple = play(bare(sandbox, tester_reward="simple"), PROGRAMS, tests)[1]
    assert simple["rewards"].tolist() == [1.0, 1.0, 0.0]
    assert simple["advantages"].tolist() == by_hand([1.0, 1.0, 0.0])
    # two good tests of 9 and 3 tokens: T = 6, l_max = 9, rhat = (-3, 3, -3), the gain doubled
    tests[1] = tests[0]
    plain, short = (
        play(bare(sandbox, short_tests=flag), PROGRAMS, tests, lengths=(9, 3, 5))[1]
        for flag in (False, True)
    )
    assert plain["rewards"].tolist() == short["rewards"].tolist() == [1.0, 1.0, 0.0]
    assert plain["advantages"].tolist() == by_hand([1.0, 1.0, 0.0])
    assert short["advantages"].tolist() == by_hand([-3, 6, -3])


def test_a_pair_that_occurs_twice_is_run_once(sandbox):
    class Counting:
        def run(self, programs, inputs, *limits, **more):
            self.pairs = list(zip(programs, inputs))
            return sandbox.run(programs, inputs, *limits, **more)

    counting = Counting()
    trainer = bare(counting)
    program, other = "print(int(input())+1)", "print(int(input())+2)"
    tables = trainer.run_tables(
        [[program, program, None], [other]], [[("1\n", "2"), ("1\n", "3"), None], [("1\n", "3")]]
    )
    assert len(counting.pairs) == 2
    trainer.run_tables([[program]], [[("1\n", "9"), ("2\n", "3")]])  # a known input and a new one
    assert counting.pairs == [(program, "2\n")]
    assert tables[0].tolist() == [[True, False, False]] * 2 + [[False] * 3]
    assert tables[1].tolist() == [[True]]


def test_a_process_without_a_share_of_the_tasks_runs_nothing(sandbox):
    trainer = bare(sandbox)
    assert trainer.run_tables([], []) == trainer.run_all([], []) == []


def test_what_a_runner_says_is_no_output(sandbox):
    """An expected output that reads like an error message is not passed by a program that fails."""
    trainer = bare(sandbox, time_limit=0.5)
    programs = ["1/0", "while True: pass", "import sys; sys.exit(1)"]
    expected = ["error: division by zero", "Timeout Error", "ZeroDivisionError", "None"]
    assert not trainer.run_tables([programs], [[("", text) for text in expected]])[0].any()


def test_tolerance(sandbox):
    program = "print(7.0)"
    assert not bare(sandbox).run_tables([[program]], [[("", "7")]])[0].any()
    assert bare(sandbox, tolerance=1e-6).run_tables([[program]], [[("", "7")]])[0].all()


def test_a_program_that_floods_its_output_passes_nothing(sandbox):
    trainer = bare(sandbox)
    table = trainer.run_tables([["print('7 ' * 10**5)"]], [[("", "7 " * 10**5)]])[0]
    assert not table.any()
    assert sum(len(result.output) for result in trainer.runs.values()) == 0


def test_what_cannot_be_read_is_no_wrong_test(sandbox):
    """p00 is about tests that can be read: else it would fall with every lost format."""
    trainer = bare(sandbox)
    tests = [written_test("2\n", "4\n"), written_test("3\n", "6\n"), "none"]
    play(trainer, [code("x+2"), code("x*2"), code("x*2")], tests)
    logged = {name: value for name, (value,) in trainer._means.items()}
    # x*2 passes the right 2 -> 4 and the wrong 3 -> 6
    assert logged["tester/p01"] == 1.0 and logged["tester/p00"] == 1.0
    assert logged["tester/accuracy"] == pytest.approx(1 / 3)
    assert logged["tester/parsed"] == pytest.approx(2 / 3)
    assert logged["coder/accuracy"] == pytest.approx(1 / 3) and logged["coder/parsed"] == 1.0
    assert logged["coder/total_reward"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert logged["co/tasks_with_a_right_program"] == 1.0


# ------------------------------------------------------------------ evaluation
RIGHT, TWICE = "print(int(input())+2)", "print(int(input())*2)"


def held_out_figures(sandbox, program, test, reference=RIGHT, base=None, tasks=1):
    """`evaluate` on tasks x + 2, with given completions: all programs of a task are alike, and so
    are all its tests and all programs of the base. Each of them is a text, or one per task."""
    per_task = [[x] * tasks if isinstance(x, str) else x for x in (program, test, reference, base)]
    program, test, reference, base = per_task
    trainer = bare(sandbox)
    written = [[text] * trainer.cfg.eval_samples for text in base or []]
    trainer.memory = {"base_programs": written} if base else {}

    def generate_all(player, prompts):
        assert len(prompts) == tasks * trainer.cfg.eval_samples
        texts = [code(text) for text in program] if player == "coder" else test
        return [text for text in texts for _ in range(trainer.cfg.eval_samples)]

    trainer.generate_all = generate_all
    row = {"question": "x+2", "test_input": ["1", "5"], "test_output": ["3", "7"]}
    figures = cure.evaluate(trainer, [{**row, "reference": known} for known in reference])
    own = [[f"x=int(input())\nprint({text})"] * trainer.cfg.eval_samples for text in program]
    assert trainer.memory == {"base_programs": written or own}
    return figures


def test_what_is_not_defined_is_not_shown(sandbox):
    right, wrong = written_test("2\n", "4\n"), written_test("2\n", "5\n")
    figures = held_out_figures(sandbox, "x+2", right)  # the base has no wrong program
    rates = {"tester/p01", "tester/p00", "tester/p00_base"}
    assert figures["tester/accuracy"] == 1.0
    assert not (rates | {"tester/p01_base", "co/mu", "co/precision"}) & figures.keys()
    # these pass 2 -> 4; there is no wrong test and no correct program of the base
    figures = held_out_figures(sandbox, "x+2", right, base=TWICE)
    assert figures["tester/p01_base"] == 1.0 and figures["co/mu"] == 0.0
    assert not (rates | {"co/precision"}) & figures.keys()
    figures = held_out_figures(sandbox, "x+2", wrong, base=TWICE)
    assert figures["tester/p00_base"] == 0.0 and "tester/p01_base" not in figures
    assert figures["co/best_of_4"] == 1.0


def test_p01_is_about_the_programs_of_now_and_p01_base_about_the_bases(sandbox):
    twice = "x*2"  # passes the right 2 -> 4 and the wrong 1 -> 2
    figures = held_out_figures(sandbox, twice, written_test("2\n", "4\n"), base="print(0)")
    assert figures["tester/p01"] == 1.0 and figures["tester/p01_base"] == 0.0
    assert "tester/p00" not in figures and figures["co/mu"] == 1.0
    figures = held_out_figures(sandbox, twice, written_test("1\n", "2\n"), base="print(0)")
    assert figures["tester/p00"] == 1.0 and figures["tester/p00_base"] == 0.0
    assert "tester/p01" not in figures


ABOUT_TESTS = {f"tester/{name}" for name in ("accuracy", "p01", "p00", "p01_base", "p00_base")}
ABOUT_TESTS |= {"co/mu", "co/precision_bound"}


@pytest.mark.parametrize("reference", ["print(0)", "Add two to it.", ""])
@pytest.mark.parametrize("program", ["x+2", "x*2", "0"])
def test_which_tests_are_right_does_not_depend_on_the_coder_of_now(sandbox, program, reference):
    """Without a reference that passes its own tests, the base's correct programs decide; without
    these nobody does, and the task is left out: no test of it is called wrong."""
    right, wrong = written_test("2\n", "4\n"), written_test("2\n", "0\n")
    figures = [
        held_out_figures(sandbox, program, test, reference, base=RIGHT) for test in (right, wrong)
    ]
    assert [row["tester/accuracy"] for row in figures] == [1.0, 0.0]
    assert [row["co/tasks_with_an_oracle"] for row in figures] == [1.0, 1.0]
    for test in (right, wrong):
        figures = held_out_figures(sandbox, program, test, reference, base="print(0)")
        assert figures["co/tasks_with_an_oracle"] == 0.0 and not ABOUT_TESTS & figures.keys()
        assert figures["coder/accuracy"] == float(program == "x+2")
        assert figures["tester/parsed"] == 1.0


def test_tests_choose_among_the_programs_of_a_task(sandbox):
    """2 tasks, of whose 5 programs 3 are right; one right program is worth as much to the first
    task's tests, one of them wrong, as a wrong one that comes first."""
    programs = ["x*2", "x+2", "x+2", "0", "x+2"]
    right, also_right, wrong = (written_test(*x) for x in (("2", "4"), ("5", "7"), ("5", "10")))
    tests = [[right, also_right, right, "none", wrong], [right, *[also_right] * 2, "none"]]
    tests[1] += [also_right]
    trainer = bare(sandbox)
    trainer.cfg.eval_samples, trainer.memory = 5, {}
    texts = {"coder": [code(text) for text in programs] * 2, "tester": sum(tests, [])}
    trainer.generate_all = lambda player, prompts: texts[player]
    row = {"question": "x+2", "test_input": ["1", "5"], "test_output": ["3", "7"]}
    figures = cure.evaluate(trainer, [{**row, "reference": RIGHT}] * 2)
    assert figures["coder/accuracy"] == 6 / 10 and figures["tester/accuracy"] == 7 / 10
    # the first four tests choose the right program; with the wrong one there is a tie
    assert figures["co/best_of_4"] == 1.0 and figures["co/best_of_5"] == 0.5
    # right programs pass 3 and 4 tests, wrong ones 3 and 0, and 1 and 0
    assert figures["co/precision"] == (3 + 6) / 12


def test_a_task_without_an_oracle_changes_no_figure_of_the_tester(sandbox):
    """Its tests can be read, and its wrong programs pass them: they would have fed p00."""
    tests = [written_test("2\n", "4\n"), written_test("5\n", "9\n"), written_test("2\n", "4\n")]
    programs, references, base = ["x*2"] * 3, [RIGHT, RIGHT, ""], [TWICE, "print(9)", TWICE]
    both = held_out_figures(sandbox, programs, tests, references, base, tasks=3)
    known = held_out_figures(sandbox, programs[:2], tests[:2], references[:2], base[:2], tasks=2)
    assert ABOUT_TESTS <= known.keys()
    assert {key: both[key] for key in ABOUT_TESTS} == {key: known[key] for key in ABOUT_TESTS}
    assert both["co/tasks_with_an_oracle"] == pytest.approx(2 / 3)
    # mu: 0, a right test that the base's programs pass; -1, a wrong one that they pass
    assert both["tester/accuracy"] == 0.5 and both["co/mu"] == -0.5


def test_precision_bound_is_the_mean_of_the_tasks_bounds(sandbox):
    """mu is 1 and 0 here: 1 - exp(-1 * 16 / 8) and 0; at their mean it would be another value."""
    tests = [written_test("2\n", "4\n")] * 2
    figures = held_out_figures(sandbox, "x+2", tests, base=["print(0)", TWICE], tasks=2)
    assert figures["co/mu"] == 0.5
    assert figures["co/precision_bound"] == pytest.approx((1 - math.exp(-2)) / 2)
    tests = [written_test("1\n", "2\n")] * 2  # wrong, and passed: mu is negative
    figures = held_out_figures(sandbox, "x+2", tests, base=TWICE, tasks=2)
    assert figures["co/mu"] == -1.0 and figures["co/precision_bound"] == 0.0


# ------------------------------------------------------------------ runs
QUICK = "--steps 2 --eval-questions 1 --eval-samples 2".split()


def steps_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "epoch" in row]


def test_a_run_trains_both_roles(finished):
    folder, printed, _ = finished("cure.py")
    rows, names = steps_of(folder), "accuracy parsed total_reward loss entropy kl".split()
    for row in rows:
        assert math.isfinite(row["co/tasks_with_a_right_program"])
        for key in [f"coder/{name}" for name in names] + ["tester/parsed", "tester/total_reward"]:
            assert math.isfinite(row[key]), key
    assert all("coder/grad_norm" in row and "tester/grad_norm" in row for row in rows)
    trained = weights(folder)
    assert all(name.startswith("policy/") for name in trained)
    assert any(tensor.abs().max() > 0 for name, tensor in trained.items() if "lora_B" in name)
    assert "--- the tester" in printed


def test_the_reference_of_the_kl_term_is_the_base(finished):
    """The tester's update follows the coder's: against a reference taken at the update's start its
    KL would be exactly 0."""
    rows = steps_of(finished("cure.py")[0])
    moved = [row for row in rows if row["coder/grad_norm"] > 0]
    assert moved and all(row["tester/kl"] > 0 for row in moved)
    assert rows[0]["coder/kl"] == pytest.approx(0, abs=1e-6) and rows[-1]["coder/kl"] > 0


@pytest.mark.parametrize(
    "flags", ["--tester-reward simple --short-tests", "--kl 0 --own-tests 1 --tolerance 1e-6"]
)
def test_ablations(tmp_path, brief, flags):
    brief("cure.py", *small("cure.py", tmp_path / "run", *QUICK, *flags.split()))
    assert len(steps_of(tmp_path / "run")) == 2
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {key for key in last if "best_of" in key} == {"eval/co/best_of_2"}


def test_a_model_that_never_writes_a_program_is_seen_and_the_run_goes_on(tmp_path, brief):
    limits = "--program-tokens 3 --test-tokens 3".split()
    brief("cure.py", *small("cure.py", tmp_path / "run", *QUICK, *limits))
    rows = steps_of(tmp_path / "run")
    assert len(rows) == 2
    assert all(row["coder/parsed"] == 0 and row["tester/parsed"] == 0 for row in rows)


def test_tasks_from_a_file(tmp_path, brief):
    rows = [
        {
            "question": f"Read x. Then add {i}. Print x mod 100.",
            "test_input": ["1\n", "2\n"],
            "test_output": [f"{(1 + i) % 10}\n", f"{(2 + i) % 10}\n"],
        }
        for i in range(60)
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    flags = ["--dataset", path]
    brief("cure.py", *small("cure.py", tmp_path / "run", *QUICK, *flags))
    assert len(steps_of(tmp_path / "run")) == 2
    path.write_text(json.dumps({"question": "q"}))
    message = refused("cure.py", *small("cure.py", tmp_path / "other", *flags))
    assert "row 1 has no tests" in message
