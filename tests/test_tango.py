"""tango.py's own mathematics and parsing: published numbers, loops, hostile text."""

import math

from tango import (
    Args,
    Tango,
    alpha_at,
    class_weights,
    format_reward,
    judgement_format,
    parse_judgement,
    solution_format,
    step_f1,
    step_rewards,
    tango_advantages,
    verdict_metrics,
    verdict_reward,
)

import pytest
import torch

# ------------------------------------------------------------------ advantages
NAN = float("nan")
MASK = (torch.arange(8) < torch.tensor([[7], [8], [6]])).long()
OUTCOME = torch.tensor([1.0, 0.0, 1.0])
STEPS = torch.tensor([[0.5, 0.5, NAN, NAN], [1 / 3, -1 / 3, -1 / 3, NAN], [0.25] * 4])
ENDS = torch.tensor([[2, 5, -1, -1], [1, 4, 6, -1], [0, 1, 3, 4]])
GOLDEN = {  # what the released function returns for these inputs
    0.0: [[0.5773] * 7 + [0], [-1.1547] * 8, [0.5773] * 6 + [0, 0]],
    1.0: [
        [2.0233, 2.0233, 2.0233, 1.0117, 1.0117, 1.0117, 0, 0],
        [-2.8565, -2.8565, -3.3325, -3.3325, -3.3325, -1.6663, -1.6663, 0],
        [0.8331, 0.6248, 0.4166, 0.4166, 0.2083, 0, 0, 0],
    ],
    0.1: [
        [0.7219, 0.7219, 0.7219, 0.6208, 0.6208, 0.6208, 0.5196, 0],
        [-1.3249, -1.3249, -1.3725, -1.3725, -1.3725, -1.2059, -1.2059, -1.0392],
        [0.6029, 0.5821, 0.5613, 0.5613, 0.5404, 0.5196, 0, 0],
    ],
}


@pytest.mark.parametrize("alpha", GOLDEN)
def test_golden_numbers(alpha):
    got = tango_advantages(OUTCOME, STEPS, ENDS, MASK, 3, alpha)
    torch.testing.assert_close(got, torch.tensor(GOLDEN[alpha]), rtol=0, atol=1e-4)


def loop_tango(outcome, steps, ends, mask, group_size, alpha):
    """Section 3 of the method, one token at a time."""
    B, T = mask.shape
    A = torch.zeros(B, T, dtype=torch.float64)
    for g in range(0, B, group_size):
        rows = range(g, g + group_size)

        def normalise(values):
            mean, std = (0.0, 1.0) if len(values) <= 1 else (sum(values) / len(values), None)
            if std is None:
                std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
            return lambda v: (v - mean) / (std + 1e-6)

        out = normalise([outcome[i].item() for i in rows])
        pool = [(i, k) for i in rows for k in range(steps.shape[1]) if ends[i, k] >= 0 and not math.isnan(steps[i, k])]
        step = normalise([steps[i, k].item() for i, k in pool])
        for i in rows:
            for t in range(T):
                if mask[i, t]:
                    to_go = sum(step(steps[j, k].item()) for j, k in pool if j == i and ends[j, k] >= t)
                    A[i, t] = (1 - alpha) * out(outcome[i].item()) + alpha * to_go
    return A


@pytest.mark.parametrize("seed", range(20))
def test_advantages_equal_the_loop(seed):
    """Two groups of four, some solutions without steps, some with dropped rewards."""
    generator = torch.Generator().manual_seed(seed)
    B, T, K = 8, 12, 4
    outcome = torch.randint(2, (B,), generator=generator).double()
    lengths = torch.randint(5, T + 1, (B,), generator=generator)
    mask = (torch.arange(T) < lengths[:, None]).long()
    steps, ends = torch.full((B, K), NAN, dtype=torch.float64), torch.full((B, K), -1)
    for i in range(B):
        count = int(torch.randint(K + 1, (1,), generator=generator))
        ends[i, :count] = torch.randperm(int(lengths[i]), generator=generator)[:count].sort().values
        if count and torch.rand(1, generator=generator) > 0.3:
            steps[i, :count] = (torch.randint(2, (count,), generator=generator) * 2.0 - 1) / count
    got = tango_advantages(outcome, steps, ends, mask, 4, 0.3)
    torch.testing.assert_close(got, loop_tango(outcome, steps, ends, mask, 4, 0.3), rtol=0, atol=1e-6)


