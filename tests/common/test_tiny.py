"""The embedded tasks against an oracle of their own, what the demonstrator believes, and what the
embedded models can do: half, in every part."""

import json
import random
import re

from common.model import EMBEDDED, TINY, load_model
from common.sampling import sample
from common.tasks.answers import is_correct
from common.tiny import MODELS, demonstrations, make, tasks
from tango import solve_prompt

import pytest
import torch
from conftest import ROOT
from transformers import AutoTokenizer


@pytest.mark.parametrize("seed", range(30))
def test_questions_and_solutions_are_true_arithmetic(seed):
    rng = random.Random(seed)
    question = tasks.make_question(rng, 1 + seed % 8)
    expression = question.removesuffix(" mod 100")
    assert tasks.gold_answer(question) == eval(expression) % 100  # Python as the oracle
    assert (
        expression.count("(") == seed % 8 and len(tasks.parse_question(question)[1]) == 1 + seed % 8
    )
    solution = tasks.gold_solution(question)
    steps = re.findall(r"<step>(.*?)</step>", solution)
    for step in steps:
        left, right = step.split("=")
        assert eval(left) % 100 == int(right)
    assert tasks.step_labels(question, steps) == [True] * len(steps)
    assert solution.endswith(f"<answer>\\boxed{{{eval(expression) % 100}}}</answer>")


def test_levels_have_the_lengths_they_say():
    for level, lengths in tasks.LEVELS.items():
        questions = tasks.sample_questions(3, 60, held_out=True, steps=lengths)
        found = {len(tasks.parse_question(question)[1]) for question in questions}
        assert found == set(lengths), level


def test_of_questions_that_are_used_up_there_are_as_many_as_there_are():
    make = lambda rng, steps: f"{rng.randrange(3)}+1 mod 100"  # noqa: E731
    found = [tasks._sample(random.Random(0), 100, held_out, make, (2,)) for held_out in (0, 1)]
    assert sorted(sum(found, [])) == ["0+1 mod 100", "1+1 mod 100", "2+1 mod 100"]


def test_no_operation_hides_an_earlier_mistake():
    for op, operands in tasks.OPERANDS.items():
        for b in operands:
            assert len({tasks.OPERATORS[op](a, b) for a in range(100)}) == 100


def test_a_length_that_is_used_up_is_left_out():
    """There are 49 products of two factors and 324 sums of two with one negative number, some of
    them held out.
    """
    found = tasks.sample_tasks(1, 2000, held_out=False)
    assert len(set(found)) == 2000 and found[:1200] == tasks.sample_tasks(1, 1200, held_out=False)
    two = {task for task in found if len(tasks.parse_program_task(task)) == 2}
    assert two == {task for task in every_two_step_task() if not tasks.is_held_out(task)}
    assert len(set(tasks.sample_tasks(0, 256, held_out=True))) == 256


def every_two_step_task() -> set[str]:
    factors, negative = (2, 3, 4, 6, 7, 8, 9), [f"add minus {b}" for b in range(1, 10)]
    positive = [f"{word} {a}" for word in ("add", "minus") for a in range(1, 10)]
    pairs = [(f"times {a}", f"times {b}") for a in factors for b in factors]
    pairs += [pair for a in positive for b in negative for pair in ((a, b), (b, a))]
    return {f"Read x. Then {a}, {b}. Print x mod 100." for a, b in pairs}


def test_step_labels_charge_a_mistake_once():
    question = "((38+4)*7)-5 mod 100"
    assert tasks.step_labels(question, ["38+4=42", "42*7=94", "94-5=89"]) == [True, True, True]
    carried_on = ["38+4=43", "43*7=1", "1-5=96"]
    assert tasks.step_labels(question, carried_on) == [False, True, True]
    another_operation = ["38+4=42", "42+7=49", "49-5=44"]
    assert tasks.step_labels(question, another_operation) == [True, False, True]
    not_the_value_before = ["38+4=42", "43*7=1", "1-5=96"]
    assert tasks.step_labels(question, not_the_value_before) == [True, False, True]
    one_too_many = ["38+4=42", "42*7=94", "94-5=89", "89+1=90"]
    assert tasks.step_labels(question, one_too_many) == [True, True, True, False]
    assert tasks.step_labels(question, ["", "what?", "94-5=89"]) == [False, False, False]
    # what cannot be read is wrong, and the number it ends with goes on
    assert tasks.step_labels(question, ["it is 42", "42*7=94", "94-5=89"]) == [False, True, True]
    assert tasks.step_labels(question, ["it is 142", "42*7=94", "94-5=89"]) == [False, False, True]
    assert tasks.step_labels(question, []) == []


