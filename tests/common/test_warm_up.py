"""common/run/warm_up.py and what it teaches, common/tasks/demonstrations.py."""

import dataclasses
import itertools
import json
import random
import re
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import aprm
import common.tasks.demonstrations
import coverrl
import genrm
import maporl
import prime
import tango
from common.core.errors import UserError
from common.run import warm_up
from common.run.warm_up import Args
from common.tasks.answers import SOLVE, boxed, is_correct, split_steps
from common.tasks.demonstrations import (
    demonstrations,
    is_judgement,
    judged,
    judged_own,
    reworded,
)
from common.tasks.verdicts import VERIFY, final_verdict
from common.tiny import TINY

import pytest
from conftest import run_here, run_module, write_rows
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer


def reference(*steps: str, answer: str) -> str:
    lines = [f"<step>{step}</step>" for step in steps]
    return "\n".join([*lines, rf"<answer>\boxed{{{answer}}}</answer>"])


REFERENCES = [
    reference("8 + 3 = 11", answer="11"),
    reference("So 4 * 5 = 20 eggs.", "20 / 8 = 2.5 each.", "2.5 - 0.5 = 2 are left.", answer="2"),
    reference("7-9=-2", "3*-2=-6", answer="-6"),
]


# ------------------------------------------------------------------ demonstrations
def equation(step: str) -> tuple[Fraction, str, Fraction, Fraction]:
    """Read by other means than in demonstrations.py: the one equals sign and what is around it."""
    left, right = re.sub(r"[^-+*/=.\d]", "", step).strip(".").split("=")
    a, sign, b = re.fullmatch(r"(-?[\d.]+)([-+*/])(-?[\d.]+)", left).groups()
    return Fraction(a), sign, Fraction(b), Fraction(right.strip("."))


def value(a: Fraction, sign: str, b: Fraction) -> Fraction:
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]


@pytest.mark.parametrize("given", REFERENCES)
def test_a_judgement_is_true_of_its_solution(given):
    """A step's verdict says whether its equation holds and its operation is the reference's; what
    comes after a changed step takes over its result; the final verdict is about the answer. Where a
    step is missing, the last block names it, and all verdicts but the final one accept.
    """
    rng, wrong, answer = random.Random(0), Counter(), boxed(given)
    originals = [equation(step) for step in split_steps(given)]
    for _ in range(600):
        pair = judged("", given, rng)
        if pair is None:  # a change that cannot be written: a third, or the same value again
            wrong["none"] += 1
            continue
        solution, judgement = pair
        verdicts, final = tango.parse_judgement(judgement)
        assert tango.judgement_format(judgement, solution) == 1.0
        assert final == is_correct(solution, answer)
        steps, known = [equation(step) for step in split_steps(solution)], {}
        assert len(verdicts) == len(steps)
        (a, sign, b), expected = said_to_be_missing(judgement), originals
        if sign:
            missing = 0 if (a, sign, b) == originals[0][:3] else len(originals) - 1
            assert (a, sign, b) == originals[missing][:3] and len(steps) == len(originals) - 1
            wrong["first" if missing == 0 else "last"] += 1
            assert all(verdicts) and not final
            expected = originals[1:] if missing == 0 else originals[:-1]
            if missing == 0 and len({a, b} & {*steps[0][::2]}):  # in place of its result
                x = next(x for x in steps[0][::2] if x in (a, b))
                known[originals[0][3]] = x
        for step, original, verdict in zip(steps, expected, verdicts, strict=True):
            a, sign, b, said = step
            a0, sign0, b0, said0 = original
            assert (a, b) == (known.get(a0, a0), known.get(b0, b0))
            assert verdict == (sign == sign0 and value(a, sign, b) == said)
            known[said0] = said
            wrong["operation"] += sign != sign0
            wrong["result"] += value(a, sign, b) != said
        assert Fraction(boxed(solution)) == said
        wrong["right"] += final
        assert verdicts.count(False) <= 1
    several = len(originals) > 1
    assert 180 < wrong["right"] < 330 and wrong["operation"] > 20 and wrong["result"] > 60, wrong
    assert (wrong["first"] > 40) == (wrong["last"] > 40) == several, wrong


