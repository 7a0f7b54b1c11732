"""mae.py: scores, formats, rewards and both pools by hand and by oracle; the loop with completions
that are given; runs."""

import functools
import json
import math
import random
import statistics
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import mae
from common.args import fill_in, grpo_config
from common.model import load_model
from common.run import Run
from common.scoring import take_rows
from common.tasks.math import load_questions
from mae import (
    add_questions,
    against_gold,
    are_new,
    draw_from,
    draw_references,
    judge_score,
    part_whiten,
    proposed_question,
    proposer_reward,
    shown_answer,
    tag_format,
)

import pytest
import torch
from conftest import refused, run_here, small, weights
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st


def V(s: float) -> float:
    return (s - 1) / 9


# ------------------------------------------------------------------ judge_score
SCORES = [  # judgement, score that is read (None = none); V is (score - 1) / 9, cut to [0, 1]
    # plain
    ("<score>1</score>", 1),
    ("<score>7</score>", 7),
    ("<score>8</score>", 8),
    ("<score>10</score>", 10),
    ("<score> 7 </score>", 7),
    ("<score>\n7\n</score>", 7),
    ("<SCORE>7</SCORE>", 7),
    ("<Score>7</scorE>", 7),
    ("<score>007</score>", 7),
    ("<score>**9**</score>", 9),
    (r"<score>\boxed{9}</score>", 9),
    ("It is fine. <score>9</score> I am sure.", 9),
    # words and nothing
    ("", None),
    ("7", None),
    ("Score: 7", None),
    ("<score></score>", None),
    ("<score> \n </score>", None),
    ("<score>eight</score>", None),
    ("<score>VIII</score>", None),
    ("<score>high</score>", None),
    ("<score>N/A</score>", None),
    ("<score>?</score>", None),
    ("<score>nan</score>", None),
    ("<score>inf</score>", None),
    ("<score>８</score>", None),  # full-width digits
    ("<score>⑧</score>", None),
    ("<score>score: 8 of 10</score>", 8),
    ("<score>eight (8)</score>", 8),
    # out of range
    ("<score>0</score>", 0),
    ("<score>11</score>", 11),
    ("<score>100</score>", 100),
    ("<score>80%</score>", 80),
    ("<score>-5</score>", -5),
    ("<score>- 5</score>", 5),  # a dash, not a sign
    ("<score>+5</score>", 5),
    (f"<score>{'9' * 5000}</score>", 10),
    (f"<score>{'0' * 5000}</score>", 0),
    # decimals
    ("<score>7.5</score>", 7.5),
    ("<score>7.0</score>", 7),
    ("<score>.5</score>", 0.5),
    ("<score>8.</score>", 8),
    ("<score>7,5</score>", 7),
    ("<score>1e1</score>", 1),
    ("<score>1.2.3</score>", 1.2),
    ("<score>9 or 7.5</score>", 7.5),  # a decimal counts before an integer, wherever it stands
    # fractions: the value of a/b is the score
    ("<score>8/10</score>", 0.8),
    ("<score>10/10</score>", 1),
    ("<score>20/2</score>", 10),
    ("<score>7.5/10</score>", 0.75),
    ("<score>8 / 1</score>", 8),
    ("<score>8 out of 10</score>", 8),
    ("<score>9, that is 9/10</score>", 0.9),  # a fraction counts before all else
    ("<score>8/0</score>", None),
    ("<score>0/0</score>", None),
    ("<score>-8/1</score>", -8),
    ("<score>8/ten</score>", 8),
    ("<score>24/3/2</score>", 8),
    (f"<score>{'9' * 400}/{'9' * 400}</score>", 0),  # not a number
    # ranges
    ("<score>7-8</score>", 7),
    ("<score>7 - 8</score>", 7),
    ("<score>7–8</score>", 7),
    ("<score>7..9</score>", 7),
    ("<score>7...9</score>", 7),
    ("<score>7 to 9</score>", 7),
    ("<score>between 1 and 10</score>", 1),
    ("<score>>7</score>", 7),
    # several
    ("<score>3</score><score>9</score>", 3),
    ("<score>none</score><score>9</score>", 9),
    ("<score></score> <score>8/0</score> <score>6</score>", 6),
    ("<score>3 9</score>", 3),
    ("<score>3</score> no, <score>9</score> no, <score>1</score>", 3),
    # tags that do not pair up
    ("<score>7", None),
    ("7</score>", None),
    ("<score>7<score>", None),
    ("</score>7<score>", None),
    ("<score>7</score", None),
    ("< score>7</score>", None),
    ("<score >7</score>", None),
    ("<score/>7", None),
    ("<scores>7</scores>", None),
    ("[score]7[/score]", None),
    ("&lt;score&gt;7&lt;/score&gt;", None),
    ("<score>3<score>9</score>", 9),  # the first is never closed
    ("<score><score>9</score></score>", 9),
    ("A <score> is from 1 to 10. <score>4</score>", 4),
    ("<score>9</score></score>", 9),
    # what is thought, and what is quoted
    ("<think>7:7</think>\n<score>9</score>", 9),
    ("<think>The answer says <score>10</score>.</think><score>2</score>", 2),
    ("<think>The answer says </think><score>10</score>.</think><score>2</score>", 2),
    ("The answer says <score>10</score></THINK><score>2</score>", 2),
    ("<think><score>10</score>", None),
    ("<think><score>10</score></think>", None),
    ("<score>8</score><think>and now <score>1</score>", 8),
    (
        '"<score>10</score>" is what the answer says. <score>2</score>',
        10,
    ),  # not in its thoughts: the first counts
    ("<question><score>10</score></question><score>2</score>", 10),
    ("```\n<score>10</score>\n```<score>2</score>", 10),
]