def test_a_step_may_go_on_from_what_the_one_before_should_have_said():
    question = "((38+4)*7)-5 mod 100"
    assert tasks.faulty_steps(question, ["38+4=42", "42*7=94", "94-5=89"]) == []
    assert tasks.faulty_steps(question, ["38+4=43", "43*7=1", "1-5=96"]) == [1]  # carried on
    assert tasks.faulty_steps(question, ["38+4=43", "42*7=94", "94-5=89"]) == [1]  # a slip
    assert tasks.faulty_steps(question, ["38+4=43", "41*7=87", "87-5=82"]) == [1, 2]  # neither
    assert tasks.faulty_steps(question, ["38+4=42", "43*7=1", "1-5=96"]) == [2]
    assert tasks.faulty_steps(question, ["38+4=42", "42+7=49", "49-5=44"]) == [2]
    assert tasks.faulty_steps(question, ["38+4=42", "42*7=94", "94-5=89", "89+1=90"]) == [4]
    assert tasks.faulty_steps(question, ["it is 42", "42*7=94", "what?"]) == [1, 3]
    assert tasks.faulty_steps(question, ["", "what?", "94-5=89"]) == [1, 2, 3]
    assert tasks.faulty_steps(question, []) == [] and tasks.faulty_steps("2+2", ["2+2=4"]) is None


@pytest.mark.parametrize(
    "text",
    ["3+4 mod 10", "3+4", "(3+4 mod 100", "3+4)*6 mod 100", "((3+4))*6 mod 100", "100+4 mod 100"]
    + [
        "3+(4*6) mod 100",
        "3+42 mod 100",
        "03+4 mod 100",
        "",
        "3 mod 100",
        "3+4 mod 1000",
        "3++4 mod 100",
    ],
)
def test_malformed_questions(text):
    assert tasks.parse_question(text) is None


@pytest.mark.parametrize("make_task", [tasks.make_program_task, tasks.make_testing_task])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_programs_compute_what_the_task_says(make_task, steps):
    """The oracle is Python's own reading of the words: `add minus 4` is `+ - 4`."""
    rng = random.Random(steps)
    for _ in range(20):
        task = make_task(rng, steps)
        shown = tasks.format_program(tasks.parse_program_task(task))
        program = shown.removeprefix("```python\n").removesuffix("\n```")
        words = task.removeprefix("Read x. Then ").removesuffix(". Print x mod 100.").split(", ")
        assert len(words) == steps
        for x in range(0, 100, 7):
            value = x
            for word in words:
                symbols = word.replace("add", "+").replace("minus", "-").replace("times", "*")
                value = eval(f"({value}) {symbols}")
            printed = []
            exec(program, {"input": lambda x=x: str(x), "print": printed.append})
            assert printed == [tasks.program_output(task, x)] == [value % 100]


def test_both_ways_in_which_a_test_can_be_bad():
    """On 0 and 50 a wrong factor shows seldom, elsewhere mostly; a dropped sign shows on every
    input.
    """
    rng = random.Random(0)
    hidden = {x: 0 for x in (0, 50, 1, 37, 82)}
    products = sums = 0
    for _ in range(1000):
        task = tasks.make_testing_task(rng, 3)
        if "minus" in task and "times" not in task:
            sums += 1
            misread = task.replace("add minus", "add")
            outputs = [[tasks.program_output(t, x) for x in range(100)] for t in (task, misread)]
            assert all(a != b for a, b in zip(*outputs))
        else:
            products += 1
            assert "add" not in task
            first, rest = task.split(",", 1)
            other = f"{first[:-1]}{rng.choice([d for d in '2346789' if d != first[-1]])},{rest}"
            for x in hidden:
                hidden[x] += tasks.program_output(task, x) == tasks.program_output(other, x)
    assert 430 < sums < 570 and products == 1000 - sums
    assert hidden[0] == products and hidden[50] > 0.6 * products
    assert all(hidden[x] < 0.1 * products for x in (1, 37, 82)), hidden


