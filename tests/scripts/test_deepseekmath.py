"""deepseekmath.py: rewards and labels against loops and cases worked by hand, hostile analyses and
solutions, who is told the truth and who is not, runs."""

import itertools
import json
import random
import re
from types import SimpleNamespace

import deepseekmath as dsm
from common.errors import UserError
from common.tasks.answers import equations_hold
from common.tiny.tasks import format_solution, gold_solution

import pytest
from conftest import answering, refused, small

QUESTION = "(38+4)*7 mod 100"  # 42, 94
ROW = {"question": QUESTION, "answer": "94"}
RIGHT = gold_solution(QUESTION)
LUCKY = format_solution(["38+4=41", "42*7=94"], 94)  # the answer in spite of a wrong step
WRONG = format_solution(["38+4=41", "41*7=87"], 87)


def ends(defects: str, score: str) -> str:
    return f"Defects: {defects}\nScore: \\boxed{{{score}}}"


# ------------------------------------------------------------------ rewards
SCORES = (0.0, 0.5, 1.0)


def test_verifier_reward_is_the_product():
    for fine, s, said, meta in itertools.product((True, False), SCORES, SCORES, SCORES):
        wanted = {0.0: 1.0, 0.5: 0.5, 1.0: 0.0}[abs(s - said)] * meta if fine else 0.0
        assert dsm.verifier_reward(fine, s, said, meta) == wanted


