"""tango.py: its mathematics against published numbers and loops, its parsing under hostile text,
its two steps against both, its ablations.
"""

import json
import math
import random
import re
import time
from types import SimpleNamespace

import tango
from common.tiny.tasks import format_solution
from tango import Args, Judgement, Tango, parse_judgement, tango_advantages

import pytest
import torch
from conftest import small, steps_of, trained_adapters
from hypothesis import given, settings
from hypothesis import strategies as st
from trainers import C, X, close, judgement, whitened, without_model

# ------------------------------------------------------------------ advantages
NAN = float("nan")
MASK = (torch.arange(8) < torch.tensor([[7], [8], [6]])).long()
OUTCOME = torch.tensor([1.0, 0.0, 1.0])
STEPS = torch.tensor([[0.5, 0.5, NAN, NAN], [1 / 3, -1 / 3, -1 / 3, NAN], [0.25] * 4])
ENDS = torch.tensor([[2, 5, -1, -1], [1, 4, 6, -1], [0, 1, 3, 4]])
GOLDEN = [  # what the released function returns for these inputs and alpha = 0.1
    [0.7219, 0.7219, 0.7219, 0.6208, 0.6208, 0.6208, 0.5196, 0],
    [-1.3249, -1.3249, -1.3725, -1.3725, -1.3725, -1.2059, -1.2059, -1.0392],
    [0.6029, 0.5821, 0.5613, 0.5613, 0.5404, 0.5196, 0, 0],
]


def test_golden_numbers():
    terms = tango_advantages(OUTCOME, STEPS, ENDS, MASK, 3, alpha=0.1)
    close(sum(terms), torch.tensor(GOLDEN), atol=1e-4)


