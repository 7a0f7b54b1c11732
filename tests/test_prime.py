"""prime.py's own mathematics: published values, loops written from the definitions, the released formula; and its filter."""

import json
import math
from types import SimpleNamespace

from prime import Args, Prime, prime_advantages, prm_loss

import pytest
import torch
from conftest import refused, run_script, run_two_processes
from safetensors.torch import load_file

K = 4
MASK = (torch.arange(6) < torch.tensor([[6], [4], [5], [3], [6], [2], [4], [5]])).long()


def random_case(seed):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(6) < torch.randint(1, 7, (8, 1), generator=g)).long()
    return torch.randn(8, 6, generator=g, dtype=torch.float64), torch.randint(2, (8,), generator=g).double(), mask


def test_prm_loss_is_ln2_while_the_prm_is_the_reference():
    for outcome in (torch.zeros(8), torch.ones(8), torch.linspace(0, 1, 8)):
        assert prm_loss(torch.zeros(8, 6), outcome, MASK).item() == pytest.approx(math.log(2), abs=1e-7)


def test_prm_loss_equals_the_loop():
    d, _, mask = random_case(1)
    outcome = torch.linspace(0, 1, 8, dtype=torch.float64)  # soft labels are used as they are
    total = 0.0
    for i in range(8):
        z = 0.05 * sum(d[i, t].item() for t in range(6) if mask[i, t])
        p = 1 / (1 + math.exp(-z))
        total -= outcome[i].item() * math.log(p) + (1 - outcome[i].item()) * math.log(1 - p)
    assert prm_loss(d, outcome, mask).item() == pytest.approx(total / 8, abs=1e-12)


def test_prm_loss_stays_finite_and_refuses_bad_labels():
    assert torch.isfinite(prm_loss(torch.full((8, 6), 1e6), torch.zeros(8), MASK))
    for bad in (-0.1, 1.1):
        with pytest.raises(ValueError, match=r"outcome must lie in \[0, 1\]"):
            prm_loss(torch.zeros(8, 6), torch.full((8,), bad), MASK)


@pytest.mark.parametrize(
    "outcome, expected", [([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]), ([1, 1, 0, 0], [2 / 3, 2 / 3, -2 / 3, -2 / 3])]
)
def test_golden_outcome_part(outcome, expected):
    """With the PRM equal to the reference only the outcomes speak: the published values, whitened."""
    A = prime_advantages(torch.zeros(4, 6), torch.tensor(outcome).float(), torch.ones(4, 6), 4)
    raw = torch.tensor(expected)[:, None].expand(4, 6)
    centred = raw - raw.mean()
    torch.testing.assert_close(A, centred / (centred.square().sum() / 23 + 1e-8).sqrt(), rtol=1e-5, atol=1e-5)


def loop_prime(d, outcome, mask):
    """Section by section, one token at a time, as the released code computes it."""
    B, T = mask.shape
    ends = [max(t for t in range(T) if mask[i, t]) for i in range(B)]
    largest = max(abs(sum(d[i, s].item() for s in range(t, ends[i] + 1))) for i in range(B) for t in range(ends[i] + 1))
    p = [[d[i, t].item() / (largest + 1e-6) for t in range(ends[i] + 1)] for i in range(B)]
    R = torch.zeros(B, T, dtype=torch.float64)
    for i in range(B):
        group = range(i // K * K, i // K * K + K)
        S = sum(sum(p[j]) / len(p[j]) for j in group)
        o = outcome[i].item() - sum(outcome[j].item() for j in group if j != i) / (K - 1)
        for t in range(ends[i] + 1):
            R[i, t] = sum(p[i][s] * K / (K - 1) - S / (K - 1) for s in range(t, ends[i] + 1)) + o
    valid = [R[i, t].item() for i in range(B) for t in range(ends[i] + 1)]
    mean = sum(valid) / len(valid)
    variance = sum((v - mean) ** 2 for v in valid) / (len(valid) - 1)
    return (R - mean) / math.sqrt(variance + 1e-8) * mask


@pytest.mark.parametrize("seed", range(12))
def test_advantages_equal_the_loop(seed):
    d, outcome, mask = random_case(seed)
    torch.testing.assert_close(prime_advantages(d, outcome, mask, K), loop_prime(d, outcome, mask), rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_released_formula_is_leave_one_out_plus_a_stretch(seed):
    """c_it = p_it - mean of the others + (p_it - own mean) / (K - 1): what the docstring's item 2 says."""
    d, outcome, mask = random_case(seed)
    p = d * mask
    p = p / (p.flip(1).cumsum(1).abs().max() + 1e-6)
    own = p.sum(1) / mask.sum(1)
    others = (own.reshape(-1, K).sum(1).repeat_interleave(K) - own) / (K - 1)
    c = (p - others[:, None] + (p - own[:, None]) / (K - 1)) * mask
    o_others = (outcome.reshape(-1, K).sum(1).repeat_interleave(K) - outcome) / (K - 1)
    R = (c.flip(1).cumsum(1).flip(1) + (outcome - o_others)[:, None]) * mask
    valid = R[mask.bool()]
    expected = (R - valid.mean()) / (valid.var() + 1e-8).sqrt() * mask
    torch.testing.assert_close(prime_advantages(d, outcome, mask, K), expected, rtol=0, atol=1e-5)


def test_first_step_noise_is_not_blown_up():
    outcome = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0])
    noise = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)) * 1e-6
    assert torch.equal(prime_advantages(noise, outcome, MASK, K), prime_advantages(None, outcome, MASK, K))


