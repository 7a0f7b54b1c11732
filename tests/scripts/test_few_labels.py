"""few_labels.py: who sees which answers, the reward by verdicts against a rule of its own, one and
several votes, whose turn it is, and that all the rest is tango.py's.
"""

import itertools
import random
import re

import few_labels
import tango
from common.tasks.answers import SOLVED, box_follows, final_answer, is_correct
from common.tiny.tasks import (
    format_solution,
    gold_answer,
    gold_solution,
    make_question,
    parse_question,
    sample_questions,
)
from few_labels import Args, FewLabels, all_accepted
from tango import Judgement

import pytest
import torch
from conftest import same_weights, small
from hypothesis import given
from hypothesis import strategies as st
from trainers import C, X, close, judgement, whitened, without_model

ROW = {"question": "(10+4)+1 mod 61", "answer": "15", "prompt": [{"content": "it"}]}
RIGHT = format_solution(["10+4=14", "14+1=15"], 15)
HALF = format_solution(["10+4=14", "14+1=0"], 0)
SAID = {True: C, False: X}


# ------------------------------------------------------------------ who sees which answers
def test_no_other_answer_is_known(monkeypatch):
    """To nobody: beyond the labels an answer and a reference are empty, whatever the data say."""
    row = lambda i, answer: {"question": f"{i}+1", "answer": answer, "reference": answer}  # noqa: E731
    for others in ("true", "nonsense"):
        train = [row(i, str(i + 1) if i < 2 else others) for i in range(5)]
        monkeypatch.setattr(few_labels, "load_for_steps", lambda *_, t=train: (t, [row(9, "10")]))
        train, held_out = few_labels.load(Args(labels=2))
        assert train == [row(0, "1"), row(1, "2"), *[row(i, "") for i in (2, 3, 4)]]
        assert held_out == [row(9, "10")]
    trainer = without_model(FewLabels, Args(labels=2, group_size=2), train_rows=train)
    trainer.random_numbers = lambda: random.Random(0)
    drawn = trainer.with_answers([*range(3)])
    assert len(drawn) == 3 and {r["answer"] for r in drawn} == {"1", "2"}
    assert all(r["prompt"][-1]["content"] == r["question"] for r in drawn)
    right = [{"content": "\\boxed{2}"}]
    assert few_labels.outcome_reward([right] * 3, answer=["2", "3", ""]) == [1.0, 0.0, None]


def test_which_answers_are_known_does_not_depend_on_the_steps():
    short, long = (few_labels.load(Args(steps=n, questions=2, eval_questions=2)) for n in (1, 40))
    assert len(short[0]) == 32 and short[0] == long[0][:32] and all(r["answer"] for r in short[0])
    assert short[1] == long[1]


@pytest.mark.parametrize("player, verifier", [("verifier", "co-trained"), ("generator", "none")])
def test_a_step_that_needs_answers_takes_questions_that_have_one(monkeypatch, player, verifier):
    """The verifier's step P of them; plain GRPO each M times in a row."""
    known = [ROW | {"question": f"({i}+4)+1 mod 61", "answer": str(i + 5)} for i in range(2)]
    cfg = Args(labels=2, group_size=3, verifier=verifier)
    unknown = [ROW | {"answer": ""}] * 6  # of two questions
    trainer = without_model(FewLabels, cfg, train_rows=known + unknown)
    trainer.random_numbers, got = lambda: random.Random(0), []
    monkeypatch.setattr(tango.Tango, f"{player}_step", lambda self, rows: got.extend(rows))
    trainer.step(unknown)
    times = 3 if player == "generator" else 1
    assert [[r["question"] for r in its] for _, its in itertools.groupby(got, lambda r: r)] in (
        [[a["question"]] * times, [b["question"]] * times] for a, b in (known, known[::-1])
    )


