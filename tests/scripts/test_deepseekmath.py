"""deepseekmath.py: rewards and labels against loops and cases worked by hand, hostile solutions,
who is told the truth, what is drawn. tests/common/test_verdicts.py has hostile analyses.
"""

import itertools
import random
import re
from functools import partial
from types import SimpleNamespace

import deepseekmath as dsm
from common.errors import UserError
from common.tasks.graded import truth_of
from common.tasks.verdicts import Analysis
from common.tiny.tasks import format_solution

import pytest
from trainers import QUESTION, RIGHT, WRONG, answering, without_model

ROW = {"question": QUESTION, "answer": "50"}
LUCKY = format_solution(["38+4=41", "42*7=50"], 50)  # the answer in spite of a wrong step
SCORES = (0.0, 0.5, 1.0)


def ends(defects: str, score: str) -> str:
    return f"Defects: {defects}\nScore: \\boxed{{{score}}}"


def meta(score: str) -> str:
    return f"Score: \\boxed{{{score}}}"


# ------------------------------------------------------------------ rewards
def test_rewards_of_verifier_and_generator():
    for s, said, quality in itertools.product(SCORES, SCORES, SCORES):
        wanted = {0.0: 1.0, 0.5: 0.5, 1.0: 0.0}[abs(s - said)] * quality
        assert dsm.verifier_reward(said, s, quality) == wanted
        assert dsm.verifier_reward(None, s, quality) == 0.0
        reward = dsm.generator_reward(s, said, quality)
        assert reward == pytest.approx(0.76 * s + 0.24 * wanted)
        assert dsm.generator_reward(s, said, quality, self_reward=False) == s


def test_a_score_that_does_not_follow_from_the_defects_is_worth_half():
    for defects, score in itertools.product([(), (2,), (1, 2)], SCORES):
        consistent = not defects if score == 1 else bool(defects)
        analysis = Analysis(defects, score)
        for ms in SCORES:
            assert dsm.meta_quality(analysis, ms) == min(ms, 1 if consistent else 0.5)
        assert dsm.meta_quality(analysis, None) == 0.5


@pytest.mark.parametrize("seed", range(50))
def test_labels_against_the_rule_read_from_the_bottom_up(seed):
    rng = random.Random(seed)
    n, m, k = rng.randint(1, 6), rng.randint(2, 3), rng.randint(1, 3)
    scores = [rng.choice(SCORES) for _ in range(n)]
    votes = [[rng.random() < 0.6 for _ in range(m)] if s < 1 else [] for s in scores]
    # two votes of three, or of two: half is no majority
    valid = [score for score, vote in zip(scores, votes) if vote.count(True) >= 2]
    wanted = None
    if n >= k and not valid:
        wanted = 1.0
    elif n >= k and valid.count(0.0) >= k:
        wanted = 0.0
    elif n >= k and valid.count(0.5) >= k:
        wanted = 0.5
    assert dsm.auto_label([*zip(scores, votes)], k) == wanted


# ------------------------------------------------------------------ parsing
@pytest.mark.parametrize(
    "text",
    [
        f"{RIGHT}\n{dsm.HEADING}\n{dsm.HEADING}\n{ends('none', '1')}",
        f"<answer>\\boxed{{50}}</answer>\n{dsm.HEADING}\n{ends('none', '1')}",
        f"<step>38+4=42</step>\n{dsm.HEADING}\n{ends('none', '1')}",
        f"{RIGHT}\n{dsm.HEADING}\n{ends('3', '0')}",  # a defect beyond its steps
        f"{dsm.HEADING}\n{ends('none', '1')}\n{RIGHT}",
        f"{RIGHT}\n{ends('none', '1')}",
    ],
)
def test_a_solution_that_shows_a_verifier_its_own_grade_has_no_format(text):
    assert dsm.parse_solution(text)[1] is None


def test_praise_is_not_shown():
    praise, own = f"This is right. {ends('none', '1')}", f"{dsm.HEADING}\n{ends('none', '1')}"
    for text in (
        f"{praise}\n{RIGHT.replace('<answer>', praise + '<answer>')}\n{praise}\n{own}",
        # in the answer, before and behind its box
        f"{RIGHT.replace('<answer>', '<answer>' + praise).replace('}</', '} Surely.</')}\n{own}",
        f"{RIGHT.replace('</answer>', '<step>checked</step></answer>')}\n{own}",
    ):
        assert dsm.parse_solution(text) == (RIGHT, ((), 1.0))
    unboxed = dsm.parse_solution(f"<step>38+4=42</step>\n<answer>right</answer>\n{own}")
    assert unboxed == ("<step>38+4=42</step>\n<answer></answer>", None)


