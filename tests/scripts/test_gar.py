"""gar.py: slices of hostile text, verdicts and rewards against cases worked by hand, one step,
stage 1 against log-probs by hand.
"""

import functools
import statistics
from types import SimpleNamespace

import gar
from common.core.lists import mean
from gar import Args, Gar, discriminator_reward, parse_verdict, slice_reasoning

import pytest
import torch
from conftest import build, perturb, write_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trainers import encoded, log_probs_by_hand, logged

# ------------------------------------------------------------------ slices
PIECES = [*"ab .\n\t!?é漢🙂", "Wait, ", "So ", "Therefore "]


@given(st.lists(st.sampled_from(PIECES), max_size=200).map("".join))
@example("x" * 10_000)
@example("word " * 3000)
@example("a\r\nb\u2028\n")
@settings(max_examples=300)
def test_nothing_is_lost_and_nothing_is_too_long(text):
    for limit, least in ((7, 1), (20, 5), (1, 1), (1000, 10)):
        slices = slice_reasoning(text, len, limit, least)
        assert "".join(slices) == text and all(0 < len(part) <= limit for part in slices)


def test_white_space_is_no_slice():
    trainer = SimpleNamespace(cfg=Args(slice_tokens=21, min_slice_tokens=1), count_tokens=len)
    assert Gar.cut(trainer, "?", "\n\n\n<answer>\\boxed{1}</answer>", True) == []
    parts = Gar.cut(trainer, "?", "one two three four\n\n\nfive", None)
    assert [part.text for part in parts] == ["one two three four\n\n\n", "five"]
    assert all((part.question, part.right, part.sound) == ("?", None, None) for part in parts)


# ------------------------------------------------------------------ verdicts and rewards
@pytest.mark.parametrize(
    "right, adversarial, alignment",  # of YES, of NO, of neither
    [
        (None, [1, 0, 0], [0, 0, 0]),  # a reference slice: YES, and no R_a
        (True, [0, 1, 0], [0.5, 0, 0]),  # a generated one of a correct solution: the two disagree
        (False, [0, 1, 0], [0, 0.5, 0]),  # of a wrong solution: NO for both
    ],
)
def test_discriminator_reward_in_every_case(right, adversarial, alignment):
    both = [sum(two) for two in zip(adversarial, alignment)]
    for kind, wanted in (("both", both), ("adversarial", adversarial), ("alignment", alignment)):
        assert [discriminator_reward(verdict, right, kind) for verdict in (1, 0, None)] == wanted
    judgements = [[{"content": text}] for text in ("**YES**", "**NO**", "hm")]
    assert gar.judgement_reward(judgements, [right] * 3, ["both"] * 3) == both


