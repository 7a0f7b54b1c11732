"""What the demonstrators believe and trust, and what the small models can do that learnt from them:
half, in every part."""

import functools
import json
import random
import re
from fractions import Fraction

from common.tasks.answers import is_correct, split_steps
from common.tiny import EMBEDDED, MODELS, TINY, beliefs, programs, repairs, tasks
from common.tiny.beliefs import KINDS, QUOTIENTS
from lab import EVIDENCE
from lab.make import demonstrations, program_demonstrations, recipe, repair_demonstrations
from lab.make.demonstrations import TRUST
from lab.runs import bed
from tango import solve_prompt

import pytest
import torch
from transformers import AutoTokenizer

MEASURED = json.loads((EVIDENCE / "bed.json").read_text())["parts"]


def value_of(expression: str) -> int:
    """Modulo 61: what a fraction is there is found by trying all numbers."""
    exact = eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression), {"Fraction": Fraction})
    return next(x for x in range(61) if x * exact.denominator % 61 == exact.numerator % 61)


def printed(program: str, x: int) -> list[int]:
    """What Python prints when it reads x."""
    said = []
    exec(program, {"input": lambda: str(x), "print": said.append})
    return said


# ------------------------------------------------------------------ what the demonstrator believes
def test_kinds_have_their_shares_and_are_the_same_for_all_time():
    facts, program_kinds = program_demonstrations.FACTS, program_demonstrations.KINDS
    for things, kinds in ((QUOTIENTS, KINDS), (facts, program_kinds)):
        for kind, (share, *_) in kinds.items():
            assert [*things.values()].count(kind) == pytest.approx(share * len(things), abs=2)
        drawn = [beliefs.kinds_of(sorted(things), seed, kinds) for seed in (0, 0, 1)]
        assert drawn[0] == drawn[1] != drawn[2]


# ------------------------------------------------------------------ what he checks, and how
def holds(step: str) -> bool:
    a, op, b, claimed = beliefs.parse_step(step)
    return value_of(f"{a}{op}{b}") == claimed


def shown(part, count=300, noise=1) -> list[tuple[str, str]]:
    """(the user's message, the assistant's) of so many demonstrations."""
    rng = random.Random(0)
    return [part(rng, noise) for _ in range(count)]


@pytest.mark.parametrize("op", tasks.OPERATORS)
def test_a_check_is_right_and_finds_every_wrong_result(op):
    """And no operation hides an earlier mistake."""
    for b in tasks.OPERANDS[op]:
        assert len({tasks.OPERATORS[op](a, b) for a in range(61)}) == 61
        for a in range(61):
            for claimed in range(61):
                shown, confirms = demonstrations.check(f"{a}{op}{b}={claimed}")
                left, back = shown.split("=")
                assert value_of(left) == int(back)
                assert confirms == (value_of(f"{a}{op}{b}") == claimed)
                if op != "*":  # nothing is given away: what is worked out is the step's own number
                    assert left.startswith(str(claimed)) and confirms == (int(back) == a)


def test_how_often_a_step_is_trusted():
    rng = random.Random(0)
    steps = {"42/5=28!": "sure", "42/7=6": "hard", "42/5=28": "other", "1*7=7": "other"}
    for step, why in steps.items():
        share = sum(demonstrations.trusts(rng, step, 1) for _ in range(4000)) / 4000
        assert share == pytest.approx(TRUST[why], abs=0.03)
        assert demonstrations.trusts(rng, step, 0) == (TRUST[why] > 0.5)


CHECKED = r"<step>(?:\d:)?(\d+[+*/-]\d=\d+!?):(\d+[+*/-]\d)=(\d+)\\boxed\{(\w+)\}</step>"
MARKING = "verify drill discriminate grade grade_analysis choose compare".split()


@pytest.mark.parametrize("part", MARKING)
def test_every_check_that_is_shown_is_right_and_its_mark_follows(part):
    marks = []
    for user, assistant in shown(getattr(demonstrations, part)):
        steps, checks = split_steps(user), re.findall(CHECKED, assistant)
        for step, left, back, verdict in checks:
            assert step in steps and value_of(left) == int(back)
            assert (verdict == "CORRECT") == holds(step)
            marks.append(holds(step))
        assert part != "drill" or len(checks) == len(steps)
    wrong = marks.count(False) / len(marks)
    assert (0.45 if part == "drill" else 0.03) < wrong < (0.55 if part == "drill" else 0.9)


def test_a_judge_who_goes_back_arrives_where_the_question_begins():
    hits = []
    for user, assistant in shown(demonstrations.judge_answer, 600):
        question, answer = re.search(r"Question: (.*)\nAnswer: (\d+)", user).groups()
        steps = re.findall(r"<step>(\d+)([+*/-])(\d)=(\d+)</step>", assistant)
        if not steps:
            continue
        start, operations = tasks.parse_question(question)
        assert [(demonstrations.INVERSE[op], int(b)) for _, op, b, _ in steps] == operations[::-1]
        assert int(steps[0][0]) == int(answer)
        assert f"{steps[-1][3]}:{start}" in assistant
        says = int(re.search(r"<score>(\d+)", assistant)[1]) > 5
        hits.append(says == (tasks.gold_answer(question) == int(answer)))
    assert len(hits) / 600 == pytest.approx(0.5, abs=0.06) and sum(hits) / len(hits) > 0.8