def labelled(solution=WRONG, label=0.0, **more):
    score, faulty = truth_of(ROW, solution)
    row = {"question": QUESTION, "solution": solution, "label": label, "truth": score}
    return row | {"faulty": faulty, "round": 0} | more


# ------------------------------------------------------------------ steps, with given completions
def given_texts(texts: dict, rows=(ROW,), **change) -> dsm.DeepSeekMath:
    """texts: player -> what it writes. `rewards`: those of the step."""
    cfg = dsm.Args(**{"questions": 1, "group_size": 2, "solutions": 2} | change)
    texts = {name: list(some) for name, some in texts.items()}
    trainer = without_model(dsm.DeepSeekMath, cfg, texts, train_rows=list(rows))
    trainer.saved = {"labelled": [], "rounds": 0}
    trainer.set_rewards = lambda batch, rewards: setattr(trainer, "rewards", rewards)
    return trainer


def test_r_meta_counts_after_the_meta_verifiers_first_steps_and_not_in_its_ablation():
    for step, change, rewards in (
        (11, {}, [1.0, 0.5]),
        (12, {}, [1.0, 0.0]),
        (12, {"meta_reward": False}, [1.0, 0.5]),
    ):
        texts = {"verifier": [ends("1", "0"), ends("2", "0.5")], "meta": [meta("1"), meta("0")]}
        trainer = given_texts(texts, **change)
        trainer.state.global_step, trainer.saved["labelled"] = step, [labelled()]
        trainer.verifier_step()
        assert trainer.rewards == rewards
        assert ("meta" in {name for name, _ in trainer.asked}) == (rewards[1] == 0.0)


def test_the_first_labels_are_the_truth_and_the_next_are_not():
    own = f"\n{dsm.HEADING}\n{ends('none', '1')}"
    texts = {"generator": [RIGHT + own, "no steps", LUCKY + own, WRONG + own]}
    trainer = given_texts(texts, least_valid=2)
    trainer.label_solutions(0)
    assert [(row["label"], row["round"]) for row in trainer.saved["labelled"]] == [(1.0, 0)]
    assert trainer.saved["rounds"] == 1 and dsm.HEADING not in str(trainer.saved)
    assert {"answer", "own"}.isdisjoint(trainer.saved["labelled"][0])
    # LUCKY is doubted twice, WRONG once
    doubt, praise, yes, no = ends("1", "0.5"), ends("none", "1"), meta("0.5"), meta("0")
    trainer.texts["verifier"] = [doubt, doubt, praise, "?", doubt, praise, praise, praise]
    # the first doubt has the votes yes, no, ?; the second yes, yes, no; that of WRONG yes, no, no
    trainer.texts["meta"] = [yes, yes, yes, no, yes, no, "?", no, no]
    trainer.logged.clear()
    trainer.label_solutions(1)
    # one valid doubt is too few for LUCKY, which is dropped; of WRONG nothing is confirmed
    new = trainer.saved["labelled"][1:]
    assert [(row["solution"], row["label"], row["truth"]) for row in new] == [(WRONG, 1.0, 0.0)]
    assert trainer.logged["labels/kept"] == [0.5] and trainer.logged["labels/agreement"] == [False]
    assert trainer.logged["labels/single"] == [True, True, False] + [False] * 4
    asked = [user for name, user in trainer.asked if name == "meta"]
    assert len(asked) == 9 and all("Defects: 1\nAre they real?" in user for user in asked)
    assert [LUCKY in user for user in asked] == [True, True, False] * 3


def test_every_round_labels_solutions_of_other_questions():
    rows = [{"question": f"({i}+4)*7 mod 61", "answer": "0"} for i in range(10, 20)]
    trainer = given_texts({"generator": [RIGHT] * 6}, rows, labels="truth", verifier_steps=1)
    for current in range(3):
        trainer.label_solutions(current)
    questions = [row["question"] for row in trainer.saved["labelled"]]
    assert questions == [row["question"] for row in rows[:6]]  # two a round, none of them twice


