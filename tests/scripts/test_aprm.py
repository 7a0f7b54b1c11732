"""aprm.py: the oracle against arithmetic by search, rewards and credit by loops, optimistic steps
against AdamW by hand; a step whose texts are given."""

import random
import re

import aprm
from aprm import chain_of, corruptor_reward, mark_advantages, mark_rewards, parse_edit
from common.checked import CoTrainer
from common.tiny.tasks import gold_solution, parse_question, sample_questions

import pytest
import torch
from trainers import without_model


def row_of(question: str) -> dict:
    return {"question": question, "answer": "12", "reference": gold_solution(question)}


ROW = row_of("((42/5)+9)*7 mod 61")  # 42/5=45, 45+9=54, 54*7=12
TEXTS = ["4*3 = 12", "12+2 = 14.", "So 14."]
REAL = {"question": "Four bags of 3, and two more?", "answer": "14"}
REAL["reference"] = "".join(f"<step>{s}</step>\n" for s in TEXTS) + r"<answer>\boxed{14}</answer>"


def steps_of(solution: str) -> list[str]:
    return re.findall("<step>(.*?)</step>", solution)


# ------------------------------------------------------------------ parsing
@pytest.mark.parametrize(
    "text, edit",
    [
        ("1:<step>42/5=31</step>", (0, "42/5=31")),
        (" 3 : <step> 54*7=1! </step>\n", (2, "54*7=1!")),
        ("2:<step>45/9=5</step>", (1, "45/9=5")),  # another operation is an edit, too
        ("0:<step>42/5=31</step>", None),
        ("4:<step>42/5=31</step>", None),
        ("<step>45+9=54</step>\nbecomes\n<step>45+9=31</step>", (1, "45+9=31")),
        ("<step>54*7=13!</step> becomes <step>54*7=31</step>", (2, "54*7=31")),  # resembles 54*7=12
        ("<step>?</step>becomes<step>42/5=31</step>", (0, "42/5=31")),  # resembles none
        ("<step>45+9=54</step>\n<step>45+9=31</step>", None),
        ("<step>45+9=54</step>\nbecomes\n", None),
        ("2:<step>45+9=54</step>\nbecomes\n<step>45+9=31</step>", None),
        ("<step>45+9=31</step>", None),
        ("١:<step>42/5=31</step>", None),
        ("1:<step>42/5=61</step>", None),  # no number modulo 61
        ("1:<step>42/5=31!!</step>", None),
        ("1:<step></step>", None),
        ("1:<step>42/5=31", None),
        ("1:<step>42/5=31</step><step>1+1=2</step>", None),
        ("1:<step>42/5=31</step> of course", None),
        ("", None),
    ],
)
def test_parse_edit(text, edit):
    assert parse_edit(text, ROW) == edit


def test_an_edit_of_prose_may_say_what_it_likes_but_no_verdict():
    edit = "2:<step>12+2 = 15.</step>"
    for end in ("", "\n<answer>15</answer>", r" <answer>\boxed{INCORRECT}</answer>"):
        assert parse_edit(edit + end, REAL) == (1, "12+2 = 15.")  # the edit, without what follows
    for end in ("<answer>15", "15</answer>", "<answer>1</answer>" * 2, "<step>So 15.</step>", "So"):
        assert parse_edit(edit + end, REAL) is None
    for step in (r"12+2 = 15 \boxed{CORRECT}", "12+2 = 15 **Correct.**", "12+2\n= 15"):
        assert parse_edit(f"2:<step>{step}</step>", REAL) is None
    assert parse_edit("1:<step>a<step>b</step>", REAL) is None
    assert parse_edit("1:<step>" + "<step" * 50_000, REAL) is None
    assert parse_edit(f"<step>{'1' * 1000}</step> becomes <step>{step}</step>", REAL) is None
    both = f"<step>{'1' * 1000}</step> becomes <step>{'2' * 1000}</step>"
    assert parse_edit(both, REAL)[1] == "2" * 1000
    assert parse_edit(f"{both}<answer>" + "becomes" * 50_000, REAL) is None


# ------------------------------------------------------------------ the oracle
def result(a: int, op: str, b: int) -> int:
    """By search: the x of 0 to 60 for which it holds."""
    off = {"+": lambda x: x - a - b, "-": lambda x: x + b - a, "*": lambda x: x - a * b}
    return next(x for x in range(61) if off.get(op, lambda x: x * b - a)(x) % 61 == 0)


