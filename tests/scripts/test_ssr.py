"""ssr.py: each check with a program that fails it, inverse mutation against edits made by hand,
both rewards, hostile completions; a step with completions that are given."""

import itertools
import random
import re

import ssr
from common.tiny import repairs
from common.tiny.tasks import is_held_out
from lab.make.repair_demonstrations import break_program, repair_program
from ssr import Bug, failed_check, injector_reward, parse_bug, repair_prompt, reverted, shown

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainers import without_model

ROW = {
    "program": "x=int(input())\nx+=3\nx*=7\nprint(x%100)",
    "tests": [("1\n", "28\n"), ("2\n", "35\n"), ("0\n", "21\n")],
}
ROW["question"] = shown(ROW["program"], ROW["tests"], number=True)


def code(*lines: str) -> str:
    return "```python\n" + "\n".join(["x=int(input())", *lines, "print(x%100)"]) + "\n```"


def bug(*lines: str, hidden: str = "1") -> str:
    return f"{code(*lines)}\n**Hidden tests:** {hidden}"


# ------------------------------------------------------------------ prompts and parsing
def test_parse_bug():
    assert parse_bug(bug("x+=4", hidden="3 , 1, 3"), ROW).hidden == [1, 3]
    for spelt in ("Hidden tests: 1", "**Hidden tests**: 1", "**Hidden tests:** 1, last.\nOf 3."):
        assert parse_bug(f"{code('x+=4')}\n{spelt}", ROW).hidden == [1]
    for numbers in ("1 and 3", "3, and 1.", "1,3"):
        assert parse_bug(bug("x+=4", hidden=numbers), ROW).hidden == [1, 3]
    none = [bug("x+=4", hidden=n) for n in ("0", "4", "1, 4", "1, 2000", "9" * 5000, "²", "-1", "")]
    none += [bug("x+=4", hidden=n) for n in ("1-3", "1 or 2", "1 2", "1; 3", "1 and 2000")]
    none += [bug("x+=4", hidden=n) for n in ("1 to 3", "1 & 2", "1\n2", "1, 2 plus 3")]
    none += [bug("x+=4").replace(":", ""), "**Hidden tests:** 1", ""]
    none += ["Hidden tests: 2\n" + code("x+=4"), code("# Hidden tests: 2")]  # before, within
    none += ["```python\n```\n**Hidden tests:** 1", "```" * 20_000 + "**Hidden tests:** 1"]
    none += ["```python\nprint(1)\n**Hidden tests:** 1"]  # never closed
    for text in none:
        assert parse_bug(text, ROW) is None, text[:80]


def test_a_test_of_several_lines_stands_on_one():
    text = shown("print(1)", [("2\n1 3\n", "4\n")], number=False)
    assert text == "```python\nprint(1)\n```\nTests:\n2\\n1 3->4\n"


def test_prompts_are_those_that_the_small_model_has_been_taught():
    def parts(user: str) -> tuple[str, list]:
        program = re.search(r"```python\n(.*)\n```", user, re.DOTALL)[1]
        return program, re.findall(r"^(?:\d: )?(\d+)->(.*)$", user, re.MULTILINE)

    endings = []
    for seed in range(8):
        taught, _ = break_program(random.Random(seed), 0)
        asked = ssr.inject_prompt(shown(*parts(taught), number=True))[1]["content"]
        assert asked.rpartition("\n")[0] == taught.rpartition("\n")[0]
        endings.append((asked.splitlines()[-1], taught.splitlines()[-1]))
        taught, _ = repair_program(random.Random(seed), 0)
        program, tests = parts(taught)
        hidden = [*range(1, len(tests) + 1)]
        assert repair_prompt(Bug({"tests": tests}, program, hidden))[1]["content"] == taught
    assert [*map(set, zip(*endings))] == [{"Change a line.", "Remove a line."}] * 2


