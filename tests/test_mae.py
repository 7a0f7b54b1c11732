"""mae.py's own rules: scores, formats, rewards, both pools; the loop with players that say what they are told; the script."""

import json
import math
import random
import shutil
import statistics
from collections import deque

import mae
from common.data import load_questions
from common.model import load_model
from mae import (
    add_questions,
    against_gold,
    are_new,
    draw_from,
    judge_score,
    part_whiten,
    proposed_question,
    proposer_reward,
    shown_answer,
    tag_format,
)

import pytest
import torch
from conftest import ROOT, refused, run_script, run_two_processes
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from trl import GRPOConfig


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
    ('"<score>10</score>" is what the answer says. <score>2</score>', 10),  # not in its thoughts: the first counts
    ("<question><score>10</score></question><score>2</score>", 10),
    ("```\n<score>10</score>\n```<score>2</score>", 10),
]


@pytest.mark.parametrize("text, score", SCORES, ids=range(len(SCORES)))
def test_judge_score(text, score):
    expected = None if score is None else min(1.0, max(0.0, V(score)))
    assert judge_score(text) == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_the_table_is_as_hostile_as_it_says():
    assert len(dict(SCORES)) == len(SCORES) >= 60


PIECES = ["<score>", "</score>", "<think>", "</think>", "7", "10", "-", ".", "/", "0", " ", "\n", "nine", "<SCORE>", "</Score>"]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
@settings(max_examples=500, deadline=None)
def test_a_score_is_none_or_in_the_unit_interval(text):
    value = judge_score(text)
    assert value is None or 0.0 <= value <= 1.0
    assert judge_score(f"<think>{text}</think><score>4</score>") == pytest.approx(V(4))  # nothing thought can change it


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
        ("<question>1+2 mod 10</question>", "1+2 mod 10"),
        ("<question> 1+2\n</question>", "1+2"),
        ("<question>1</question> better: <question>2</question>", "2"),
        ("<question>1</question><question>2", "1"),
        ("<question>1<question>2</question>", "2"),
        ("<QUESTION>1</Question>", "1"),
        ("<question>1</question><question> </question>", ""),  # the last one counts, as in the released code
        ("<question></question>", ""),
        ("1+2 mod 10", ""),
        ("", ""),
    ],
)
def test_proposed_question(text, question):
    assert proposed_question(text) == question