def test_flat_groups_no_steps_and_a_single_step():
    mask = torch.ones(2, 4)
    flat = torch.tensor([1.0, 1.0])
    none = torch.full((2, 1), NAN), torch.full((2, 1), -1)
    assert (tango_advantages(flat, *none, mask, 2, 0.1) == 0).all()
    assert (tango_advantages(flat, torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.long), mask, 2, 0.1) == 0).all()
    equal = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[1, 3], [0, 2]])
    assert (tango_advantages(flat, *equal, mask, 2, 0.1) == 0).all()
    single = torch.tensor([[1.0], [NAN]]), torch.tensor([[1], [-1]])  # a pool of one: mean 0, std 1
    expected = torch.tensor([[0.1, 0.1, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(tango_advantages(flat, *single, mask, 2, 0.1), expected, rtol=0, atol=1e-6)


def test_alpha_one_over_k_is_not_length_neutral():
    """The trap in the docstring: two all-correct solutions of 2 and 10 steps get +4.28 and -4.28 at their first token."""
    steps, ends = step_rewards([[True] * 2, [True] * 10], [[0, 1], list(range(10))])
    A = tango_advantages(torch.zeros(2), steps, ends, torch.ones(2, 10), 2, 1.0)
    assert A[0, 0].item() == pytest.approx(4.28, abs=0.01) and A[1, 0].item() == pytest.approx(-4.28, abs=0.01)


def test_step_rewards():
    rewards, ends = step_rewards([[True, False], [True], [], []], [[3, 7], [2, 5], [], [4]])
    assert rewards[0].tolist() == [0.5, -0.5] and ends[0].tolist() == [3, 7]
    assert rewards[1:].isnan().all()  # another count of verdicts, no steps, no verdicts: dropped, not guessed
    assert ends[2].tolist() == [-1, -1] and ends[3].tolist() == [4, -1]


def test_alpha_schedule():
    for share, alpha in ((0, 0.1), (0.25, 0.0316), (0.5, 0.01), (0.75, 0.00316), (1, 0.001)):
        assert alpha_at(round(300 * share), 300, 0.1) == pytest.approx(alpha, rel=2e-3)
    assert alpha_at(500, 300, 0.1) == 1e-3 and alpha_at(0, 0, 0.1) == 0.1 and alpha_at(3, 10, 0.0) == 0.0


def test_class_weights():
    labels = torch.tensor([True] * 40 + [False] * 1240)
    weights = class_weights(labels, torch.tensor([1240.0, 40.0]))
    assert weights[0].item() == pytest.approx(4.87, abs=0.01) and weights[-1].item() == pytest.approx(0.875, abs=1e-3)
    assert weights.mean().item() == pytest.approx(1.0, abs=1e-5)
    only = class_weights(torch.tensor([False] * 4), torch.tensor([4.0, 0.0]))
    assert only.tolist() == pytest.approx([1.0] * 4)


def test_schedule():
    def players(**change):
        script = Args(ver_warmup=2, **change)
        return [Tango.player_at(type("trainer", (), {"script": script}), step)[:3] for step in range(11)]

    assert players() == ["ver", "ver", "gen", "gen", "gen", "ver", "gen", "gen", "gen", "ver", "gen"]
    assert players(verifier="frozen") == players(verifier="none") == ["gen"] * 11
    assert players(generator="frozen") == ["ver"] * 11


# ------------------------------------------------------------------ parsing and formats
C, X = r"\boxed{CORRECT}", r"\boxed{INCORRECT}"


def judgement(*verdicts, final=C, section=None, tail=""):
    steps = section if section is not None else "\n".join(f"<step>so it is {v}</step>" for v in verdicts)
    return f"<step_verification>\n{steps}\n</step_verification>\n<final_verification>{final}</final_verification>{tail}"


@pytest.mark.parametrize(
    "text, expected",
    [
        (judgement(C, X, final=X), ([True, False], False)),
        (judgement(r"\box{correct}.", final=r"\box{Correct}."), ([True], True)),
        (judgement("no verdict", C), ([True], True)),  # one verdict for two steps: the counts differ, rewards are dropped
        (judgement(section=f"<step>it quotes {C} but says {X}</step>"), ([False], True)),
        (judgement(section=f"<step>{C} is what it says at first</step>"), ([], True)),
        (
            judgement(section=f"<step><final_verification>{C}</final_verification> it quotes {X}</step>", final=X),
            ([False], False),
        ),
        (judgement(C, final="CORRECT"), ([True], None)),
        (judgement(C, final=r"\boxed{MAYBE}"), ([True], None)),
        (f"<step_verification><step>{C}</step>", ([], None)),
        (f"<final_verification>{C}</final_verification>", ([], True)),
        (f"<step>{C}</step>{judgement(X)}", ([False], True)),
        ("", ([], None)),
        ("</step_verification><step_verification>", ([], None)),
        ("<step>" * 1000, ([], None)),
        (judgement(*[C] * 500), ([True] * 500, True)),
        (judgement(C).replace("</final_verification>", ""), ([True], None)),
        (C, ([], None)),
    ],
)
def test_parse_judgement(text, expected):
    assert parse_judgement(text) == expected


def solution(steps, answer=r"\boxed{9}"):
    return "".join("<step>s</step>\n" for _ in range(steps)) + f"<answer>{answer}</answer>"


@pytest.mark.parametrize(
    "text, score",
    [(solution(3), 1.0), (solution(2), 0.6), (solution(0), 0.2), (solution(3, "9"), 0.2), (solution(0, "9"), 0.0), ("", 0.0)],
)
def test_solution_format(text, score):
    assert solution_format(text) == pytest.approx(score)


@pytest.mark.parametrize(
    "text, of, score",
    [
        (judgement(C, C, C), solution(3), 1.0),
        (judgement(C, C), solution(3), 0.2),  # one verdict too few
        (judgement(C, C), "no format at all", 1.0),  # whose steps cannot be counted
        (judgement(C, C, C, tail="more"), solution(3), 0.0),
        (judgement(C, C, C, final="CORRECT"), solution(3), 0.2),
        (judgement(section="nothing"), solution(3), 0.0),
        (judgement(section=f"words <step>{C}</step>" * 3), solution(3), 0.6),
        (judgement(C, final="CORRECT"), solution(3), 0.0),
        ("", solution(3), 0.0),
    ],
)
def test_judgement_format(text, of, score):
    assert judgement_format(text, of) == pytest.approx(score)


def test_verifier_rewards():
    texts = [judgement(C, C, C), judgement(C, C, C, final=X), judgement(C, C, C, final="?"), ""]
    completions = [[{"content": text}] for text in texts]
    assert verdict_reward(completions, label=[True] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert verdict_reward(completions, label=[False] * 4) == [0.0, 1.0, 0.0, 0.0]  # what cannot be read is never right
    assert format_reward(completions, solution=[solution(3)] * 4) == pytest.approx([0.8, 0.8, 0.0, 0.0])


def test_verdict_metrics():
    got = verdict_metrics([True, False, None, True, False], [True, True, True, False, False])
    assert got["tpr"] == pytest.approx(1 / 3) and got["tnr"] == 0.5 and got["balanced_accuracy"] == pytest.approx(5 / 12)
    assert got["says_correct"] == 0.4 and got["parsed"] == 0.8
    assert "tnr" not in verdict_metrics([True], [True])


def test_step_f1():
    question = "(3+4)*6 mod 10"
    wrong_second = "<step>3+4=7</step>\n<step>7*6=3</step>\n<answer>\\boxed{3}</answer>"
    assert step_f1([question], [wrong_second], [judgement(C, X)]) == 1.0
    assert step_f1([question], [wrong_second], [judgement(X, X)]) == pytest.approx(2 / 3)
    assert step_f1([question], [wrong_second], [judgement(C, C)]) == 0.0
    assert step_f1([question], [wrong_second], [judgement(X)]) == 0.0  # not as many verdicts as steps