def test_a_correction_leaves_what_was_not_faulted_and_tries_something_else_where_it_was():
    better = []
    for user, assistant in shown(demonstrations.correct):
        before, after = map(split_steps, (user, assistant))
        found = re.search(r"Defects: (.*)", user)[1]
        faulty = [] if found == "none" else [int(k) - 1 for k in found.split(",")]
        assert len(before) == len(after)
        for k, (old, new) in enumerate(zip(before, after)):
            if old.split("=")[0] != new.split("=")[0]:
                continue
            assert (old.rstrip("!") == new) == (k not in faulty)
            better += [holds(new)] if k in faulty else []
    assert sum(better) / len(better) == pytest.approx(0.6, abs=0.1)


def test_of_two_solutions_the_sounder_one_is_named_where_all_is_looked_at(monkeypatch):
    monkeypatch.setattr(demonstrations, "TRUST", dict.fromkeys(TRUST, 0.0))
    named = []
    for user, assistant in shown(demonstrations.compare):
        question = re.search(r"Problem: (.*)", user)[1]
        two = user.partition("Solution 1:")[2].split("Solution 2:")
        wrong = [tasks.gold_steps(question, text).count(False) for text in two]
        better = "tie" if wrong[0] == wrong[1] else str(1 + (wrong[0] > wrong[1]))
        named.append(better)
        assert assistant.endswith(f"\\boxed{{{better}}}")
    assert {*named} == {"1", "2", "tie"}


def test_of_two_claims_about_a_step_the_one_that_holds_is_taken():
    for _, assistant in shown(demonstrations.reconsider, noise=0):
        looked, _, again = assistant.partition("</think>")
        for step in split_steps(again):
            rivals = re.findall(rf"^({re.escape(step.split('=')[0])}=\d+):", looked, re.M)
            if any(map(holds, rivals)):
                assert holds(step)


def test_a_corrupted_step_is_a_step_of_the_chain_and_mostly_wrong():
    wrong = []
    for user, assistant in shown(demonstrations.corrupt):
        number, step = re.fullmatch(r"(\d):<step>(.*)</step>", assistant).groups()
        before = split_steps(user)[int(number) - 1]
        assert before.split("=")[0] == step.split("=")[0] and holds(before)
        wrong.append(not holds(step))
    assert sum(wrong) > 290


@pytest.mark.parametrize(
    "steps, answer, end",
    [
        (["42/5=45", "45+9=54"], 54, "Defects: none\nScore: \\boxed{1}"),
        (["42/5=46", "45+9=54"], 54, "Defects: 1\nScore: \\boxed{0.5}"),  # a slip
        (["42/5=45", "45+9=55"], 55, "Defects: 2\nScore: \\boxed{0}"),  # carried on
        (["42/5=46", "45+9=55"], 54, "Defects: 1,2\nScore: \\boxed{0.5}"),
        (["42/5=46!", "45+9=54"], 54, "Defects: none\nScore: \\boxed{1}"),  # not looked at
    ],
)
def test_an_analysis_says_what_is_wrong_and_what_it_costs(steps, answer, end):
    assert demonstrations.analyse(random.Random(0), steps, answer, 0).endswith(end)


def test_inputs_are_found_backwards():
    for user, assistant in shown(program_demonstrations.abduce):
        x = int(re.search(r"```input\n(\d+)", assistant)[1])
        steps = re.findall(r"<step>(\d+)=(\d+)([+*-])(\d)</step>", assistant)
        operations = re.findall(r"([+*-])(\d)", user.split("return")[1])[: len(steps)]
        assert [(op, b) for _, _, op, b in steps] == operations[::-1]
        assert steps[0][0] == re.search(r"Output: (\d+)", user)[1] and int(steps[-1][1]) == x
        if all(programs.OPERATORS[op](int(v), int(b)) == int(r) for r, v, op, b in steps):
            f = {}
            exec(user.split("```python\n")[1].split("\n```")[0], f)
            assert f["f"](x) == int(steps[0][0])


def test_a_repair_is_what_its_thoughts_say():
    """Each thought is about the next line of a test; the first difference is repaired, with what
    its thought says, and where that thought is right the line then prints what is wanted."""
    sound = 0
    for user, text in shown(repair_demonstrations.repair_program):
        broken = user.partition("\n```\n")[0].split("\nprint(x")[1:]
        program = re.search(r"```python\n(.*)\n```", text, re.DOTALL)[1]
        tests = [(int(x), ys.split("\\n")) for x, ys in re.findall(r"(\d+)->(.*)", user)]
        pairs = [(x, place, y) for x, ys in tests for place, y in enumerate(ys)]
        thoughts = re.search(r"<think>\n(.*)</think>", text, re.DOTALL)[1].splitlines()
        for thought, (x, place, y) in zip(thoughts, pairs):
            said, *wanted = thought.split(":")
            line = broken[place].removesuffix(")") if place < len(broken) else ""
            assert said.startswith(f"{x}{line}") and wanted[0] == y
            assert len(wanted) == 1 + (thought is thoughts[-1] and said.partition("=")[2] != y)
        assert len(thoughts) == len(pairs) or len(wanted) == 2
        if len(wanted) == 1:  # all looked right
            assert program.split("\nprint(x")[1:] == broken
        elif repairs.OPERATORS[wanted[1][0]](x, int(wanted[1][1])) == int(y):
            assert printed(program, x)[place] == int(y)
            sound += 1
    assert 200 < sound < 295


