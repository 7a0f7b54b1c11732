"""apo.py: its losses against the released form in loops and a softmax by hand, calibration against
its definition, which pairs each player gets, the RM's restart, hostile answers, a fixed RM."""

import json
import math

import apo
from common.core.errors import UserError
from common.tasks.answers import solve_prompt

import pytest
import torch
from conftest import build, gradient, perturb, saved_of, small, steps_of
from trainers import QUESTION, RIGHT, WRONG, encoded, likelihood, logged, without_model

OTHER = "<step>38+4=42</step>\n<step>42*7=51</step>\n<answer>\\boxed{51}</answer>"


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def released_loss(rows: list[tuple], anchor: float, adversarial: float, diff: bool) -> float:
    """The released form: for every query the matrix over its answers i and j, of the scores s that
    they were given and their r; each unordered pair stands in it twice, and both terms are divided
    by the pairs of the whole batch.

    rows: (s of each answer, r of each answer, whether people's).
    """
    count = sum(si != sj for s, _, _ in rows for si in s for sj in s)

    def rank(of: bool, unbounded: bool) -> float:
        total = 0.0
        for s, r, human in rows:
            for si, ri in zip(s, r):
                for sj, rj in zip(s, r):
                    margin = math.copysign(1, si - sj) * (ri - rj)
                    if human == of and si != sj:
                        total += -margin if unbounded else math.log(1 + math.exp(-margin))
        return total / count

    return anchor * rank(True, False) + adversarial * rank(False, diff)


# ------------------------------------------------------------------ the formulas
@pytest.mark.parametrize("diff", [False, True])
def test_the_rms_loss_is_the_released_one(diff):
    """Whichever of a row's two answers comes first there."""
    draw = torch.Generator().manual_seed(0)
    r = torch.randn(7, 2, generator=draw, dtype=torch.float64)
    human = torch.tensor([1, 0, 0, 1, 0, 0, 1]).bool()
    better = [0, 1, 1, 0, 0, 1, 0]  # place of y+ in the released row
    rows = [
        ([1 - b, b], [x[1 - b], x[b]], h) for b, x, h in zip(better, r.tolist(), human.tolist())
    ]
    chosen = torch.tensor([of[s.index(1)] for s, of, _ in rows], dtype=torch.float64)
    rejected = torch.tensor([of[s.index(0)] for s, of, _ in rows], dtype=torch.float64)
    found = apo.rm_losses(chosen - rejected, human, 1.3, 0.1 / 4, diff).mean().item()
    assert found == pytest.approx(released_loss(rows, 1.3, 0.1 / 4, diff), abs=1e-12)
    assert found != pytest.approx(released_loss(rows, 1.3, 0.1 / 4, not diff), abs=1e-3)
    huge = apo.rm_losses(torch.tensor([1e6, -1e6]), torch.tensor([True, True]), 1.0, 1.0)
    assert huge.tolist() == [0, 1e6]


def test_dpos_loss_by_hand():
    best, worst = torch.tensor([1.0, -3.0, -1e6]), torch.tensor([-2.0, 4.0, 1e6])
    wanted = [-math.log(sigmoid(0.3 * 3)), -math.log(sigmoid(0.3 * -7)), 0.3 * 2e6]
    assert apo.dpo_losses(best, worst, 0.3).tolist() == pytest.approx(wanted, rel=1e-6)
    assert apo.dpo_losses(best, best, 0.3).tolist() == pytest.approx([math.log(2)] * 3)


def calibration_by_hand(margins: list[float], bins: int) -> float:
    """sum over bins of |bin| / n * | accuracy - mean confidence |, bin by bin."""
    total, n = 0.0, len(margins)
    for k in range(bins):
        low, high = 0.5 + k / (2 * bins), 0.5 + (k + 1) / (2 * bins)
        within = []
        for m in margins:
            sure = max(sigmoid(m), 1 - sigmoid(m))
            if low <= sure < high or (k == bins - 1 and sure >= high):
                within.append((1.0 if m > 0 else 0.5 if m == 0 else 0.0, sure))
        if within:
            accuracy, sure = (sum(column) / len(within) for column in zip(*within))
            total += len(within) / n * abs(accuracy - sure)
    return total


@pytest.mark.parametrize("bins", [1, 4, 10])
def test_the_calibration_error_is_its_definition(bins):
    draw = torch.Generator().manual_seed(bins)
    for scale in (0.1, 1.0, 5.0, 500.0):
        margins = (scale * torch.randn(60, generator=draw, dtype=torch.float64) + 0.3).tolist()
        margins += [0.0, 0.0, 1e5, -1e5]
        assert apo.calibration_error(margins, bins) == pytest.approx(
            calibration_by_hand(margins, bins), abs=1e-12
        )
    even = math.log(3)  # p = .75: right in three of four
    assert apo.calibration_error([even, even, even, -even]) == pytest.approx(0)
    assert apo.calibration_error([40.0] * 3) == pytest.approx(0)
    assert apo.calibration_error([-40.0] * 3) == pytest.approx(1)
    assert apo.calibration_error([0.0]) == 0  # a tie: half sure, half right


