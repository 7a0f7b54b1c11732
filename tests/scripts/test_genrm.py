"""genrm.py: both losses against a softmax by hand, p(Yes) and the mean over rationales, who writes
solutions, what the verifier is taught, hostile rationales."""

import math

import genrm
from common.tasks.answers import solve_prompt

import pytest
import torch
from conftest import build, perturb
from hypothesis import given
from hypothesis import strategies as st
from trainers import (
    QUESTION,
    RIGHT,
    WRONG,
    encoded,
    log_probs_by_hand,
    logged,
    loss_in_parts,
    without_model,
)

THOUGHTS = f"<step>4:\\boxed{{CORRECT}}</step>\n{genrm.OPENING}"


def row(solution, right, **more):
    return {"question": QUESTION, "solution": solution, "right": right, "well_formed": True} | more


# ------------------------------------------------------------------ parsing
@given(st.lists(st.sampled_from([genrm.OPENING, genrm.CLOSING, *genrm.VERDICTS, " ", "x", "{"])))
def test_whatever_is_written_the_verdict_is_behind_the_rationale(parts):
    text = "".join(parts)
    judged = genrm.rationale(text)
    if judged:
        thoughts, verdict = judged
        rest = text.removeprefix(thoughts)
        assert thoughts.endswith(genrm.OPENING) and genrm.OPENING not in rest
        said = rest.partition(genrm.CLOSING)[0].strip()
        assert said.endswith(genrm.VERDICTS[0 if verdict else 1])


# ------------------------------------------------------------------ on the small model
def real(folder, **change) -> genrm.GenRM:
    """The trainer on the small model, whose adapter is no longer the base."""
    args = genrm.Args(**{"questions": 2, "micro_batch": 2, "solve_weight": 1.0} | change)
    trainer = build(genrm.GenRM, folder, args, genrm.GenRM.define_players(args), solve_prompt)
    perturb(trainer, 0.05)
    return trainer


def mean_loss(trainer, texts: list[tuple]) -> float:
    """Minus the mean over the tokens of all texts, end tokens included."""
    logps = []
    for prompt, text in texts:
        logps += log_probs_by_hand(trainer, "verifier", prompt, encoded(trainer, text))
    return -sum(logps) / len(logps)


@pytest.mark.parametrize(
    "verifier, solve_weight", [("direct", 0.0), ("direct", 1.0), ("cot", 0.25)]
)
def test_the_loss_of_a_step_by_hand(tmp_path, verifier, solve_weight):
    """A mean over verdicts and one over solutions, for any lambda: 1 once made one mean of both."""
    trainer = real(tmp_path, verifier=verifier, solve_weight=solve_weight)
    lessons = [row(text, z, rationale=THOUGHTS) for text, z in ((RIGHT, True), (WRONG, False))]
    trainer.saved = {"D_verify": lessons, "D_correct": [row(RIGHT, True)]}
    (batch,) = trainer.step([])
    ours = loss_in_parts(trainer, batch, 2)
    prompt, words = genrm.ask_prompt, ["Yes", "No"]
    if verifier == "cot":
        prompt = genrm.verify_prompt
        words = [f"{THOUGHTS}{verdict}</final_verification>" for verdict in genrm.VERDICTS]
    said = [(prompt(QUESTION, text), word) for text, word in zip((RIGHT, WRONG), words)]
    verify, solve = (mean_loss(trainer, x) for x in (said, [(solve_prompt(QUESTION), RIGHT)]))
    assert ours == pytest.approx(verify + solve_weight * solve, rel=1e-4)
    assert logged(trainer)["verifier/verify_loss"] == pytest.approx(verify, rel=1e-4)
    assert len(batch.extras["weight"]) == (4 if solve_weight else 2)
    assert ("verifier/solve_loss" in logged(trainer)) == (solve_weight > 0)


def test_the_generator_stays_the_base(tmp_path):
    """However the verifier has changed, which writes otherwise by now."""
    trainer, question = real(tmp_path), "((42/7)/9)/8 mod 61"  # quotients are believed, not known
    rows = [{"question": question, "answer": "50"}] * 8

    def written() -> list[str]:
        trainer.sample_calls = 0  # so that it draws the same
        return trainer.generate("generator", [solve_prompt(question)] * 8)

    own = written()
    trainer.sample_calls = 0
    solutions = [row["solution"] for row in trainer.sample_solutions(rows)]
    for name, p in trainer.model.named_parameters():
        if "lora_B" in name:
            p.data.zero_()  # the adapter is the base, too
    base = written()
    assert solutions == [text.strip() for text in base] and base != own