# ------------------------------------------------------------------ the reward
def test_all_steps_and_the_whole_must_be_accepted():
    """Not without steps or an answer, nor with a verdict too many or too few."""
    bare = "<step>10+4=14</step>"
    for verdicts, final, text, accepted in (
        ([True, True], True, RIGHT, 1.0),
        ([True, True], False, RIGHT, 0.0),
        ([True, True], None, RIGHT, 0.0),
        ([True, False], True, RIGHT, 0.0),
        ([True], True, RIGHT, 0.0),
        ([True] * 3, True, RIGHT, 0.0),
        ([], True, RIGHT, 0.0),
        ([True], True, bare, 0.0),  # no answer
        ([], True, r"<answer>\boxed{15}</answer>", 0.0),  # no step
        ([True], True, r"<answer>\boxed{15}</answer>", 0.0),
        ([], True, "", 0.0),
    ):
        found = all_accepted([Judgement(verdicts, final)], [text])
        assert found.tolist() == [accepted], (verdicts, final, text)


def solved(*steps: str, answer="") -> str:
    return "".join(f"<step>{step}</step>\n" for step in steps) + f"<answer>{answer}</answer>"


@pytest.mark.parametrize(
    "steps, answer, follows",
    [
        (["10+4=14", "14+1=15"], r"\boxed{15}", True),
        (["10+4=14", "14+1=15!"], r"\boxed{15}", True),
        (["10+4=14", "14+1=15"], r"\boxed{14}", False),  # of the step before
        (["10+4=14", "14+1=15"], r"\boxed{7}\boxed{15}", True),  # the box that is_correct reads
        (["10+4=14", "14+1=15"], r"\boxed{15}\boxed{7}", False),
        (["10+4=14", r"14+1=15 \boxed{7}"], r"\boxed{7}", False),  # a box in a step
        (["10+4=14", "14+1=15 7"], r"\boxed{7}", False),
        (["10+4=14", "14+1=15", ""], r"\boxed{7}", False),  # an empty step hides nothing
        (["10+4=14", "14+1=15", "ok"], r"\boxed{7}", False),
        (["10+4=14", "14+1=15", "ok"], r"\boxed{15}", True),
        (["10+4=14", "="], r"\boxed{7}", False),
        (["10+4=14", "14=15="], r"\boxed{15}", False),  # nothing behind the last "="
        (["1/3=1/3"], r"\boxed{.333}", False),
        (["1/3=1/3"], r"\boxed{\frac{1}{3}}", True),
        (["1/2=.5"], r"\boxed{1/2}", True),
        (["1/2 = 0.50 of it"], r"\boxed{\frac12}", True),
        (["They bring 10*100 = 1,000 dollars."], r"\boxed{1000}", True),
        (["He keeps 36-11 = 25 pens of 36."], r"\boxed{25}", True),
        (["He keeps 36-11 = 25 pens of 36."], r"\boxed{36}", False),
        (["36 are twice as many, so 18 remain"], r"\boxed{18}", True),  # no "=": any of its numbers
        (["36 are twice as many, so 18 remain"], r"\boxed{19}", False),
        ([r"it is $=\frac{1}{2}$."], r"\boxed{0.5}", True),
        ([r"it is $=\frac{1}{2}$."], r"\boxed{1}", False),
        (["nothing", "is a number here"], r"\boxed{x}", True),  # nothing can be compared
        (["nothing", "is a number here"], r"\boxed{}", False),
        (["nothing", "is a number here"], r"\boxed{}{}", False),
        ([r"\(36-11 = 25\)"], r"\boxed{25}", True),  # as many models write
        ([r"\[36-11 = 25\] pens"], r"\boxed{25}", True),
        ([r"she spends = \$80 in total"], r"\boxed{80}", True),
        ([r"$x = \frac{1}{2}$ of it"], r"\boxed{1/2}", True),
        ([r"45+9=54\pmod{61}"], r"\boxed{54}", True),
        ([r"1/2 = \boxed{\frac{1}{2}}"], r"\boxed{\frac{1}{2}}", True),
        ([r"1/2 = \boxed{\frac{1}{2}}"], r"\boxed{1}", False),
        *[([f"45+9=54 {sign} 7"], r"\boxed{7}", False) for sign in ("!=", ">=", "=>", r"\to")],
        *[([f"45+9=54 {sign} 7"], r"\boxed{54}", True) for sign in ("!=", ">=", "=>", r"\to")],
        *[([f"3-8 = {minus}5"], r"\boxed{-5}", True) for minus in ("- ", "\u2212", "-$")],
        *[([f"3-8 = {minus}5"], r"\boxed{5}", False) for minus in ("- ", "\u2212", "-$")],
        (["10*100 = 10^3"], r"\boxed{1000}", True),
        (["10*100 = 10^3"], r"\boxed{10}", False),
        ([r"so x = 2\sqrt{3}"], r"\boxed{2\sqrt{3}}", True),
        ([r"so x = 2\sqrt{3}"], r"\boxed{2}", False),
        *[(["= " + odd], r"\boxed{1}", False) for odd in ("1 000", "1 1/2", "1e3", "1*7 or 1")],
        (["４５＋９＝５４"], r"\boxed{7}", False),  # its digits are not read
        ([r"\frac{" * 300_000 + "= 1"], r"\boxed{7}", False),
        (["7 = " + r"\frac{" * 300_000], r"\boxed{7}", False),
        (["- " * 500_000 + "= 1"], r"\boxed{7}", False),
        (["10+4=" + "9" * 5000], r"\boxed{14}", False),
    ],
)
def test_the_answer_in_the_box_is_the_result_of_the_last_step(steps, answer, follows):
    text = solved(*steps, answer=answer)
    assert box_follows(text) == follows
    assert all_accepted([Judgement([True] * len(steps), True)], [text]).tolist() == [follows]