def test_best_and_worst():
    a, b, c = ({"ids": [i]} for i in range(3))
    assert apo.best_and_worst([a, b, c], [0.0, 2.0, -1.0]) == [b, c]
    assert apo.best_and_worst([a, b, c], [2.0, 2.0, 1.0]) == [a, c]  # the first of equal ones
    assert apo.best_and_worst([a, b, c], [1.0, 1.0, 1.0]) == []
    # one text, whose score is rounded otherwise beside other rows
    assert apo.best_and_worst([a, {"ids": [0]}], [1.0, 1.0 + 1e-7]) == []
    assert apo.best_and_worst([a, b], [-math.inf, 0.0]) == [b, a]


# ------------------------------------------------------------------ `step` and `loss`
def real(folder, **change) -> apo.Apo:
    """The trainer on the small model, its two adapters apart; a round of a step for each."""
    sizes = {"steps": 4, "rm_steps": 1, "iterations": 2, "questions": 3, "micro_batch": 3}
    args = apo.Args(**sizes | {"pool": 8, "beta": 0.3, "rm_beta": 0.4} | change)
    trainer = build(apo.Apo, folder, args, apo.Apo.define_players(args), solve_prompt)
    perturb(trainer, 0.05)
    return trainer


def teach(trainer, player: str, pairs: list[tuple]):
    """The next step trains the player on these (chosen, rejected, people's)."""
    trainer.state.global_step = 0 if player == "rm" else 1
    row = {"question": QUESTION}
    pairs = [(encoded(trainer, y), encoded(trainer, z), human) for y, z, human in pairs]
    pairs = [apo.a_pair(row, y, z, human) for y, z, human in pairs]
    trainer.saved |= {"round": 0, "scored": 0, player: pairs}


PAIRS = [(RIGHT, WRONG, True), (RIGHT, OTHER, False), (OTHER, WRONG, False)]


@pytest.mark.parametrize("player, change", [
    ("rm", {}), ("rm", {"diff": True}), ("generator", {}),
    ("generator", {"improve": "rejection"}),
])  # fmt: skip
def test_the_step_is_the_papers_loss_however_it_is_cut(tmp_path, player, change):
    """Of three pairs, an answer at a time, in float64; then in micro-batches of one."""
    more = {"anchor": 0.7, "adversarial": 0.9} | change
    trainer = real(tmp_path, **more)
    teach(trainer, player, PAIRS)
    wanted = 0.0
    for chosen, rejected, human in PAIRS:
        y, z = (likelihood(trainer, player, text) for text in (chosen, rejected))
        if player == "rm":
            loss = -math.log(sigmoid(0.4 * (y - z)))
            if "diff" in change and not human:
                loss = -0.4 * (y - z)
            wanted += (0.7 if human else 0.9 / 4) * loss / 3
        elif change:
            wanted -= y / sum(len(encoded(trainer, text)) for text, _, _ in PAIRS)
        else:
            y, z = y - likelihood(trainer, None, chosen), z - likelihood(trainer, None, rejected)
            wanted -= math.log(sigmoid(0.3 * (y - z))) / 3
    found = gradient(trainer, trainer.step([])[0])
    total, count = trainer._sums[f"{player}/loss"]
    assert total / count == pytest.approx(wanted, rel=1e-4)
    assert all(f".{player}." in name for name in found)
    assert max(g.abs().max() for g in found.values()) > 1e-4
    again = real(tmp_path, micro_batch=1, **more)
    teach(again, player, PAIRS)
    for name, g in gradient(again, again.step([])[0]).items():
        torch.testing.assert_close(g, found[name], rtol=0, atol=1e-6)
    assert logged(again) == pytest.approx(logged(trainer), rel=1e-4)


def test_a_score_is_the_likelihood_under_the_rm(tmp_path):
    trainer = real(tmp_path)
    answers = [{"question": QUESTION, "ids": encoded(trainer, text)} for text in (RIGHT, WRONG)]
    wanted = [0.4 * likelihood(trainer, "rm", text) for text in (RIGHT, WRONG)]
    assert trainer.scores(answers) == pytest.approx(wanted, rel=1e-4) and trainer.scores([]) == []