def test_there_are_only_so_many_programs_for_the_small_model():
    """A run that wants more gets those that there are; once it looked for others without an end."""
    rows = repairs.sample_rows(0, 2000, held_out=True)
    programs = map(repairs.format_lines, itertools.permutations(repairs.EVERY, repairs.LINES))
    assert {row["question"] for row in rows} == {*filter(is_held_out, programs)}


# ------------------------------------------------------------------ inverse mutation
@given(st.lists(st.sampled_from(["keep", "change", "drop", "add"]), min_size=1, max_size=8))
def test_each_edited_line_is_put_right_alone(kinds):
    """Edits of a text with different lines, so that only one reading of them is possible: no two
    neighbours are edited."""
    parts = []  # (as it was, as it is): lines
    for i, kind in enumerate(kinds):
        stay, was, now = [f"stay {i}"], [f"old {i}"], [f"new {i}"]
        edits = {"keep": (was, was), "change": (was, now), "drop": (was, []), "add": ([], now)}
        parts += [(stay, stay), edits[kind]]
    text = lambda lines: "\n".join(line for part in lines for line in part)  # noqa: E731
    expected = []
    for k, (was, now) in enumerate(parts):
        if was != now:
            expected.append(text([p[0] if j == k else p[1] for j, p in enumerate(parts)]))
    before, after = text([p[0] for p in parts]), text([p[1] for p in parts])
    assert reverted(before, after) == expected


def test_neighbouring_lines_are_put_right_one_by_one():
    assert reverted("a\nb\nc", "A\nB\nc") == ["a\nB\nc", "A\nb\nc"]
    assert reverted("a\nb\nc\nd", "a\nd") == ["a\nb\nd", "a\nc\nd"]
    assert reverted("a\nb", "a\nB\nC") == ["a\nb\nC", "a\nB"]


def test_checks_against_loops():
    rng, seen = random.Random(0), set()
    for _ in range(2000):
        E, t = rng.randint(0, 3), rng.randint(1, 4)
        rate = rng.choice([0.1, 0.5, 0.9])
        table = [[rng.random() < rate for _ in range(t)] for _ in range(2 + E)]
        table[0] = [rng.random() < 0.95 for _ in range(t)]
        hidden = rng.sample(range(1, t + 1), rng.randint(1, t))
        failing = [k for k in range(t) if not table[1][k]]
        checks = {
            "a test fails at first": not all(table[0]),
            "nothing was changed": E == 0,
            "no test fails": not failing,
            "no failing test is hidden": not any(k + 1 in hidden for k in failing),
            "a line needs no edit": any(not any(row[k] for k in failing) for row in table[2:]),
        }
        expected = next((name for name, fails in checks.items() if fails), None)
        seen.add(expected)
        assert failed_check(torch.tensor(table), hidden) == expected
        lax = None if expected == "a line needs no edit" else expected
        assert failed_check(torch.tensor(table), hidden, inverse_mutation=False) == lax
    assert len(seen) == 6


# ------------------------------------------------------------------ rewards
def test_the_injectors_reward_is_absolute_zeros_scaled():
    """(1 + alpha) r - alpha, where r = 1 - s within (0, 1) and 0 at its ends."""
    for alpha in (0.0, 0.5, 0.8):
        for k in range(9):
            r = 1 - k / 8 if 0 < k < 8 else 0
            assert injector_reward(k / 8, alpha) == pytest.approx((1 + alpha) * r - alpha)
        assert injector_reward(None, alpha) == -1


# ------------------------------------------------------------------ a step by hand
def given_texts(sandbox, injector=(), solver=(), **change) -> ssr.Ssr:
    cfg = ssr.Args(**{"injections": 2, "group_size": 2} | change)
    texts = {"injector": injector, "solver": solver}
    more = {"train_rows": [ROW], "held_out": [{"program": HELD_OUT}]}
    more["never"] = {ssr.bare(HELD_OUT)}
    return without_model(ssr.Ssr, cfg, texts, sandbox=sandbox, **more)


