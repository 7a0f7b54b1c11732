"""prime.py: its mathematics against loops written from the definitions; the order of a step, the
PRM's update, the noise floor, the filter.
"""

import json
import math
from types import SimpleNamespace

from prime import Args, Prime, prime_advantages, prm_loss, solve_prompt

import pytest
import torch
from conftest import build, gradient, lora, moved, perturb, relative
from trainers import close, logged, without_model

K = 4


# ------------------------------------------------------------------ the mathematics
def random_case(seed):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(6) < torch.randint(1, 7, (8, 1), generator=g)).long()
    d = torch.randn(8, 6, generator=g, dtype=torch.float64)
    return d, torch.randint(2, (8,), generator=g).double(), mask


def test_prm_loss_is_ln2_while_the_prm_is_the_reference_and_equals_the_loop():
    d, _, mask = random_case(1)
    outcome = torch.linspace(0, 1, 8, dtype=torch.float64)  # soft labels are used as they are
    assert prm_loss(0 * d, outcome, mask).item() == pytest.approx(math.log(2), abs=1e-7)
    total = 0.0
    for i in range(8):
        z = 0.05 * sum(d[i, t].item() for t in range(6) if mask[i, t])
        p = 1 / (1 + math.exp(-z))
        total -= outcome[i].item() * math.log(p) + (1 - outcome[i].item()) * math.log(1 - p)
    assert prm_loss(d, outcome, mask).item() == pytest.approx(total / 8, abs=1e-12)


def test_prm_loss_stays_finite_and_refuses_bad_labels():
    assert torch.isfinite(prm_loss(torch.full((8, 6), 1e6), torch.zeros(8), torch.ones(8, 6)))
    for bad in (-0.1, 1.1):
        with pytest.raises(ValueError, match=r"outcome must lie in \[0, 1\]"):
            prm_loss(torch.zeros(8, 6), torch.full((8,), bad), torch.ones(8, 6))


