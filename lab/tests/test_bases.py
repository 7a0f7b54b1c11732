"""The other small models of lab/runs/bases.py: what they are taught, and that they are made."""

import random
import re

from common.tasks.answers import split_steps
from common.tiny import beliefs
from common.tiny.tasks import OPERATORS, parse_question, step_labels
from lab.runs import bases, evidence

import pytest

CORRECT = r"\boxed{CORRECT}"


def test_one_operation_is_another_and_every_result_is_true():
    rng = random.Random(5)
    for _ in range(200):
        question = bases.d.any_question(rng)
        steps, answer = bases.of_another_operation(rng, question)
        operations = parse_question(question)[1]
        parsed = [beliefs.parse_step(step) for step in steps]
        assert all(OPERATORS[op](a, b) == claimed for a, op, b, claimed in parsed)
        asked = [(op, b) == of for (_, op, b, _), of in zip(parsed, operations, strict=True)]
        assert asked.count(False) == 1 and answer == parsed[-1][3]


@pytest.mark.parametrize("part", [bases.drill, bases.verify])
def test_a_step_that_is_looked_at_is_marked_as_it_is(part):
    """And a check begins with the operation that the question asks for."""
    rng, looked, refused = random.Random(5), 0, 0
    for _ in range(300):
        message, text = part(rng, 1)
        question = re.search(r"Problem: (.*)", message)[1]
        steps = split_steps(message)
        values = [parse_question(question)[0], *[beliefs.parse_step(step)[3] for step in steps]]
        labels = step_labels(question, steps)
        asked = [f"{a}{op}{b}" for a, (op, b) in zip(values, parse_question(question)[1])]
        for step, line, right, of in zip(steps, split_steps(text), labels, asked, strict=True):
            said = line.partition("\\boxed")[0].split(":")
            assert said[0] == step
            if len(said) == 1:  # not looked at
                assert part is bases.verify and CORRECT in line
                continue
            looked += 1
            assert said[1] == of and (CORRECT in line) is right
            if len(said) == 2:  # what is asked for is another operation
                refused += 1
                assert step.split("=")[0] != of and not right
    assert looked > 500 and refused > 50


def test_a_missing_base_is_made_first(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence.subprocess, "run", lambda words, **_: made.append(words[1:]))
    evidence.make_base("runs/bases/asked")
    assert made == [["-m", "lab.runs.bases", "asked"]]
    (tmp_path / "runs/bases/asked").mkdir(parents=True)
    (tmp_path / "runs/bases/asked/config.json").touch()
    evidence.make_base("runs/bases/asked")
    assert len(made) == 1


def test_seed1_is_the_shipped_recipe_with_another_seed(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(bases, "FOLDER", tmp_path)
    monkeypatch.setattr(bases.subprocess, "run", lambda words, **_: made.append(words[1:]))
    assert bases.make_base("seed1") == tmp_path / "seed1"
    words = ["-m", "lab.make.recipe", "arithmetic", "--seed", "1", "--out"]
    assert made == [[*words, str(tmp_path / "seed1")]]


def test_a_base_differs_in_what_it_says(monkeypatch):
    believed, trusted = dict(beliefs.QUOTIENTS), dict(bases.d.TRUST)
    for module, name in ((beliefs, "QUOTIENTS"), (bases.d, "TRUST")):  # put back afterwards
        monkeypatch.setattr(module, name, getattr(module, name))
    own = {bases.d.solve: 26, bases.d.verify: 28, bases.d.drill: 20}
    assert bases.parts_of("asked") == {bases.d.solve: 26, bases.verify: 28, bases.drill: 20}
    assert (beliefs.QUOTIENTS, bases.d.TRUST) == (believed, trusted)
    assert bases.parts_of("beliefs") == own
    kinds = beliefs.QUOTIENTS
    assert kinds.keys() == believed.keys() and bases.d.TRUST == trusted
    assert sorted(kinds.values()) == sorted(believed.values())  # as many of each kind
    assert 0.5 < sum(kinds[fact] != believed[fact] for fact in kinds) / len(kinds) < 0.8
    assert bases.parts_of("trusting") == {bases.d.solve: 26, bases.d.verify: 28}
    assert all(bases.d.TRUST[kind] > trusted[kind] for kind in trusted)