def test_groups_of_one_are_refused():
    with pytest.raises(ValueError, match="group_size must be at least 2"):
        prime_advantages(None, torch.ones(4), torch.ones(4, 6), 1)


# ------------------------------------------------------------------ the script
SMALL = "--steps 4 --questions 2 --group-size 4 --micro-batch 4 --eval-questions 8 --save-every 2".split()


def weights(folder):
    files = {player: load_file(folder / player / "adapter_model.safetensors") for player in ("policy", "prm")}
    return {f"{player}.{name}": tensor for player, state in files.items() for name, tensor in state.items()}


def steps(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval/pol/accuracy" not in row]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prime") / "whole"
    result = run_script("prime.py", *SMALL, "--out", folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_a_run_trains_both(finished):
    rows = steps(finished)
    assert rows[0]["prm/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert all(row["prm/loss"] != rows[0]["prm/loss"] for row in rows[1:])
    for row in rows:
        for key in ("prm/accuracy", "prm/grad_norm", "pol/grad_norm", "pol/accuracy", "co/groups_kept", "co/samples"):
            assert isinstance(row[key], float | int)
        assert row["co/tokens_per_kept_group"] > 0
    moved = weights(finished)
    for player in ("policy", "prm"):
        assert any(t.abs().max() > 0 for n, t in moved.items() if n.startswith(player) and "lora_B" in n)


def test_resume_is_the_same_run_bit_for_bit_the_prms_optimiser_included(finished, tmp_path):
    import shutil

    folder = tmp_path / "resumed"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoint-4")
    result = run_script("prime.py", *SMALL, "--out", folder)
    assert result.returncode == 0 and "step 3/4" in result.stdout and "step 2/4" not in result.stdout, result.stderr
    ours, expected = weights(folder), weights(finished)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    memory = [json.loads((f / "checkpoint-4" / "memory.json").read_text()) for f in (folder, finished)]
    assert memory[0] == memory[1] and "surplus" in memory[0]


@pytest.mark.parametrize("flags", ["--no-process-reward", "--prm-update before", "--prm-update none", "--prm-reference policy"])
def test_variants(tmp_path, flags):
    result = run_script("prime.py", *SMALL, "--steps", "2", *flags.split(), "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    prm = [t for n, t in weights(tmp_path / "run").items() if n.startswith("prm") and "lora_B" in n]
    trained = flags not in ("--no-process-reward", "--prm-update none")
    assert any(t.abs().max() > 0 for t in prm) == trained


def test_two_processes(tmp_path):
    result = run_two_processes("prime.py", *SMALL, "--steps", "2", "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["processes"] == 2
    moved = weights(tmp_path / "run")
    for player in ("policy", "prm"):
        assert any(t.abs().max() > 0 for n, t in moved.items() if n.startswith(player) and "lora_B" in n)


def test_every_process_keeps_its_own_count_and_no_group_is_lost(monkeypatch):
    """Two processes, the first of which fills its batch sooner: what is beyond the shorter one's groups is asked again, and a
    resumed run draws on where each had stopped."""
    rows = [{"question": str(i), "prompt": [{"content": str(i)}]} for i in range(40)]

    def process(rank, memory):
        trainer = SimpleNamespace(
            script=Args(questions=2, group_size=2, max_refills=2),
            memory=memory,
            train_dataset=rows,
            accelerator=SimpleNamespace(process_index=rank, num_processes=2, reduce=lambda x, _: x),
            log_metric=lambda *_: None,
            asked=[],
        )
        trainer.gather = lambda x: x + others(rank, x)
        trainer.next_question = lambda: Prime.next_question(trainer)

        def turn(_, asked):
            trainer.asked += [row["question"] for row in asked[::2]]
            rewards = torch.tensor([1.0, 0.0] * 2) if rank == 0 else torch.tensor([1.0, 0.0, 0.0, 0.0])
            return {"rewards": rewards, "completion_mask": torch.ones(4, 3), "notes": [{}] * 4, "texts": [""] * 4}

        trainer.turn = turn
        trainer.join = lambda kept: {"completion_mask": torch.ones(2 * len(kept), 3), "rewards": torch.ones(2 * len(kept))}
        return trainer

    def others(rank, x):
        return [[[], 7]] if isinstance(x[0], list) else [1] if rank == 0 and isinstance(x[0], int) else []

    memory = {}
    trainer = process(0, memory)
    joined = Prime.fill_batch(trainer, rows[:2])
    assert len(joined["rewards"]) == 2  # the other process has one group only, so one group it is
    assert memory["drawn"] == {"0": 2, "1": 7}
    assert [row["question"] for row in memory["surplus"]["0"]] == trainer.asked[1:]  # sampled, kept, not trained on
    later = process(1, memory)
    assert Prime.next_question(later) == rows[-(8 * 2 + 1)]


def test_a_filter_that_nothing_passes_ends_in_a_sentence(tmp_path):
    narrow = "--keep-low 0.55 --keep-high 0.6 --max-refills 2".split()  # a group of four cannot have such an accuracy
    message = refused("prime.py", *SMALL, *narrow, "--out", tmp_path / "run")
    assert "in 2 rounds no group of 4" in message and "the accuracy is" in message
