"""vstar.py: losses and scores against a softmax by hand, step labels against brute force, hostile
solutions, what the data hold and when the generator starts again."""

import math

import vstar
from common.tasks.answers import solve_prompt

import pytest
from conftest import build, perturb
from trainers import (
    QUESTION,
    RIGHT,
    WRONG,
    encoded,
    likelihood,
    log_probs_by_hand,
    logged,
    loss_in_parts,
    without_model,
)


def row(solution, right, **more):
    return {"question": QUESTION, "solution": solution, "right": right, "answer": "50"} | more


# ------------------------------------------------------------------ the schedule
def test_the_generator_learns_in_all_iterations_and_then_the_verifier():
    cfg = vstar.Args(steps=8, ver_steps=2, iterations=3)
    found = [vstar.player_at(step, cfg) for step in range(8)]
    assert found[:6] == [("generator", t) for t in (0, 0, 1, 1, 2, 2)]
    assert found[6:] == [("verifier", 2)] * 2
    assert vstar.player_at(0, vstar.Args(steps=4, ver_steps=4)) == ("verifier", 2)


# ------------------------------------------------------------------ on the small model
def real(folder, verifier="dpo") -> vstar.VStar:
    """The trainer on the small model, its two adapters apart."""
    args = vstar.Args(verifier=verifier, questions=2, micro_batch=2, beta=0.3)
    trainer = build(vstar.VStar, folder, args, vstar.VStar.define_players(args), solve_prompt)
    perturb(trainer, 0.05)
    return trainer


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def step_loss(trainer) -> float:
    """Of the step that the trainer would take, micro-batch by micro-batch."""
    (batch,) = trainer.step([])
    return loss_in_parts(trainer, batch)


def teach(trainer, lessons: list[dict]):
    """The next step is the verifier's, on these lessons."""
    trainer.state.global_step = trainer.cfg.steps - 1
    trainer.saved |= {"iteration": 2, "taught": 2, "lessons": lessons}


def test_dpos_loss_by_hand(tmp_path):
    """The verifier against the base, of the right solution and of the wrong one."""
    trainer, wanted, margins = real(tmp_path), 0.0, []
    others = [WRONG, "<step>38+4=42</step>\n<answer>\\boxed{42}</answer>"]
    rows = [row(RIGHT, True, rejected=wrong, z=1.0) for wrong in others]
    teach(trainer, rows)
    for wrong in others:
        right, wrong = (
            0.3 * (likelihood(trainer, "verifier", text) - likelihood(trainer, None, text))
            for text in (RIGHT, wrong)
        )
        wanted -= math.log(sigmoid(right - wrong)) / 2
        margins.append((right - wrong) / 0.3)
    assert step_loss(trainer) == pytest.approx(wanted, rel=1e-4)
    found = [logged(trainer)[f"verifier/{name}"] for name in ("margin", "pair_accuracy")]
    assert found == pytest.approx([sum(margins) / 2, sum(m > 0 for m in margins) / 2], rel=1e-3)
    # and its score is the verifier's likelihood, end token included
    likely = likelihood(trainer, "verifier", RIGHT)
    assert trainer.scores(rows)[0] == pytest.approx(likely, rel=1e-4) and trainer.scores([]) == []


@pytest.mark.parametrize("kind", ["orm", "prm"])
def test_the_heads_losses_and_scores_by_hand(tmp_path, kind):
    """The token for good against the one for bad, behind what is judged; z may be soft."""
    trainer = real(tmp_path, kind)

    def logit(text: str) -> float:
        good, bad = (encoded(trainer, text + sign)[:-1] for sign in "+-")
        assert good[:-1] == bad[:-1]
        asked = solve_prompt(QUESTION)
        good, bad = (log_probs_by_hand(trainer, "verifier", asked, x)[-1] for x in (good, bad))
        return good - bad

    first = vstar.beginnings(WRONG)[0]
    teach(trainer, [row(RIGHT, True, z=1.0, part=RIGHT), row(WRONG, False, z=0.25, part=first)])
    p, soft = sigmoid(logit(RIGHT)), sigmoid(logit(first))
    cross_entropy = -math.log(p) - 0.25 * math.log(soft) - 0.75 * math.log(1 - soft)
    assert step_loss(trainer) == pytest.approx(cross_entropy / 2, rel=1e-4)
    agree = [p > 0.5, soft < 0.5]
    assert logged(trainer)["verifier/pair_accuracy"] == sum(agree) / 2
    parts = trainer.parts(WRONG)
    worst = min(sigmoid(logit(part)) for part in parts)
    scores = trainer.scores([row(RIGHT, True), row(WRONG, False)])
    assert scores[1] == pytest.approx(worst, rel=1e-4)


def test_the_generators_loss_by_hand(tmp_path):
    """A mean over the tokens, of texts of different lengths."""
    trainer = real(tmp_path)
    trainer.saved |= {"iteration": 0, "D_gen": [row(RIGHT, True), row(WRONG, True)]}
    tokens = len(encoded(trainer, RIGHT)) + len(encoded(trainer, WRONG))
    wanted = -sum(likelihood(trainer, "generator", text) for text in (RIGHT, WRONG)) / tokens
    assert step_loss(trainer) == pytest.approx(wanted, rel=1e-4)