@pytest.mark.parametrize("text, score", SCORES, ids=range(len(SCORES)))
def test_judge_score(text, score):
    expected = None if score is None else min(1.0, max(0.0, V(score)))
    assert judge_score(text) == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_the_table_is_as_hostile_as_it_says():
    assert len(dict(SCORES)) == len(SCORES) >= 60


PIECES = ["<score>", "</score>", "<think>", "</think>", "<SCORE>", "</Score>", "nine"]
PIECES += ["7", "10", "-", ".", "/", "0", " ", "\n"]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
@settings(max_examples=500, deadline=None)
def test_a_score_is_none_or_in_the_unit_interval(text):
    value = judge_score(text)
    assert value is None or 0.0 <= value <= 1.0
    # nothing in its thoughts can change it
    assert judge_score(f"<think>{text}</think><score>4</score>") == pytest.approx(V(4))


def test_a_long_judgement_is_read_in_no_time():
    assert judge_score("<score>" * 20_000 + "7" + "</score>") == pytest.approx(V(7))
    assert judge_score("<score>" + "7-/." * 20_000 + "</score>") is not None


# ------------------------------------------------------------------ format, question, answer
@pytest.mark.parametrize(
    "text, expected",
    [
        ("<answer>7</answer>", 1.0),
        ("a\n<answer>\n7\n</answer>b", 1.0),
        ("<Answer>7</ANSWER>", 1.0),
        ("<answer></answer>", 1.0),
        ("<answer>1</answer><answer>2</answer>", 0.5),
        ("<answer>1</answer>" * 7, 0.5),
        ("", 0.0),
        ("7", 0.0),
        ("<answer>7", 0.0),
        ("7</answer>", 0.0),
        ("</answer>7<answer>", 0.0),
        ("<answer>1</answer><answer>2", 0.0),
        ("<answer>1</answer></answer>", 0.0),
        ("<answer><answer>1</answer></answer>", 0.0),
        ("<question>7</question>", 0.0),
        ("<answer >7</answer>", 0.0),
    ],
)
def test_tag_format(text, expected):
    assert tag_format(text, "answer") == expected


@pytest.mark.parametrize(
    "text, question",
    [
        ("<question>1+2 mod 100</question>", "1+2 mod 100"),
        ("<question> 1+2\n</question>", "1+2"),
        ("<question>1</question> better: <question>2</question>", "2"),
        ("<question>1</question><question>2", "1"),
        ("<question>1<question>2</question>", "2"),
        ("<QUESTION>1</Question>", "1"),
        (
            "<question>1</question><question> </question>",
            "",
        ),  # the last one counts, as in the released code
        ("<question></question>", ""),
        ("1+2 mod 100", ""),
        ("", ""),
    ],
)
def test_proposed_question(text, question):
    assert proposed_question(text) == question


def test_shown_answer():
    assert shown_answer(r"<step>1</step><answer>\boxed{3}</answer>") == "3"
    assert shown_answer(r"\boxed{1} or \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert (
        shown_answer("<answer>3</answer>") == "<answer>3</answer>"
    )  # no box: everything, reasoning included
    for unboxed in (r"\boxed{}", r"it is \boxed{3"):
        assert shown_answer(unboxed) == unboxed


# ------------------------------------------------------------------ rewards and advantages
def test_proposer_reward_is_a_third_each_and_difficulty_counts_from_a_score_of_8_on():
    assert proposer_reward(V(10), 0.4, 1.0) == pytest.approx((1 + 0.4 + 1) / 3)
    assert proposer_reward(V(8), 1.0, 0.5) == pytest.approx((7 / 9 + 1 + 0.5) / 3)
    assert proposer_reward(V(7), 1.0, 0.5) == pytest.approx((6 / 9 + 0.5) / 3)
    assert proposer_reward(0.5, 1.0, 1.0) == pytest.approx(
        0.5
    )  # an unreadable score is below the gate
    assert proposer_reward(0.0, 1.0, 1.0, gate=0.0) == pytest.approx(2 / 3)
    assert proposer_reward(0.0, 1.0, 0.0) == 0.0


def by_hand(rewards: list[float], parts: list[int]) -> list[float]:
    """Whitening per role with the standard library; a constant role is 0."""
    result = []
    for r, p in zip(rewards, parts):
        of_part = [x for x, q in zip(rewards, parts) if q == p]
        flat = max(of_part) == min(of_part)
        if flat:
            result.append(0.0)
            continue
        deviation = math.sqrt(statistics.variance(of_part) + 1e-4)
        result.append((r - statistics.mean(of_part)) / deviation)
    return result


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.integers(0, 2)), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_part_whiten_equals_the_loop(rows):
    rewards, parts = [r for r, _ in rows], [p for _, p in rows]
    got = part_whiten(torch.tensor(rewards), torch.tensor(parts))
    assert got.tolist() == pytest.approx(by_hand(rewards, parts), abs=1e-4)