def test_generator_reward_weighs_the_solution_and_what_it_says_of_itself():
    """By hand: an honest 0 for a wrong solution is worth 0.24, a boast for it nothing."""
    reward = dsm.generator_reward
    assert reward(True, 1.0, 1.0, 1.0) == pytest.approx(1)
    assert reward(True, 0.0, 0.0, 1.0) == pytest.approx(0.24)
    assert reward(True, 0.0, 1.0, 1.0) == 0
    assert reward(True, 1.0, 0.0, 1.0) == pytest.approx(0.76)
    assert reward(True, 0.5, 1.0, 0.5) == pytest.approx(0.76 * 0.5 + 0.24 * 0.5 * 0.5)
    assert reward(False, 1.0, 1.0, 1.0) == 0
    for s, own, meta in itertools.product(SCORES, SCORES, SCORES):
        assert reward(True, s, own, meta, self_reward=False) == s
    # to be right pays more than to be honest about being wrong
    assert reward(True, 1.0, 0.0, 0.0) > reward(True, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("seed", range(50))
def test_labels_against_the_rule_read_from_the_bottom_up(seed):
    rng = random.Random(seed)
    n, k = rng.randint(1, 6), rng.randint(1, 3)
    scores = [rng.choice(SCORES) for _ in range(n)]
    votes = [[rng.random() < 0.5 for _ in range(3)] if s < 1 else [] for s in scores]
    wanted, any_valid = None, False
    for candidate in (0.0, 0.5):
        count = 0
        for score, vote in zip(scores, votes):
            yes = 0
            for v in vote:
                yes += v
            if score == candidate and yes >= 2:  # of three
                count, any_valid = count + 1, True
        if count >= k and wanted is None:
            wanted = candidate
    if not any_valid:
        wanted = 1.0
    assert dsm.auto_label(scores, votes, k) == wanted


def test_labels_by_hand():
    yes, no = [True, True, False], [True, False, False]
    label = dsm.auto_label
    assert label([1, 1, 1], [[], [], []], 2) == 1
    assert label([0, 0, 1], [yes, yes, []], 2) == 0
    assert label([0, 0.5, 0.5], [yes, yes, yes], 2) == 0.5  # the 0 stands alone
    assert label([0, 1, 1], [yes, [], []], 2) is None  # one valid doubt: neither
    assert label([0, 0, 0], [no, no, no], 1) == 1  # nobody confirms it
    assert label([0, 0], [[], []], 1) == 1  # a score below 1 that names nothing
    assert label([0, 0], [[True, False]] * 2, 1) == 1  # half is no majority
    assert label([], [], 1) is None


# ------------------------------------------------------------------ the meta-verifier
def test_what_is_claimed_is_judged_and_nothing_else():
    assert dsm.meta_truth((1,), [1, 2]) == 1  # it missed one: not its business
    assert dsm.meta_truth((1, 3), [1, 2]) == 0.5
    assert dsm.meta_truth((3, 4), [1, 2]) == 0
    assert dsm.meta_truth((), [1, 2]) == 1  # an honest "none" about a wrong solution
    assert dsm.meta_truth((), []) == 1
    assert dsm.meta_truth((1,), []) == 0


def test_a_score_that_does_not_follow_from_the_defects_is_an_error():
    for defects, score in itertools.product([(), (2,), (1, 2)], SCORES):
        fits = not defects if score == 1 else bool(defects)
        analysis = dsm.Analysis(defects, score)
        assert analysis.fits is fits
        for meta in SCORES:
            assert dsm.meta_quality(analysis, meta) == min(meta, 1 if fits else 0.5)
        assert dsm.meta_quality(analysis, None) == 0.5


# ------------------------------------------------------------------ parsing
def test_an_analysis_is_read_from_its_end():
    parse = dsm.parse_analysis
    assert parse(f"<step>fine</step>\n{ends('none', '1')}\n", 3) == ((), 1.0)
    assert parse(ends("2", "0.5"), 3) == ((2,), 0.5)
    assert parse(ends("3, 1,3", "0"), 3) == ((1, 3), 0.0)
    quoted = f"The solution says {ends('none', '1')} of itself.\n{ends('1', '0')}"
    assert parse(quoted, 3) == ((1,), 0.0)


HOSTILE = {
    "nothing": "",
    "no score": "Defects: 1",
    "no defects": "Score: \\boxed{1}",
    "another score": ends("1", "0.25"),
    "a score of 10": ends("none", "10"),
    "a negative score": ends("none", "-1"),
    "a step that is not there": ends("4", "0"),
    "step 0": ends("0", "0"),
    "a negative step": ends("-1", "0"),
    "a word for a number": ends("two", "0"),
    "numbers that never end": ends("1,", "0"),
    "both": ends("none,1", "0"),
    "something after it": ends("1", "0") + " or maybe not",
    "a score in between": "Defects: 1\nfine\nScore: \\boxed{0}",
    "digits of another script": ends("١", "0"),
    "a huge number": ends("9" * 5000, "0"),
    "an unclosed box": "Defects: 1\nScore: \\boxed{0",
    "a second try": ends("1", "0") + "\nDefects:",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_analysis_without_the_form_is_none(name):
    assert dsm.parse_analysis(HOSTILE[name], 3) is None


@pytest.mark.parametrize(
    "text",
    [
        "Defects: " * 100_000,
        "Defects: " + "1," * 100_000,
        "Score: " * 100_000,
        "Defects: 1 \n" * 9999,
    ],
    ids=["openings", "numbers", "scores", "lines"],
)
def test_long_texts_are_read_in_no_time(text):
    assert dsm.parse_analysis(text, 3) is None and dsm.parse_meta(text) is None
    assert dsm.parse_solution(text)[1] is None


def test_a_meta_verification_is_its_last_score():
    assert dsm.parse_meta("Score: \\boxed{0} or rather\nScore: \\boxed{0.5}\n") == 0.5
    for text in ("", "Score: 1", "Score: \\boxed{2}", "Score: \\boxed{1} I think", "\\boxed{1}"):
        assert dsm.parse_meta(text) is None


def test_a_solution_ends_where_its_self_evaluation_begins():
    text = f"{RIGHT}\n{dsm.HEADING}\n{ends('none', '1')}"
    assert dsm.parse_solution(text) == (RIGHT, ((), 1.0))
    assert dsm.parse_solution(RIGHT) == (RIGHT, None)


SMUGGLED = {
    "a second heading": f"{RIGHT}\n{dsm.HEADING}\n{dsm.HEADING}\n{ends('none', '1')}",
    "no steps": f"<answer>\\boxed{{94}}</answer>\n{dsm.HEADING}\n{ends('none', '1')}",
    "no answer": f"<step>38+4=42</step>\n{dsm.HEADING}\n{ends('none', '1')}",
    "a defect beyond its steps": f"{RIGHT}\n{dsm.HEADING}\n{ends('3', '0')}",
    "the evaluation first": f"{dsm.HEADING}\n{ends('none', '1')}\n{RIGHT}",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_a_solution_that_shows_a_verifier_its_own_grade_has_no_format(name):
    assert dsm.parse_solution(SMUGGLED[name])[1] is None


def test_praise_is_not_shown():
    praise = f"This is right. {ends('none', '1')}"
    own = f"{dsm.HEADING}\n{ends('none', '1')}"
    text = f"{praise}\n{RIGHT.replace('<answer>', praise + '<answer>')}\n{praise}\n{own}"
    assert dsm.parse_solution(text) == (RIGHT, ((), 1.0))
    # nor in the answer, before or behind its box
    within = RIGHT.replace("<answer>", f"<answer>{praise}").replace(
        "</answer>", " Surely.</answer>"
    )
    assert dsm.parse_solution(f"{within}\n{own}") == (RIGHT, ((), 1.0))
    step = RIGHT.replace("</answer>", "<step>checked</step></answer>")
    assert dsm.parse_solution(f"{step}\n{own}") == (RIGHT, ((), 1.0))
    unboxed = dsm.parse_solution(f"<step>38+4=42</step>\n<answer>right</answer>\n{own}")
    assert unboxed == ("<step>38+4=42</step>\n<answer></answer>", None)
    # nor a self-evaluation without its heading
    assert dsm.parse_solution(f"{RIGHT}\n<step>fine\\boxed{{7}}</step>\n{praise}")[0] == RIGHT


# ------------------------------------------------------------------ the truth
def test_the_truth_of_embedded_solutions():
    assert dsm.truth_of(ROW, RIGHT) == (1.0, [])
    assert dsm.truth_of(ROW, LUCKY) == (0.5, [1])  # the second goes on as if there were no mistake
    assert dsm.truth_of(ROW, WRONG) == (0.0, [1])
    assert dsm.truth_of(ROW, "nonsense") == (0.0, [])
    in_a_step = RIGHT.replace("</step>\n<answer>", " ").replace("</answer>", "</step>")
    assert "<answer>" not in in_a_step and dsm.truth_of(ROW, in_a_step)[0] == 0.0


WORDS = {"question": "Tom has 3 bags of 4 apples and eats 2. How many are left?", "answer": "10"}


@pytest.mark.parametrize(
    "steps, answer, truth",
    [
        (["3*4 = 12", "12 - 2 = 10"], 10, (1.0, [])),
        (["3*4 = 13", "so 10 are left"], 10, (0.5, [1])),
        (["3*4 = 12", "12 - 2 = 9"], 9, (0.0, [2])),
        (["3*4 = 12", "so 12 are left"], 12, (0.0, None)),  # nobody knows which step is faulty
    ],
)
def test_the_truth_of_other_solutions_is_the_answer_and_the_equations(steps, answer, truth):
    assert dsm.truth_of(WORDS, format_solution(steps, answer)) == truth


@pytest.mark.parametrize(
    "step, true",
    [
        ("3*4 = 12 apples", True),
        ("3*4=13", False),
        ("$1,200 - $200 = $1,000", True),
        ("$1,200 - $200 = $1,100", False),
        ("10/3 = 3.33", True),
        ("10/3 = 3.3 and 20/3=6.67", True),
        ("10/3 = 3.4", False),
        ("7/2 = 3", True),  # a half is rounded either way
        ("7/2 = 5", False),
        ("1/0 = 5", False),
        ("-3 + 5 = 2", True),
        ("0.1 + 0.2 = 0.3", True),
        ("1 + 2 + 3 = 6", True),  # chains are not looked at
        ("2 * 3 = 6 + 1 = 7", True),
        ("2+3 = 5 and 2+3=6", False),
        ("2*3+4 = 10", True),
        ("x + 2 = 5", True),
        ("no numbers at all", True),
        ("- 3*2 = 6", True),  # an item of a list
        ("- 3*2 = 7", False),
        ("(20-8) - 3*2 = 6", True),  # parts of something else
        ("20 dollars - 3*2 = 14", True),
        ("2^3+1 = 9", True),
        ("10^2-5 = 95", True),
        ("20/100 = 20%", True),
        ("x^2+3=7", True),
        ("5!-100 = 20", True),
        ("2x-1*3 = 7", True),
        ("so (3*4 = 13)", False),
        ("9" * 10_000 + " + 1 = 3", True),
    ],
)
def test_plain_equations_are_checked(step, true):
    assert equations_hold(step) is true


# ------------------------------------------------------------------ the schedule
def test_phases_are_the_papers_order():
    cfg = dsm.Args(verifier_steps=2, meta_steps=1, generator_steps=3)
    found = [dsm.phase_at(step, cfg) for step in range(13)]
    first = [("verifier", 0)] * 2 + [("meta", 0)]
    rounds = [[("verifier", r)] * 2 + [("generator", r)] * 3 for r in (0, 1)]
    assert found == [*first, *rounds[0], *rounds[1]]


def test_the_default_ends_with_two_rounds_of_automatic_labels():
    cfg = dsm.Args()
    assert max(dsm.phase_at(step, cfg)[1] for step in range(cfg.steps)) == 2


# ------------------------------------------------------------------ steps, with given completions
class Given(dsm.DeepSeekMath):
    """The trainer without a model: `generate` and `rollout` return given texts, by player."""

    def __init__(self, texts: dict, **change):
        self.cfg = dsm.Args(**{"questions": 1, "group_size": 2, "solutions": 2} | change)
        self.texts = {name: list(some) for name, some in texts.items()}
        self.state, self.asked = SimpleNamespace(global_step=0), []
        self.accelerator = SimpleNamespace(num_processes=1, process_index=0)
        self.memory, self.train_rows = {"labelled": [], "rounds": 0}, [ROW]
        self.logged, self.paid = {}, None

    def generate(self, name, prompts, greedy=False):
        prompts = list(prompts)
        self.asked += [(name, prompt[-1]["content"]) for prompt in prompts]
        return [self.texts[name].pop(0) for _ in prompts]

    def rollout(self, name, rows):
        texts = self.generate(name, [row["prompt"] for row in rows])
        return {"player": name, "texts": texts, "notes": [{"prompt": ""} for _ in texts]}

    def pay(self, batch, rewards):
        self.paid = rewards

    def gather(self, values):
        return values

    def log_mean(self, name, values):
        self.logged[name] = values


def labelled(solution=WRONG, label=0.0, **more):
    score, faulty = dsm.truth_of(ROW, solution)
    row = {"question": QUESTION, "solution": solution, "label": label, "truth": score}
    return row | {"faulty": faulty} | more


def test_r_meta_is_paid_after_the_meta_verifiers_first_steps_and_not_in_its_ablation():
    def played(**change):
        trainer, phases = Given({}, verifier_steps=2, meta_steps=2, generator_steps=1, **change), []
        trainer.memory["rounds"] = 9
        trainer.verifier_step = lambda with_meta: phases.append(("verifier", with_meta))
        trainer.meta_step = lambda: phases.append("meta")
        trainer.generator_step = lambda rows: phases.append("generator")
        for trainer.state.global_step in range(8):
            trainer.step([])
        return phases

    first = [("verifier", False)] * 2 + ["meta"] * 2
    for paid in (True, False):
        later = [("verifier", paid)]
        assert played(meta_reward=paid) == first + later * 2 + ["generator"] + later


def test_the_first_labels_are_the_truth_and_the_next_are_not():
    own = f"\n{dsm.HEADING}\n{ends('none', '1')}"
    texts = {"generator": [RIGHT + own, "no steps", LUCKY + own, WRONG + own]}
    trainer = Given(texts, least_valid=2)
    trainer.label_solutions(0)
    assert [(row["label"], row["round"]) for row in trainer.memory["labelled"]] == [(1.0, 0)]
    assert trainer.memory["rounds"] == 1 and dsm.HEADING not in str(trainer.memory)
    # LUCKY is doubted twice, WRONG once
    doubt, praise = ends("1", "0.5"), ends("none", "1")
    trainer.texts["verifier"] = [doubt, doubt, praise, "?", doubt, praise, praise, praise]
    yes, no = "Score: \\boxed{0.5}", "Score: \\boxed{0}"
    # the first doubt has the votes yes, no, no; the second yes, yes, no; that of WRONG as the first
    trainer.texts["meta"] = [yes, yes, yes, no, yes, no, no, no, no]
    trainer.label_solutions(1)
    # one valid doubt is too few for LUCKY, which is dropped; of WRONG nothing is confirmed
    new = trainer.memory["labelled"][1:]
    assert [(row["solution"], row["label"], row["truth"]) for row in new] == [(WRONG, 1.0, 0.0)]
    assert trainer.logged["labels/kept"] == 0.5 and trainer.logged["labels/agreement"] == [False]
    assert trainer.logged["labels/single"] == [pytest.approx(2 / 3), 0.0]
    asked = [user for name, user in trainer.asked if name == "meta"]
    assert len(asked) == 9 and all("Defects: 1\nAre they real?" in user for user in asked)


def test_every_process_logs_the_same_metrics_of_analyses():
    """`log_mean` waits for all of them; one whose analyses claim nothing must not leave it out."""
    logged = []
    for text in ("unreadable", ends("1", "0")):
        trainer = Given({"verifier": [text] * 2, "meta": ["Score: \\boxed{1}"] * 2})
        trainer.memory["labelled"] = [labelled(WRONG)]
        trainer.verifier_step(with_meta=False)
        logged.append([*trainer.logged])
    assert logged[0] == logged[1] and len(logged[0]) == 5
    assert trainer.logged["verifier/claims_real"] == 1.0


def test_votes_make_the_label_and_the_truth_is_only_kept():
    doubt, yes = ends("2", "0"), "Score: \\boxed{1}"
    trainer = Given({"verifier": [doubt] * 4, "meta": [yes] * 12})
    (row,) = trainer.by_votes([labelled(RIGHT)])
    assert (
        row["label"] == 0 and row["truth"] == 1 and row["single"] == 0
    )  # all agree, all are wrong
    for meta, label in (("Score: \\boxed{0.5}", 0), ("Score: \\boxed{0}", 1), ("?", 1)):
        trainer = Given({"verifier": [doubt] * 4, "meta": [meta] * 12})
        (row,) = trainer.by_votes([labelled(RIGHT)])
        assert row["label"] == label  # one real fault is enough for a vote


def test_too_few_analyses_that_can_be_read_make_no_label():
    texts = {"verifier": [ends("none", "1"), "?", "?", "?"], "meta": []}
    trainer = Given(texts, least_valid=2)
    assert trainer.by_votes([labelled(RIGHT)])[0]["label"] is None


def test_without_a_known_fault_the_meta_verifier_cannot_be_taught():
    trainer = Given({})
    trainer.memory["labelled"] = [labelled(faulty=None)]
    with pytest.raises(UserError, match="--meta-steps 6: of no labelled solution"):
        trainer.meta_step()


def test_the_verifier_is_paid_for_the_label_and_the_meta_reward():
    said = [ends("1", "0"), ends("2", "0.5"), "?", ends("none", "1")]
    texts = {"verifier": said, "meta": ["Score: \\boxed{1}", "Score: \\boxed{0}"]}
    trainer = Given(texts, group_size=4)
    trainer.memory["labelled"] = [labelled()]
    trainer.verifier_step(with_meta=True)
    assert trainer.paid == [1.0, 0.0, 0.0, 0.0]
    assert [name for name, _ in trainer.asked] == ["verifier"] * 4 + ["meta"] * 2
    assert trainer.logged["verifier/claims_real"] == 0.5
    trainer = Given({"verifier": said}, group_size=4)
    trainer.memory["labelled"] = [labelled()]
    trainer.verifier_step(with_meta=False)  # a made-up defect is paid like a real one
    assert trainer.paid == [1.0, 0.5, 0.0, 0.0]


def test_the_meta_verifier_is_paid_for_what_it_says_of_the_claims():
    texts = {
        "verifier": [ends("1,2", "0")],
        "meta": ["Score: \\boxed{0.5}", "Score: \\boxed{1}", "?", "Score: \\boxed{0}"],
    }
    trainer = Given(texts, group_size=4)
    trainer.memory["labelled"] = [labelled(), labelled(faulty=None)]
    trainer.meta_step()
    assert trainer.paid == [1.0, 0.5, 0.0, 0.5]
    assert "Defects: 1,2\nAre they real?" in trainer.asked[-1][1]


def test_a_verifier_that_claims_nothing_is_given_a_made_up_defect():
    trainer = Given({"verifier": [ends("none", "1")], "meta": ["Score: \\boxed{0}"] * 2})
    trainer.memory["labelled"] = [labelled(RIGHT, 1.0)]
    trainer.meta_step()
    assert trainer.paid == [1.0, 1.0]


def test_the_generator_is_paid_by_the_verifier_and_not_by_the_truth():
    own = [ends("none", "1"), ends("1", "0"), ends("1", "0"), "no grade"]
    solutions = [WRONG, WRONG, RIGHT, RIGHT]
    texts = {
        "generator": [f"{s}\n{dsm.HEADING}\n{o}" for s, o in zip(solutions, own)],
        "verifier": [ends("none", "1"), ends("1", "0"), "?"],
        "meta": ["Score: \\boxed{1}", "Score: \\boxed{0}"],
    }
    trainer = Given(texts)
    trainer.generator_step([{**ROW, "prompt": dsm.solve_prompt(QUESTION)}] * 4)
    # the verifier is fooled; both are honest; nobody can read the verifier: s = 0, Z disbelieved
    assert trainer.paid == pytest.approx([1.0, 0.24, 0.0, 0.0])
    shown = [user for name, user in trainer.asked if name == "verifier"]
    assert len(shown) == 3 and all(dsm.HEADING not in user for user in shown)
    trainer = Given(texts, self_reward=False)
    trainer.generator_step([{**ROW, "prompt": dsm.solve_prompt(QUESTION)}] * 4)
    assert trainer.paid == pytest.approx([1.0, 0.0, 0.0, 0.0])


def test_each_label_is_drawn_equally_often():
    trainer = Given({}, questions=30)
    pool = [labelled(WRONG)] * 50 + [labelled(LUCKY, 0.5)] + [labelled(RIGHT, 1.0)] * 5
    drawn = [row["label"] for row in trainer.draw(pool, random.Random(0))]
    assert [drawn.count(score) for score in SCORES] == [10, 10, 10]


def test_metrics_of_analyses_by_hand():
    rows = [labelled(), labelled(RIGHT, 1.0), labelled(LUCKY, 0.5), labelled(faulty=None)]
    found = [dsm.Analysis((1, 2), 0.0), dsm.Analysis((), 1.0), dsm.Analysis((), 1.0), None]
    metrics = dsm.analysis_metrics(rows, found)
    assert metrics["balanced_accuracy"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert metrics["claims_real"] == 0.5 and metrics["defects_found"] == 0.5
    assert metrics["analysis_quality"] == pytest.approx((0.5 + 1 + 1) / 3)


def test_evaluation_by_hand():
    """8 questions, 2 samples of each. The verifier tells the truth when it decodes greedily."""
    held_out = [{"question": f"({i}+4)+1 mod 100", "answer": str(i + 5)} for i in range(10, 18)]

    def solution(i, kind):
        if kind == "wrong":
            return format_solution([f"{i}+4=1", "1+1=2"], 2)
        return format_solution(
            [f"{i}+4={i + 4 if kind == 'right' else 1}", f"{i + 4}+1={i + 5}"], i + 5
        )

    def graded(i, kind, own):
        return f"{solution(i, kind)}\n{dsm.HEADING}\n{own}"

    perfect, doubt = ends("none", "1"), ends("1", "0")
    first = {10: ("right", perfect), 11: ("lucky", perfect), 12: ("wrong", doubt)}
    now_right = []

    def say(player, asked, greedy, before):
        i = int(asked[asked.index("(") + 1 :][:2])
        if player == "meta":
            return "Score: \\boxed{0}"
        if player == "verifier":
            kind = next(k for k in ("right", "lucky", "wrong") if solution(i, k) in asked)
            if greedy:
                return {"right": perfect, "lucky": ends("1", "0.5"), "wrong": doubt}[kind]
            of_base = {10: perfect, 11: ends("2", "0.5"), 12: ends("1,2", "0"), 13: "?"}
            if kind == first.get(i, ("wrong", ""))[0]:
                return "?" if i == 10 and before else of_base.get(i, perfect)
            return [ends("1", "0.5"), doubt][before] if i == 10 else "?"
        if asked.endswith("Correct it."):
            return solution(i, "right" if i < 14 else "wrong")
        if greedy:
            return graded(i, "lucky", ends("1", "0.5"))
        kind, own = first.get(i, ("wrong", "no grade"))
        if now_right:
            kind, own = "right", perfect
        elif before:
            kind, own = ("wrong", doubt) if i == 10 else ("right", perfect)
        return graded(i, kind, own)

    trainer = answering(say, eval_samples=2)
    result = dsm.evaluate(trainer, held_out)
    base = {
        "verifier/balanced_accuracy": (1 + 1 + 1 / 6) / 3,
        "verifier/claims_real": 1 / 3,
        "verifier/defects_found": 1 / 7,
        "verifier/analysis_quality": (1 + 0 + 0.5 + 0 + 4) / 8,
        "verifier/balanced_accuracy_greedy": 1.0,
        "verifier/claims_real_greedy": 1.0,
        "verifier/defects_found_greedy": 1.0,
        "verifier/analysis_quality_greedy": 1.0,
        "meta/accuracy": 1 / 2,  # of what is claimed nothing is real, or half
    }
    assert result == pytest.approx(
        base
        | {
            "generator/accuracy": (1 + 2 + 1 + 5) / 16,
            "generator/own_score_right": 10 / 11,
            "co/over_claim": 0.5 / 11,
            "generator/greedy": 1.0,
            "generator/own_score_right_greedy": 1.0,
            "co/over_claim_greedy": 0.0,
            "generator/refined": 4 / 8,
            # of the first two questions: 1 and nothing beats 0.5 and 0; of two right ones either
            "co/best_of_2": 1.0,
            "co/mean_of_same": 3 / 4,
        }
    )
    refined = [asked for player, asked, _ in trainer.calls if asked[0].endswith("Correct it.")]
    named = [re.search(r"Defects: (.*)", user)[1] for user in refined[0]]
    assert named == ["none", "none", "1"] + ["none"] * 5
    assert dsm.HEADING not in str(refined)
    # a better generator does not make another verifier of it
    now_right.append(True)
    later = dsm.evaluate(trainer, held_out)
    assert later["generator/accuracy"] == 1.0
    assert {name: later[name] for name in base} == pytest.approx(base)


# ------------------------------------------------------------------ runs
def test_a_run_goes_through_all_phases_and_keeps_its_labels(finished):
    folder, out, _ = finished("deepseekmath.py")
    players = [line.split("  ")[1] for line in out.splitlines() if line.startswith("step ")]
    players = [name for name in players if name in ("verifier", "meta", "generator")]
    assert players == ["verifier", "meta", "verifier", "generator", "verifier", "generator"]
    memory = json.loads((folder / "checkpoint-6" / "memory.json").read_text())
    assert memory["rounds"] == 2 and {row["round"] for row in memory["labelled"]} <= {0, 1}
    first = [row for row in memory["labelled"] if row["round"] == 0]
    assert first and all(row["label"] == row["truth"] for row in first)


ABLATIONS = ["--no-meta-reward", "--no-self-reward", "--labels truth", "--meta-steps 0"]


@pytest.mark.parametrize("more", ABLATIONS)
def test_ablations_run(tmp_path, brief, more):
    arguments = f"{more} --steps 4".split()  # the fourth is of the second round
    out = brief("deepseekmath.py", *small("deepseekmath.py", tmp_path / "run", *arguments))
    assert "held-out questions" in out
    if more == "--labels truth":
        memory = json.loads((tmp_path / "run" / "checkpoint-4" / "memory.json").read_text())
        assert all(row["label"] == row["truth"] for row in memory["labelled"])


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--verifier-steps 0 --generator-steps 0", "a round needs a step of one of them"),
        ("--least-valid 5", "--least-valid 5 must be at most --analyses 4"),
        ("--votes 0", "--votes 0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, arguments, sentence):
    assert sentence in refused("deepseekmath.py", *arguments.split(), "--out", tmp_path / "run")


def test_a_generator_that_is_never_trained_is_said_to_be(tmp_path, brief):
    out = brief("deepseekmath.py", *small("deepseekmath.py", tmp_path / "run", "--steps", 2))
    assert "note: the verifier has all --steps 2, the generator is never trained" in out