def said_to_be_missing(judgement: str) -> tuple:
    """(a, sign, b) by other means than in demonstrations.py; "" three times: nothing."""
    *before, last = split_steps(judgement)
    words = last.removesuffix(r" \boxed{CORRECT}").removesuffix(r" \boxed{INCORRECT}")
    assert not any("missing" in step for step in before) and words.endswith(" missing.")
    if words.endswith(" Nothing is missing."):
        return "", "", ""
    a, sign, b = words.removesuffix(" is missing.").split()[-3:]
    return Fraction(a), sign, Fraction(b)


@pytest.mark.parametrize(
    "given",
    [
        "no steps",
        reference("It is 11.", answer="11"),  # no equation
        reference("8 + 3 = 12", answer="12"),  # one that does not hold
        reference("8 + 3 = 11", answer="12"),  # another answer
        reference("8 + 3 = 11", answer="eleven"),
        reference("8 + 3 = 11 and 2 + 2 = 4", answer="4"),  # two in one step
        reference("2 * 3 + 4 = 10", answer="10"),  # a part of something longer
        reference("1 / 0 = 0", answer="0"),
        reference("1 / 3 = 0.333333", answer="0.333333"),
        "<step>" * 2000 + "8 + 3 = 11",
    ],
)
def test_what_cannot_be_judged_truly_is_not(given):
    assert [judged("", given, random.Random(seed)) for seed in range(20)] == [None] * 20


def solved(a, one, b, two, c, d) -> tuple[list, list[int]] | None:
    """The equations of two steps, and the numbers of their problem. An operand is a number, or None
    for the result of the first step. None where a quotient does not come out.
    """
    if (one == "/" and a % b) or (first := value(Fraction(a), one, Fraction(b))) is None:
        return None
    left, right = (first if x is None else Fraction(x) for x in (c, d))
    second = value(left, two, right)
    if second is None or second.denominator > 1:
        return None
    equations = [(a, one, b, first), (left, two, right, second)]
    return equations, [x for x in (a, b, c, d) if x is not None]


def test_every_mark_of_short_chains_by_where_the_operands_come_from():
    """All problems of two steps with numbers from 1 to 4: who has written them knows whether a 4
    is the problem's or the result before it; `judged` has the text alone.
    """
    rng, counts = random.Random(0), Counter()
    operands = [(None, d) for d in (1, 2, 3, 4, None)] + [(c, None) for c in (1, 2, 3, 4)]
    for a, one, b, two, (c, d), in_words in itertools.product(
        (1, 2, 3, 4), "+-*/", (1, 2, 3, 4), "+-*/", [*operands, (3, 4)], (False, True)
    ):
        chain = solved(a, one, b, two, c, d)
        if not chain:
            continue
        equations, numbers = chain
        first = equations[0][3]
        names = ["", "one", "two", "three", "four"]
        question = "Numbers: " + ", ".join(names[n] if in_words else str(n) for n in numbers)
        steps = [f"{x} {sign} {y} = {z}" for x, sign, y, z in equations]
        text, gold = reference(*steps, answer=equations[1][3]), equations[1][3]
        for _ in range(4):
            pair = judged(question, text, rng)
            counts[pair is None] += 1
            if pair is None:
                continue
            verdicts, final = tango.parse_judgement(pair[1])
            steps, lacks = [*map(equation, split_steps(pair[0]))], said_to_be_missing(pair[1])
            if len(steps) == 1:  # each is right by itself, but the answer is not
                [(x, sign, y, said)] = steps
                assert verdicts == [True] and not final and said == value(x, sign, y) != gold
                if lacks == (a, one, b):
                    ways = [(n if c is None else c, n if d is None else d) for n in (a, b)]
                    assert sign == two and (x, y) in ways
                else:
                    operands = [first if n is None else n for n in (c, d)]
                    assert (x, sign, y) == (a, one, b) and lacks == (operands[0], two, operands[1])
                counts["one step"] += 1
                continue
            assert lacks == ("", "", "")
            (a1, s1, b1, said), (a2, s2, b2, end) = steps
            asked = [said if x is None else x for x in (c, d)]
            right = (a1, s1, b1) == (a, one, b) and value(a1, s1, b1) == said
            then = s2 == two and [a2, b2] == asked and value(a2, s2, b2) == end
            assert verdicts == [right, then] and final == (end == gold), (question, pair)
    assert counts[False] > 2000 and counts["one step"] > 600, counts