def test_a_flat_part_gives_exactly_zero_and_no_part_touches_another():
    part = torch.tensor([0, 1, 2] * 11)
    rewards = torch.rand(33, generator=torch.Generator().manual_seed(0))
    rewards[part == 1] = 0.1 + 0.2  # its float mean over 11 need not be the same number
    A = part_whiten(rewards, part)
    assert (A[part == 1] == 0).all() and A[part == 0].std() == pytest.approx(1, abs=0.01)
    rewards[part == 2] *= 100
    assert torch.equal(part_whiten(rewards, part)[part == 0], A[part == 0])
    assert part_whiten(torch.tensor([0.3]), torch.tensor([0])).tolist() == [0.0]


def test_rounding_noise_is_not_amplified_and_a_real_difference_is_kept():
    noisy = torch.tensor([1 / 3] * 16) + torch.tensor([0.0, 6e-8] * 8)
    assert noisy.unique().numel() == 2
    assert part_whiten(noisy, torch.zeros(16)).abs().max() < 1e-4


@pytest.mark.parametrize("rows", [4, 32, 128])
@pytest.mark.parametrize("paid", [0.0, 0.5])
def test_the_only_slip_in_a_batch_weighs_what_the_paper_makes_it_weigh(rows, paid):
    """(N - 1) / sqrt(N): 5.5 for one malformed row of 32, as the docstring says."""
    A = part_whiten(torch.tensor([1.0] * (rows - 1) + [paid]), torch.zeros(rows))
    assert A[-1].item() == pytest.approx(-(rows - 1) / math.sqrt(rows), rel=0.03)
    assert A[:-1].tolist() == pytest.approx([1 / math.sqrt(rows)] * (rows - 1), rel=0.03)
    assert A.sum().item() == pytest.approx(0, abs=1e-4)