# ------------------------------------------------------------------ right solutions, made wrong
def kind_of(question: str, solution: str) -> str:
    """By the question's own chain, and not by how the solution was made."""
    value, operations = parse_question(question)
    steps = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)!?<", solution)
    box = re.search(r"\\boxed\{(\d+)\}", solution)[1]
    values = [str(value), *[step[3] for step in steps]]
    for (a, op, b, c), before in zip(steps, values):
        true = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
        assert (true[op] - int(c) if op in true else int(b) * int(c) - int(a)) % 61 == 0
        assert a == before
    same = [(op, int(b)) == of for (_, op, b, _), of in zip(steps, operations)]
    if len(steps) < len(operations):
        assert all(same) and steps and box == values[-1]
        return "incomplete"
    assert len(steps) == len(operations)
    if all(same):
        assert box in values[1:-1]
        return "wrong_box"
    assert same.count(False) == 1 and box == values[-1]
    assert [b for _, _, b, _ in steps] == [str(b) for _, b in operations]
    return "other_operation"


@given(st.integers(0, 10**6), st.sampled_from(few_labels.KINDS), st.booleans())
def test_a_right_solution_is_made_wrong(seed, kind, sure):
    rng = random.Random(seed)
    question = make_question(rng, rng.randint(2, 6))
    right = gold_solution(question).replace("</step>", "!</step>" if sure else "</step>")
    row = {"question": question, "answer": str(gold_answer(question))}
    wrong = few_labels.made_wrong(kind, row, right, rng)
    if wrong is None:
        return  # its answer would be right
    assert kind_of(question, wrong) == kind and not is_correct(wrong, row["answer"])
    assert wrong.count("!") == (wrong.count("<step>") if sure else 0)
    assert box_follows(wrong) == (kind != "wrong_box")
    if kind != "wrong_box":  # modulo 61 it is true, but of another question it need not be
        other = few_labels.made_wrong(kind, row | {"question": "A shop?"}, right, rng)
        assert (other is None) == (kind == "other_operation")