# ------------------------------------------------------------------ with given completions
def given_texts(texts=(), **change) -> genrm.GenRM:
    cfg = genrm.Args(**{"pool": 1, "samples": 4, "rationales": 2} | change)
    rows = [{"question": QUESTION, "answer": "50"}]
    more = {"train_rows": rows, "playing": lambda name: torch.no_grad()}
    return without_model(genrm.GenRM, cfg, texts, **more)


def test_what_is_sampled_once_and_what_of_it_is_taught():
    spelled = RIGHT.replace("</step>", "<|end|></step>")  # would become a token when it is encoded
    written = [RIGHT, RIGHT, RIGHT, WRONG, spelled, "\\boxed{50}", WRONG, "<step>38+4=42</step>"]
    written += [f"{RIGHT}…"]  # cut, behind its box
    trainer = given_texts(written, samples=9, verifier="direct")
    trainer.collect()
    assert [r["solution"] for r in trainer.saved["D_correct"]] == [RIGHT]  # once
    lessons = trainer.saved["D_verify"]
    assert sorted(r["solution"] for r in lessons) == sorted([RIGHT, RIGHT, WRONG, WRONG])
    wrong = [not right for right in trainer.logged["generator/accuracy"]]
    assert wrong == [False] * 3 + [True, False, False, True, True, False]


def test_rationales_are_kept_if_they_agree_and_balanced_afterwards():
    correct, incorrect = (THOUGHTS + verdict for verdict in genrm.VERDICTS)
    trainer = given_texts([correct, incorrect, "nothing", incorrect, f"<|end|>{correct}"])
    rows = [row(RIGHT, True), row(RIGHT, True), row(WRONG, False), row(WRONG, False)]
    kept = trainer.with_rationales([*rows, row(RIGHT, True)])
    assert [(r["right"], r["rationale"]) for r in kept] == [(True, THOUGHTS), (False, THOUGHTS)]
    # both wrong solutions get one, of the right solutions one: whichever is judged when
    trainer = given_texts([RIGHT, RIGHT, WRONG, WRONG], verifier="cot")
    judged = {RIGHT: iter([correct, "nothing"]), WRONG: iter([incorrect, incorrect])}
    trainer.generate_all = lambda name, prompts: [
        next(judged[RIGHT if RIGHT in prompt[-1]["content"] else WRONG]) for prompt in prompts
    ]
    trainer.collect()
    assert sorted(r["right"] for r in trainer.saved["D_verify"]) == [False, True]
    assert trainer.logged["verifier/rationales_kept"] == [3 / 4]


def probabilities(trainer, table: dict) -> list[str]:
    """Makes the trainer's `log_probs` say the table's probability of each text; the texts that it
    will have been asked for.
    """
    seen = []

    def log_probs(name, ids):
        texts = trainer.processing_class.batch_decode(ids)
        seen.extend(texts)
        return torch.tensor([[math.log(table[text])] for text in texts])

    trainer.completions = lambda player, prompts, ids: ids
    trainer.log_probs = log_probs
    return seen


def test_a_direct_score_is_p_yes():
    """All forms add up, and other words have no part in it."""
    trainer = given_texts(verifier="direct")
    forms = dict(zip([*genrm.YES, *genrm.NO], (0.2, 0.2, 0.2, 0.1, 0.05, 0.05)))
    probabilities(trainer, forms)
    assert trainer.scores([row(RIGHT, True)]) == [pytest.approx(0.6 / 0.8)]
    assert trainer.scores([]) == []


def test_a_score_behind_rationales_is_their_mean_and_silence_counts_one_half():
    """Two solutions with two rationales each, one of which comes to no verdict."""
    bodies = [letter + genrm.OPENING for letter in "abc"]
    yes, no = genrm.VERDICTS
    trainer = given_texts([bodies[0] + yes, bodies[1] + no, "nothing", bodies[2] + yes])
    ends = [verdict + genrm.CLOSING for verdict in genrm.VERDICTS]
    texts = [body + end for body in bodies for end in ends]
    seen = probabilities(trainer, dict(zip(texts, (0.9, 0.1, 0.2, 0.6, 0.3, 0.1))))
    scores = trainer.scores([row(RIGHT, True), row(WRONG, False)])
    assert scores == pytest.approx([(0.9 + 0.25) / 2, (0.5 + 0.75) / 2])
    # a verdict is encoded behind its rationale as it was taught: a tokenizer may join signs there
    taught = [trainer.lesson(row(RIGHT, z, rationale=bodies[0]))[1] for z in (True, False)]
    assert seen[:2] == taught