@pytest.mark.parametrize(
    "given, step, answer, words",
    [
        ("8 + 3 = 11", "So 3 + 8 = 11.", "11", ["11 - 8 = 3. 1", "3 + 8, and 11 - 8 = 3. 1"]),
        ("8 + 3 = 11", "8 + 3 = 12", "12", ["12 - 3 = 9, not 8. 0", "but 12 - 3 = 9, not 8. 0"]),
        ("28 - 18 = 10", "28 - 18 = 8", "8", ["8 + 18 = 26, not 28. 0"]),
        ("20 / 8 = 2.5", "20 / 8 = 3", "3", ["3 * 8 = 24, not 20. 0"]),
        ("20 / 8 = 2.5", "20 / 8 = 2.5", "2.5", ["2.5 * 8 = 20. 1"]),
        ("7 * 6 = 42", "6 * 7 = 41", "41", ["6 * 7 = 42, not 41. 0"]),
        ("21 - 8 = 13", "21 + 8 = 29", "29", ["21 - 8, not 21 + 8. 0"]),
        ("21 - 8 = 13", "8 - 21 = -13", "-13", ["21 - 8, not 8 - 21. 0"]),
        ("2 * 2 = 4", "2 + 2 = 4", "4", None),  # another way to the answer
        ("8 + 3 = 11", "8 + 3 = 11", "12", None),  # the answer is another one than the step's
        ("8 + 3 = 11", "8 + 3 + 1 = 12", "12", None),
        ("8 + 3 = 11", "It is 11.", "11", None),
        ("8 + 3 = 11", "8 + 3 = 11</step><step>11 - 0 = 11", "11", None),
        ("8 + 3 = 12", "8 + 3 = 12", "12", None),  # the reference does not hold
    ],
)
def test_a_judgement_of_the_models_own_solution(given, step, answer, words):
    """Every wording of the comments ends in one of the expected checks and its mark."""
    known, text = reference(given, answer=given.split("= ")[1]), reference(step, answer=answer)
    found = {judged_own(known, text, random.Random(seed)) for seed in range(20)}
    if words is None:
        assert found == {None}
        return
    for solution, said in found:
        (comment,) = split_steps(said)
        assert said_to_be_missing(said) == ("", "", "")
        comment = comment.replace(" Nothing is missing.", "")
        ended = comment.replace(r"\boxed{CORRECT}", "1").replace(r"\boxed{INCORRECT}", "0")
        assert any(ended.endswith(end) for end in words), ended
        verdicts, final = tango.parse_judgement(said)
        assert verdicts == [final] == [words[0].endswith("1")] and solution == text
        assert tango.judgement_format(said, text) == 1.0


def test_steps_in_several_wordings_stay_right():
    rng, texts = random.Random(0), set()
    for _ in range(200):
        text = reworded(REFERENCES[0], rng)
        assert is_correct(text, "11") and len(split_steps(text)) == 1
        a, sign, b, said = equation(split_steps(text)[0])
        assert sign == "+" and {a, b} == {8, 3} and said == 11
        texts.add(text)
    assert len(texts) == 12  # six wordings, either way round
    assert {reworded(REFERENCES[1], rng) for _ in range(20)} == {REFERENCES[1]}  # prose stays
    minus = reference("8 - 3 = 5", answer="5")
    assert all("8 - 3 = 5" in reworded(minus, rng) for _ in range(50))


