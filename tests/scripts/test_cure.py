"""cure.py: rewards and theorem 3.1's rates against for-loops, hostile completions, a step and the
evaluation with completions that are given.
"""

import functools
import math
from itertools import product

import cure  # not its names: pytest would collect tester_rewards as a test

import numpy as np
import pytest
import torch
from conftest import steps_of
from trainers import logged, without_model


def random_tables(seed: int):
    rng = np.random.default_rng(seed)
    N, t, M = rng.integers(1, 9), rng.integers(1, 5), rng.integers(1, 9)
    own = torch.tensor(rng.random((N, t)) < rng.choice([0.3, 0.7, 0.95]))
    return own, torch.tensor(rng.random((N, M)) < rng.choice([0.2, 0.5, 0.9]))


# ------------------------------------------------------------------ rewards and advantages
def test_a_tests_reward_is_its_estimate_of_mu():
    """mu = p_u (1 - p01) - (1 - p_u) p00 with the estimators of section 3.2, in plain loops."""
    both = 0
    for seed in range(500):
        own, unit = random_tables(seed)
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
    assert cure.normalised(torch.full((3,), math.nan)).tolist() == [0.0] * 3
    assert cure.normalised(torch.tensor([-0.0, 0.0])).tolist() == [0.0] * 2


def test_shorter_is_better_against_the_printed_formula():
    rng, shaped_groups = np.random.default_rng(0), 0
    for longest in [8, 60] * 200:  # with many equal lengths, too
        M = rng.integers(2, 12)
        r, length = rng.normal(size=M), rng.integers(5, longest, size=M)
        r -= r.mean()
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
    assert shaped_groups > 150
    none_good = torch.zeros(3)
    assert torch.equal(cure.shorter_is_better(none_good, torch.tensor([1, 2, 3])), none_good)


# ------------------------------------------------------------------ theorem 3.1
def test_p01_p00_and_mu_against_loops():
    """mu is the mean of X over pairs of a wrong program and a test: 1 where it fails a right one,
    -1 where it passes a wrong one. What cannot be read is left out of the rates; a test that cannot
    be read adds 0 to mu.
    """
    for seed in range(300):
        own, unit = random_tables(seed)
        rng, M = np.random.default_rng(seed + 1), unit.shape[1]
        programs = [rng.choice(["p", None], p=[0.8, 0.2]) for _ in own]
        good, read = torch.tensor(rng.random((2, M)) < 0.6)
        read |= good
        unit &= read
        tests = [("1", "2") if known else None for known in read]
        found = cure.reward_precision(cure.Ran([programs], [own], [unit]), [tests], {0: good})
        wrong = [row for row, ran, text in zip(unit, own, programs) if text and not all(ran)]
        X = [(1 - int(row[k])) if good[k] else -int(row[k]) for row in wrong for k in range(M)]
        assert found["p01"] == [bool(row[k]) for row in wrong for k in range(M) if good[k]]
        bad = [k for k in range(M) if read[k] and not good[k]]
        assert found["p00"] == [bool(row[k]) for row in wrong for k in bad]
        assert found["mu"] == ([pytest.approx(sum(X) / len(X), abs=1e-12)] if X else [])


# ------------------------------------------------------------------ parsing
def written_test(given="3\n", expected="7\n", mark=""):
    fence = f"```{mark}\n"
    return (
        f"**Test Input:**\n{fence}{given}```\n**Test Output:**\n{fence}{expected}```\n"
        f"**Explanation:** x"
    )


SECOND = written_test("2\n", "3\n")