ROWS = [ROW | {"prompt": [{}, {"content": "break"}]}] * 2
RIGHT, WRONG = code("x+=3", "x*=7"), code("x+=1", "x*=7")
HELD_OUT = "n = int(input())\nn += 9  # under another name\nn *= 7\nprint(n % 100)"


def test_a_step(sandbox):
    """One bug is valid and repaired by one of two; the other edits a line without need. The solver
    sees the hidden tests, and neither the original nor the other tests.
    """
    bugs = [bug("x+=4", "x*=7", hidden="1, 2"), bug("x+=4", "x*=7", "x+=0", hidden="1")]
    trainer = given_texts(sandbox, bugs, ["thinking\n" + RIGHT, WRONG, RIGHT, "none"])
    injector, solver, again = trainer.step(ROWS)[0]
    assert injector.rewards.tolist() == pytest.approx([1 - 1.8 * 0.5, -1])
    one, two = injector.notes
    assert one["solve_rate"] == 0.5 and two["failed_check"] == "a line needs no edit"
    assert solver.rewards.tolist() == [1, -1]
    # the wrong repair is the next bug, with the same tests hidden; what cannot be read is none
    assert again.rewards.tolist() == [1, -1]
    asked = [text for name, text in trainer.asked if name == "solver"]
    assert "x+=4" in asked[0] and "x+=1" in asked[2] and len(asked) == 4
    assert all(user.endswith("Tests:\n1->28\n2->35\nRepair it.") for user in asked)
    assert not any("x+=3" in user or "0->21" in user for user in asked)
    assert trainer.logged["injector/solve_rate"] == [0.5]
    assert trainer.logged["injector/valid"] == [True, False]
    assert trainer.logged["solver/second_order"] == [True, False]


def test_a_repair_must_pass_the_tests_that_it_was_not_shown(sandbox):
    bugs, shown_only = [bug("x+=4", "x*=7")] * 2, "```python\nprint(28)\n```"
    trainer = given_texts(sandbox, bugs, [shown_only, RIGHT] * 2, second_order=0)
    injector, solver, _ = trainer.step(ROWS)[0]
    assert solver.rewards.tolist() == [-1, 1, -1, 1]
    assert injector.rewards.tolist() == pytest.approx([0.1] * 2)


def test_worked_examples_are_valid_bugs_and_right_repairs(sandbox):
    trainer = given_texts(sandbox)
    inject, repair = ssr.examples(of_injector=True), ssr.examples(of_injector=False)
    for (program, tests, *_), (asked, text), (user, repaired) in zip(ssr.EXAMPLES, inject, repair):
        row = {"program": program, "tests": [f"assert {test}" for test in tests]}
        row["question"] = shown(program, row["tests"], number=True)
        assert asked.startswith(row["question"]) and asked[-7:] in ("a line.", "e line.")
        bug = parse_bug(text, row)
        assert trainer.check([bug]) == [None]
        assert user == repair_prompt(bug)[-1]["content"]
        assert trainer.pass_all_tests([(ssr.parse_program(repaired), bug)]) == [True]
        # every test that the injector's thought names fails, and no other
        (passed,) = trainer.run_tests([(bug.program, row)])
        named = [*map(int, re.findall(r"\d", text.partition("tests ")[2].partition("fail")[0]))]
        assert [k for k, holds in enumerate(passed.tolist(), 1) if not holds] == named
        messages = ssr.inject_prompt(row["question"])
        assert [m["content"] for m in messages if m.get("example")] == sum(map(list, inject), [])


def test_the_bug_itself_is_no_bug_of_second_order(sandbox):
    bugs, unchanged = [bug("x+=4", "x*=7")] * 2, code("x+=4", "x*=7")
    assert not given_texts(sandbox, bugs, [unchanged, RIGHT] * 2).step(ROWS)[0][2]


