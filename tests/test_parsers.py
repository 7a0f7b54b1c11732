"""Every line of tests/data/texts.txt: what a parser makes of a text that a model may write. And the
worked examples of prompts, which are read as what they mean.
"""

import importlib
import re

import mae
import raro
import self_rewarding
import self_taught
import self_verify
import ssp
import sweet_rl
from common.tasks.answers import SOLVED, final_answer, is_correct, split_steps
from common.tasks.equations import equations_hold
from common.tasks.functions import LONGEST, call_each
from common.tasks.verdicts import read_verdict

import pytest
from conftest import ROOT

PLUS = "def f(x):\n return (x+3)%100"


def V(score: float) -> float:
    return min(1.0, max(0.0, (score - 1) / 9))


def lines() -> list:
    found, section = [], ""
    for line in (ROOT / "tests" / "data" / "texts.txt").read_text().splitlines():
        section = line[3:] if line.startswith("== ") else section
        if section and " | " in line and line[0] != "#":
            found.append(pytest.param(section, *line.rsplit(" | ", 1), id=f"{section} {line}"[:90]))
    return found


@pytest.mark.parametrize("function, text, wanted", lines())
def test_what_is_read_in_a_text(function, text, wanted, sandbox, monkeypatch):
    monkeypatch.setattr("common.tasks.answers.SECONDS", 600)  # however busy the machine is
    wanted = eval(wanted, {"V": V})
    arguments = eval(f"({text},)", {"PLUS": PLUS, "LONGEST": LONGEST})
    if function == "call":
        assert call_each(sandbox, [[(*arguments, "3")]], 0.5) == [[wanted]]
        return
    module, _, name = function.rpartition(".")
    parse = getattr(importlib.import_module(module), name)
    if isinstance(wanted, type):
        with pytest.raises(wanted):
            parse(*arguments)
        return
    found = parse(*arguments)
    assert type(found) is type(wanted)
    assert found == (pytest.approx(wanted, abs=1e-12) if isinstance(wanted, float) else wanted)


# ------------------------------------------------------------------ worked examples
def pairs(prompt: list[dict]) -> list[tuple[str, str]]:
    """What the user says and the model answers, in a prompt's worked examples."""
    texts = [message["content"] for message in prompt if message.get("example")]
    return [*zip(texts[::2], texts[1::2])]


def verdicts(text: str) -> list[str | None]:
    return [read_verdict(step, ("CORRECT", "INCORRECT")) for step in split_steps(text)]


@pytest.mark.parametrize(
    "prompt, parse, wanted",
    [
        (mae.judge_answer_prompt("Q", "7"), mae.judge_score, [1, 1 / 9]),
        (mae.judge_question_prompt("Q"), mae.judge_score, [8 / 9, 2 / 9]),
        (mae.propose_prompt("Q"), lambda text: mae.tag_format(text, "question"), [1, 1, 1]),
        (self_rewarding.score_prompt("Q", "S"), self_rewarding.parse_score, [1, 0]),
        (self_taught.compare_prompt("Q", "A", "B"), self_taught.parse_choice, [1, 2]),
        (raro.compare_prompt("Q", "A", "B"), raro.parse_choice, ["1", "2", "tie"]),
        (
            self_verify.judge_prompt("answer", "Q", "7"),
            lambda text: self_verify.parse_verdict("answer", text),
            [True, False],
        ),
        (sweet_rl.critic_prompt("Q", "S"), final_answer, ["80", "25"]),
    ],
)
def test_a_worked_example_is_read_as_what_it_means(prompt, parse, wanted):
    examples, asked = pairs(prompt), prompt[-1]["content"]
    assert [parse(text) for _, text in examples] == pytest.approx(wanted)
    for user, text in examples:
        assert user.splitlines()[-1] == asked.splitlines()[-1]  # the user asks in the same words
        assert not re.search(r"[.?}]</", text)  # which is one token of many tokenizers
        marks = verdicts(text)
        if "CORRECT" in marks:  # each step of each solution has its verdict, and a false equation
            steps = split_steps(user)  # is in a step that is called faulty
            assert len(marks) == len(steps)
            for step, mark in zip(steps, marks):
                assert equations_hold(step) or mark == "INCORRECT"


def test_the_examples_proposals_can_be_solved_and_do_not_name_their_answer():
    for (user, text), (question, solution) in zip(pairs(ssp.propose_prompt("7")), SOLVED):
        answer = user.splitlines()[0].removeprefix("Answer: ")
        assert ssp.proposed_question(text) == question and is_correct(solution, answer)
        assert ssp.follows_rules(question, answer)