@pytest.mark.parametrize(
    ("text", "test"),
    [
        (written_test(mark="plaintext"), ("3\n", "7\n")),
        (written_test("1\n") + "\nbetter:\n" + SECOND, ("2\n", "3\n")),  # the last one
        (written_test(given=""), ("\n", "7\n")),  # a program may read nothing
        (written_test(given="1\\n2"), ("1\n2\n", "7\n")),  # a written backslash-n is a new line
        (written_test().replace("\n", "\r\n"), ("3\n", "7\n")),
        ("**Test Input:** ```3``` **Test Output:** ```7```", ("3\n", "7\n")),  # inside of a line
        (written_test().replace("```\n", ""), ("3\n", "7\n")),  # without fences
        ("**Test Input:**\n1\n2\n\n**Test Output:** 3", ("1\n2\n", "3\n")),  # to the end
        (written_test(given="```\n3\n```\n"), ("\n", "7\n")),  # nested: the next fence ends it
        # a heading that is only spoken of, and a second test that is cut: with fences the last
        # block counts, and an input belongs to the output behind it
        (written_test() + " so the **Test Output:** is 7", ("3\n", "7\n")),
        (written_test() + "\n**Test Input:**\n```\n5\n```\n", ("3\n", "7\n")),
        ("**Test Input:** 1 **Test Output:** 2 **Test Input:** 3", ("1\n", "2\n")),
        ("**Test Input:** ```1``` hm, no. " + SECOND, ("2\n", "3\n")),  # a draft is no part of it
        # an unclosed fence, or one that is hidden in prose
        ("**Test Input:** 1\n**Test Output:**\n```\n7\n", None),
        (written_test().replace("Input:**\n", "Input:**\nHere it is:\n"), None),
        (written_test(expected=" \n \n"), None),  # programs that print nothing would pass
        (written_test().replace("Output", "Result"), None),
        (written_test().split("**Test Output")[0], None),
        ("**Test Output:**\n```\n7\n```\n**Test Input:**\n```\n3\n```", None),
        (written_test()[:-25], None),  # cut at the length limit
        ("", None),
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


# ------------------------------------------------------------------ tables
def bare(sandbox, **change):
    """A trainer without a model, which logs as a real one."""
    cfg = cure.Args(group_size=3, **change)
    trainer = without_model(cure.Cure, cfg, sandbox=sandbox)
    trainer.log_mean = functools.partial(cure.Cure.log_mean, trainer)
    return trainer


def test_a_pair_that_occurs_twice_is_run_once(sandbox):
    class Counting:
        def run(self, programs, inputs, **limits):
            self.pairs = list(zip(programs, inputs))
            return sandbox.run(programs, inputs, **limits)

    counting, runs = Counting(), {}
    trainer = bare(counting)
    program, other = "print(int(input())+1)", "print(int(input())+2)"
    three = [("1\n", "2"), ("1\n", "3"), None]
    tasks = [([program, program, None], three), ([other], three[1:2])]
    tables = trainer.run_tables(tasks, runs)
    assert len(counting.pairs) == 2
    trainer.run_tables([([program], [("1\n", "9"), ("2\n", "3")])], runs)  # a known and a new input
    assert counting.pairs == [(program, "2\n")]
    assert tables[0].tolist() == [[True, False, False]] * 2 + [[False] * 3]
    assert tables[1].tolist() == [[True]]
    assert trainer.run_tables([], runs) == []  # a process without a share of the tasks


def test_what_passes(sandbox):
    """Not an expected output that reads like an error, by a program that fails; not a flood."""
    trainer = bare(sandbox, time_limit=0.5)
    programs = ["1/0", "while True: pass", "import sys; sys.exit(1)", "print('7 ' * 10**5)"]
    expected = ["error: division by zero", "Timeout Error", "ZeroDivisionError", "7 " * 10**5]
    assert not trainer.run_tables([(programs, [("", text) for text in expected])], {})[0].any()


# ------------------------------------------------------------------ the step
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
    assert (coder["texts"], tester["texts"]) == (programs, tests)
    both = {"coder": cure.code_prompt("x+2"), "tester": cure.test_prompt("x+2")}
    assert prompts == {name: [prompt] * 3 for name, prompt in both.items()}
    return coder, tester


def code(expression):
    return f"```python\nx=int(input())\nprint({expression})\n```"


# one correct program, one that is correct at 2 only, one that cannot be read
PROGRAMS = [code("x+2"), code("x*2"), "print(x+2)"]
RIGHT, WEAK = written_test("5\n", "7\n"), written_test("2\n", "4\n")


def test_a_step_on_real_runs(sandbox):
    trainer = bare(sandbox)
    coder, tester = play(trainer, PROGRAMS, [RIGHT, WEAK, "no test"])
    assert coder["rewards"].tolist() == [1.0, 0.5, 0.0]
    assert coder["advantages"].tolist() == by_hand([1.0, 0.5, 0.0])
    # right, and both wrong programs fail; right, passed by one of two; not readable: the worst
    assert tester["rewards"].tolist() == [1.0, 0.5, -1.0]
    assert tester["advantages"].tolist() == by_hand([1.0, 0.5, -1.0])
    assert coder["advantages"].dtype == tester["advantages"].dtype == torch.float32
    # the report's table is what was measured: an unreadable test is passed by nobody
    passes = [[1, 1, 1, 1, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]
    for batch in (coder, tester):
        tables = [note.get("table") for note in batch["notes"]]
        assert tables == [{"passes": passes, "own": 2}, None, None]
        assert [note["rewards"]["total"] for note in batch["notes"]] == batch["rewards"].tolist()
    # of what can be read: x*2 fails 5 -> 7 and passes 2 -> 4
    assert logged(trainer) == pytest.approx(
        {
            "coder/accuracy": 1 / 3,
            "coder/parsed": 2 / 3,
            "coder/total_reward": 0.5,
            "coder/frac_reward_zero_std": 0,
            "tester/accuracy": 2 / 3,
            "tester/parsed": 2 / 3,
            "tester/total_reward": 0.5 / 3,
            "tester/frac_reward_zero_std": 0,
            "tester/p01": 0.5,
            "co/tasks_with_a_right_program": 1,
        }
    )


def test_flat_groups_and_a_task_without_a_correct_program_teach_nothing(sandbox):
    trainer = bare(sandbox)
    coder, tester = play(trainer, [code("x*2"), code("x"), code("x")], [RIGHT] * 3)
    assert coder["advantages"].tolist() == by_hand([0.5, 0.0, 0.0])
    assert tester["rewards"].isnan().all() and tester["advantages"].tolist() == [0.0] * 3
    assert logged(trainer)["co/tasks_with_a_right_program"] == 0.0
    assert not {"tester/accuracy", "tester/p01", "tester/p00"} & logged(trainer).keys()
    tests = [RIGHT, written_test("5\n", "8\n"), "no test"]
    coder, tester = play(bare(sandbox), [code("x+2")] * 3, tests)
    assert coder["rewards"].tolist() == [1.0] * 3 and coder["advantages"].tolist() == [0.0] * 3
    assert tester["advantages"].tolist() == by_hand([1.0, -1.0, -1.0])
    trainer = bare(sandbox)  # nothing can be read
    coder, _ = play(trainer, ["no program"] * 3, ["no test"] * 3)
    assert coder["rewards"].tolist() == coder["advantages"].tolist() == [0.0] * 3
    assert logged(trainer)["coder/parsed"] == logged(trainer)["tester/parsed"] == 0


def test_the_ablations_reach_the_advantages(sandbox):
    tests = [RIGHT, WEAK, written_test("2\n", "5\n")]
    simple = play(bare(sandbox, tester_reward="simple"), PROGRAMS, tests)[1]
    assert simple["rewards"].tolist() == [1.0, 1.0, 0.0]
    assert simple["advantages"].tolist() == by_hand([1.0, 1.0, 0.0])
    # two good tests of 9 and 3 tokens: T = 6, l_max = 9, rhat = (-3, 3, -3), the gain doubled
    tests[1] = tests[0]
    short = play(bare(sandbox, short_tests=True), PROGRAMS, tests, lengths=(9, 3, 5))[1]
    assert short["rewards"].tolist() == [1.0, 1.0, 0.0]
    assert short["advantages"].tolist() == by_hand([-3, 6, -3])


# ------------------------------------------------------------------ evaluation
SOLUTION, TWICE = "print(int(input())+2)", "print(int(input())*2)"


def held_out_figures(sandbox, program, test, reference=SOLUTION, base=None, tasks=1):
    """`evaluate` on tasks x + 2, with given completions: all programs of a task are the same, and
    so are all its tests and all programs of the base. Each of them is a text, or one per task."""
    per_task = [[x] * tasks if isinstance(x, str) else x for x in (program, test, reference, base)]
    program, test, reference, base = per_task
    trainer = bare(sandbox)
    n = trainer.cfg.eval_samples
    trainer.saved = {"base_programs": [[text] * n for text in base]} if base else {}

    def generate_all(player, prompts):
        assert len(prompts) == tasks * n
        texts = [code(text) for text in program] if player == "coder" else test
        return [text for text in texts for _ in range(n)]

    trainer.generate_all = generate_all
    row = {"question": "x+2", "test_input": ["1", "5"], "test_output": ["3", "7"]}
    figures = cure.evaluate(trainer, [{**row, "reference": known} for known in reference])
    own = [[f"x=int(input())\nprint({text})"] * n for text in program]
    assert trainer.saved == {"base_programs": [[text] * n for text in base] if base else own}
    return figures


ABOUT_TESTS = {f"tester/{name}" for name in ("accuracy", "p01", "p00", "p01_base", "p00_base")}
ABOUT_TESTS |= {"co/mu", "co/precision_bound"}


@pytest.mark.parametrize(
    "program, test, base, shown",
    [
        ("x+2", ("2", "4"), None, {}),  # the base has no wrong program
        # its wrong ones pass 2 -> 4, and not 2 -> 5
        ("x+2", ("2", "4"), TWICE, {"tester/p01_base": 1, "co/mu": 0}),
        ("x+2", ("2", "5"), TWICE, {"tester/p00_base": 0, "co/mu": 0}),
        # p01 is about the programs of now, which pass the right 2 -> 4 and the wrong 1 -> 2
        ("x*2", ("2", "4"), "print(0)", {"tester/p01": 1, "tester/p01_base": 0, "co/mu": 1}),
        ("x*2", ("1", "2"), "print(0)", {"tester/p00": 1, "tester/p00_base": 0, "co/mu": 0}),
    ],
)
def test_what_is_not_defined_is_not_shown(sandbox, program, test, base, shown):
    figures = held_out_figures(sandbox, program, written_test(*test), base=base)
    rates = ABOUT_TESTS - {"tester/accuracy", "co/precision_bound"} | {"co/precision"}
    assert {name: figures[name] for name in rates & figures.keys()} == shown
    assert figures["co/best_of_4"] == (program == "x+2")


@pytest.mark.parametrize("reference", ["print(0)", ""])
@pytest.mark.parametrize("program", ["x+2", "x*2"])
def test_which_tests_are_right_does_not_depend_on_the_coder_of_now(sandbox, program, reference):
    """Without a reference that passes its own tests, the base's correct programs decide; without
    these nobody does, and the task is left out: no test of it is called right or wrong."""
    for test, is_right in ((WEAK, 1.0), (written_test("2\n", "0\n"), 0.0)):
        figures = held_out_figures(sandbox, program, test, reference, base=SOLUTION)
        assert figures["tester/accuracy"] == is_right
        assert figures["co/tasks_with_an_oracle"] == 1.0
        figures = held_out_figures(sandbox, program, test, reference, base="print(0)")
        assert figures["co/tasks_with_an_oracle"] == 0.0 and not ABOUT_TESTS & figures.keys()
        assert figures["coder/accuracy"] == float(program == "x+2")
        assert figures["tester/parsed"] == 1.0


def test_tests_choose_among_the_programs_of_a_task(sandbox):
    """2 tasks, of whose 5 programs 3 are right; one right program is worth as much to the first
    task's tests, one of them wrong, as a wrong one that comes first."""
    programs = ["x*2", "x+2", "x+2", "0", "x+2"]
    wrong = written_test("5", "10")
    tests = [[WEAK, RIGHT, WEAK, "none", wrong], [WEAK, RIGHT, RIGHT, "none", RIGHT]]
    trainer = bare(sandbox)
    trainer.cfg.eval_samples = 5
    texts = {"coder": [code(text) for text in programs] * 2, "tester": sum(tests, [])}
    trainer.generate_all = lambda player, prompts: texts[player]
    row = {"question": "x+2", "test_input": ["1", "5"], "test_output": ["3", "7"]}
    figures = cure.evaluate(trainer, [{**row, "reference": SOLUTION}] * 2)
    assert figures["coder/accuracy"] == 6 / 10 and figures["tester/accuracy"] == 7 / 10
    # the first four tests choose the right program; with the wrong one there is a tie
    assert figures["co/best_of_4"] == 1.0 and figures["co/best_of_5"] == 0.5
    # right programs pass 3 and 4 tests, wrong ones 3 and 0, and 1 and 0
    assert figures["co/precision"] == (3 + 6) / 12


def test_figures_of_several_tasks(sandbox):
    """A task without an oracle changes no figure of the tester, though its tests can be read and
    its wrong programs pass them; precision_bound is the mean of the tasks' bounds."""
    tests = [WEAK, written_test("5\n", "9\n"), WEAK]
    programs, references, base = ["x*2"] * 3, [SOLUTION, SOLUTION, ""], [TWICE, "print(9)", TWICE]
    both = held_out_figures(sandbox, programs, tests, references, base, tasks=3)
    known = held_out_figures(sandbox, programs[:2], tests[:2], references[:2], base[:2], tasks=2)
    assert ABOUT_TESTS <= known.keys()
    assert {key: both[key] for key in ABOUT_TESTS} == {key: known[key] for key in ABOUT_TESTS}
    assert both["co/tasks_with_an_oracle"] == pytest.approx(2 / 3)
    # mu: 0, a right test that the base's programs pass; -1, a wrong one that they pass
    assert both["tester/accuracy"] == 0.5 and both["co/mu"] == -0.5
    assert both["co/precision_bound"] == 0.0
    figures = held_out_figures(sandbox, "x+2", [WEAK] * 2, base=["print(0)", TWICE], tasks=2)
    assert figures["co/mu"] == 0.5  # 1 and 0; at their mean the bound would be another value
    assert figures["co/precision_bound"] == pytest.approx((1 - math.exp(-2)) / 2)


# ------------------------------------------------------------------ runs
def test_the_reference_of_the_kl_term_is_the_base(finished):
    """The tester's update follows the coder's: against a reference taken at the update's start its
    KL would be exactly 0."""
    rows = steps_of(finished("cure.py")[0])
    moved = [row for row in rows if row["coder/grad_norm"] > 0]
    assert moved and all(row["tester/kl"] > 0 for row in moved)
    assert rows[0]["coder/kl"] == pytest.approx(0, abs=1e-6) and rows[-1]["coder/kl"] > 0