# ------------------------------------------------------------------ pools
@given(
    st.integers(0, 4),
    st.integers(1, 6),
    st.lists(st.lists(st.sampled_from("abcdefghijkl"), max_size=5), max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_a_full_pool_drops_its_oldest_self_generated_question(seeds, room, batches):
    pool = [f"seed {i}" for i in range(seeds)]
    oracle = deque(maxlen=room)  # of self-generated ones
    for batch in batches:
        fresh = []
        for q in batch:
            if q not in oracle and q not in fresh and q != "c":
                fresh.append(q)
        oracle.extend(fresh)
        add_questions(pool, batch, seeds, seeds + room, {"c"})
        assert pool == [f"seed {i}" for i in range(seeds)] + list(oracle)


def test_neither_copies_nor_held_out_questions_join_the_pool():
    pool = ["seed", "old"]
    add_questions(pool, ["old", "new", "held out", "new", "seed"], 1, 10, {"held out"})
    assert pool == ["seed", "old", "new"]


def test_draw_from():
    rng = random.Random(0)
    assert draw_from(rng, [], 5) == []
    assert sorted(draw_from(rng, list(range(9)), 9)) == list(range(9))
    assert len(set(draw_from(rng, list(range(100)), 20))) == 20  # without replacement
    more = draw_from(rng, [1, 2, 3], 10)
    assert len(more) == 10 and set(more[:3]) == {1, 2, 3} and set(more) == {1, 2, 3}


def test_draw_references():
    rng = random.Random(0)
    for share, low, high in ((0.0, 0, 0), (1.0, 400, 400), (0.5, 160, 240)):
        drawn = draw_references(rng, ["a", "b"], share, 400)
        assert len(drawn) == 400 and set(drawn) <= {"a", "b", None}
        assert low <= sum(reference is not None for reference in drawn) <= high
    assert draw_references(rng, [], 1.0, 3) == [None] * 3


def test_new_questions():
    from common.tiny.tasks import sample_questions

    pool = sample_questions(1, 500, held_out=False)
    fresh = sample_questions(2, 200, held_out=False)
    assert sum(are_new(fresh, pool)) > 180
    assert not any(are_new(pool[:50], pool))
    assert not any(are_new([q.upper() + " " for q in pool[:50]], pool))
    assert are_new(["a b c", "a b d", ""], ["x", "a b c", "a b"]) == [False, True, True]
    assert are_new(fresh[:3], []) == [True] * 3
    words = [f"w{i}" for i in range(29)]  # 20 n-grams of 10
    assert are_new([" ".join(words)], [" ".join(words[:18])]) == [True]  # 9 of them known
    assert are_new([" ".join(words)], [" ".join(words[:19])]) == [False]  # 10


def test_against_gold():
    got = against_gold([1.0, 0.6, 0.2, None, 0.0, 0.6], [True, True, True, False, False, False])
    assert got["balanced_accuracy"] == pytest.approx(
        (2 / 3 + 1 / 3) / 2
    )  # no score is wrong; 0.6 says right
    # right 1, .6, .2 against wrong .5 (no score), 0, .6: wins 3, 2.5, 1
    assert got["rank_agreement"] == pytest.approx(6.5 / 9)
    assert against_gold([0.3] * 6, [True, False] * 3)["rank_agreement"] == 0.5
    half, nothing = (dict.fromkeys(("balanced_accuracy", "rank_agreement"), v) for v in (0.5, 0.0))
    assert against_gold([1.0, 0.0], [True, True]) == half  # one class only
    assert against_gold([0.0, 1.0], [True, False]) == nothing
    assert against_gold([0.5, 0.49], [True, False])["balanced_accuracy"] == 1.0


# ------------------------------------------------------------------ the loop, piece by piece
def make_mae(folder, seeds=12, **change):
    """A trainer on the embedded model, 4 rows of each role."""
    sizes = {"questions": 4, "micro_batch": 4, "rows_at_once": 256, "seed_questions": seeds}
    args = mae.Args(**sizes, lr=1e-3, steps=4, **change)
    args = fill_in(args, rows=12)
    model, tokenizer = load_model("tiny", ["agent"], 4, False, seed=0)
    train, held_out = load_questions("tiny", seeds + 8, 8, seed=0)
    return mae.Mae(
        model,
        args,
        [row["question"] for row in train[:seeds]],
        train[seeds:],
        held_out,
        args=grpo_config(args, folder, 12, save_strategy="no"),
        train_dataset=Dataset.from_list([{"prompt": mae.propose_prompt(None)}] * 12),
        processing_class=tokenizer,
    )


def speak(trainer, completions: dict[str, list[str]], solver="", judge=None):
    """Let the roles write what they are told, in rollouts and elsewhere. Returns the prompts that
    `generate` was given, by role."""
    asked = {"solver": [], "judge": []}
    tags = {"proposer": "question", "solver": "answer", "judge": "score"}

    def rollout(name, rows):
        assert len(rows) == len(completions[name]) and {row["tag"] for row in rows} == {tags[name]}
        formats = torch.tensor([tag_format(text, tags[name]) for text in completions[name]])
        return {
            "player": name,
            "texts": completions[name],
            "rewards": formats,
            "completion_mask": torch.ones(len(rows), 2),
            "num_items_in_batch": 2 * len(rows),
            "notes": [
                {"player": name, "prompt": row["prompt"][-1]["content"], "rewards": {}}
                for row in rows
            ],
        }

    def generate(name, prompts, greedy=False):
        asked[name] += [prompt[-1]["content"] for prompt in prompts]
        return [solver if name == "solver" else judge(p[-1]["content"]) for p in prompts]

    trainer.rollout, trainer.generate, trainer.judgements = rollout, generate, []
    return asked


GOOD, POOR, NONE = "1+2 mod 100", "1+ mod 100", "no tags"
TWO = "<question>x</question><question>2+2 mod 100</question>"


def proposals(text: str) -> str:
    return text if text in (NONE, TWO) else f"<question>{text}</question>"


def test_the_proposers_reward_by_hand(tmp_path):
    trainer = make_mae(tmp_path)
    replies = {GOOD: "<score>9</score>", POOR: "<score>7</score>", "2+2 mod 100": "no score"}

    def judge(user):
        question = user.split("\n")[0].removeprefix("Question: ")
        return "<score>4</score>" if "Answer: " in user else replies[question]

    before = list(trainer.memory["questions"])
    completions = {"proposer": [proposals(text) for text in (GOOD, POOR, NONE, TWO)]}
    asked = speak(trainer, completions, r"<answer>\boxed{3}</answer>", judge)
    batch = trainer.propose([None] * 4)
    difficulties = [note["rewards"].get("difficulty") for note in batch["notes"]]
    assert difficulties == pytest.approx([6 / 9, 0.0, None, 0.0])
    # quality 8/9, difficulty 1 - 3/9 from 5 answers scored 4; below the gate no difficulty; no
    # question: 0; two pairs: format one half, quality neutral
    expected = [(8 / 9 + 6 / 9 + 1) / 3, (6 / 9 + 0 + 1) / 3, 0.0, (0.5 + 0 + 0.5) / 3]
    assert batch["rewards"].tolist() == pytest.approx(expected)
    totals = [note["rewards"]["total"] for note in batch["notes"]]
    assert totals == batch["rewards"].tolist()
    assert asked["solver"] == [GOOD] * 5  # difficulty is sampled above the gate only
    assert asked["judge"].count(f"Question: {GOOD}\nAnswer: 3\nScore the answer.") == 5
    assert len(asked["judge"]) == len(trainer.judgements) == 3 + 5
    assert trainer.memory["questions"] == before + [GOOD]
    logged = {name: value for name, (value,) in trainer._means.items()}
    assert logged["proposer/quality"] == pytest.approx((8 / 9 + 6 / 9 + 0.5) / 3)
    assert logged["proposer/difficulty"] == pytest.approx(6 / 9)
    assert logged["proposer/accepted"] == 1 / 4 and logged["co/questions"] == 13


def test_without_the_gate_everything_joins_and_is_paid_for_its_difficulty(tmp_path):
    trainer = make_mae(tmp_path, quality_gate=False, format_reward=False)
    completions = {"proposer": [proposals(POOR)] * 4}
    asked = speak(trainer, completions, "no box", lambda user: "<score>1</score>")
    rewards = trainer.propose([None] * 4)["rewards"]
    assert rewards.tolist() == pytest.approx([(0 + 1 + 0) / 3] * 4)
    assert trainer.memory["questions"][-1] == POOR and len(asked["solver"]) == 20
    assert f"Question: {POOR}\nAnswer: no box\nScore the answer." in asked["judge"]


def test_the_solvers_reward_by_hand_and_its_pairs(tmp_path):
    trainer, two = make_mae(tmp_path), "<answer>x</answer>" * 2
    texts = [r"<answer>\boxed{1}</answer>", r"<answer>\boxed{2}</answer>", r"\boxed{3}", two]
    scores = {"1": "<score>10</score>", "2": "?", "3": "<score>10</score>"}

    def judge(user):
        return scores.get(user.split("Answer: ")[1].split("\n")[0], "<score>4</score>")

    speak(trainer, {"solver": texts}, judge=judge)
    trainer.example = ""
    batch = trainer.solve(["q1", "q2", "q3", "q4"])
    notes = [(note["judgement"], note["rewards"]["judged"]) for note in batch["notes"]]
    assert notes[:2] == [("<score>10</score>", 1.0), ("?", 0.5)]
    expected = [1.0, (0.5 + 1) / 2, (1 + 0) / 2, (3 / 9 + 0.5) / 2]
    assert batch["rewards"].tolist() == pytest.approx(expected)
    assert trainer.memory["pairs"] == [
        {"question": "q1", "answer": "1", "right": None},
        {"question": "q2", "answer": "2", "right": None},
        {"question": "q3", "answer": "3", "right": None},
        {"question": "q4", "answer": two, "right": None},
    ]
    trainer.cfg.format_reward = False
    rewards = trainer.solve(["q1", "q2", "q3", "q4"])["rewards"]
    assert rewards.tolist() == pytest.approx([0.5, 0.25, 0.5, 1 / 6])
    trainer.cfg.pool_size = 6
    trainer.solve(["q5", "q6", "q7", "q8"])
    kept = [pair["question"] for pair in trainer.memory["pairs"]]
    assert kept == ["q3", "q4", "q5", "q6", "q7", "q8"]


def test_the_judges_reward_by_hand(tmp_path):
    right = (True, True, False, False)
    pairs = [{"question": "q", "answer": "1", "right": label} for label in right]
    tens, two = "<score>10</score>", "<score>4</score><score>1</score>"
    trainer = make_mae(tmp_path)
    speak(trainer, {"judge": [tens, "no score", tens, two]})
    # the format and nothing else
    assert trainer.judge(pairs)["rewards"].tolist() == [1.0, 0.0, 1.0, 0.5]
    trainer.cfg.format_reward = False
    assert trainer.judge(pairs)["rewards"].tolist() == [0.0] * 4
    trainer.cfg.judge_reward, trainer.cfg.format_reward = "agreement", True
    expected = [1.0, 0.0, 0.5, (0.5 + 1 - 3 / 9) / 2]
    assert trainer.judge(pairs)["rewards"].tolist() == pytest.approx(expected)


def test_agreement_takes_its_pairs_from_questions_set_aside(tmp_path):
    trainer = make_mae(tmp_path, judge_reward="agreement")
    gold = {row["question"]: row["answer"] for row in trainer.gold}
    assert len(gold) == 8
    assert not gold.keys() & set(trainer.memory["questions"]) and not gold.keys() & trainer.never
    completions = {"solver": ["<answer>x</answer>"] * 4}
    speak(trainer, completions, r"<answer>\boxed{3}</answer>", lambda user: "<score>9</score>")
    for trainer.state.global_step in range(6):
        trainer.solve(trainer.memory["questions"][:4])
    pairs = trainer.memory["pairs"]
    assert len(pairs) == 24 and len({pair["question"] for pair in pairs}) > 4
    assert all(pair["right"] == (gold[pair["question"]] == "3") for pair in pairs)
    # one right answer among 50: it is drawn as often as all wrong ones together
    pairs = [{"question": "q", "answer": "1", "right": i == 0} for i in range(50)]
    trainer.memory["pairs"] = pairs
    assert sorted(pair["right"] for pair in trainer.draw()[2]) == [False, False, True, True]
    trainer.memory["pairs"] = pairs[1:]
    assert trainer.draw()[2] == []  # only one class: no batch


PAIRS = [{"question": f"{i}+4 mod 100", "answer": str(i), "right": None} for i in range(4)]


def test_what_is_drawn(tmp_path):
    trainer = make_mae(tmp_path, seeds=6, reference_share=1.0)
    trainer.memory["pairs"] = list(PAIRS)
    references, questions, pairs = trainer.draw()
    assert trainer.draw() == (references, questions, pairs)  # the seed and the step decide
    assert set(references) <= set(trainer.memory["questions"]) and len(references) == 4
    assert set(questions) <= set(trainer.memory["questions"]) and len(set(questions)) == 4
    assert sorted(pair["answer"] for pair in pairs) == ["0", "1", "2", "3"]
    trainer.state.global_step = 1
    assert trainer.draw() != (references, questions, pairs)
    trainer.memory |= {"questions": [], "pairs": []}
    assert trainer.draw() == ([None] * 4, [], [])


def two_processes(tmp_path, **change) -> list[mae.Mae]:
    """Two trainers in two threads' hands, which gather from each other."""
    barrier, given = threading.Barrier(2, timeout=900), [[], []]

    def gather(rank, values):
        given[rank] = list(values)
        barrier.wait()
        everyone = given[0] + given[1]
        barrier.wait()
        return everyone

    trainers = [make_mae(tmp_path / str(rank), **change) for rank in range(2)]
    for rank, trainer in enumerate(trainers):
        trainer.accelerator = SimpleNamespace(num_processes=2, process_index=rank, device="cpu")
        trainer.gather = functools.partial(gather, rank)
    return trainers


def test_two_processes_keep_the_same_pools_and_whiten_over_both(tmp_path):
    trainers = two_processes(tmp_path)
    for rank, trainer in enumerate(trainers):
        questions = [proposals(f"{rank}+{i} mod 100") for i in range(3)] + [NONE]
        answers = [f"<answer>{rank}</answer>" * n for n in (1, 2, 1, 3)]
        scores = ["<score>4</score>", "?", "?", f"<score>{rank}</score>"]
        completions = {"proposer": questions, "solver": answers, "judge": scores}
        opinions = iter(range(1000))
        speak(trainer, completions, "x", lambda _, n=opinions: f"<score>{8 + next(n) % 3}</score>")
    for step in range(2):
        with ThreadPoolExecutor(2) as pool:
            batches = [batch for (batch,) in pool.map(lambda trainer: trainer.step([]), trainers)]
        first, second = (json.dumps(trainer.memory) for trainer in trainers)
        assert first == second
        assert len(trainers[0].memory["pairs"]) == 8 * (step + 1)
        assert {f"{rank}+2 mod 100" for rank in range(2)} <= set(trainers[0].memory["questions"])
        rewards = [r for batch in batches for r in batch["rewards"].tolist()]
        parts = [mae.ROLES.index(note["player"]) for batch in batches for note in batch["notes"]]
        assert len(rewards) == (16, 24)[step] and max(parts) == (1, 2)[step]
        advantages = torch.cat([batch["advantages"] for batch in batches]).tolist()
        assert advantages == pytest.approx(by_hand(rewards, parts), abs=1e-4)


def test_two_processes_share_what_is_drawn(tmp_path):
    """They draw the same 8, without replacement, and have no row in common."""
    trainers = two_processes(tmp_path, judge_reward="agreement", reference_share=1.0)
    pairs = [{"question": f"q{i}", "answer": "1", "right": i % 2 == 0} for i in range(8)]
    gold = []
    for trainer in trainers:
        trainer.memory["pairs"] = pairs
        trainer.generate = lambda name, prompts: [""] * len(prompts)
        gold += [pair["question"] for pair in trainer.pairs_with_gold()]
    references, questions, pairs = zip(*[trainer.draw() for trainer in trainers])
    assert [len(share) for share in references] == [4, 4]
    assert len(set(questions[0] + questions[1])) == 8 == len(set(gold))
    assert len({pair["question"] for pair in pairs[0] + pairs[1]}) == 8


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """One real step: the trainer, its rollouts, what was generated beside them, the batch that it
    returned, the pools before."""
    trainer = make_mae(tmp_path_factory.mktemp("mae"), difficulty_samples=2)
    trainer.memory["pairs"] = list(PAIRS)
    before = json.loads(json.dumps(trainer.memory))
    rollout, generate, rollouts, generated = trainer.rollout, trainer.generate, {}, []

    def spy_rollout(name, rows):
        rollouts[name] = (rows, rollout(name, rows))
        return rollouts[name][1]

    def spy_generate(name, prompts, **options):
        generated.extend((name, prompt[-1]["content"]) for prompt in prompts)
        return generate(name, prompts, **options)

    trainer.rollout, trainer.generate = spy_rollout, spy_generate
    (batch,) = trainer.step([])
    return trainer, rollouts, generated, batch, before


def test_all_roles_play_on_the_pools_as_the_last_step_left_them(played):
    trainer, rollouts, _, _, before = played
    asked = {
        role: [row["prompt"][-1]["content"] for row in rows] for role, (rows, _) in rollouts.items()
    }
    assert set(asked["solver"]) <= set(before["questions"]) and len(set(asked["solver"])) == 4
    pairs = [
        f"Question: {pair['question']}\nAnswer: {pair['answer']}\nScore the answer."
        for pair in before["pairs"]
    ]
    assert sorted(asked["judge"]) == sorted(pairs)  # 4 of 4
    proposed = {text.split("\n")[0].removeprefix("Reference: ") for text in asked["proposer"]}
    assert proposed <= {*before["questions"], "Propose a question."}
    assert len(trainer.memory["pairs"]) == 8
    assert len(trainer.memory["questions"]) >= len(before["questions"])


def test_only_the_rollouts_are_trained_on_and_each_role_is_whitened_by_itself(played):
    trainer, rollouts, generated, batch, _ = played
    assert list(rollouts) == ["proposer", "solver", "judge"] and batch["player"] == "agent"
    assert batch["texts"] == [text for _, part in rollouts.values() for text in part["texts"]]
    assert len(batch["advantages"]) == 12 and len(generated) > 12  # the rest only made rewards
    assert len(trainer.judgements) == sum(name == "judge" for name, _ in generated)
    rewards, parts = batch["rewards"].tolist(), [0] * 4 + [1] * 4 + [2] * 4
    assert batch["advantages"].tolist() == pytest.approx(by_hand(rewards, parts), abs=1e-4)
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    for i in range(0, 12, 4):  # group advantages, of groups of one, are gone
        flat = len(set(rewards[i : i + 4])) == 1
        assert flat == (batch["advantages"][i : i + 4] == 0).all()


@pytest.mark.parametrize("part", range(3))
def test_a_role_that_is_not_trained_plays_and_adds_nothing(tmp_path, part):
    """The gradient is that of a batch without its rows, but for the tokens it is divided by."""
    off = {f"train_{mae.ROLES[part]}": False}
    trainer = make_mae(tmp_path, difficulty_samples=1, **off)
    trainer.memory["pairs"] = list(PAIRS)
    (batch,) = trainer.step([])
    own = torch.arange(12) // 4 == part
    assert (batch["advantages"][own] == 0).all() and len(batch["advantages"]) == 12
    assert len(trainer.memory["pairs"]) == 8
    batch["advantages"] = batch["advantages"] + (~own).float()  # so that no other role is flat

    def gradient(rows):
        trainer.model.zero_grad(set_to_none=True)
        trainer.loss(trainer.model, take_rows(batch, rows)).backward()
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad])

    with trainer.playing("agent"):
        with_it, without = gradient(torch.arange(12)), gradient(torch.arange(12)[~own])
    assert torch.allclose(with_it, without, atol=1e-6) and with_it.abs().max() > 1e-4