def test_shown_answer():
    assert shown_answer(r"<step>1</step><answer>\boxed{3}</answer>") == "3"
    assert shown_answer(r"\boxed{1} or \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert shown_answer("<answer>3</answer>") == "<answer>3</answer>"  # no box: everything, reasoning included
    assert shown_answer(r"\boxed{}") == r"\boxed{}" and shown_answer(r"it is \boxed{3") == r"it is \boxed{3"


# ------------------------------------------------------------------ rewards and advantages
def test_proposer_reward_is_a_third_each_and_difficulty_counts_from_a_score_of_8_on():
    assert proposer_reward(V(10), 0.4, 1.0) == pytest.approx((1 + 0.4 + 1) / 3)
    assert proposer_reward(V(8), 1.0, 0.5) == pytest.approx((7 / 9 + 1 + 0.5) / 3)
    assert proposer_reward(V(7), 1.0, 0.5) == pytest.approx((6 / 9 + 0.5) / 3)
    assert proposer_reward(0.5, 1.0, 1.0) == pytest.approx(0.5)  # an unreadable score is below the gate
    assert proposer_reward(0.0, 1.0, 1.0, gate=0.0) == pytest.approx(2 / 3)
    assert proposer_reward(0.0, 1.0, 0.0) == 0.0


def by_hand(rewards: list[float], parts: list[int]) -> list[float]:
    """Whitening per part with the standard library; a constant part is 0."""
    result = []
    for r, p in zip(rewards, parts):
        of_part = [x for x, q in zip(rewards, parts) if q == p]
        flat = max(of_part) == min(of_part)
        result.append(0.0 if flat else (r - statistics.mean(of_part)) / math.sqrt(statistics.variance(of_part) + 1e-4))
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
    one_of_many = torch.tensor([1.0] * 31 + [0.5])
    assert part_whiten(one_of_many, torch.zeros(32))[-1] == pytest.approx(-5.4, abs=0.1)


# ------------------------------------------------------------------ pools
@given(st.integers(0, 4), st.integers(1, 6), st.lists(st.lists(st.sampled_from("abcdefghijkl"), max_size=5), max_size=8))
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


def test_new_questions():
    from common.tiny.tasks import sample_questions

    pool = sample_questions(1, 500, held_out=False)
    fresh = sample_questions(2, 200, held_out=False)
    assert sum(are_new(fresh, pool)) > 180
    assert not any(are_new(pool[:50], pool)) and not any(are_new([q.upper() + " " for q in pool[:50]], pool))
    assert are_new(["a b c", "a b d", ""], ["x", "a b c", "a b"]) == [False, True, True]
    assert are_new(fresh[:3], []) == [True] * 3
    words = [f"w{i}" for i in range(29)]  # 20 n-grams of 10
    assert are_new([" ".join(words)], [" ".join(words[:18])]) == [True]  # 9 of them known
    assert are_new([" ".join(words)], [" ".join(words[:19])]) == [False]  # 10


def test_against_gold():
    got = against_gold([1.0, 0.6, 0.2, None, 0.0, 0.6], [True, True, True, False, False, False])
    assert got["balanced_accuracy"] == pytest.approx((2 / 3 + 1 / 3) / 2)  # no score is wrong; 0.6 says right
    # right 1, .6, .2 against wrong .5 (no score), 0, .6: wins 3, 2.5, 1
    assert got["rank_agreement"] == pytest.approx(6.5 / 9)
    assert against_gold([0.3] * 6, [True, False] * 3)["rank_agreement"] == 0.5
    assert against_gold([1.0, 0.0], [True, True]) == {"balanced_accuracy": 0.5, "rank_agreement": 0.5}  # one class only
    assert against_gold([0.0, 1.0], [True, False]) == {"balanced_accuracy": 0.0, "rank_agreement": 0.0}
    assert against_gold([0.5, 0.49], [True, False])["balanced_accuracy"] == 1.0


# ------------------------------------------------------------------ the loop, piece by piece
def make_mae(folder, seeds=12, **change):
    lengths = {"solution_tokens": 64, "judgement_tokens": 64, "rows_at_once": 256}
    script = mae.Args(questions=4, seed_questions=seeds, lr=1e-3, **lengths, **change)
    model, tokenizer = load_model("tiny", ["agent"], 4, False, seed=0)
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        steps_per_generation=3,
        num_generations=2,
        loss_type="dapo",
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        save_strategy="no",
    )
    train, held_out = load_questions("tiny", seeds + 8, 8, seed=0)
    rows = Dataset.from_list([{"prompt": mae.propose_prompt(None)}] * 12)
    pool = [row["question"] for row in train[:seeds]]
    return mae.Mae(model, script, pool, train[seeds:], held_out, args=config, train_dataset=rows, processing_class=tokenizer)


def speak(trainer, turns: dict[str, list[str]], solver="", judge=None):
    """Let the players say what they are told. Returns the prompts of everything that `act` was asked, by player."""
    asked = {"solver": [], "judge": []}
    tags = {"proposer": "question", "solver": "answer", "judge": "score"}

    def turn(name, rows):
        assert len(rows) == len(turns[name]) and {row["tag"] for row in rows} == {tags[name]}
        rewards = torch.tensor([tag_format(text, tags[name]) for text in turns[name]])
        return {"texts": turns[name], "rewards": rewards, "notes": [{"rewards": {}} for _ in rows]}

    def act(name, prompts, greedy=False):
        asked[name] += [prompt[-1]["content"] for prompt in prompts]
        return [solver if name == "solver" else judge(prompt[-1]["content"]) for prompt in prompts]

    trainer.turn, trainer.act, trainer.readable = turn, act, []
    return asked


GOOD, POOR, NONE, TWO = "1+2 mod 10", "1+ mod 10", "no tags", "<question>x</question><question>2+2 mod 10</question>"


def proposals(text: str) -> str:
    return text if text in (NONE, TWO) else f"<question>{text}</question>"