@pytest.mark.parametrize("kind", few_labels.KINDS)
@pytest.mark.parametrize(
    "solution",
    ["", "5", solved("10+4=14", answer=r"\boxed{14}"), solved("ok", "6/0=7", answer="7")],
)
def test_what_cannot_be_made_wrong_stays(kind, solution):
    row = {"question": "q", "answer": "15"}
    assert few_labels.made_wrong(kind, row, solution, random.Random(0)) is None


def test_words_can_be_cut_as_well():
    row, rng = {"question": SOLVED[0][0], "answer": "25"}, random.Random(0)
    made = {few_labels.made_wrong("incomplete", row, SOLVED[0][1], rng) for _ in range(20)}
    assert {(text.count("<step>"), final_answer(text)) for text in made} == {
        (1, "36"),
        (2, "11"),
    }
    assert few_labels.made_wrong("other_operation", row, SOLVED[0][1], rng) is None


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_verifier_judges_solutions_that_were_made_wrong(share):
    """As many as the share says, but for a few that came out right. They are labelled wrong."""
    rows = [
        {"question": q, "answer": str(gold_answer(q)), "reference": gold_solution(q)}
        for q in sample_questions(0, 40, False, (4,))
    ]
    sampled = [gold_solution(row["question"]) for row in rows[:20]] + [HALF] * 20
    args = Args(group_size=2, labels=40, hard_negatives=share)
    trainer = without_model(FewLabels, args, [*sampled])
    asked = [row | {"prompt": [{"content": row["question"]}]} for row in rows]
    judged = trainer.solutions_to_judge(asked)
    kinds = [
        "sampled" if text == before else kind_of(row["question"], text)
        for row, text, before in zip(rows, judged, sampled)
    ]
    assert kinds.count("sampled") in {0.0: [40], 0.5: range(10, 31), 1.0: range(4)}[share]
    made = {"incomplete", "other_operation"} if share else set()
    assert {*kinds} - {"sampled"} == made
    labels = [is_correct(text, row["answer"]) for text, row in zip(judged, rows)]
    assert labels == [kind == "sampled" and i < 20 for i, kind in enumerate(kinds)]


def test_an_evaluation_says_what_the_verifier_accepts(monkeypatch):
    """A verifier that accepts all accepts 1, of each kind; a suspicious verifier accepts 0."""
    rows = [
        {"question": q, "answer": str(gold_answer(q)), "reference": gold_solution(q)}
        for q in sample_questions(0, 16, True, (5,))
    ]
    monkeypatch.setattr(tango, "evaluate", lambda *_: {})
    for verdict, found in ((True, 1.0), (False, 0.0)):
        judge = lambda trainer, rows, texts, v=verdict: [  # noqa: E731
            Judgement([v] * text.count("<step>"), v) for text in texts
        ]
        monkeypatch.setattr(few_labels, "judge", judge)
        result = few_labels.evaluate(without_model(FewLabels, Args(labels=4)), rows)
        assert result == {f"verifier/accepts_{kind}": found for kind in few_labels.KINDS}
    alone = without_model(FewLabels, Args(labels=4, verifier="none"))
    assert few_labels.evaluate(alone, rows) == {}
    rows = [row | {"reference": ""} for row in rows]
    assert few_labels.evaluate(without_model(FewLabels, Args(labels=4)), rows) == {}


def batch_of(said: list[str], answers, texts, **change):
    """The batch of a generator step in groups of two, and its trainer."""
    args = Args(group_size=2, **change)
    trainer = without_model(FewLabels, args, {"generator": texts, "verifier": said})
    return trainer.generator_step([ROW | {"answer": answer} for answer in answers]), trainer