def test_bugs_that_are_none(sandbox):
    """Unreadable, unchanged, held out; but one that fails on a single input is a bug, which nobody
    repairs here."""
    for text in ("none", bug("x+=3", "x*=7")):
        injector, *_ = given_texts(sandbox, [text] * 2, ["none"] * 4).step(ROWS)[0]
        assert injector.rewards.tolist() == [-1] * 2
    trainer = given_texts(sandbox, [bug("x=3+x//(x-1)", "x*=7")] * 2, ["none"] * 4)
    injector, *_ = trainer.step(ROWS)[0]
    assert injector.rewards.tolist() == pytest.approx([-0.8] * 2)
    assert trainer.logged["injector/too_hard"] == [True, True]
    assert trainer.logged["injector/too_easy"] == [False, False]


@pytest.mark.parametrize(
    "line, reason",
    [
        ("x = = 1", "it does not run"),
        ("while 1: pass", "it does not run"),
        ("raise SystemExit", "it does not run"),
        ("import os; os._exit(0)", "it does not run"),
        ("print(); raise SystemExit", "it does not run"),
        ("import os; x=int.from_bytes(os.urandom(9), 'big'); print(x)", "it is random"),
    ],
)
def test_a_bug_runs_and_is_not_random(sandbox, line, reason):
    trainer = given_texts(sandbox, [bug(line, "x*=7")] * 2, time_limit=0.2)
    injector, *_ = trainer.step(ROWS)[0]
    assert injector.notes[0]["failed_check"] == reason
    assert injector.rewards.tolist() == [-1, -1]


def test_held_out_programs_are_neither_written_nor_shown(sandbox):
    """As a bug: no reward, neither a good nor a bad one. As a repair: no bug of second order."""
    bugs, repeats = [bug("x+=9", "x*=7"), bug("x+=4", "x*=7")], code("x+=9", "x*=7")
    trainer = given_texts(sandbox, bugs, [repeats, RIGHT])
    injector, solver, _ = trainer.step(ROWS)[0]
    assert injector.notes[0]["failed_check"] == "it is held out"
    assert injector.rewards.isnan().tolist() == [True, False]
    assert injector.advantages.tolist() == [0, 0]
    assert solver.rewards.tolist() == [-1, 1]
    assert not any("x+=9" in text for name, text in trainer.asked if name == "solver")


@pytest.mark.parametrize("train, zero", [("solver", [0]), ("injector", [1, 2]), ("both", [])])
def test_who_is_trained(sandbox, train, zero):
    attempts = [RIGHT, WRONG, WRONG, WRONG] + [RIGHT, WRONG] * 2
    batches = given_texts(sandbox, [bug("x+=4", "x*=7")] * 2, attempts, train=train).step(ROWS)[0]
    assert len(batches) == 3
    assert [i for i, batch in enumerate(batches) if not batch.advantages.any()] == zero


def test_a_process_without_a_bug_takes_part_with_no_row(sandbox):
    trainer = given_texts(sandbox, ["none"] * 2, [])
    injector, solver, again = trainer.step(ROWS)[0]
    assert (len(injector), len(solver), len(again)) == (2, 0, 0)


def test_held_out_bugs_fail_and_their_originals_do_not(sandbox):
    rows = [ROW | {"question": f"{i}"} for i in range(8)]
    rows += [ROW | {"question": "broken", "program": "print(1)"}]  # fails its own tests
    rows += [ROW | {"question": "one", "program": "print((int(input())+3)*7)"}]
    found = {b.row["question"]: b for b in ssr.removals(given_texts(sandbox), rows)}
    assert "broken" not in found and "one" not in found  # a line in all, which is not removed
    assert len(found) == 8
    assert {b.program for b in found.values()} == {
        "x=int(input())\nx*=7\nprint(x%100)",
        "x=int(input())\nx+=3\nprint(x%100)",
    }