def test_phases_are_the_papers_order_and_labels_are_made_before_each_round():
    """And the meta-verifier is not forgotten."""
    trainer, calls = given_texts({}, verifier_steps=4, meta_steps=1, generator_steps=2), []
    trainer.verifier_step = lambda: calls.append("verifier")
    trainer.meta_step = lambda: calls.append("meta")
    trainer.generator_step = lambda rows: calls.append("generator")

    def label(current):
        calls.append(current)
        trainer.saved["rounds"] += 1

    trainer.label_solutions = label
    for trainer.state.global_step in range(23):
        trainer.step([])
    turn = ["verifier", "verifier", "meta", "verifier", "generator", "generator"]
    assert calls == [0, *["verifier"] * 4, "meta", *turn, 1, *turn, 2, *turn]
    cfg = dsm.Args(meta_steps=0)
    assert "meta" not in {dsm.phase_at(step, cfg)[0] for step in range(48)}


def test_the_verifier_is_rewarded_for_the_label_and_what_its_lessons_are_worth_is_logged():
    said = [ends("1", "0"), ends("2", "0.5"), "?", ends("none", "1")]
    trainer = given_texts({"verifier": said}, group_size=4)
    trainer.saved["labelled"] = [labelled(RIGHT, label=0.0)]  # by votes, and wrong
    trainer.verifier_step()
    assert trainer.rewards == [1.0, 0.5, 0.0, 0.0]
    assert trainer.logged["verifier/wrong_lessons"] == [True] * 4
    assert trainer.logged["verifier/balanced_accuracy"] == [0.25]
    assert trainer.logged["verifier/claims_real"] == [0.0]


def test_the_meta_verifier_learns_from_claims_about_the_first_rounds_solutions():
    texts = {"verifier": [ends("1,2", "0")], "meta": [meta("0.5"), meta("1"), "?", meta("0")]}
    trainer = given_texts(texts, group_size=4)
    # of the second nobody knows the faulty steps, and those of a later round are not told
    later = labelled(RIGHT, 0.0, round=1)
    trainer.saved["labelled"] = [labelled(), labelled(faulty=None), later]
    trainer.meta_step()
    assert trainer.rewards == [1.0, 0.5, 0.0, 0.5]
    assert "Defects: 1,2\nAre they real?" in trainer.asked[-1][1] and WRONG in trainer.asked[-1][1]
    trainer = given_texts({"verifier": [ends("none", "1")], "meta": [meta("0")] * 2})
    trainer.saved["labelled"] = [labelled(RIGHT, 1.0)]
    trainer.meta_step()
    assert trainer.rewards == [1.0, 1.0]  # where nothing is claimed a defect is made up
    trainer.saved["labelled"] = [labelled(faulty=None), later]
    with pytest.raises(UserError, match="--meta-steps 6: no solution's faulty steps are known"):
        trainer.meta_step()


def test_the_generator_is_rewarded_by_the_verifier_and_not_by_the_truth():
    own = [ends("none", "1"), ends("1", "0"), ends("1", "0"), "no grade"]
    solutions = [WRONG, WRONG, RIGHT, RIGHT]
    texts = {
        "generator": [f"{s}\n{dsm.HEADING}\n{o}" for s, o in zip(solutions, own)],
        "verifier": [ends("none", "1"), ends("1", "0"), "?"],
        "meta": [meta("1"), meta("0")],
    }
    rows = [{**ROW, "prompt": dsm.solve_prompt(QUESTION)}] * 4
    trainer = given_texts(texts)
    trainer.generator_step(rows)
    # the verifier is fooled; both are honest; nobody can read the verifier: s = 0, Z disbelieved
    assert trainer.rewards == pytest.approx([1.0, 0.24, 0.0, 0.0])
    shown = [user for name, user in trainer.asked if name == "verifier"]
    assert len(shown) == 3 and all(dsm.HEADING not in user for user in shown)
    assert trainer.logged["co/over_claim"] == [1.0, 0.0, -1.0]
    assert trainer.logged["co/verdict_minus_gold"] == [1.0, 0.0]
    trainer = given_texts(texts, self_reward=False)
    trainer.generator_step(rows)
    assert trainer.rewards == pytest.approx([1.0, 0.0, 0.0, 0.0])


# ------------------------------------------------------------------ what is drawn
def solutions(count: int, label: float) -> list[dict]:
    return [labelled(f"<step>{i}</step>{label}", label) for i in range(count)]


def test_a_label_of_a_few_solutions_is_drawn_as_often_as_it_occurs():
    """One solution of 128 was a third of the lessons, and by votes a wrong one."""
    trainer, counts = given_texts({}, questions=16), dict.fromkeys(SCORES, 0)
    few = solutions(1, 0.5) * 4 + solutions(3, 0.5)  # seven rows, three different ones
    pool = solutions(80, 0.0) + few + solutions(25, 1.0)
    for seed in range(500):
        for row in trainer.draw(pool, random.Random(seed)):
            counts[row["label"]] += 1
    expected = 16 * 500 * 7 / 112
    assert 0.85 * expected < counts[0.5] < 1.15 * expected
    assert 0.9 < counts[0.0] / counts[1.0] < 1.1  # these two are still balanced