def test_the_update_carries_one_name_where_only_the_proposer_plays(tmp_path):
    trainer = make_mae(tmp_path, seeds=0)
    (batch,) = trainer.step([])
    assert batch["player"] == "agent" and {note["player"] for note in batch["notes"]} == {
        "proposer"
    }
    assert batch["advantages"].shape == (4,)


def test_no_gold_answer_of_a_seed_is_anywhere_in_the_trainer(tmp_path, monkeypatch):
    """Neither where the loop looks nor where it does not, as the script itself makes it."""
    made = []
    train, held_out = load_questions("tiny", 16, 8, seed=0)
    train = [row | {"answer": "secret", "reference": "secret"} for row in train]
    monkeypatch.setattr(mae, "load_questions", lambda *_: (train, held_out))
    monkeypatch.setattr(Run, "train", lambda self, trainer, *_: made.append(trainer))
    run_here("mae.py", *small("mae.py", tmp_path / "run"))
    (trainer,) = made
    assert trainer.memory["questions"] == [row["question"] for row in train]
    kept = [value for value in vars(trainer).values() if isinstance(value, list | dict | tuple)]
    assert "secret" not in repr([*kept, trainer.train_dataset.to_list()])


def test_hopeless_steps_must_follow_each_other(tmp_path):
    trainer = make_mae(tmp_path, seeds=0)
    score, none = ["<score>5</score>"], ["no score"]
    for pool, judgements, count in (
        ([], [], 1),
        ([], score * 4, 2),
        (["q"], score * 4, 0),  # a question at last: counted anew
        (["q"], none + score, 0),  # half is not more than half
        (["q"], none * 3 + score, 1),
        ([], score * 4, 2),
    ):
        trainer.memory["questions"], trainer.judgements = pool, judgements
        trainer.stop_if_hopeless()
        assert trainer.memory["hopeless_steps"] == count and not trainer.trouble
    trainer.judgements = none * 3 + score
    trainer.stop_if_hopeless()
    assert "75% of the judgements had no <score>" in trainer.trouble
    assert trainer.state.max_steps == 1


