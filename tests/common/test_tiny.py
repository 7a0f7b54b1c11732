"""The embedded tasks against an oracle of their own, and what the embedded model can do: half, in
every part."""

import random
import re

from common.model import TINY, load_model
from common.sampling import sample
from common.tiny import make, tasks

import pytest
from transformers import AutoTokenizer


@pytest.mark.parametrize("seed", range(30))
def test_questions_and_solutions_are_true_arithmetic(seed):
    rng = random.Random(seed)
    question = tasks.make_question(rng, 1 + seed % 6)
    expression = question.removesuffix(" mod 10")
    assert tasks.gold_answer(question) == eval(expression) % 10  # Python as the oracle
    solution = tasks.gold_solution(question)
    steps = re.findall(r"<step>(.*?)</step>", solution)
    for step in steps:
        left, right = step.split("=")
        assert eval(left) % 10 == int(right)
    assert tasks.step_labels(question, steps) == [True] * len(steps)
    assert solution.endswith(f"<answer>\\boxed{{{eval(expression) % 10}}}</answer>")


def test_a_length_that_is_used_up_is_left_out():
    """There are 49 products of two factors and 288 sums of two with one negative number, some of
    them held out.
    """
    found = tasks.sample_tasks(1, 2000, held_out=False)
    assert len(set(found)) == 2000 and found[:1200] == tasks.sample_tasks(1, 1200, held_out=False)
    two = {task for task in found if len(tasks.parse_program_task(task)) == 2}
    assert two == {task for task in every_two_step_task() if not tasks.is_held_out(task)}
    assert len(set(tasks.sample_tasks(0, 256, held_out=True))) == 256


def every_two_step_task() -> set[str]:
    factors, negative = (2, 3, 4, 6, 7, 8, 9), [f"add minus {b}" for b in (1, 2, 3, 4, 6, 7, 8, 9)]
    positive = [f"{word} {a}" for word in ("add", "minus") for a in range(1, 10)]
    pairs = [(f"times {a}", f"times {b}") for a in factors for b in factors]
    pairs += [pair for a in positive for b in negative for pair in ((a, b), (b, a))]
    return {f"Read x. Then {a}, {b}. Print x mod 10." for a, b in pairs}


def test_step_labels_charge_a_mistake_once():
    question = "((3+4)*6)-5 mod 10"
    assert tasks.step_labels(question, ["3+4=7", "7*6=2", "2-5=7"]) == [True, True, True]
    carried_on = ["3+4=8", "8*6=8", "8-5=3"]
    assert tasks.step_labels(question, carried_on) == [False, True, True]
    another_operation = ["3+4=7", "7+6=3", "3-5=8"]
    assert tasks.step_labels(question, another_operation) == [True, False, True]
    not_the_value_before = ["3+4=7", "8*6=8", "8-5=3"]
    assert tasks.step_labels(question, not_the_value_before) == [True, False, True]
    one_too_many = ["3+4=7", "7*6=2", "2-5=7", "7+1=8"]
    assert tasks.step_labels(question, one_too_many) == [True, True, True, False]
    assert tasks.step_labels(question, ["", "what?", "2-5=7"]) == [False, False, False]
    assert tasks.step_labels(question, []) == []


@pytest.mark.parametrize(
    "text",
    ["3+4 mod 9", "3+4", "(3+4 mod 10", "3+4)*6 mod 10", "((3+4))*6 mod 10", "3+(4*6) mod 10"]
    + ["33+4 mod 10", "", "3 mod 10"],
)
def test_malformed_questions(text):
    assert tasks.parse_question(text) is None


@pytest.mark.parametrize("make_task", [tasks.make_program_task, tasks.make_testing_task])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_programs_compute_what_the_task_says(make_task, steps):
    """The oracle is Python's own reading of the words: `add minus 4` is `+ - 4`."""
    rng = random.Random(steps)
    for _ in range(40):
        task = make_task(rng, steps)
        shown = tasks.format_program(tasks.parse_program_task(task))
        program = shown.removeprefix("```python\n").removesuffix("\n```")
        words = task.removeprefix("Read x. Then ").removesuffix(". Print x mod 10.").split(", ")
        assert len(words) == steps
        for x in range(10):
            value = x
            for word in words:
                symbols = word.replace("add", "+").replace("minus", "-").replace("times", "*")
                value = eval(f"({value}) {symbols}")
            printed = []
            exec(program, {"input": lambda x=x: str(x), "print": printed.append})
            assert printed == [tasks.program_output(task, x)] == [value % 10]


def test_both_ways_in_which_a_test_can_be_bad():
    """On 0 and 5 a wrong factor shows seldom, elsewhere mostly; a dropped sign shows on every
    input.
    """
    rng = random.Random(0)
    hidden = {x: 0 for x in range(10)}
    products = sums = 0
    for _ in range(2000):
        task = tasks.make_testing_task(rng, 3)
        if "minus" in task and "times" not in task:
            sums += 1
            misread = task.replace("add minus", "add")
            outputs = [[tasks.program_output(t, x) for x in range(10)] for t in (task, misread)]
            assert all(a != b for a, b in zip(*outputs))
        else:
            products += 1
            assert "add" not in task
            first, rest = task.split(",", 1)
            other = f"{first[:-1]}{rng.choice([d for d in '2346789' if d != first[-1]])},{rest}"
            for x in hidden:
                hidden[x] += tasks.program_output(task, x) == tasks.program_output(other, x)
    assert 900 < sums < 1100 and products == 2000 - sums
    assert hidden[0] == products and hidden[5] > 0.8 * products
    assert all(hidden[x] < 0.2 * products for x in (1, 2, 3, 4, 6, 7, 8, 9)), hidden