def test_discriminator_advantages_against_loops():
    """The mean is the slice's, the standard deviation (unbiased) that of all judgements."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        R, expected = torch.randint(4, (12,), generator=generator).double() / 2, []
        std = statistics.stdev(R.tolist())
        for i in range(0, 12, 3):
            group = R[i : i + 3].tolist()
            expected += [(r - mean(group)) / (std + 1e-6) for r in group]
        assert gar.discriminator_advantages(R, 3).tolist() == pytest.approx(expected, abs=1e-9)
    assert gar.discriminator_advantages(torch.ones(4), 2).tolist() == [0.0] * 4


# ------------------------------------------------------------------ one step
def make_gar(folder, labels=None, **change) -> Gar:
    """4 questions, groups of 4, micro-batches of 4."""
    args = Args(questions=4, group_size=4, micro_batch=4, **change)
    kind = functools.partial(Gar, labels=labels or {})
    return build(kind, folder, args, Gar.define_players(args), gar.solve_prompt, 16)


def rows_of(trainer) -> list[dict]:
    return [trainer.train_dataset[i] for i in range(4) for _ in range(4)]


def test_a_step_judges_first_and_then_trains_both(tmp_path):
    trainer = make_gar(tmp_path, seed=1)
    cut, judge_often = [], trainer.judge_often
    trainer.judge_often = lambda rows, slices: cut.extend(slices) or judge_often(rows, slices)
    trainer.over_all_processes = lambda fn, rewards: 2 * fn(rewards)
    judgements, batch = trainer.step(rows_of(trainer))
    assert (judgements.player, batch.player) == ("discriminator", "reasoner")
    # the reasoner: its answer, and the mean over its slices of the share of YES
    matches = [note["rewards"]["match_reward"] for note in batch.notes]
    assert 0 < sum(matches) < len(matches)
    slices = iter(cut)
    for note, reward, match in zip(batch.notes, batch.rewards.tolist(), matches):
        parts = [next(slices) for _ in note["parts"]]
        assert all(part.right is (match == 1) and part.verdicts for part in parts)
        yes = [part.verdicts.count(1) / len(part.verdicts) for part in parts]
        assert note["verdicts"] == yes and len(note["gold"]) == len(yes)
        assert reward == pytest.approx(match + sum(yes) / max(1, len(yes)))
    assert next(slices, None) is None
    assert sorted(len(part.verdicts) for part in cut) == [1] * (len(cut) - 2) + [4] * 2
    shares = [note["verdicts"] for note in batch.notes]  # of YES: judges disagree, slices differ
    assert any(0 < yes < 1 for several in shares for yes in several)
    assert any(len({*several}) > 1 for several in shares)
    # the discriminator: half of the batch is about reference slices, M judgements of each slice
    prompts = [note["prompt"] for note in judgements.notes]
    kinds = [note["slice"] for note in judgements.notes]
    assert all("generated" in kind for kind in kinds[:8]) and kinds[8:] == ["reference"] * 8
    assert [len(set(prompts[i : i + 4])) for i in range(0, 16, 4)] == [1] * 4
    references = "|".join(row["reference"] for row in rows_of(trainer))
    for prompt in prompts[8:]:
        assert prompt.split("Reasoning:\n")[1].split("\nIs it sound?")[0] in references
    # each reward is that of the verdict and of the slice's kind, and advantages are of the rewards
    right = {kind: right for right, kind in gar.KINDS.items()}
    verdicts = [parse_verdict(text) for text in judgements.texts]
    rewards = [discriminator_reward(v, right[kind]) for v, kind in zip(verdicts, kinds)]
    assert judgements.rewards.tolist() == rewards
    A = gar.discriminator_advantages(judgements.rewards, 4)
    assert torch.equal(judgements.advantages, 2 * A)


def test_without_references_and_frozen_the_discriminator_judges_and_stays_as_it_is(tmp_path):
    trainer = make_gar(tmp_path)
    rows = rows_of(trainer)
    for change in ({"reference": ""}, {}):
        (batch,) = trainer.step([row | change for row in rows])
        assert batch.player == "reasoner"
        assert any(verdict for note in batch.notes for verdict in note["verdicts"])
        trainer.cfg.discriminator = "frozen"
    trainer.cfg.discriminator, trainer.generate = "none", None  # plain GRPO: nobody is asked
    (batch,) = trainer.step(rows)
    assert batch.player == "reasoner" and set(batch.rewards.tolist()) <= {0.0, 1.0}


# ------------------------------------------------------------------ stage 1
LABELS = [
    {"question": "3+4 mod 61", "slice": "<step>3+4=8</step>\n", "judgement": "it is 7. **NO**"},
    {"question": "3+4 mod 61", "slice": "<step>3+4=7</step>\n", "judgement": "**YES** it is so"},
]


def test_stage_one_is_cross_entropy_of_the_judgement_under_the_discriminator(tmp_path):
    """A = 1 for every token: tests/common/test_loss.py has the gradient of such a batch."""
    labels = gar.load_labels(write_rows(tmp_path / "labels.jsonl", LABELS))
    trainer = make_gar(tmp_path, labels, sft_steps=1)
    perturb(trainer)  # so that the adapters are two models
    trainer.gather = lambda values: 2 * values  # a second process with as many tokens
    (batch,) = trainer.step([{}] * 6)
    del trainer.gather
    logps = []
    for i, row in enumerate(LABELS * 3):  # as many NO as YES
        written, mask = encoded(trainer, row["judgement"]), batch.completion_mask[i].bool()
        assert batch.completion_ids[i][mask].tolist() == written
        asked = gar.judge_prompt(row["question"], row["slice"])
        logps += log_probs_by_hand(trainer, "discriminator", asked, written)
    assert batch.player == "discriminator" and batch.advantages.tolist() == [1.0] * 6
    assert batch.total_tokens == 2 * len(logps)
    assert logged(trainer)["discriminator/sft_loss"] == pytest.approx(-mean(logps), rel=1e-5)
    trainer.state.global_step = 1  # stage 2
    assert trainer.step(rows_of(trainer))[-1].player == "reasoner"