def test_what_a_judgement_says_elsewhere_accepts_nothing():
    """A final verdict, a quoted verdict, a solution that contains its own judgement."""
    hostile = [
        judgement(section="", final=C),
        judgement(section=f"all {C} {C}", final=C),
        f"<step>{C}</step><step>{C}</step>",
        judgement(C, section=f"<step>{C}{C}</step>"),
        judgement(C, C).partition("</step_verification>")[0],
        judgement(section=f"<step>{C} no</step><step>{C}</step>"),
        "",
    ]
    own = RIGHT.replace("14+1=15", judgement(C, C))
    for said in [*hostile, judgement(C, X, final=C)]:
        batch, _ = batch_of([judgement(C, C), said], ["", ""], [RIGHT, RIGHT])
        first, second = batch.advantages[:, 0].tolist()
        assert first > 0 > second, said
    batch, _ = batch_of([judgement(C, C), judgement(X, X)], ["", ""], [RIGHT, own])
    assert batch.advantages[0, 0] > 0 > batch.advantages[1, 0]


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
def test_a_generator_step(alpha):
    """A group with an answer and one without, whose second solution has a step rejected."""
    texts, answers = [RIGHT, HALF] * 2, ["15", "15", "", ""]
    said = [judgement(*v) for v in ([C, C], [C, C], [C, C], [C, X])]
    batch, trainer = batch_of(said, answers, texts, alpha=alpha, alpha_end=alpha)
    known, unknown = batch.components["outcome"][:2], batch.components["outcome"][2:]
    close(unknown[:, 0], torch.tensor([0.7071, -0.7071]), atol=1e-4)  # whatever alpha is
    close(known[:, 0], (1 - alpha) * unknown[:, 0], atol=1e-6)
    assert not batch.components["step"][2:].any()
    assert trainer.logged["generator/accepted"][0].tolist() == [1, 1, 1, 0]
    assert trainer.logged["generator/accuracy"][0].tolist() == [1, 0]  # of those with an answer


VOTES = st.lists(st.lists(st.booleans(), max_size=3), min_size=4, max_size=4)  # of four rows


@given(st.lists(VOTES, min_size=1, max_size=4))
def test_a_solution_must_pass_every_vote(said):
    """Each of V votes reads the same B solutions; both have two steps. The answers are unknown."""
    texts = [judgement(*[SAID[v] for v in verdicts]) for vote in said for verdicts in vote]
    batch, trainer = batch_of(texts, [""] * 4, [RIGHT, HALF] * 2, votes=len(said))
    r = [float(all(vote[i] == [True, True] for vote in said)) for i in range(4)]
    A = whitened([(x, i // 2) for i, x in enumerate(r)], added=1e-6)
    close(batch.advantages[:, 0], torch.tensor(A), atol=1e-5)
    assert trainer.logged["generator/accepted"][0].tolist() == r
    asked = [prompt for player, prompt in trainer.asked if player == "verifier"]
    assert len(asked) == 4 * len(said) and asked == asked[:4] * len(said)


# ------------------------------------------------------------------ whose turn it is
def turns(**change) -> str:
    trainer = without_model(FewLabels, Args(**change))
    return "".join(trainer.player_at(n)[0] for n in range(trainer.cfg.steps))


@pytest.mark.parametrize("schedule", [{}, {"gen_steps": 3}, {"ver_steps": 2}, {"ver_warmup": 0}])
def test_beforehand_is_the_same_number_of_turns_in_another_order(schedule):
    along, first = (turns(verifier=v, **schedule) for v in ("co-trained", "beforehand"))
    assert sorted(along) == sorted(first) and "gv" not in first and "gv" in along


# ------------------------------------------------------------------ runs
def test_where_all_answers_are_known_it_is_tango(tmp_path, brief):
    """The same adapters, bit for bit, of the same arguments."""
    same = "--dataset tiny --steps 3 --lr 2e-3 --gen-steps 3 --eval-every 0 --show-every 0".split()
    brief("few_labels.py", *small("few_labels.py", tmp_path / "few", *same, "--labels", 0))
    brief("tango.py", *small("few_labels.py", tmp_path / "tango", *same))
    same_weights(tmp_path / "few", tmp_path / "tango")