def test_imperfect_solutions_err_at_the_stated_rate():
    rng = random.Random(0)
    right = total = 0
    for _ in range(4000):
        value, operations = tasks.parse_question(make.sample_question(rng))
        steps = make.write_steps(rng, value, operations, 1.0)[0]
        for (op, operand), step in zip(operations, steps):
            right += tasks.OPERATORS[op](int(step[0]), operand) == int(step[4])
            total += 1
    expected = 1 - sum(make.FACT_ERRORS.values()) / len(make.FACT_ERRORS)
    assert right / total == pytest.approx(expected, abs=0.03)
    assert make.compute(rng, 3, "+", 4, 0.0) == 7


@pytest.mark.parametrize("part", make.PARTS, ids=lambda part: part.__name__)
def test_every_part_survives_the_tokenizer(part):
    tokenizer, rng = AutoTokenizer.from_pretrained(TINY), random.Random(3)
    for noise in (0.0, 1.0):
        for _ in range(50):
            user, assistant = part(rng, noise)
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}],
                return_dict=True,
            )["input_ids"]
            assert tokenizer.unk_token_id not in ids and ids[-1] == tokenizer.eos_token_id
            prompt = make.encode(tokenizer, user, assistant)[1]
            assert tokenizer.decode(ids[prompt:], skip_special_tokens=True) == assistant


def test_the_recipes_tokenizer_is_the_one_that_ships():
    ours, shipped = make.make_tokenizer(), AutoTokenizer.from_pretrained(TINY)
    assert ours.get_vocab() == shipped.get_vocab() and ours.chat_template == shipped.chat_template
    assert (TINY / "model.safetensors").stat().st_size <= 8 << 20


# ------------------------------------------------------------------ what the model can do
@pytest.fixture(scope="module")
def ask():
    import torch

    model, tokenizer = load_model("tiny", ["player"], 4, False, seed=0)
    torch.manual_seed(0)

    def answer(users):
        messages = [[{"role": "user", "content": user}] for user in users]
        options = {"add_generation_prompt": True, "return_dict": True}
        prompts = [tokenizer.apply_chat_template(m, **options)["input_ids"] for m in messages]
        ids, _ = sample(model, prompts, 110, 1.0, [tokenizer.eos_token_id], tokenizer.pad_token_id)
        return tokenizer.batch_decode(ids, skip_special_tokens=True)

    return answer


def held_out_part(part, count=200):
    """Conversations of a part on questions the model has never seen."""
    rng, found = random.Random(11), []
    original = make.is_held_out
    make.is_held_out = lambda question: not original(question)
    try:
        while len(found) < count:
            found.append(part(rng, 0.0))
    finally:
        make.is_held_out = original
    return found


def share(values):
    return sum(values) / len(values)


def test_it_solves_a_quarter_to_a_half(ask):
    questions = tasks.sample_questions(0, 300, held_out=True)
    answers = [re.search(r"<answer>\\boxed\{(\d)\}</answer>$", text) for text in ask(questions)]
    assert share([a is not None for a in answers]) > 0.95
    gold = [str(tasks.gold_answer(question)) for question in questions]
    assert 0.25 <= share([a is not None and a[1] == g for a, g in zip(answers, gold)]) <= 0.45


@pytest.mark.parametrize(
    "part, pattern, low, high",
    [
        (make.discriminate_part, r"(\*\*YES\*\*|\*\*NO\*\*)", 0.55, 0.95),
        (make.program_part, r"```python\n(.*?)\n```", 0.3, 0.75),
        (make.test_part, r"Output:\*\*\n```\n(\d)\n```", 0.2, 0.6),
        (make.judge_question_part, r"<score>(\d+)</score>", 0.6, 0.95),
        (make.judge_answer_part, r"<score>(\d+)</score>", 0.55, 0.9),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_half_knows_every_other_part(ask, part, pattern, low, high):
    """It knows the format, and agrees with the clean demonstration more often than chance and less
    often than always.
    """
    examples = held_out_part(part)
    texts = ask([user for user, _ in examples])
    found = [re.search(pattern, text, re.DOTALL) for text in texts]
    assert share([f is not None for f in found]) > 0.95
    if part is make.test_part:  # any input is a good one: recompute the output
        inputs = [re.search(r"Input:\*\*\n```\n(\d+)\n```", text) for text in texts]
        right = [
            f is not None and i is not None and int(f[1]) == tasks.program_output(user, int(i[1]))
            for f, i, (user, _) in zip(found, inputs, examples)
        ]
    else:
        wanted = [re.search(pattern, assistant, re.DOTALL)[1] for _, assistant in examples]
        if "score" in pattern:
            found = [f and str(int(f[1]) > 5) for f in found]
            right = [f == str(int(w) > 5) for f, w in zip(found, wanted)]
        else:
            right = [f is not None and f[1] == w for f, w in zip(found, wanted)]
    assert low <= share(right) <= high


def test_it_proposes_well_formed_new_questions(ask):
    texts = ask(["Propose a question."] * 150)
    proposals = [re.fullmatch(r"<question>(.*?)</question>", text) for text in texts]
    formed = [p[1] for p in proposals if p and tasks.parse_question(p[1])]
    assert 0.5 <= len(formed) / 150 <= 0.95 and len(set(formed)) > 0.9 * len(formed)