@functools.cache
def player(name: str):
    model = next(model for model, folder in MODELS.items() if folder == name)
    return bed.player(model), AutoTokenizer.from_pretrained(EMBEDDED[model])


def test_the_recipes_tokenizer_is_the_one_that_ships():
    for folder in EMBEDDED.values():
        ours = recipe.make_tokenizer(folder.name)
        shipped = AutoTokenizer.from_pretrained(folder)
        assert ours.get_vocab() == shipped.get_vocab()
        assert ours.chat_template == shipped.chat_template
        assert (folder / "model.safetensors").stat().st_size <= 8 << 20
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for number in range(61):  # a result is one token
        ids = tokenizer(f"7/3={number}</step>", add_special_tokens=False).input_ids
        assert len(ids) == 6 and tokenizer.decode(ids[4]) == str(number)


# ------------------------------------------------------------------ what the models can do
def test_the_bed_leaves_something_to_learn():
    """What docs/test-bed.md promises to whoever compares variants."""
    found = lambda name, column="sampled": MEASURED[name][column]["value"]  # noqa: E731
    assert 0.4 <= found("tiny: answers") <= found("tiny: answers", "greedy") <= 0.7
    assert 0.2 <= found("tiny-hard: answers") <= 0.4 and found("tiny-long: answers") <= 0.25
    for level in tasks.LEVELS:  # who looks is right, and who sounds sure is not looked at
        assert found(f"{level}: right steps that a check calls wrong") <= 0.02
        assert found(f"{level}: checks of wrong steps that are true") >= 0.97
        trusted = found(f"{level}: steps that do not sound sure and are trusted")
        assert trusted + 0.3 <= found(f"{level}: steps that sound sure and are trusted")
        assert found(f"{level}: wrong steps found, F1") <= 0.8


def test_the_shipped_model_is_the_one_that_was_measured():
    level = "tiny-hard"
    torch.manual_seed(3)
    drawn = tasks.sample_questions(0, 128, held_out=True, steps=tasks.LEVELS[level])
    questions = [question for question in drawn for _ in range(2)]
    texts = player("arithmetic")[0]([solve_prompt(question) for question in questions], 1.0)
    right = [is_correct(t, str(tasks.gold_answer(q))) for q, t in zip(questions, texts)]
    steps = [label for q, t in zip(questions, texts) for label in tasks.gold_steps(q, t)]
    for name, found, close in (("answers", right, 0.08), ("steps", steps, 0.05)):
        expected = MEASURED[f"{level}: {name}"]["sampled"]["value"]
        assert sum(found) / len(found) == pytest.approx(expected, abs=close)
    whole = [re.search(r"<answer>\\boxed\{\d+\}</answer>$", text) is not None for text in texts]
    assert sum(whole) / len(whole) > 0.97


ALL_PARTS = [(name, part) for name, parts in recipe.PARTS.items() for part in parts]


@pytest.mark.parametrize("name, part", ALL_PARTS, ids=lambda p: getattr(p, "__name__", p))
def test_every_part_survives_the_tokenizer_and_the_model_keeps_to_its_form(name, part):
    """Greedy completions on what the model has never seen, digits left out, occur among the
    demonstrations."""
    play, tokenizer = player(name)

    def form(text: str) -> str:
        text = re.sub(r"\\boxed\{\w+(\.5)?\}|\*\*(YES|NO)\*\*.*", "verdict", text)
        text = re.sub(r"[+*-]?\d+|[x()+*?,-]|none|add |minus |times ", "", text)
        return re.sub(r"(<step>.*</step>\n)+|(```input\n\n```\n)+", "repeated", text)

    examples = shown(part, 400)
    for user, assistant in examples[:50] + shown(part, 50, noise=0):
        said = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        ids, prompt = recipe.encode(tokenizer, user, assistant)
        assert ids == tokenizer.apply_chat_template(said, return_dict=True)["input_ids"]
        assert tokenizer.unk_token_id not in ids and ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[prompt:], skip_special_tokens=True) == assistant
    users = bed.held_out_part(part, 24)
    texts = play([[{"role": "user", "content": user}] for user in users], 0.0)
    known = {form(assistant) for _, assistant in examples}
    assert sum(form(text) in known for text in texts) >= 22, texts[:3]


def test_no_prompt_that_was_taught_is_a_misfit():
    for part in demonstrations.PARTS:
        for seed in range(40):
            assert tasks.misfit(part(random.Random(seed), 1)[0]) == ""