def test_the_proposers_reward_by_hand(tmp_path):
    trainer = make_mae(tmp_path)
    replies = {GOOD: "<score>9</score>", POOR: "<score>7</score>", "2+2 mod 10": "no score"}

    def judge(user):
        question = user.split("\n")[0].removeprefix("Question: ")
        return "<score>4</score>" if "Answer: " in user else replies[question]

    before = list(trainer.memory["questions"])
    asked = speak(trainer, {"proposer": [proposals(t) for t in (GOOD, POOR, NONE, TWO)]}, r"<answer>\boxed{3}</answer>", judge)
    batch = trainer.propose([None] * 4)
    assert [note["rewards"].get("difficulty") for note in batch["notes"]] == pytest.approx([6 / 9, 0.0, None, 0.0])
    # quality 8/9, difficulty 1 - 3/9 from 5 answers scored 4; below the gate no difficulty; no question: 0; two pairs: format
    # one half, quality neutral
    expected = [(8 / 9 + 6 / 9 + 1) / 3, (6 / 9 + 0 + 1) / 3, 0.0, (0.5 + 0 + 0.5) / 3]
    assert batch["rewards"].tolist() == pytest.approx(expected)
    assert asked["solver"] == [GOOD] * 5  # difficulty is sampled above the gate only
    assert asked["judge"].count(f"Question: {GOOD}\nAnswer: 3\nScore the answer.") == 5
    assert len(asked["judge"]) == 3 + 5 and trainer.readable.count(False) == 1
    assert trainer.memory["questions"] == before + [GOOD]


def test_without_the_gate_everything_joins_and_is_paid_for_its_difficulty(tmp_path):
    trainer = make_mae(tmp_path, quality_gate=False, format_reward=False)
    asked = speak(trainer, {"proposer": [proposals(POOR)] * 4}, "no box", lambda user: "<score>1</score>")
    assert trainer.propose([None] * 4)["rewards"].tolist() == pytest.approx([(0 + 1 + 0) / 3] * 4)
    assert trainer.memory["questions"][-1] == POOR and len(asked["solver"]) == 20
    assert f"Question: {POOR}\nAnswer: no box\nScore the answer." in asked["judge"]


def test_the_solvers_reward_by_hand_and_its_pairs(tmp_path):
    trainer = make_mae(tmp_path)
    texts = [r"<answer>\boxed{1}</answer>", r"<answer>\boxed{2}</answer>", r"\boxed{3}", "<answer>x</answer>" * 2]
    scores = {"1": "<score>10</score>", "2": "?", "3": "<score>10</score>"}

    def judge(user):
        return scores.get(user.split("Answer: ")[1].split("\n")[0], "<score>4</score>")

    speak(trainer, {"solver": texts}, judge=judge)
    batch = trainer.solve(["q1", "q2", "q3", "q4"])
    assert [(note["judgement"], note["rewards"]["judged"]) for note in batch["notes"]][:2] == [
        ("<score>10</score>", 1.0),
        ("?", 0.5),
    ]
    assert batch["rewards"].tolist() == pytest.approx([1.0, (0.5 + 1) / 2, (1 + 0) / 2, (3 / 9 + 0.5) / 2])
    assert [(p["question"], p["answer"], p["right"]) for p in trainer.memory["pairs"]] == [
        ("q1", "1", None),
        ("q2", "2", None),
        ("q3", "3", None),
        ("q4", "<answer>x</answer>" * 2, None),
    ]
    trainer.script.format_reward = False
    assert trainer.solve(["q1", "q2", "q3", "q4"])["rewards"].tolist() == pytest.approx([0.5, 0.25, 0.5, 1 / 6])
    trainer.script.pool_size = 6
    trainer.solve(["q5", "q6", "q7", "q8"])
    assert [pair["question"] for pair in trainer.memory["pairs"]] == ["q3", "q4", "q5", "q6", "q7", "q8"]


def test_the_judges_reward_by_hand(tmp_path):
    pairs = [{"question": "q", "answer": "1", "right": right} for right in (True, True, False, False)]
    texts = ["<score>10</score>", "no score", "<score>10</score>", "<score>4</score><score>1</score>"]
    trainer = make_mae(tmp_path)
    speak(trainer, {"judge": texts})
    assert trainer.judge(pairs)["rewards"].tolist() == [1.0, 0.0, 1.0, 0.5]  # the format and nothing else
    trainer.script.format_reward = False
    assert trainer.judge(pairs)["rewards"].tolist() == [0.0] * 4
    trainer.script.judge_reward, trainer.script.format_reward = "agreement", True
    assert trainer.judge(pairs)["rewards"].tolist() == pytest.approx([1.0, 0.0, 0.5, (0.5 + 1 - 3 / 9) / 2])