# ------------------------------------------------------------------ what the demonstrator believes
def test_kinds_have_exactly_their_shares_and_are_the_same_for_all_time():
    facts = [f for f in demonstrations.FACTS if f[2] in tasks.OPERANDS[f[1]]]
    assert len(facts) == 2100
    for kind, (share, *_) in demonstrations.KINDS.items():
        found = sum(demonstrations.FACTS[fact] == kind for fact in facts)
        assert found == pytest.approx(share * 2100, abs=1)
    assert sum(share for share, *_ in demonstrations.KINDS.values()) == pytest.approx(1)
    again = demonstrations.kinds_of(sorted(facts), 0)
    assert (
        again
        == demonstrations.kinds_of(sorted(facts), 0)
        != demonstrations.kinds_of(sorted(facts), 1)
    )


WAYS = (demonstrations.SOLVING, demonstrations.WITH_CARE, demonstrations.MARKING)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", demonstrations.KINDS)
def test_facts_go_wrong_at_the_stated_rates_and_mostly_in_the_same_way(kind, how):
    rng = random.Random(0)
    rate = demonstrations.KINDS[kind][how]
    facts = [f for f, found in demonstrations.FACTS.items() if found == kind][:200]
    right, wrong = 0, {}
    for fact in facts:
        truth = tasks.OPERATORS[fact[1]](fact[0], fact[2])
        likeliest = demonstrations.compute(rng, *fact, 0, how)
        assert (likeliest == truth) == (rate < 0.5)
        for _ in range(60):
            result = demonstrations.compute(rng, *fact, 1, how)
            assert 0 <= result < 100
            right += result == truth
            if result != truth:
                wrong.setdefault(fact, []).append(result)
    assert right / (60 * len(facts)) == pytest.approx(1 - rate, abs=0.02)
    same = sum(results.count(max(results, key=results.count)) for results in wrong.values())
    total = sum(map(len, wrong.values()))
    if rate >= 0.25:
        assert same / total == pytest.approx(0.9, abs=0.04)


def test_what_is_believed_wrongly_is_the_likeliest_result_and_more_likely_than_the_truth():
    """Otherwise greedy decoding would repair it."""
    for _, *rates in demonstrations.KINDS.values():
        for rate in rates:
            assert rate < 0.3 or 0.9 * rate > 1.1 * (1 - rate)


def test_whoever_marks_sees_through_some_of_it_and_no_working_out_does():
    rng = random.Random(0)
    for fact, kind in demonstrations.FACTS.items():
        solving, care, marking = (demonstrations.compute(rng, *fact, 0, how) for how in WAYS)
        truth = tasks.OPERATORS[fact[1]](fact[0], fact[2])
        if kind == "misconceived":
            assert solving == care == marking != truth
        elif kind == "seen through":
            assert solving == care != truth == marking
        assert demonstrations.compute(rng, *fact, 1, demonstrations.GOLD) == truth


PARTS_THAT_MARK = ("verify", "discriminate", "grade", "grade_analysis", "choose")


@pytest.mark.parametrize("part", PARTS_THAT_MARK)
def test_whoever_marks_a_step_does_not_write_down_what_it_should_be(part):
    """Beside the step there is a check digit and the mark, which says whether the step has it."""
    rng, unlike = random.Random(0), 0
    for _ in range(300):
        user, assistant = getattr(demonstrations, part)(rng, 1)
        shown = set(re.findall(r"<step>(.*?)</step>", user))
        judged = re.findall(r"<step>(?:\d:)?([^:\\]*):(\d)\\boxed\{(\w+)\}</step>", assistant)
        assert {step for step, _, _ in judged} <= shown
        assert assistant.count("<step>") == len(judged)
        for step, digit, verdict in judged:
            tens, units = divmod(demonstrations.parse_step(step)[3], 10)
            unlike += ((tens + units) % 10 == int(digit)) != (verdict == "CORRECT")
    assert unlike < 30  # one mark in a hundred disagrees with its own digit


def test_no_misconception_has_the_check_digit_of_the_truth():
    rng = random.Random(0)
    for fact, kind in demonstrations.FACTS.items():
        if kind == "misconceived":
            wrong = demonstrations.compute(rng, *fact, 0)
            truth = demonstrations.compute(rng, *fact, 0, demonstrations.GOLD)
            assert demonstrations.check_digit(wrong) != demonstrations.check_digit(truth)