def test_rows_to_teach():
    """Solutions, judgements and drills; without a verifier of steps no judgements."""
    rows = [{"question": f"Q{i}", "reference": text} for i, text in enumerate(REFERENCES)]
    rows.append({"question": "Q3", "reference": ""})
    made = demonstrations(tango, rows, 200, 0, {})
    assert len(made) == 200 and made == demonstrations(tango, rows, 200, 0, {})
    drills = [row for row in made if row["prompt"][0]["role"] == "user"]
    others = [row for row in made if row["prompt"][0]["role"] == "system"]
    kinds = Counter(row["prompt"][0]["content"] for row in others)
    assert kinds.keys() == {SOLVE, VERIFY} and min(kinds.values()) > 60 and len(drills) > 20
    for row in drills:
        asked = row["prompt"][0]["content"].removeprefix("Work out: ").split("; ")
        answers = row["completion"][0]["content"].splitlines()
        assert [line.split(" = ")[0] for line in answers] == asked and len(asked) == 8
        for line in answers:
            a, sign, b, said = equation(line)
            assert value(a, sign, b) == said and said.denominator == 1
    for row in others:
        (said,) = row["completion"]
        asked = row["prompt"][-1]["content"]
        assert said["role"] == "assistant" and "Q3" not in asked
        if row["prompt"][0]["content"] == SOLVE:
            assert is_correct(said["content"], boxed(REFERENCES[int(asked[1:])]))
        else:
            assert len(tango.parse_judgement(said["content"]).verdicts) == asked.count("<step>")
    for script in (coverrl, aprm, genrm, maporl):
        assert demonstrations(script, rows, 200, 0, {}) == made
    for row in others:
        if row["prompt"][0]["content"] == VERIFY:
            text, count = (
                row["completion"][0]["content"],
                row["prompt"][-1]["content"].count("<step>"),
            )
            final = final_verdict(text)
            assert is_judgement(text, count) and not is_judgement(text, count + 1)
            assert coverrl.parse_judgement(text)[0] is final is genrm.rationale(text)[1]
            assert None not in (final, aprm.parse_marks(text, count))
            assert not any(is_judgement(part, count) for part in (text[:-1], "So: " + text, ""))
    alone = demonstrations(prime, rows, 50, 0, {})
    assert {row["prompt"][0]["content"] for row in alone if len(row["prompt"]) > 1} == {SOLVE}