def test_labels_and_what_follows_an_edit_are_executed_again():
    rng = random.Random(5)
    for question in sample_questions(3, 60, held_out=False):
        (value, operations), labels, expected = parse_question(question), [], []
        place, a, claimed = rng.randrange(len(operations)), rng.randrange(61), rng.randrange(61)
        old = steps_of(gold_solution(question))[place]
        # another operation, another result, or the same step that now sounds sure
        other = f"{a}{rng.choice('+-*/')}{rng.randint(2, 9)}={claimed}"
        new = rng.choice([other, f"{old.split('=')[0]}={claimed}", old + "!"])
        chain = chain_of(row_of(question), (place, new), random.Random(1))
        for k, (op, b) in enumerate(operations):
            right = f"{value}{op}{b}={result(value, op, b)}"
            expected.append(new.rstrip("!") if k == place else right)
            labels.append(expected[-1] == right)
            value = int(expected[-1].split("=")[1])
        assert [step.rstrip("!") for step in steps_of(chain.solution)] == expected
        assert steps_of(chain.solution)[place] == new  # its tone is the corruptor's
        assert chain.labels == labels and chain.label == labels[place]
        assert chain.solution.endswith(rf"\boxed{{{value}}}</answer>")


def test_tones_do_not_say_who_wrote_a_step_and_do_not_differ_within_a_group():
    chains = [chain_of(ROW, None, random.Random(i)) for i in range(400)]
    sure = [step.endswith("!") for chain in chains for step in steps_of(chain.solution)]
    assert 0.1 < sum(sure) / len(sure) < 0.2 and all(chain.label is None for chain in chains)
    of = [chain_of(ROW, (0, f"42/5={x}"), random.Random(9)).solution for x in range(40)]
    assert len({tuple(s.endswith("!") for s in steps_of(text)[1:]) for text in of}) == 1


@pytest.mark.parametrize(
    "place, new, labels",
    [
        (0, "4*3 = 13", [False, None, None]),
        (1, "12+2 = 15.", [True, False, None]),
        (1, "12+4 = 16.", [True, None, None]),  # true, but is it asked for?
        (2, "So 15.", [True, True, None]),
    ],
)
def test_elsewhere_the_oracle_sees_false_equations_only(place, new, labels):
    chain = chain_of(REAL, (place, new), random.Random(0))
    assert chain.labels == labels and chain.label is labels[place]
    assert steps_of(chain.solution) == TEXTS[:place] + [new] + TEXTS[place + 1 :]
    assert chain_of(REAL, None, random.Random(0))[:2] == (REAL["reference"], [True] * 3)


@pytest.mark.parametrize("kind", ["random", "misconceptions"])
def test_static_edits_are_wrong(kind):
    edits = [aprm.static_edit(ROW, kind, random.Random(i)) for i in range(200)]
    chains = [chain_of(ROW, edit, random.Random(0)) for edit in edits]
    assert all(chain.labels.count(False) == 1 and chain.label is False for chain in chains)
    results = {(k, step.rstrip("!")) for k, step in edits}
    # 45 + 1 + (3 * 42 + 7 * 5) % 59 = 89, which is 28 modulo 61
    assert len(results) > 90 if kind == "random" else results == {(0, "42/5=28")}
    assert {k for k, _ in results} == ({0, 1, 2} if kind == "random" else {0})
    assert 0.05 < sum(step.endswith("!") for _, step in edits) / 200 < 0.25  # as solvers' steps


def test_static_edits_of_prose_change_its_last_number():
    for k, step in (aprm.static_edit(REAL, "random", random.Random(i)) for i in range(50)):
        one, other = (re.sub(r"\d+(?=\D*$)", "", text) for text in (step, TEXTS[k]))
        assert one == other and step != TEXTS[k]
    assert aprm.static_edit(REAL | {"reference": "<step>no</step>"}, "random", None) is None