def loop_prime(d, outcome, mask):
    """Section by section, one token at a time, as the released code computes it."""
    B, T = mask.shape
    lengths = [int(row.sum()) for row in mask]
    to_go = [sum(d[i, t:n].tolist()) for i, n in enumerate(lengths) for t in range(n)]
    p = [(d[i, :n] / (max(map(abs, to_go)) + 1e-6)).tolist() for i, n in enumerate(lengths)]
    R = torch.zeros(B, T, dtype=torch.float64)
    for i in range(B):
        group = range(i // K * K, i // K * K + K)
        S = sum(sum(p[j]) / len(p[j]) for j in group)
        o = outcome[i].item() - sum(outcome[j].item() for j in group if j != i) / (K - 1)
        for t in range(lengths[i]):
            R[i, t] = o + sum(x * K / (K - 1) - S / (K - 1) for x in p[i][t:])
    valid = [R[i, t].item() for i in range(B) for t in range(lengths[i])]
    mean = sum(valid) / len(valid)
    variance = sum((v - mean) ** 2 for v in valid) / (len(valid) - 1)
    return (R - mean) / math.sqrt(variance + 1e-8) * mask


@pytest.mark.parametrize("seed", range(12))
def test_advantages_equal_the_loop(seed):
    d, outcome, mask = random_case(seed)
    A, alone = prime_advantages(d, outcome, mask, K)
    close(A, loop_prime(d, outcome, mask))
    close(alone, loop_prime(0 * d, outcome, mask))


def test_below_the_floor_there_is_no_process_reward():
    d, outcome, mask = random_case(0)
    largest = (d * mask).flip(1).cumsum(1).abs().max().item()
    for floor in (0.99, 1.01):
        A, alone = prime_advantages(d, outcome, mask, K, largest * floor)
        assert torch.equal(A, alone) == (floor > 1)


# ------------------------------------------------------------------ one step
def make_prime(folder, micro_batch=16, **change) -> Prime:
    """2 questions, groups of 8; the filter lets everything pass, so that a step samples once."""
    change = {"questions": 2, "group_size": 8, "keep_low": 0.0, "keep_high": 1.0} | change
    args = Args(micro_batch=micro_batch, **change)
    trainer = build(Prime, folder, args, Prime.define_players(args), solve_prompt, rows=16)
    trainer.create_optimizer()
    torch.manual_seed(0)
    return trainer


def take_step(trainer) -> list[dict]:
    return trainer.step([trainer.train_dataset[i] for i in range(2) for _ in range(8)])


def expected_advantages(trainer, batch, reference=None):
    """(A, A by outcomes alone), from the PRM as it is now."""
    d = trainer.log_probs("prm", batch) - trainer.log_probs(reference, batch)
    return prime_advantages(d, batch.rewards, batch.completion_mask, 8)


@pytest.mark.parametrize("when, reference", [("after", "base"), ("before", "policy")])
def test_who_scores_when_and_who_is_trained(tmp_path, when, reference):
    trainer = make_prime(tmp_path, prm_update=when, prm_reference=reference)
    perturb(trainer)  # policy, PRM and base are three models now
    prm, policy = lora(trainer, "prm"), lora(trainer, "policy")
    *first, batch = take_step(trainer)
    # groups that the filter took away do not count in the mean over tokens
    assert batch.total_tokens == batch.completion_mask.sum()
    assert (moved(prm, lora(trainer, "prm")) > 0) == (when == "before")
    assert moved(policy, lora(trainer, "policy")) == 0
    # "after": the PRM of the step's start; "before": the updated one
    A, alone = expected_advantages(trainer, batch, "policy" if reference == "policy" else None)
    close(batch.advantages, A, atol=1e-4)
    assert torch.equal(batch.components["outcome alone"], alone)
    assert torch.equal(batch.components["process reward"], batch.advantages - alone)
    assert [b.player for b in first] == (["prm"] if when == "after" else [])
    for prm_batch in first:
        assert prm_batch.advantages is None  # so that no row is dropped
        assert torch.equal(prm_batch.rewards, batch.rewards)
        assert 0 < batch.rewards.mean() < 1


def test_an_offline_prm_learns_first_and_is_frozen_then(tmp_path):
    trainer = make_prime(tmp_path, prm_update="none", prm_warmup=1)
    (first,) = take_step(trainer)
    assert first.player == "prm" and first.advantages is None
    trainer.update(first)
    before, trainer.state.global_step = lora(trainer, "prm"), 1
    (batch,) = take_step(trainer)
    assert batch.player == "policy" and moved(before, lora(trainer, "prm")) == 0
    A, alone = expected_advantages(trainer, batch)
    close(batch.advantages, A, atol=1e-4)
    assert (A - alone).abs().max() > 1e-2
    trainer.cfg.process_reward = False  # only the outcome counts
    (batch,) = take_step(trainer)
    assert torch.equal(batch.advantages, expected_advantages(trainer, batch)[1])


def test_the_noise_floor_is_measured_once_in_the_bases_precision(tmp_path):
    """In bfloat16 it is above 1e-3, which was once written down for all; and it is large enough:
    the ratio of a PRM that has hardly moved, which is all rounding there, stays below it.
    """
    trainer = make_prime(tmp_path)
    take_step(trainer)
    assert 0 < trainer.saved["noise"] < 1e-4
    trainer.saved["noise"] = 1e6  # of a checkpoint: it is not measured again
    perturb(trainer)
    *_, batch = take_step(trainer)
    assert torch.equal(batch.advantages, expected_advantages(trainer, batch)[1])
    assert trainer.saved["noise"] == 1e6
    trainer = make_prime(tmp_path, micro_batch=8)
    for name, p in trainer.model.named_parameters():
        if "lora_" not in name:
            p.data = p.data.bfloat16()
    perturb(trainer, 1e-5)
    *_, batch = take_step(trainer)
    d = trainer.log_probs("prm", batch) - trainer.log_probs(None, batch)
    largest = (d * batch.completion_mask).flip(1).cumsum(1).abs().max()
    assert 1e-3 < largest < trainer.saved["noise"] < 0.3
    assert torch.equal(batch.advantages, expected_advantages(trainer, batch)[1])
    perturb(trainer)  # now it has been trained, and is heard
    *_, batch = take_step(trainer)
    close(batch.advantages, expected_advantages(trainer, batch)[0], atol=1e-4)


@pytest.mark.parametrize("micro_batch", [16, 3])
def test_the_prms_gradient_is_that_of_its_loss_over_all_rows(tmp_path, micro_batch):
    """In however many micro-batches, sorted, trimmed, of unequal size."""
    trainer = make_prime(tmp_path, micro_batch)
    perturb(trainer)
    prm_batch, _ = take_step(trainer)
    count = 13  # a filter that was not filled: parts of 13 rows cannot be equal
    prm_batch = prm_batch.take(torch.arange(count))
    prm_batch.extras["rows"] = count
    with trainer.playing("prm"):
        d = trainer.score(prm_batch)[0] - prm_batch.token_extras["reference_logps"]
        loss = prm_loss(d, prm_batch.rewards, prm_batch.completion_mask, 0.05)
        named = {n: p for n, p in trainer.model.named_parameters() if ".prm." in n}
        expected = dict(zip(named, torch.autograd.grad(loss, [*named.values()])))
    assert relative(gradient(trainer, prm_batch), expected) < 1e-4
    assert logged(trainer)["prm/loss"] == pytest.approx(loss.item(), rel=1e-5)
    hits = ((d * prm_batch.completion_mask).sum(1) > 0) == prm_batch.rewards.bool()
    assert logged(trainer)["prm/accuracy"] == pytest.approx(hits.double().mean().item())
    rates = {name: (player.lr, player.max_grad_norm) for name, player in trainer.players.items()}
    assert rates == {"policy": (5e-4, 1.0), "prm": (1e-3, 10.0)}


# ------------------------------------------------------------------ the filter
def row_of(q: int) -> dict:
    return {"question": f"{q}", "prompt": [{"content": f"{q}"}], "answer": "True"}


ROWS = [*map(row_of, range(40))]


def fill(accuracy, loader, saved=None, rank=0, others=(), **change):
    """`Prime.fill_batch` of one process, on the loader's questions and others of ROWS.

    Args:
        accuracy: question -> share of right responses.
        others: how many groups each of the other processes keeps.
    """
    cfg = Args(**{"questions": 3, "group_size": 2} | change)
    size = cfg.group_size

    def generate(name, prompts):
        tried = [prompt[0]["content"] for prompt in prompts[::size]]
        trainer.tried += tried
        right = [round(accuracy(q) * size) for q in tried]
        return [rf"{q}: \boxed{{{i < n}}}" for q, n in zip(tried, right) for i in range(size)]

    def gather(mine):
        theirs = others if isinstance(mine[0], int) else [{"waiting": [], "drawn": 0}] * len(others)
        return [*theirs[:rank], *mine, *theirs[rank:]]

    def concat(groups):
        questions = [[text.split(":")[0] for text in group.texts] for group in groups]
        assert all(len({*group}) == 1 and len(group) == size for group in questions)
        trainer.trained = [group[0] for group in questions]
        return groups[0]

    given = {"generate": generate, "gather": gather, "concat": concat, "tried": []}
    trainer = without_model(Prime, cfg, **given, train_dataset=ROWS)
    trainer.saved = json.loads(json.dumps(saved or {}))  # as after a checkpoint
    trainer.accelerator = SimpleNamespace(num_processes=len(others) + 1, process_index=rank)
    trainer.accelerator.reduce = lambda x, _: x
    trainer.fill_batch(loader)
    trainer.waiting = [row["question"] for row in trainer.saved["filter"][rank]["waiting"]]
    return trainer


@pytest.mark.parametrize(
    "size, bounds, kept",
    [
        (4, {}, [1, 2, 3]),
        (4, {"keep_low": 0.2, "keep_high": 0.8}, [1, 2, 3]),  # the released script's, at its K
        (8, {}, [1, 2, 3, 4, 5, 6, 7]),
        (8, {"keep_low": 0.2, "keep_high": 0.8}, [2, 3, 4, 5, 6]),
        (3, {}, [1, 2]),  # 1/3 and 1 - 1/3 in float32 and in float64
        (49, {}, [*range(1, 49)]),
        (2, {}, [1]),
        (4, {"keep_low": 0.0, "keep_high": 1.0}, [0, 1, 2, 3, 4]),
    ],
)
def test_the_filter_keeps_groups_with_right_and_wrong_responses(size, bounds, kept):
    """Question q has q right responses of `size`; asked are those near the bounds."""
    near = [q for q in range(size + 1) if min(q, size - q) < 3]
    change = {"questions": len(near), "max_refills": 1, "group_size": size} | bounds
    done = fill(lambda q: int(q) / size, [*map(row_of, near)], **change)
    assert [int(q) for q in done.trained] == [q for q in kept if q in near]


def test_further_questions_come_until_the_batch_is_full():
    """Groups that are all right or all wrong are passed over, in order of the data."""
    first = fill(lambda q: 0.5 if q in {"1", "39", "37"} else float(q == "2"), ROWS[:3])
    assert first.tried == ["0", "1", "2", "39", "38", "37"] and first.trained == ["1", "39", "37"]
    assert first.saved["filter"] == [{"waiting": [], "drawn": 3}]
    assert first.logged["policy/accuracy"] == [0, 0.5, 1, 0.5, 0, 0.5]
    assert first.logged["co/groups_kept"] == [3 / 6] and first.logged["co/samples"] == [12]


def test_groups_beyond_the_batch_give_their_questions_back():
    good = lambda q: 0.5 if q != "0" else 0  # noqa: E731
    first = fill(good, ROWS[:3])
    assert first.trained == ["1", "2", "39"] and first.waiting == ["38", "37"]
    # of five groups; True is shorter
    tokens = sum(len(rf"{q}: \boxed{{False}}") for q in first.tried * 2) - 5
    assert first.logged["co/tokens_per_kept_group"] == [tokens / 3]  # three are trained on
    second = fill(good, ROWS[3:6], saved=first.saved)
    assert second.tried == ["38", "37", "3"] and second.trained == second.tried
    assert second.waiting == ["4", "5"]  # the loader's, for the next step


def test_the_process_with_the_fewest_groups_decides_how_many_are_trained():
    """The others of this one give their questions back, once it has sampled as many rounds."""
    done = fill(lambda q: 0.5, ROWS[:2], others=[1], questions=2, max_refills=2)
    assert done.tried == ["0", "1", "19", "18"]
    assert done.trained == ["0"] and done.waiting == ["1", "19", "18"]


def test_each_process_draws_its_own_further_questions_and_resumes_where_it_stopped():
    saved = {"filter": [{"waiting": [], "drawn": 7}, {"waiting": ROWS[5:6], "drawn": 2}]}
    done = fill(lambda q: 0.5, ROWS[1:2], saved=saved, rank=1, others=[3])
    assert done.tried == ["5", "1", "37"] and done.saved["filter"][1]["drawn"] == 3
    done.train_dataset, done.cfg.questions = ROWS[:5], 5  # its end is followed by its beginning
    drawn = done.next_questions({"waiting": [], "drawn": 0})
    assert [row["question"] for row in drawn] == ["4", "3", "2", "4", "3"]