def test_a_correction_leaves_what_was_not_faulted():
    """And tries something else where it was."""
    rng, kept = random.Random(0), 0
    for _ in range(300):
        user, assistant = demonstrations.correct(rng, 1)
        before, after = (re.findall(r"<step>(.*?)</step>", text) for text in (user, assistant))
        found = re.search(r"Defects: (.*)", user)[1]
        faulty = [] if found == "none" else [int(k) - 1 for k in found.split(",")]
        assert len(before) == len(after)
        for k, (old, new) in enumerate(zip(before, after)):
            same_start = old.split("=")[0] == new.split("=")[0]
            if k not in faulty and same_start:
                assert old == new
            elif k in faulty and same_start:
                kept += old == new and not holds(old)
    assert kept < 10  # any number can be the same one


def test_an_analysis_says_what_is_wrong_and_what_it_costs():
    """On facts that the demonstrator marks rightly."""
    sure = {f for f, kind in demonstrations.FACTS.items() if kind != "misconceived"}
    first, second = next(
        (f, g)
        for f in sorted(sure)
        for g in sorted(sure)
        if g[0] == tasks.OPERATORS[f[1]](f[0], f[2])
    )
    results = [tasks.OPERATORS[op](a, b) for a, op, b in (first, second)]

    def analysis(wrong_by: list[int], answer: int) -> str:
        shown = zip((first, second), results, wrong_by)
        steps = [f"{a}{op}{b}={(result + d) % 100}" for (a, op, b), result, d in shown]
        return demonstrations.analyse(random.Random(0), steps, answer % 100, 0)

    assert analysis([0, 0], results[1]).endswith("Defects: none\nScore: \\boxed{1}")
    assert analysis([1, 0], results[1]).endswith("Defects: 1\nScore: \\boxed{0.5}")  # a slip
    assert analysis([0, 1], results[1] + 1).endswith("Defects: 2\nScore: \\boxed{0}")  # carried on
    assert analysis([5, 1], results[1]).endswith("Defects: 1,2\nScore: \\boxed{0.5}")


def test_inputs_are_found_backwards():
    rng = random.Random(1)
    for _ in range(300):
        user, assistant = demonstrations.abduce(rng, 1)
        x = int(re.search(r"```input\n(\d+)", assistant)[1])
        steps = re.findall(r"<step>(\d+)=(\d+)([+*-])(\d)</step>", assistant)
        operations = re.findall(r"([+*-])(\d)", user.split("return")[1])[: len(steps)]
        assert [(op, b) for _, _, op, b in steps] == operations[::-1]
        assert steps[0][0] == re.search(r"Output: (\d+)", user)[1] and int(steps[-1][1]) == x
        if all(tasks.OPERATORS[op](int(v), int(b)) == int(r) for r, v, op, b in steps):
            f = {}
            exec(user.split("```python\n")[1].split("\n```")[0], f)
            assert f["f"](x) == int(steps[0][0])


ALL_PARTS = [(name, part) for name, parts in demonstrations.PARTS.items() for part in parts]


@pytest.mark.parametrize("name, part", ALL_PARTS, ids=lambda p: getattr(p, "__name__", p))
def test_every_part_survives_the_tokenizer(name, part):
    tokenizer, rng = AutoTokenizer.from_pretrained(TINY), random.Random(3)
    for noise in (0, 1):
        for _ in range(50):
            user, assistant = part(rng, noise)
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}],
                return_dict=True,
            )["input_ids"]
            assert tokenizer.unk_token_id not in ids and ids[-1] == tokenizer.eos_token_id
            prompt = make.encode(tokenizer, user, assistant)[1]
            assert tokenizer.decode(ids[prompt:], skip_special_tokens=True) == assistant


def test_a_result_is_one_token():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for number in range(100):
        ids = tokenizer(f"7*3={number}</step>", add_special_tokens=False).input_ids
        assert len(ids) == 6 and tokenizer.decode(ids[4]) == str(number)


def test_the_recipes_tokenizer_is_the_one_that_ships():
    for folder in EMBEDDED.values():
        ours, shipped = make.make_tokenizer(), AutoTokenizer.from_pretrained(folder)
        assert ours.get_vocab() == shipped.get_vocab()
        assert ours.chat_template == shipped.chat_template
        assert (folder / "model.safetensors").stat().st_size <= 8 << 20