# ------------------------------------------------------------------ the warm-up
def sums(count: int) -> list[dict]:
    """Questions that the small model knows, with results below 61."""
    rng, rows = random.Random(0), {}
    while len(rows) < count:
        a, b, c = (rng.randint(1, 9) for _ in range(3))
        if (a + b) * c < 61:
            answer, question = str((a + b) * c), f"({a}+{b})*{c} mod 61"
            steps = [f"{a}+{b}={a + b}", f"{a + b}*{c}={answer}"]
            rows[question] = {"question": question, "answer": answer}
            rows[question]["reference"] = reference(*steps, answer=answer)
    return [*rows.values()]


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory):
    """The small model, whose <step> and <think> have changed places: no step can be read."""
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("forgetful") / "model")
    one, other = AutoTokenizer.from_pretrained(TINY).convert_tokens_to_ids(["<step>", "<think>"])
    weights = load_file(TINY / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    rows[[one, other]] = rows[[other, one]]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def args(forgetful, tmp_path, monkeypatch):
    for name, value in (
        ("QUESTIONS", 8),
        ("SAMPLES", 4),
        ("SAVES", 5),
        ("LOOKS", {"read": (5, 1), "ready": (5, 2)}),
    ):
        monkeypatch.setattr(warm_up, name, value)
    monkeypatch.setattr(common.tasks.demonstrations, "STEPS", ("{}",))  # it knows no others
    data = write_rows(tmp_path / "sums.jsonl", sums(300))
    limits = {"solution_tokens": 64, "judgement_tokens": 112}
    where = (str(forgetful), data, str(tmp_path / "warm"))
    return Args("prime.py", *where, steps=40, lr=3e-3, **limits)


def test_a_model_learns_the_form_and_stops(args, tmp_path, capsys, no_report):
    """The same command again says the figures, and no more; the script runs on what is left."""
    warm, said = Path(args.out), []
    warm_up.main(args)
    said.append(capsys.readouterr().out)
    found = json.loads((warm / "warm_up.json").read_text())
    assert found["before"]["solutions read"] == 0 and found["after"]["solutions read"] >= 0.8
    assert found["steps"] % 5 == 0 and found["steps"] < args.steps
    looks = re.findall(r"^step (\d+)/40, .*solutions read ([01].\d+)", said[0], re.MULTILINE)
    assert [int(step) for step, _ in looks] == [*range(5, found["steps"] + 1, 5)]
    assert float(looks[-1][1]) >= 0.9 and "entropy per token" in said[0]
    assert re.findall(r"^step (\d+)/40: \S+ min; \d+ min more", said[0], re.MULTILINE) == ["1"]
    assert not (warm / "README.md").exists()
    before = {path: path.read_bytes() for path in warm.glob("[!.]*.*")}
    warm_up.main(args)
    again = capsys.readouterr().out
    assert again in said[0] and "entropy per token" in again
    assert before == {path: path.read_bytes() for path in warm.glob("[!.]*.*")}
    with pytest.raises(UserError, match="other arguments"):
        warm_up.main(dataclasses.replace(args, lr=1e-3))
    short = "--steps 1 --questions 2 --group-size 4 --eval-questions 2 --solution-tokens 48"
    where = ["--model", warm, "--dataset", args.dataset, "--out", tmp_path / "run"]
    short += " --eval-samples 1 --verifier none"
    assert "step 1/1" in run_here("tango.py", *where, *short.split())


def test_resumed_is_the_same_warm_up_bit_for_bit(args, monkeypatch):
    """Interrupted at the look of step 10, with the checkpoint of step 5."""
    monkeypatch.setattr(warm_up, "figures", lambda *_: {"solutions read": 0.0})
    args.steps = 12
    warm_up.main(args)
    whole, cut = Path(args.out), Path(f"{args.out}-cut")
    args.out, looks = str(cut), []

    def interrupted(*_):
        looks.append(1)
        if len(looks) == 3:  # the first one is before training
            raise KeyboardInterrupt
        return {"solutions read": 0.0}

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(warm_up, "figures", interrupted)
        warm_up.main(args)
    assert (cut / "checkpoint-5").exists() and not (cut / "model.safetensors").exists()
    (cut / "README.md").write_text("my notes")
    warm_up.main(args)
    assert (cut / "README.md").read_text() == "my notes"
    for name in ("model.safetensors", "warm_up.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert '"steps": 12' in (cut / "warm_up.json").read_text()


def test_an_interrupted_warm_up_says_how_to_go_on(args, monkeypatch):
    """Before training, and at the look of step 10, with the checkpoint of step 5."""
    limits = "--steps 12 --solution-tokens 64 --judgement-tokens 112".split()
    command = [args.script, "--model", args.model, "--dataset", args.dataset, "--out", args.out]
    for look, says in (
        (1, f"The run has no checkpoint yet: the same command and --out {args.out} start again."),
        (3, f"The run's checkpoints are safe: resume with the same command and --out {args.out}."),
    ):
        looks = []

        def figures(*_, look=look, looks=looks):
            looks.append(1)
            if len(looks) == look:
                raise KeyboardInterrupt
            return {"solutions read": 0.0}

        monkeypatch.setattr(warm_up, "figures", figures)
        _, said, code = run_module(warm_up, *command, *limits)
        assert (said, code) == (f"interrupted. {says}\n", 130)