def test_golden_answers_fit_with_their_end(tmp_path):
    trainer = real(tmp_path)
    rows = trainer.train_rows[:8]
    limit = trainer.cfg.solution_tokens = max(len(row["golden"]) for row in trainer.rm_rows)
    found = trainer.with_golden([row | {"reference": f" {row['reference']}\n"} for row in rows])
    for row in found:
        assert row["golden"] == encoded(trainer, row["reference"].strip())
    assert {len(row["golden"]) for row in found} <= {*range(limit + 1)}
    bad = [row | {"reference": text} for row, text in zip(rows, ["", " \n", "7+" * limit])]
    assert len(trainer.with_golden(bad + rows[:1])) == 1
    trainer.cfg.solution_tokens = 2
    with pytest.raises(UserError, match="--dataset tiny: no question has a reference of .* 2"):
        trainer.with_golden(rows)
    assert not {r["question"] for r in trainer.rm_rows} & {
        r["question"] for r in trainer.generator_rows
    }


# ------------------------------------------------------------------ which pairs, from given answers
ROW = {"question": QUESTION, "answer": "50"}


def given(texts, **change) -> apo.Apo:
    """A question of each player's; `restarts` counts those of the RM."""
    cfg = apo.Args(**{"samples": 3, "labelled": 1, "steps": 6, "rm_steps": 1} | change)
    trainer = without_model(apo.Apo, cfg, texts, generator_rows=[ROW])
    trainer.rm_rows = [ROW | {"golden": encoded(trainer, RIGHT)}]
    trainer.saved = {"round": -1, "human": [], "rm": [], "scored": -1, "generator": []}
    trainer.restarts = 0
    trainer.restart = lambda name: setattr(trainer, "restarts", trainer.restarts + (name == "rm"))
    return trainer


def read(trainer, pairs: list[dict]) -> list[tuple]:
    decode = trainer.processing_class.decode
    return [(decode(p["chosen"]), decode(p["rejected"]), p["human"]) for p in pairs]


def test_the_rms_pairs_are_peoples_once_and_golden_above_what_is_written_now():
    """A golden answer written again is no pair, one that is cut is one and keeps its cut."""
    cut = f"{RIGHT}…"
    trainer = given([RIGHT, WRONG, OTHER] + [WRONG, RIGHT, cut] + [OTHER, OTHER, RIGHT])
    trainer.start_round(0)
    people = [(RIGHT, WRONG, True), (RIGHT, OTHER, True)]
    assert read(trainer, trainer.saved["rm"]) == [
        *people, (RIGHT, WRONG, False), (RIGHT, cut, False)
    ]  # fmt: skip
    assert trainer.saved["rm"][-1]["rejected"][-1] != 4 == trainer.saved["rm"][-1]["chosen"][-1]
    assert trainer.logged["co/own_golden"] == [pytest.approx(1 / 3)]
    assert trainer.logged["generator/accuracy"] == [False, True, True]
    trainer.start_round(1)
    assert read(trainer, trainer.saved["rm"]) == [*people, *2 * [(RIGHT, OTHER, False)]]
    assert {name for name, _ in trainer.asked} == {"generator"} and trainer.restarts == 2
    json.dumps(trainer.saved)


@pytest.mark.parametrize("change, human", [({"anchor": 0.0}, False), ({"adversarial": 0.0}, True)])
def test_a_weight_of_zero_leaves_the_pairs_out(change, human):
    texts = [RIGHT, WRONG, OTHER] * (1 + human)
    trainer = given(texts, restart=False, **change)
    trainer.start_round(0)
    assert {p["human"] for p in trainer.saved["rm"]} == {human}
    assert trainer.restarts == 0 and not trainer.texts  # nobody is asked for nothing


@pytest.mark.parametrize("improve", ["dpo", "golden"])
def test_the_generators_pairs_are_the_rms_best_and_worst(improve):
    hostile = "<|end|>\\boxed{" * 50
    trainer = given([WRONG, hostile, RIGHT], improve=improve)
    trainer.scores = lambda answers: [3.0, 1.0, 2.0][: len(answers)]
    trainer.start_generator(0)
    wanted = {"dpo": [(WRONG, hostile, False)], "golden": [(RIGHT, RIGHT, False)]}
    assert read(trainer, trainer.saved["generator"]) == wanted[improve]
    assert trainer.logged["rm/rank_agreement"] == [0.5]  # above hostile, below wrong
    assert trainer.logged["co/pairs_one_right"] == [0.0]


# ------------------------------------------------------------------ runs
def test_without_golden_answers_every_round_has_the_same_rm(finished, tmp_path, brief):
    """Bit for bit: only so is it a fixed RM."""

    def losses(folder) -> list[float]:
        return [row["rm/loss"] for row in steps_of(folder) if "rm/loss" in row]

    brief("apo.py", *small("apo.py", tmp_path / "run", "--adversarial", 0, "--steps", 6))
    first, second = losses(tmp_path / "run")[:2], losses(tmp_path / "run")[2:]
    assert first == second and len(set(first)) == 2
    assert all(pair["human"] for pair in saved_of(tmp_path / "run")["rm"])
    whole = losses(finished("apo.py")[0])
    assert whole[:2] != whole[2:] and len(whole) == 4