# ------------------------------------------------------------------ evaluation
def test_evaluation_judges_the_first_sample_of_each_question_and_samples_before_it_decodes():
    """2 questions, 3 samples each. The judge, greedily, is always right; sampled, it says 10."""
    held_out = [{"question": f"{i}+1 mod 100", "answer": str(i + 1)} for i in range(2)]
    asked = []
    written = {  # question -> its samples, then the greedy one
        "0+1 mod 100": ["1", "1", "7", "1"],
        "1+1 mod 100": ["7", "2", "7", "2"],
    }

    def generate_all(name, prompts, greedy=False):
        users = [prompt[-1]["content"] for prompt in prompts]
        asked.append((name, users, greedy))
        if name == "proposer":
            return ["<question>3+3 mod 100</question>"] * len(users)
        if name == "solver":
            left = {q: iter(texts[-1:] if greedy else texts) for q, texts in written.items()}
            return [rf"\boxed{{{next(left[user])}}}" for user in users]
        score = lambda user: 10 if not greedy or "Answer: 1" in user else 1  # noqa: E731
        return [f"<score>{score(user)}</score>" for user in users]

    cfg = SimpleNamespace(eval_samples=3, reference_share=0.5)
    trainer = SimpleNamespace(generate_all=generate_all, cfg=cfg, memory={"questions": []})
    result = mae.evaluate(trainer, held_out)
    assert result["solver/accuracy"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert result["solver/greedy"] == 1.0
    # the first samples are right and wrong, and the model finds both perfect
    assert result["solver/judged"] == 1.0 and result["co/flattery"] == 0.5
    assert result["judge/balanced_accuracy"] == 0.5 == result["judge/rank_agreement"]
    assert result["judge/balanced_accuracy_greedy"] == 1.0 == result["judge/rank_agreement_greedy"]
    assert trainer.memory["base_solutions"] == [r"\boxed{1}", r"\boxed{7}"]
    assert asked[0][1] == ["0+1 mod 100"] * 3 + ["1+1 mod 100"] * 3
    names = [(name, len(users), greedy) for name, users, greedy in asked]
    sampled = [("solver", 6), ("judge", 2), ("judge", 2), ("proposer", 1)]
    assert names[:4] == [(*call, False) for call in sampled]
    assert names[4:] == [("solver", 2, True), ("judge", 2, True)]
    # later the base's answers are judged again, in the same order of calls
    written["0+1 mod 100"][0] = "9"
    mae.evaluate(trainer, held_out)
    assert trainer.memory["base_solutions"] == [r"\boxed{1}", r"\boxed{7}"]
    assert [(name, len(users), greedy) for name, users, greedy in asked[6:]] == names
    assert asked[7][1] != asked[8][1] == asked[2][1]


# ------------------------------------------------------------------ runs
QUICK = "--questions 4 --micro-batch 4 --seed-questions 8 --difficulty-samples 2".split()


def read(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "epoch" in row]
    return steps, [row for row in rows if row not in steps]


def moved(folder):
    return any(
        tensor.abs().max() > 0 for name, tensor in weights(folder).items() if "lora_B" in name
    )


def memory(folder, step=4):
    return json.loads((folder / f"checkpoint-{step}" / "memory.json").read_text())


def test_a_run_says_whether_it_learns_or_flatters_itself(finished):
    folder, printed, _ = finished("mae.py")
    assert "--- proposed" in printed and "--- the judge" in printed
    steps, evaluations = read(folder)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert [row["step"] for row in evaluations] == [0, 4]
    keys = "proposer/quality proposer/accepted proposer/total_reward solver/judged".split()
    keys += "solver/total_reward judge/unparsable co/questions agent/loss agent/entropy".split()
    for row in steps:
        for key in keys:
            assert math.isfinite(row[key]), key
        # one update for all
        assert not {"proposer/loss", "solver/loss", "judge/loss", "all/loss"} & row.keys()
    for row in evaluations:
        assert abs(row["eval/co/flattery"]) <= 1
        judge = "balanced_accuracy rank_agreement balanced_accuracy_greedy rank_agreement_greedy"
        for key in ["solver/greedy", *[f"judge/{name}" for name in judge.split()]]:
            assert 0 <= row[f"eval/{key}"] <= 1
        for key in "well_formed answerable new".split():
            assert 0 <= row[f"eval/proposer/{key}"] <= 1
    assert moved(folder) and all(name.startswith("agent/") for name in weights(folder))
    kept = memory(folder)
    assert len(kept["pairs"]) == 32 and len(kept["base_solutions"]) == 8
    assert len(kept["questions"]) == steps[-1]["co/questions"] > 16 == kept["seeds"]
    seeds, _ = load_questions("tiny", 16, 1, seed=0)
    assert kept["questions"][:16] == [row["question"] for row in seeds]
    assert memory(folder, 2)["pairs"] == kept["pairs"][:16]


@pytest.mark.parametrize(
    "flags",
    [
        "--no-train-proposer --no-train-solver --no-quality-gate --pool-size 9",
        "--no-train-judge --no-format-reward --reference-share 1",
        "--judge-reward agreement",
    ],
)
def test_ablations(tmp_path, brief, flags):
    brief("mae.py", *small("mae.py", tmp_path / "run", *QUICK, *flags.split()))
    steps, _ = read(tmp_path / "run")
    kept = memory(tmp_path / "run")
    if "pool-size" in flags:
        assert len(kept["questions"]) == 9
        assert all(row["proposer/accepted"] == 1 for row in steps)
    if "agreement" in flags:
        assert {pair["right"] for pair in kept["pairs"]} == {True, False}
        assert any("judge/agreement" in row for row in steps)
    if "no-train-judge" in flags:
        assert moved(tmp_path / "run")


def test_another_dataset(tmp_path, brief):
    path = tmp_path / "data.jsonl"
    rows = [{"question": f"What is {i}+4?", "answer": str(i + 4)} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    flags = [*QUICK, "--steps", "1", "--dataset", path]
    brief("mae.py", *small("mae.py", tmp_path / "run", *flags), most_tokens=None)
    # nothing says what can be answered
    assert all("eval/proposer/answerable" not in row for row in read(tmp_path / "run")[1])
    flags += ["--judge-reward", "agreement", "--seed-questions", "500"]
    message = refused("mae.py", *small("mae.py", tmp_path / "other", *flags))
    assert "all questions are seeds, none is left for --judge-reward agreement" in message


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--judgement-tokens 2",
            "step 3: 100% of the judgements had no <score> within --judgement-tokens 2 "
            "for 3 steps in a row",
        ),
        (
            "--seed-questions 0 --solution-tokens 2",
            "step 3: the pool was empty: no --seed-questions",
        ),
    ],
)
def test_a_hopeless_run_stops_with_its_checkpoint(tmp_path, flags, message):
    more = [*QUICK, "--steps", "9", "--save-every", "50", *flags.split()]
    command = ["mae.py", *small("mae.py", tmp_path / "run", *more)]
    ending = refused(*command)
    assert message in ending and f"its checkpoint is in {tmp_path / 'run'}" in ending
    assert memory(tmp_path / "run", 3)["hopeless_steps"] == 3
    steps, evaluations = read(tmp_path / "run")
    assert len(steps) == 3 and evaluations[-1]["step"] == 3
    # it goes on, and sees at once that nothing has changed
    assert message.replace("step 3", "step 4") in refused(*command)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--questions 5 --micro-batch 5", "--questions 5 must be even"),
        ("--questions 0", "--questions 0 must be at least 1"),
        ("--questions 4 --micro-batch 8", "--micro-batch 8 does not divide the 12 rows of a step"),
        ("--pool-size 8", "--seed-questions 8 must be less than --pool-size 8"),
    ],
)
def test_bad_arguments(tmp_path, flags, message):
    assert message in refused("mae.py", *small("mae.py", tmp_path / "run", *QUICK, *flags.split()))