# ------------------------------------------------------------------ data, with given completions
def given_texts(texts=(), **change) -> vstar.VStar:
    """`events`: who wrote, restarted and learnt."""
    cfg = vstar.Args(**{"pool": 1, "samples": 4, "questions": 2} | change)
    rows = [{"question": QUESTION, "answer": "50"}]
    trainer = without_model(vstar.VStar, cfg, texts, train_rows=rows)
    trainer.saved = {"iteration": -1, "D_gen": [], "D_ver": [], "lessons": [], "taught": -1}
    trainer.events, generate = [], trainer.generate

    def writes(name, *rest, **more):
        trainer.events.append(f"{name} writes")
        return generate(name, *rest, **more)

    trainer.generate = writes
    trainer.restart = lambda name: trainer.events.append(f"{name} restarts")
    trainer.generator_step = lambda: trainer.events.append("generator learns")
    return trainer


def test_right_ones_are_learnt_once_and_all_of_all_iterations_are_judged():
    trainer = given_texts([RIGHT, RIGHT, WRONG, "cut off"], steps=6, ver_steps=3)
    another = f"x\n{RIGHT}"
    trainer.step([])
    assert [r["solution"] for r in trainer.saved["D_gen"]] == [RIGHT]
    assert [r["right"] for r in trainer.saved["D_ver"]] == [True, True, False]
    for t, texts in ((1, [another, another, WRONG, WRONG]), (2, [RIGHT, WRONG, WRONG, WRONG])):
        trainer.state.global_step, trainer.texts = t, texts
        trainer.step([])
    assert [r["solution"] for r in trainer.saved["D_gen"]] == [RIGHT, another]
    assert [r["iteration"] for r in trainer.saved["D_ver"]] == [0] * 3 + [1] * 4 + [2] * 4
    # the solutions are those of the generator that was trained, which starts anew after them
    assert trainer.events == ["generator writes", "generator restarts", "generator learns"] * 3
    spelled = RIGHT.replace("</step>", "<|end|></step>")  # would be cut in two when it is encoded
    unread = [spelled, "\\boxed{50}", "<step>38+4=42</step>", f"{RIGHT}…"]  # the last is cut
    unread += [RIGHT.replace("{50}", "{ }")]
    trainer = given_texts([RIGHT, WRONG, *unread], samples=7, restart=False)
    trainer.step([])
    trainer.step([])  # nothing is sampled in the same iteration
    assert trainer.events == ["generator writes", "generator learns", "generator learns"]
    assert len(trainer.saved["D_ver"]) == 2


def test_in_the_loop_the_better_half_of_the_right_ones_is_learnt():
    others = [f"{i}\n{RIGHT}" for i in range(4)]
    trainer = given_texts(others, verifier_in_loop=True)
    trainer.scores = lambda rows: [int(r["solution"][0]) for r in rows]
    trainer.start_iteration(1)
    assert [r["solution"] for r in trainer.saved["D_gen"]] == [others[3], others[2]]
    easy = {"question": "1+1 mod 61"}  # however sure it is of this one
    rows = [row(RIGHT, True) | easy, row("a", True), row("b", True), row("c", True)]
    trainer.scores = lambda rows: [9, 1, 3, 2]
    assert [r["solution"] for r in trainer.better_half(rows)] == [RIGHT, "b", "c"]
    trainer = given_texts(others, verifier_in_loop=True)
    trainer.start_iteration(0)  # nobody has been taught to judge yet
    assert len(trainer.saved["D_gen"]) == 4


@pytest.mark.parametrize("how", ["hard", "soft"])
def test_step_labels_are_what_the_generator_makes_of_a_beginning(how):
    """The box in the second beginning is no answer of what follows."""
    rest = RIGHT.removeprefix("<step>38+4=42</step>")
    lost = "\n<step>41*7=43</step>\n<answer>\\boxed{43}</answer>"
    wrong = rf"<step>38+4=\boxed{{50}}</step>{lost}"
    trainer = given_texts([rest, lost, lost, "", lost, lost], step_samples=3, verifier="prm")
    trainer.cfg.step_labels, trainer.train_rows = how, trainer.train_rows * 2
    lessons = trainer.judged_parts([row(RIGHT, True), row(wrong, False), row("third", False)])
    first = 1.0 if how == "hard" else pytest.approx(1 / 3)
    assert [lesson["z"] for lesson in lessons] == [first, 1.0, 0.0, 0.0]
    parts = [*trainer.parts(RIGHT), *trainer.parts(wrong)]
    assert [lesson["part"] for lesson in lessons] == parts
    assert trainer.prefix == [parts[0]] * 3 + [parts[2]] * 3
    assert {name for name, _ in trainer.asked} == {"generator"}


def test_orm_is_taught_as_many_right_as_wrong_ones():
    trainer = given_texts(verifier="orm")
    trainer.saved["D_ver"] = [row(RIGHT, True)] + [row(WRONG, False)] * 9
    trainer.start_verifier(0)
    assert sorted(lesson["z"] for lesson in trainer.saved["lessons"]) == [0.0, 1.0]