# ------------------------------------------------------------------ rewards and credit
def test_rewards_are_those_of_the_table():
    fooled, caught = corruptor_reward(False, True), corruptor_reward(False, False)
    assert (fooled, caught) == (1, 0) and corruptor_reward(False, None) == caught
    for label in (True, None):  # harmless, not readable, or nobody can tell
        assert {corruptor_reward(label, mark) for mark in (True, False, None)} == {-1}
    marks, checks, labels = [True, True, False, False], [1, 0, 1, 1], [True, False, False, None]
    rewards = mark_rewards(marks, checks, labels, 0.25)
    assert rewards[:3] == [0.75, 0.0, 0.75] and rewards[3] != rewards[3]
    assert mark_rewards(None, [1, 1, 1, 1], labels, 0.25)[:3] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_has_the_credit_of_its_own_mark(seed):
    """Two chains of different lengths, G judgements each; no label for the last step of one."""
    rng, G, T, nan = random.Random(seed), 3, 14, torch.nan
    r = [[rng.choice([0.0, 0.75, 1.0]) for _ in range(3)] for _ in range(2 * G)]
    r = [row[:2] + [nan] if i < G else row for i, row in enumerate(r)]
    ends = [sorted(rng.sample(range(10), 3)) if rng.random() < 0.8 else None for _ in r]
    mask = torch.tensor([[t < n for t in range(T)] for n in rng.choices(range(10, T + 1), k=6)])
    found = mark_advantages(torch.tensor(r), ends, mask.long(), G)
    for i, end in enumerate(ends):
        group = r[i // G * G :][:G]
        A = [r[i][k] - sum(row[k] for row in group) / G for k in range(3)]
        known = [a for a in A if a == a]
        for t in range(T):
            a = sum(known) / len(known) if end is None else 0.0
            if end and t <= end[-1]:
                a = A[sum(e < t for e in end)]
            a = a if a == a and mask[i, t] else 0.0
            assert found[i, t].item() == pytest.approx(a, abs=1e-6)


# ------------------------------------------------------------------ a step by hand
def given_texts(edits=(), judgements=(), **change) -> aprm.Aprm:
    cfg, texts = aprm.Args(group_size=2, **change), {"corruptor": edits, "verifier": judgements}
    trainer = without_model(aprm.Aprm, cfg, texts, random_numbers=lambda *_: random.Random(0))
    trainer.set_rewards = lambda batch, rewards: setattr(batch, "rewards", torch.as_tensor(rewards))
    return trainer


def judged(marks: str, check: str = "") -> str:
    box = {"+": r"\boxed{CORRECT}", "-": r"\boxed{INCORRECT}"}
    return "".join(f"<step>x{check}{box[mark]}</step>" for mark in marks)


def test_a_step():
    """Four edits: fooled, caught, harmless, not readable; the mark of the edited step alone counts.
    The only chains with an error are the first question's; one of them is judged, since --untouched
    is 0, and the other as it was.
    """
    edits = ["2:<step>45/9=3!</step>", "1:<step>42/5=3</step>", "1:<step>42/5=45</step>", "hm"]
    verdicts = [judged("-+-"), judged("-++"), judged("-++"), judged("+++"), judged("++"), "?"]
    trainer = given_texts(edits, verdicts, untouched=0.0)
    rows = [ROW] * 2 + [row_of("(42/5)+9 mod 61")] * 2
    corruptor, verifier = trainer.step(rows)
    assert corruptor.rewards.tolist() == [1, 0, -1, -1]
    shown = [user for name, user in trainer.asked if name == "verifier"]
    wrong, rollout = shown[:2], shown[2:]
    assert "<step>45/9=3!</step>" in wrong[0] and wrong[0].endswith("Verify its 3 steps.")
    assert "<step>42/5=3</step>" in wrong[1] and "45" not in wrong[1].split("Solution:")[1]
    assert rollout[0] == rollout[1] and rollout[0] in wrong and rollout[2] == rollout[3]
    assert "<step>42/5=45" in rollout[2] and rollout[2].endswith("Verify its 2 steps.")
    # of the first step the one judgement is right and the other is not, of all others both are
    end = len(r"<step>x\boxed{INCORRECT}</step>")
    one, other = verifier.advantages[:2]
    assert one[:end].eq(0.5).all() and not one[end:].any()
    assert other[: end - 2].eq(-0.5).all() and not other[end - 2 :].any()
    readable, not_readable = verifier.advantages[2:]
    assert readable.unique().tolist() == [0.0, 0.5] and not_readable[:1].tolist() == [-0.5]
    assert verifier.rewards.tolist() == pytest.approx([1, 2 / 3, 1, 0])
    assert trainer.logged["co/caught"] == [False, True]
    assert trainer.logged["corruptor/fooled"] == [True, False, False, False]
    assert trainer.logged["corruptor/same_operation"] == [False, True, True]
    assert trainer.logged["corruptor/harmless"] == [False, False, True]
    assert trainer.logged["corruptor/unreadable"] == [False, False, False, True]
    assert trainer.logged["corruptor/distinct"] == [0.75]
    assert trainer.logged["corruptor/sounds_sure"] == [True, False, False]


@pytest.mark.parametrize(
    "untouched, questions, whole",
    [(0.0, 4, 0), (0.5, 4, 16), (1.0, 4, 32), (0.5, 1, 4), (0.3, 3, 7)],
)
def test_the_share_of_untouched_chains(untouched, questions, whole):
    """In eight steps; it is kept over the steps where it is none of a step's questions."""
    rows = [row_of(q) for q in sample_questions(7, questions, held_out=False) for _ in range(2)]
    found = []
    for step in range(8):
        trainer = given_texts((), ["?"] * len(rows), untouched=untouched, corruptor="random")
        trainer.state.global_step = step
        (batch,) = trainer.step(rows)
        found += [note["labels"].count(False) for note in batch.notes]
    assert found.count(0) == 2 * whole


def test_a_frozen_corruptor_writes_and_is_not_trained():
    edits, verdicts = ["1:<step>42/5=3</step>"] * 2, [judged("+++")] * 4
    trainer = given_texts(edits, verdicts, corruptor="frozen")
    assert [batch.player for batch in trainer.step([ROW] * 2)] == ["verifier"]
    assert not trainer.texts["corruptor"] and not trainer.texts["verifier"]
    assert aprm.Aprm.define_players(trainer.cfg)["corruptor"].lr == 0


# ------------------------------------------------------------------ optimistic gradients
def test_optimistic_steps_are_those_by_hand_and_survive_a_checkpoint(monkeypatch):
    def update(self, batch):  # as CoTrainer's
        self.add_up_gradients("verifier", batch["parameters"])
        if batch["parameters"][0].grad.norm() > 0:
            self.optimizer.step()
        self.optimizer.zero_grad()

    monkeypatch.setattr(CoTrainer, "update", update)
    monkeypatch.setattr(CoTrainer, "add_up_gradients", lambda *_: None)
    parameter, trainer = torch.nn.Parameter(torch.tensor([1.0])), None
    p, m, v, before, n = 1.0, 0.0, 0.0, None, 0
    for t, g in enumerate([0.0, 1.0, -0.5, 0.25, 0.0, -2.0]):
        if t in (0, 3):  # the second time from a checkpoint
            kept = trainer and trainer.optimizer.state_dict()
            trainer = given_texts()
            trainer.optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.0)
            trainer.optimizer.load_state_dict(kept or trainer.optimizer.state_dict())
        parameter.grad = torch.tensor([g])
        trainer.update({"parameters": [parameter]})
        d = 2 * g - (g if before is None else before)
        if d:  # nothing is remembered before the first step
            n, m, v, before = n + 1, 0.9 * m + 0.1 * d, 0.999 * v + 0.001 * d * d, g
            p -= 0.1 * (m / (1 - 0.9**n)) / ((v / (1 - 0.999**n)) ** 0.5 + 1e-8)
        assert parameter.item() == pytest.approx(p, rel=1e-5)


# ------------------------------------------------------------------ evaluation, refusals, a run
def test_figures_of_steps():
    """Of two right steps one is accepted; of four wrong ones one is found, one accepted, and two
    are in a judgement that is not readable.
    """
    marks = [[True, False, False], None, [True]]
    labels = [[True, False, True], [False, None, False], [False]]
    assert aprm.step_figures(marks, labels) == pytest.approx(
        {"wrong_steps_accepted": 1 / 4, "step_balanced_accuracy": (1 / 2 + 1 / 4) / 2}
        | {"step_f1": 2 / (2 * 1 + 1 + 3)}  # 2 TP / (2 TP + FP + FN)
    )
    assert aprm.step_figures([[True]], [[True]]) == {}


def test_rows_with_another_answer_without_steps_or_with_one_that_does_not_hold_are_not_clean():
    assert aprm.is_clean(ROW) and aprm.is_clean(REAL) and not aprm.is_clean(REAL | {"answer": "15"})
    assert not aprm.is_clean(REAL | {"reference": REAL["reference"].replace("12+2", "12+3")})
    assert not aprm.is_clean(REAL | {"reference": r"<answer>\boxed{14}</answer>"})  # no steps