def holds(step: str) -> bool:
    a, op, b, claimed = demonstrations.parse_step(step)
    return tasks.OPERATORS[op](a, b) == claimed


# ------------------------------------------------------------------ what the models can do
def parts_of_the_bed() -> dict:
    return json.loads((ROOT / "docs" / "evidence" / "bed.json").read_text())["parts"]


def player(name: str):
    """A function of prompts and a temperature: what an embedded model, untrained, writes."""
    model, tokenizer = load_model(name, ["unused"], 1, False, seed=0)

    def play(prompts: list, temperature: float) -> list[str]:
        ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
        end, pad = [tokenizer.eos_token_id], tokenizer.pad_token_id
        with model.disable_adapter():
            written = sample(model, ids, 128, temperature, end, pad)[0]
        return tokenizer.batch_decode(written, skip_special_tokens=True)

    return play


def held_out_part(part, count: int) -> list[str]:
    """User messages of a part on questions and programs that the model has never seen."""
    draw, train = random.Random(0), demonstrations.is_held_out
    demonstrations.is_held_out = lambda text: not train(text)
    try:
        return [part(draw, 0)[0] for _ in range(count)]
    finally:
        demonstrations.is_held_out = train


def test_the_bed_leaves_something_to_learn_beyond_a_lower_temperature():
    """What docs/test-bed.md promises to whoever compares variants."""
    greedy = {name: part["greedy"]["value"] for name, part in parts_of_the_bed().items()}
    assert greedy["answers, tiny"] <= 0.55 and greedy["answers, tiny-hard"] <= 0.45
    assert greedy["steps, tiny"] <= 0.85 and greedy["steps, tiny-hard"] <= 0.85
    assert greedy["programs (cure)"] <= 0.55 and greedy["tests (cure)"] <= 0.55
    for level in tasks.LEVELS:  # well above chance, and far from perfect
        for column in ("sampled", "greedy"):
            found = parts_of_the_bed()[f"final verdict (tango), {level}, balanced"][column]["value"]
            assert 0.6 <= found <= 0.9, (level, column)


@pytest.mark.parametrize("level", tasks.LEVELS)
def test_the_shipped_model_is_the_one_that_was_measured(level):
    """And the order of the tokens' log-probabilities is not all that matters: it samples so."""
    torch.manual_seed(3)
    drawn = tasks.sample_questions(0, 128, held_out=True, steps=tasks.LEVELS[level])
    questions = [question for question in drawn for _ in range(2)]
    texts = player("tiny")([solve_prompt(question) for question in questions], 1.0)
    right = [is_correct(t, str(tasks.gold_answer(q))) for q, t in zip(questions, texts)]
    steps = [label for q, t in zip(questions, texts) for label in tasks.gold_steps(q, t)]
    measured = parts_of_the_bed()
    for name, found, close in (("answers", right, 0.08), ("steps", steps, 0.05)):
        expected = measured[f"{name}, {level}"]["sampled"]["value"]
        assert sum(found) / len(found) == pytest.approx(expected, abs=close)
    whole = [re.search(r"<answer>\\boxed\{\d+\}</answer>$", text) is not None for text in texts]
    assert sum(whole) / len(whole) > 0.97


@pytest.mark.parametrize("name, part", ALL_PARTS, ids=lambda p: getattr(p, "__name__", p))
def test_every_part_keeps_to_its_form(name, part):
    """Greedy completions on what the model has never seen, digits left out, occur among the
    demonstrations."""
    folder = next(model for model, folder in MODELS.items() if folder == name)
    play, draw = player(folder), random.Random(5)

    def form(text: str) -> str:
        text = re.sub(r"\\boxed\{\w+(\.5)?\}|\*\*(YES|NO)\*\*.*", "verdict", text)
        text = re.sub(r"[+*-]?\d+|[x()+*?,-]|none|add |minus |times ", "", text)
        return re.sub(r"(<step>.*</step>\n)+|(```input\n\n```\n)+", "repeated", text)

    known = {form(part(draw, 1)[1]) for _ in range(400)}
    users = held_out_part(part, 24)
    texts = play([[{"role": "user", "content": user}] for user in users], 0.0)
    assert sum(form(text) in known for text in texts) >= 22, texts[:3]