def loop_tango(outcome, steps, ends, mask, group_size, alpha):
    """Section 3 of the method, one token at a time."""
    groups = [i // group_size for i in range(len(mask))]
    A_out = whitened([*zip(outcome.tolist(), groups)], added=1e-6)
    rows, columns = torch.nonzero((ends >= 0) & ~steps.isnan(), as_tuple=True)
    rewards = [(steps[i, k].item(), groups[i]) for i, k in zip(rows, columns)]
    z = whitened(rewards, added=1e-6)
    alone = [[group for _, group in rewards].count(group) == 1 for _, group in rewards]
    z = [r if one else a for (r, _), one, a in zip(rewards, alone, z)]
    A = torch.zeros(mask.shape, dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        to_go = sum(a for a, row, k in zip(z, rows, columns) if row == i and ends[i, k] >= t)
        A[i, t] = (1 - alpha) * A_out[i] + alpha * to_go
    return A


@pytest.mark.parametrize("seed", range(20))
def test_advantages_equal_the_loop(seed):
    """Two groups of four, some solutions without steps, some without rewards; at most as many steps
    each as the seed says, so that in some groups none or just one has a reward.
    """
    generator = torch.Generator().manual_seed(seed)
    B, T, K = 8, 12, 4
    outcome = torch.randint(2, (B,), generator=generator).double()
    lengths = torch.randint(5, T + 1, (B,), generator=generator)
    mask = (torch.arange(T) < lengths[:, None]).long()
    steps, ends = torch.full((B, K), NAN, dtype=torch.float64), torch.full((B, K), -1)
    for i in range(B):
        count = int(torch.randint(seed % (K + 1) + 1, (1,), generator=generator))
        ends[i, :count] = torch.randperm(int(lengths[i]), generator=generator)[:count].sort().values
        if count and torch.rand(1, generator=generator) > 0.3:
            steps[i, :count] = (torch.randint(2, (count,), generator=generator) * 2.0 - 1) / count
    got = sum(tango_advantages(outcome, steps, ends, mask, 4, 0.3))
    close(got, loop_tango(outcome, steps, ends, mask, 4, 0.3))


def test_step_rewards():
    """Another number of verdicts, no steps, no verdicts: dropped, not guessed."""
    rewards, ends = tango.step_rewards([[True, False], [True], [], []], [[3, 7], [2, 5], [], [4]])
    assert rewards[0].tolist() == [0.5, -0.5] and rewards[1:].isnan().all()
    assert ends.tolist() == [[3, 7], [2, 5], [-1, -1], [4, -1]]
    assert [x.shape for x in tango.step_rewards([[]], [[]])] == [(1, 1)] * 2


def test_class_weights_equal_the_loop_over_several_batches():
    """Eq. 9 with the running counts, updated before they are used; they begin with batch one, in
    which no solution is right.
    """
    draw, trainer, counts = random.Random(0), SimpleNamespace(saved={}), None
    for n in range(30):
        labels = [draw.random() < 0.2 * (n > 0) for _ in range(24)]
        now = {label: labels.count(label) for label in (True, False)}
        before = counts or now
        counts = {label: 0.8 * before[label] + 0.2 * now[label] for label in (True, False)}
        raw = [1 / math.sqrt(max(counts[label], 1e-6)) for label in labels]
        expected = [24 * s / sum(raw) for s in raw]
        assert Tango.class_weights(trainer, labels).tolist() == pytest.approx(expected, rel=1e-5)
    assert json.loads(json.dumps(trainer.saved)) == trainer.saved  # it is saved with checkpoints


# ------------------------------------------------------------------ whose turn it is
def at_step(step, **change):
    trainer = SimpleNamespace(cfg=Args(ver_warmup=2, **change))
    trainer.state = SimpleNamespace(global_step=step)
    trainer.player_at = lambda n: Tango.player_at(trainer, n)
    return trainer


def test_schedule():
    def players(**change):
        return "".join(at_step(0, **change).player_at(step)[0] for step in range(11))

    assert players() == "vvgggvgggvg"
    assert players(gen_steps=1, ver_steps=2) == "vvgvvgvvgvv"
    assert players(gen_steps=0) == players(generator="frozen") == "v" * 11
    assert players(verifier="frozen") == players(verifier="none") == "g" * 11


def test_the_clock_of_alpha_counts_the_generators_steps_only():
    """V V G G G V G G: alpha falls from 0.1 over the five steps of the generator."""

    def alphas(**change):
        trainers = [at_step(step, steps=8, **change) for step in range(8)]
        turns = [x for x in trainers if x.player_at(x.state.global_step) == "generator"]
        return [Tango.alpha(trainer) for trainer in turns]

    assert alphas() == pytest.approx([0.1 * 0.01 ** (n / 5) for n in range(5)])
    assert alphas(verifier="frozen") == pytest.approx([0.1 * 0.01 ** (n / 8) for n in range(8)])
    assert alphas(alpha=1.0, alpha_end=1.0) == [1.0] * 5
    assert alphas(verifier="none") == [0.0] * 8
    assert tango.alpha_at(500, 300, 0.1, 1e-3) == 1e-3 and tango.alpha_at(0, 0, 0.1, 1e-3) == 0.1
    assert tango.alpha_at(3, 10, 0.0, 1e-3) == 0.0


# ------------------------------------------------------------------ parsing and formats
QUOTES_THE_END = f"<step><final_verification>{C}</final_verification> it quotes {X}</step>"


@pytest.mark.parametrize(
    "text, expected",
    [
        (judgement(C, X, final=X), ([True, False], False)),
        (judgement("no verdict", C), ([True], True)),
        (judgement(section=f"<step>it quotes {C} but says {X}</step>"), ([False], True)),
        (judgement(section=f"<step>{C} is what it says at first</step>"), ([], True)),
        (judgement(section=QUOTES_THE_END, final=X), ([False], False)),
        (judgement(section=QUOTES_THE_END).partition("\n<final")[0], ([False], None)),  # cut off
        (f"<step_verification><step>{C}</step>", ([], None)),
        (f"<final_verification>{C}</final_verification>", ([], True)),
        (f"<step>{C}</step>{judgement(X)}", ([False], True)),
        ("</step_verification><step_verification>", ([], None)),
        (judgement(C, X).replace("</step_verification>", ""), ([True, False], True)),
        (judgement(*[C] * 500), ([True] * 500, True)),
    ],
)
def test_parse_judgement(text, expected):
    assert parse_judgement(text) == expected


TAGS = ["step", "step_verification", "final_verification", "answer"]
PIECES = [mark for tag in TAGS for mark in (f"<{tag}>", f"</{tag}>")] + [C, X, r"\boxed{", "}", " "]
PIECES += [f"<step>{C}</step>", f"<final_verification>{X}</final_verification>"]
WRITTEN = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@given(WRITTEN, WRITTEN)
@settings(max_examples=500)
def test_no_verdict_that_nobody_wrote_and_no_format_out_of_its_range(text, other):
    verdicts, final = parse_judgement(text)
    assert len(verdicts) <= text.count("</step>")
    assert len(verdicts) + (final is not None) <= text.count("CORRECT}")
    assert 0 <= tango.judgement_format(text, other) <= (final is not None)


def test_long_texts_are_parsed_in_no_time():
    """The longest judgement has 1,024 tokens, some 5,000 characters; these have twice as many."""
    for text in (
        "<step_verification>" * 500,
        "<step_verification>" + "<step>" * 1500 + "</step_verification>",
        "<final_verification>" + " " * 10_000 + C,
        f"<step_verification>{'<step>' + C + ' ' * 200}</step>" * 40,
        "<answer>" + r"\boxed{" * 1200 + "}" * 1200 + "</answer>",
    ):
        start = time.process_time()
        parse_judgement(text), tango.judgement_format(text, text), tango.has_countable_steps(text)
        assert time.process_time() - start < 5, text[:30]


# ------------------------------------------------------------------ rewards
def solution(steps, answer=r"\boxed{9}"):
    return "".join("<step>s</step>\n" for _ in range(steps)) + f"<answer>{answer}</answer>"


def test_steps_are_countable_where_the_released_format_score_is_at_least_06():
    texts = [solution(3), solution(1), solution(0), solution(3, "9"), "<step>s</step>", ""]
    assert [*map(tango.has_countable_steps, texts)] == [True] * 2 + [False] * 4


@pytest.mark.parametrize(
    "text, of, score",
    [
        (judgement(C, C, C), solution(3), 1.0),
        (judgement(C, C), solution(3), 0.2),  # one verdict too few
        (judgement(C, C), "no format at all", 1.0),  # whose steps cannot be counted
        (judgement(), "no format at all", 0.2),
        (judgement(C, C, C) + "more", solution(3), 0.0),
        (judgement(C, C, C, final=f"{C}."), solution(3), 0.2),  # readable, but not in its form
        (judgement(section="nothing"), solution(3), 0.0),
        (judgement(section=f"words <step>{C}</step>" * 3), solution(3), 0.6),
        (judgement(C, C, C, final="CORRECT"), solution(3), 0.0),  # no final verdict
    ],
)
def test_the_format_of_a_judgement(text, of, score):
    assert tango.judgement_format(text, of) == pytest.approx(score)


# ------------------------------------------------------------------ evaluation
def test_figures_of_one_class_and_of_other_numbers_of_verdicts():
    assert "tnr" not in tango.judgement_metrics([Judgement([], True)], [True])
    # of two steps the second is wrong; at last not as many verdicts as steps
    for verdicts, f1 in (("CX", 1), ("XX", 2 / 3), ("CC", 0), ("XC", 0), ("X", 0), ("XXX", 0)):
        judged = Judgement([verdict == "C" for verdict in verdicts], None)
        assert tango.step_f1([[True, False]], [judged]) == pytest.approx(f1), verdicts


def two_steps(i: int, kind: str) -> str:
    """A solution of (i+4)+1 that is right, half right (its first step is) or all wrong."""
    first = f"{i}+4={i + 4}" if kind != "wrong" else f"{i}+4=1"
    second = f"{i + 4}+1={i + 5}" if kind == "right" else f"{i + 4}+1=0"
    return format_solution([first, second], i + 5 if kind == "right" else 0)


# ------------------------------------------------------------------ the two steps, put together
ROW = {"question": "(10+4)+1 mod 61", "answer": "15", "prompt": [{"content": "it"}]}


def test_a_generator_step_credits_the_tokens_that_its_judgements_are_about():
    """Two groups of two, a token per character. The last judgement is empty."""
    texts = [two_steps(10, kind) for kind in ("right", "half", "wrong", "right")]
    said = [judgement(C, C), judgement(C, X), judgement(C, X), ""]
    cfg = Args(group_size=2, ver_warmup=0, alpha=0.3)
    trainer = without_model(Tango, cfg, {"generator": texts, "verifier": said})
    batch = trainer.generator_step([ROW] * 4)
    assert batch.player == "generator" and batch.rewards.tolist() == [1, 0, 0, 1]
    asked = [f"Problem: {ROW['question']}\nSolution:\n{y}\nVerify its 2 steps." for y in texts]
    assert trainer.asked[4:] == [("verifier", prompt) for prompt in asked]
    ends = torch.tensor([[m.end() - 1 for m in re.finditer("</step>", y)] for y in texts])
    r_step = torch.tensor([[0.5, 0.5], [0.5, -0.5], [0.5, -0.5], [NAN, NAN]])
    mask = torch.tensor([[t < len(y) for t in range(max(map(len, texts)))] for y in texts])
    expected = loop_tango(batch.rewards, r_step, ends, mask, 2, 0.3)
    close(batch.advantages, expected, atol=1e-5)
    of_steps = loop_tango(torch.ones(4), r_step, ends, mask, 2, 0.3)
    close(batch.components["step"], of_steps, atol=1e-5)
    close(batch.components["outcome"], expected - of_steps, atol=1e-5)
    assert [note["verdicts"] for note in batch.notes] == [parse_judgement(y)[0] for y in said]
    assert trainer.logged["co/step_rewards_dropped"] == [False] * 3 + [True]
    assert trainer.logged["co/wrong_steps_accepted"] == [False, True, False]


def test_a_verifier_step_weighs_normalised_rewards_by_class():
    """Three judgements each of a right solution and of one that is right for another question."""
    other = ROW | {"question": "(11+4)+1 mod 61", "answer": "16"}
    solutions = [two_steps(10, "right"), two_steps(10, "right").replace("1=15", "1=15!")]
    said = [judgement(C, C), judgement(X, C, final=X), "?"]
    texts = {"generator": solutions, "verifier": said * 2}
    trainer = without_model(Tango, Args(group_size=3), texts)
    trainer.saved["class_counts"], rollout = [30.0, 2.0], trainer.rollout

    def rolled(name, rows):
        batch = rollout(name, rows)
        z = whitened([(r, i // 3) for i, r in enumerate(batch.rewards.tolist())])
        batch.advantages = torch.tensor(z)
        return batch

    trainer.rollout = rolled
    trainer.over_all_processes = lambda fn, labels: 2 * fn(labels)
    batch = trainer.verifier_step([ROW, other])
    assert batch.player == "verifier"
    assert batch.rewards.tolist() == pytest.approx([1.8, 0.8, 0, 0.8, 1.8, 0])
    asked = [f"Solution:\n{y}\nVerify its 2 steps." for y in solutions for _ in range(3)]
    assert [text.split("61\n")[1] for _, text in trainer.asked[2:]] == asked
    assert [note["solution is right"] for note in batch.notes] == [True] * 3 + [False] * 3
    assert trainer.logged["verifier/judged_right"] == [True] * 3 + [False] * 3
    assert "generator/accuracy" not in trainer.logged  # which a generator's step has
    counts = [0.8 * 30 + 0.2 * 3, 0.8 * 2 + 0.2 * 3]  # of wrong and of right ones
    s = torch.tensor([counts[1]] * 3 + [counts[0]] * 3) ** -0.5
    z = whitened([(1.8, 0), (0.8, 0), (0.0, 0), (0.8, 1), (1.8, 1), (0.0, 1)])
    close(batch.advantages, 2 * torch.tensor(z) * s * 6 / s.sum(), atol=1e-5)
    assert trainer.saved["class_counts"] == pytest.approx(counts)


# ------------------------------------------------------------------ runs
@pytest.mark.parametrize("verifier", ["none", "frozen"])
def test_a_verifier_that_is_not_trained_judges_if_there_is_one(tmp_path, brief, verifier):
    brief("tango.py", *small("tango.py", tmp_path, "--steps", 2, "--verifier", verifier))
    assert trained_adapters(tmp_path) == {"generator"}
    judged = ["co/verdict_minus_gold" in row for row in steps_of(tmp_path)]
    assert judged == [verifier == "frozen"] * 2