def test_agreement_takes_its_pairs_from_questions_set_aside(tmp_path):
    trainer = make_mae(tmp_path, judge_reward="agreement")
    gold = {row["question"]: row["answer"] for row in trainer.gold}
    assert len(gold) == 8 and not gold.keys() & set(trainer.memory["questions"]) and not gold.keys() & trainer.never
    speak(trainer, {"solver": ["<answer>x</answer>"] * 4}, r"<answer>\boxed{3}</answer>", lambda user: "<score>9</score>")
    for _ in range(6):
        trainer.solve(trainer.memory["questions"][:4])
    pairs = trainer.memory["pairs"]
    assert len(pairs) == 24 and all(pair["right"] == (gold[pair["question"]] == "3") for pair in pairs)
    trainer.memory["pairs"] = pairs = [{"question": "q", "answer": "1", "right": i == 0} for i in range(50)]
    assert sorted(pair["right"] for pair in trainer.draw()[2]) == [False, False, True, True]  # one right one among 50
    trainer.memory["pairs"] = pairs[1:]
    assert trainer.draw()[2] == []  # only one class: no batch


def test_references_are_shared_out_as_asked(tmp_path):
    trainer = make_mae(tmp_path, seeds=2)
    for share, low, high in ((0.0, 0, 0), (1.0, 400, 400), (0.5, 160, 240)):
        trainer.script.reference_share = share
        drawn = []
        for trainer.state.global_step in range(100):
            drawn += trainer.draw()[0]
        given_one = [reference for reference in drawn if reference]
        assert low <= len(given_one) <= high and set(given_one) <= set(trainer.memory["questions"])
    trainer.memory["questions"] = []
    references, questions, pairs = trainer.draw()
    assert references == [None] * 4 and questions == [] and pairs == []


PAIRS = [{"question": f"{i}+4 mod 10", "answer": str(i), "right": None} for i in range(4)]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """One real step: the trainer, what turns asked and gave, what was only acted, the joined batch, the pools before."""
    trainer = make_mae(tmp_path_factory.mktemp("mae"), difficulty_samples=2)
    trainer.memory["pairs"] = list(PAIRS)
    before = json.loads(json.dumps(trainer.memory))
    turn, act, turned, acted = trainer.turn, trainer.act, {}, []

    def spy_turn(name, rows):
        turned[name] = (rows, turn(name, rows))
        return turned[name][1]

    def spy_act(name, prompts, **options):
        acted.extend((name, prompt[-1]["content"]) for prompt in prompts)
        return act(name, prompts, **options)

    trainer.turn, trainer.act = spy_turn, spy_act
    joined = trainer._generate_and_score_completions([])
    return trainer, turned, acted, joined, before


def test_all_parts_are_asked_from_the_pools_as_the_last_step_left_them(played):
    trainer, turned, _, _, before = played
    solved = [row["prompt"][-1]["content"] for row in turned["solver"][0]]
    assert set(solved) <= set(before["questions"]) and len(set(solved)) == 4
    pairs = [f"Question: {p['question']}\nAnswer: {p['answer']}\nScore the answer." for p in before["pairs"]]
    assert sorted(row["prompt"][-1]["content"] for row in turned["judge"][0]) == sorted(pairs)  # 4 of 4
    proposed = [row["prompt"][-1]["content"].split("\n")[0].removeprefix("Reference: ") for row in turned["proposer"][0]]
    assert set(proposed) <= {*before["questions"], "Propose a question."}
    assert len(trainer.memory["pairs"]) == 8 and len(trainer.memory["questions"]) >= len(before["questions"])


def test_only_the_three_batches_are_trained_on_and_each_part_is_whitened_by_itself(played):
    _, turned, acted, joined, _ = played
    assert list(turned) == ["proposer", "solver", "judge"]
    assert joined["texts"] == [text for _, batch in turned.values() for text in batch["texts"]]
    assert len(joined["advantages"]) == 12 and len(acted) > 12  # the rest only made rewards
    rewards, parts = joined["rewards"].tolist(), [0] * 4 + [1] * 4 + [2] * 4
    expected = torch.tensor(by_hand(rewards, parts))[:, None] * joined["completion_mask"]  # (B, T)
    assert torch.allclose(joined["advantages"], expected, atol=1e-4)
    assert joined["num_items_in_batch"] == joined["completion_mask"].sum()
    for part in range(3):  # TRL's own group advantages, of groups of one, are gone
        assert (len(set(rewards[4 * part : 4 * part + 4])) == 1) == (joined["advantages"][4 * part : 4 * part + 4] == 0).all()