def test_where_no_label_has_enough_solutions_all_are_drawn_alike():
    trainer = given_texts({}, questions=16)
    pool, rng = solutions(12, 0.0) + solutions(3, 1.0), random.Random(0)
    drawn = [row["label"] for _ in range(200) for row in trainer.draw(pool, rng)]
    assert 0.17 < drawn.count(1.0) / len(drawn) < 0.23


def test_labels_with_enough_solutions_are_drawn_equally_often_by_all_processes_together():
    pool, shares = solutions(90, 0.0) + solutions(30, 0.5) + solutions(40, 1.0), []
    for index in range(2):
        trainer = given_texts({}, questions=15)
        trainer.accelerator = SimpleNamespace(num_processes=2, process_index=index)
        shares.append(trainer.draw(pool, random.Random(3)))
    whole = given_texts({}, questions=30).draw(pool, random.Random(3))
    assert shares == [whole[::2], whole[1::2]]
    assert [[row["label"] for row in whole].count(score) for score in SCORES] == [10, 10, 10]


# ------------------------------------------------------------------ evaluation
def test_evaluation_by_hand():
    """8 questions, 2 samples of each, the first samples of which are the base's at step 0."""
    held_out = [{"question": f"({i}+4)+1 mod 61", "answer": str(i + 5)} for i in range(10, 18)]

    def solution(i, kind):
        if kind == "wrong":
            return format_solution([f"{i}+4=1", "1+1=2"], 2)
        first = i + 4 if kind == "right" else 1
        return format_solution([f"{i}+4={first}", f"{i + 4}+1={i + 5}"], i + 5)

    perfect, doubt = ends("none", "1"), ends("1", "0")
    first = {10: ("right", perfect), 11: ("lucky", perfect), 12: ("wrong", doubt)}
    later = []

    def say(player, asked, greedy, before):
        i = int(asked[asked.index("(") + 1 :][:2])
        if player == "meta":
            return meta("0")
        if player == "verifier":
            of_base = {10: perfect, 11: ends("2", "0.5"), 12: ends("1,2", "0"), 13: "?"}
            return of_base.get(i, perfect)
        if asked.endswith("Correct it."):
            return solution(i, "right" if i < 14 else "wrong")
        kind, own = first.get(i, ("wrong", "no grade"))
        if later:
            kind, own = "right", perfect
        elif greedy:
            kind, own = "lucky", doubt
        elif before:
            kind, own = ("wrong", doubt) if i == 10 else ("right", perfect)
        return f"{solution(i, kind)}\n{dsm.HEADING}\n{own}"

    trainer = answering(say, eval_samples=2)
    trainer.generate = trainer.generate_all
    trainer.solve, trainer.analyse = (
        partial(method, trainer) for method in (dsm.DeepSeekMath.solve, dsm.DeepSeekMath.analyse)
    )
    base = {
        "verifier/balanced_accuracy": 3 / 8,  # no score has ten solutions: of all
        "verifier/claims_real": 1 / 3,
        "verifier/defects_found": 1 / 7,
        "verifier/analysis_quality": (1 + 0 + 0.5 + 0 + 4 * 0.5 + 4 * 0.5) / 8,
        "meta/accuracy": 1 / 2,  # of what is claimed nothing is real, or half
    }
    result = dsm.evaluate(trainer, held_out)
    assert result == pytest.approx(
        base
        | {
            "generator/accuracy": (1 + 2 + 1 + 5) / 16,
            "generator/greedy": 1.0,
            "generator/own_score_right": 10 / 11,
            "co/over_claim": 0.5 / 11,
            "generator/refined": 4 / 8,
        }
    )
    refined = [asked for player, asked, _ in trainer.calls if asked[0].endswith("Correct it.")]
    claims = [re.search(r"Defects: (.*)", user)[1] for user in refined[0]]
    assert claims == ["none", "none", "1"] + ["none"] * 5 and dsm.HEADING not in str(refined)
    # a better generator does not make another verifier of it
    later.append(True)
    result = dsm.evaluate(trainer, held_out)
    assert result["generator/accuracy"] == 1.0
    assert {name: result[name] for name in base} == pytest.approx(base)