@pytest.mark.parametrize("part", range(3))
def test_a_part_that_is_not_trained_plays_and_adds_nothing(tmp_path, part):
    """The gradient is that of a batch from which its rows are cut out, but for the token count in the denominator."""
    trainer = make_mae(tmp_path, difficulty_samples=1, **{f"train_{['proposer', 'solver', 'judge'][part]}": False})
    trainer.memory["pairs"] = list(PAIRS)
    trainer.current_gradient_accumulation_steps = 3
    batch = trainer._generate_and_score_completions([])
    assert (batch["advantages"][4 * part : 4 * part + 4] == 0).all() and len(batch["advantages"]) == 12
    assert len(trainer.memory["pairs"]) == 8
    others = torch.tensor([float(i // 4 != part) for i in range(12)])  # so that no other part is flat
    batch["advantages"] += others[:, None] * batch["completion_mask"]

    def gradient(rows):
        inputs = {k: v[rows] if v.dim() else v for k, v in batch.items() if isinstance(v, torch.Tensor)}
        trainer.model.zero_grad(set_to_none=True)
        trainer._compute_loss(trainer.model, inputs).backward()
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])

    with_it = gradient(list(range(12)))
    without = gradient([i for i in range(12) if i // 4 != part])
    assert torch.allclose(with_it, without, atol=1e-6) and with_it.abs().max() > 1e-4


def test_no_gold_answer_of_a_seed_is_anywhere_in_the_trainer(tmp_path):
    trainer = make_mae(tmp_path)
    assert set(trainer.train_dataset.column_names) == {"prompt"}
    assert all(isinstance(q, str) for q in trainer.memory["questions"]) and trainer.memory["pairs"] == []


def test_hopeless_steps_must_follow_each_other(tmp_path):
    trainer = make_mae(tmp_path, seeds=0)
    judge_ok, judge_silent = [True] * 4, [False] * 3 + [True]
    for pool, readable, count in (
        ([], [], 1),
        ([], judge_ok, 2),
        (["q"], judge_ok, 0),  # a question at last: counted anew
        (["q"], [False, True], 0),  # half is not more than half
        (["q"], judge_silent, 1),
        ([], judge_ok, 2),
    ):
        trainer.memory["questions"], trainer.readable = pool, readable
        trainer.stop_if_hopeless()
        assert trainer.memory["hopeless_steps"] == count and not trainer.trouble
    trainer.readable = judge_silent
    trainer.stop_if_hopeless()
    assert "75% of the judgements had no <score>" in trainer.trouble and trainer.state.max_steps == 1


# ------------------------------------------------------------------ the script
SMALL = "--steps 4 --questions 4 --micro-batch 4 --seed-questions 8 --eval-questions 8 --save-every 2 --show-every 2".split()


def read(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if "eval/sol/accuracy" in row]
    return [row for row in rows if row not in evaluations], evaluations


def weights(folder):
    return load_file(folder / "agent" / "adapter_model.safetensors")


def moved(folder):
    return any(tensor.abs().max() > 0 for name, tensor in weights(folder).items() if "lora_B" in name)


def memory(folder, step=4):
    return json.loads((folder / f"checkpoint-{step}" / "memory.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mae") / "whole"
    result = run_script("mae.py", *SMALL, "--out", folder)
    assert result.returncode == 0, result.stderr
    assert "--- proposed" in result.stdout and "--- the judge" in result.stdout
    return folder


def test_a_run_says_whether_it_learns_or_flatters_itself(finished):
    steps, evaluations = read(finished)
    assert [row["step"] for row in steps] == [1, 2, 3, 4] and [row["step"] for row in evaluations] == [0, 4]
    for row in steps:
        for key in "pro/quality pro/difficulty pro/accepted pro/total_reward sol/judged jud/unparsable co/questions".split():
            assert math.isfinite(row[key]), key
        assert math.isfinite(row["all/loss"]) and math.isfinite(row["all/entropy"])
    for row in evaluations:
        assert row["eval/co/flattery"] == pytest.approx(row["eval/sol/judged"] - row["eval/sol/accuracy"])
        for key in "sol/greedy jud/balanced_accuracy jud/rank_agreement pro/well_formed pro/answerable pro/new".split():
            assert 0 <= row[f"eval/{key}"] <= 1
    assert moved(finished)
    kept = memory(finished)
    assert len(kept["pairs"]) == 16 and len(kept["questions"]) == steps[-1]["co/questions"] > 8 == kept["seeds"]
    seeds, _ = load_questions("tiny", 8, 1, seed=0)
    assert kept["questions"][:8] == [row["question"] for row in seeds]


def test_resume_is_the_same_run_bit_for_bit(finished, tmp_path):
    folder = tmp_path / "resumed"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoint-4")
    result = run_script("mae.py", *SMALL, "--out", folder)
    assert result.returncode == 0 and "step 3/4" in result.stdout and "step 2/4" not in result.stdout, result.stderr
    ours, expected = weights(folder), weights(finished)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert memory(folder) == memory(finished) and memory(finished, 2)["pairs"] == memory(finished)["pairs"][:8]


@pytest.mark.parametrize(
    "flags",
    [
        "--no-train-proposer --no-train-solver",
        "--no-train-judge --reference-share 0",
        "--no-quality-gate --pool-size 9",
        "--no-format-reward --reference-share 1",
        "--judge-reward agreement",
    ],
)
def test_ablations(tmp_path, flags):
    result = run_script("mae.py", *SMALL, *flags.split(), "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    steps, _ = read(tmp_path / "run")
    kept = memory(tmp_path / "run")
    if "pool-size" in flags:
        assert len(kept["questions"]) == 9 and all(row["pro/accepted"] == 1 for row in steps)
    if "agreement" in flags:
        assert {pair["right"] for pair in kept["pairs"]} == {True, False}
        assert any("jud/agreement" in row for row in steps)
    else:
        assert moved(tmp_path / "run") or "train-solver" in flags


CHECKED = """
import json, sys
sys.path.insert(0, {root!r})
import mae, tyro
from common.run import plain_errors

end = mae.Mae.stop_if_hopeless
def check(self):
    end(self)
    memories = self.gather([json.dumps(self.memory)])
    assert len(memories) == 2 and memories[0] == memories[1] and len(self.memory["pairs"]) == 8 * (self.state.global_step + 1)
mae.Mae.stop_if_hopeless = check
with plain_errors():
    mae.main(tyro.cli(mae.Args))
"""


def test_two_processes_keep_the_same_pools(tmp_path):
    script = tmp_path / "checked.py"
    script.write_text(CHECKED.format(root=str(ROOT)))
    result = run_two_processes(script, *SMALL, "--steps", "3", "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["processes"] == 2
    assert moved(tmp_path / "run")


def test_another_dataset(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"What is {i}+4?", "answer": str(i + 4)}) for i in range(60)))
    result = run_script("mae.py", *SMALL, "--steps", "1", "--dataset", path, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert all("eval/pro/answerable" not in row for row in read(tmp_path / "run")[1])  # nothing says what can be answered
    flags = ["--judge-reward", "agreement", "--seed-questions", "500"]
    message = refused("mae.py", *SMALL, *flags, "--dataset", path, "--out", tmp_path / "other")
    assert "all questions are seeds, none is left for --judge-reward agreement" in message


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--judgement-tokens 2",
            "step 3: 100% of the judgements had no <score> within --judgement-tokens 2 for 3 steps in a row",
        ),
        ("--seed-questions 0 --solution-tokens 2", "step 3: the pool was empty: no --seed-questions"),
    ],
)
def test_a_hopeless_run_stops_with_its_checkpoint(tmp_path, flags, message):
    command = ["mae.py", *SMALL, "--steps", "9", "--save-every", "50", *flags.split(), "--out", tmp_path / "run"]
    said = refused(*command)
    assert message in said and f"its checkpoint is in {tmp_path / 'run'}" in said
    assert memory(tmp_path / "run", 3)["hopeless_steps"] == 3 and len(read(tmp_path / "run")[0]) == 3
    assert read(tmp_path / "run")[1][-1]["step"] == 3
    assert message.replace("step 3", "step 4") in refused(*command)  # goes on, and sees at once that nothing has changed


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--questions 5 --micro-batch 5", "--questions 5 must be even"),
        ("--questions 4 --micro-batch 8", "3 times it a multiple of --micro-batch 8"),
        ("--reference-share 1.5", "--reference-share 1.5: it is a share, from 0 to 1"),
        ("--pool-size 8", "--seed-questions 8 must be less than --pool-size 8"),
        ("--seed-questions -1", "--seed-questions -1 must be less than"),
    ],
)
def test_bad_arguments(tmp_path, flags, message):
    assert message in refused("mae.py", *SMALL, *flags.split(), "--out", tmp_path / "run")
