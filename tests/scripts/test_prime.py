"""prime.py: its mathematics against published values, loops written from the definitions and the
released formula; the order of a step, the PRM's update, the filter; what a run says of itself."""

import json
import math
import threading
from types import SimpleNamespace

from common.args import fill_in, grpo_config
from common.model import load_model
from common.tasks.math import load_questions
from prime import Args, Prime, evaluate, prime_advantages, prm_loss, solve_prompt

import pytest
import torch
from conftest import lora, moved, perturb, refused, small, weights
from datasets import Dataset

K = 4
MASK = (torch.arange(6) < torch.tensor([[6], [4], [5], [3], [6], [2], [4], [5]])).long()


def random_case(seed):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(6) < torch.randint(1, 7, (8, 1), generator=g)).long()
    return (
        torch.randn(8, 6, generator=g, dtype=torch.float64),
        torch.randint(2, (8,), generator=g).double(),
        mask,
    )


def test_prm_loss_is_ln2_while_the_prm_is_the_reference():
    for outcome in (torch.zeros(8), torch.ones(8), torch.linspace(0, 1, 8)):
        assert prm_loss(torch.zeros(8, 6), outcome, MASK).item() == pytest.approx(
            math.log(2), abs=1e-7
        )


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
    "outcome, expected",
    [([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]), ([1, 1, 0, 0], [2 / 3, 2 / 3, -2 / 3, -2 / 3])],
)
def test_golden_outcome_part(outcome, expected):
    """With the PRM equal to the reference only outcomes speak: the published values, whitened."""
    A = prime_advantages(torch.zeros(4, 6), torch.tensor(outcome).float(), torch.ones(4, 6), 4)
    raw = torch.tensor(expected)[:, None].expand(4, 6)
    centred = raw - raw.mean()
    torch.testing.assert_close(
        A, centred / (centred.square().sum() / 23 + 1e-8).sqrt(), rtol=1e-5, atol=1e-5
    )


def loop_prime(d, outcome, mask):
    """Section by section, one token at a time, as the released code computes it."""
    B, T = mask.shape
    ends = [max(t for t in range(T) if mask[i, t]) for i in range(B)]
    largest = max(
        abs(sum(d[i, s].item() for s in range(t, ends[i] + 1)))
        for i in range(B)
        for t in range(ends[i] + 1)
    )
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
    torch.testing.assert_close(
        prime_advantages(d, outcome, mask, K), loop_prime(d, outcome, mask), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_released_formula_is_leave_one_out_plus_a_stretch(seed):
    """c_it = p_it - mean of the others + (p_it - own mean) / (K - 1)."""
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
    noise = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)) * 1e-2
    largest = (noise * MASK).flip(1).cumsum(1).abs().max().item()
    silent = prime_advantages(None, outcome, MASK, K)
    assert torch.equal(prime_advantages(noise, outcome, MASK, K, largest * 1.01), silent)
    assert not torch.equal(prime_advantages(noise, outcome, MASK, K, largest * 0.99), silent)
    assert torch.equal(prime_advantages(torch.zeros(8, 6), outcome, MASK, K, 0.0), silent)


def test_groups_of_one_are_refused():
    with pytest.raises(ValueError, match="group_size must be at least 2"):
        prime_advantages(None, torch.ones(4), torch.ones(4, 6), 1)


# ------------------------------------------------------------------ one step
def make_prime(folder, micro_batch=16, **change) -> Prime:
    """2 questions, groups of 8; the filter lets everything pass, so that a step samples once."""
    change = {"questions": 2, "group_size": 8, "keep_low": 0.0, "keep_high": 1.0} | change
    args = fill_in(Args(micro_batch=micro_batch, rows_at_once=256, **change), rows=16)
    model, tokenizer = load_model("tiny", ["policy", "prm"], 4, False, seed=0)
    train, _ = load_questions("tiny", 64, 8, seed=0)
    trainer = Prime(
        model,
        args,
        args=grpo_config(args, folder, 16, 8, save_strategy="no"),
        train_dataset=Dataset.from_list(
            [{"prompt": solve_prompt(row["question"]), **row} for row in train]
        ),
        processing_class=tokenizer,
    )
    trainer.create_optimizer()
    torch.manual_seed(0)
    return trainer


def rows_of(trainer) -> list[dict]:
    return [trainer.train_dataset[i] for i in range(2) for _ in range(8)]


def log_ratio_of(trainer, batch, reference=None) -> torch.Tensor:
    return trainer.log_probs("prm", batch) - trainer.log_probs(reference, batch)


@pytest.mark.parametrize("reference", ["base", "policy"])
@pytest.mark.parametrize("when", ["after", "before", "none"])
def test_who_scores_when_and_who_is_trained(tmp_path, when, reference):
    trainer = make_prime(tmp_path, prm_update=when, prm_reference=reference)
    perturb(trainer)  # policy, PRM and base are three models now
    before = lora(trainer, "prm"), lora(trainer, "policy")
    *first, batch = trainer.step(rows_of(trainer))
    # groups that the filter took away do not count in the mean over tokens
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    changed = moved(before[0], lora(trainer, "prm"))
    assert (changed > 0) == (when == "before") and moved(before[1], lora(trainer, "policy")) == 0
    # as it is now: the PRM of the step's start for "after", the updated one for "before"
    d = log_ratio_of(trainer, batch, "policy" if reference == "policy" else None)
    wanted = prime_advantages(d, batch["rewards"], batch["completion_mask"], 8)
    torch.testing.assert_close(batch["advantages"], wanted, rtol=0, atol=1e-4)
    # the report's two terms
    alone = prime_advantages(None, batch["rewards"], batch["completion_mask"], 8)
    assert torch.equal(batch["components"]["outcome alone"], alone)
    assert torch.equal(batch["components"]["process reward"], batch["advantages"] - alone)
    assert [b["player"] for b in first] == (["prm"] if when == "after" else [])
    assert "advantages" not in dict(*first)  # so that no row is dropped


def test_without_process_reward_only_the_outcome_counts(tmp_path):
    trainer = make_prime(tmp_path, process_reward=False)
    perturb(trainer)
    (batch,) = trainer.step(rows_of(trainer))
    wanted = prime_advantages(None, batch["rewards"], batch["completion_mask"], 8)
    assert torch.equal(batch["advantages"], wanted) and "components" not in batch


def floor_of(trainer) -> float:
    trainer.step(rows_of(trainer))
    return trainer.memory["noise"]


def test_the_noise_floor_is_that_of_the_bases_precision(tmp_path):
    """In bfloat16 it is above 1e-3, which was once written down for all; and it is large enough:
    the ratio of a PRM that has hardly moved, which is all rounding there, stays below it.
    """
    trainer = make_prime(tmp_path)
    assert floor_of(trainer) < 1e-4
    trainer = make_prime(tmp_path, micro_batch=8)
    for name, p in trainer.model.named_parameters():
        if "lora_" not in name:
            p.data = p.data.bfloat16()
    perturb(trainer, 1e-5)
    *_, batch = trainer.step(rows_of(trainer))
    mask, noise = batch["completion_mask"], trainer.memory["noise"]
    d = log_ratio_of(trainer, batch)
    assert 1e-3 < (d * mask).flip(1).cumsum(1).abs().max() < noise < 0.3
    silent = prime_advantages(None, batch["rewards"], mask, 8)
    assert torch.equal(batch["advantages"], silent)
    perturb(trainer)  # now it has been trained, and is heard
    *_, batch = trainer.step(rows_of(trainer))
    d, mask = log_ratio_of(trainer, batch), batch["completion_mask"]
    wanted = prime_advantages(d, batch["rewards"], mask, 8)
    torch.testing.assert_close(batch["advantages"], wanted, rtol=0, atol=1e-4)


def test_the_noise_floor_is_measured_once_and_resumed(tmp_path):
    trainer = make_prime(tmp_path)
    trainer.memory["noise"] = 1e6  # of a checkpoint
    perturb(trainer)
    *_, batch = trainer.step(rows_of(trainer))
    silent = prime_advantages(None, batch["rewards"], batch["completion_mask"], 8)
    assert torch.equal(batch["advantages"], silent) and trainer.memory["noise"] == 1e6


def test_an_offline_prm_learns_first_and_is_frozen_then(tmp_path):
    trainer = make_prime(tmp_path, prm_update="none", prm_warmup=1)
    (first,) = trainer.step(rows_of(trainer))
    assert first["player"] == "prm" and "outcome" in first and trainer.example
    trainer.update(first)
    before, trainer.state.global_step = lora(trainer, "prm"), 1
    (batch,) = trainer.step(rows_of(trainer))
    assert batch["player"] == "policy" and moved(before, lora(trainer, "prm")) == 0
    d = log_ratio_of(trainer, batch)
    wanted = prime_advantages(d, batch["rewards"], batch["completion_mask"], 8)
    torch.testing.assert_close(batch["advantages"], wanted, rtol=0, atol=1e-4)
    assert d.abs().max() > 1e-3


@pytest.mark.parametrize("micro_batch", [16, 8, 4, 1])
def test_the_prms_update_is_adamw_on_its_loss_over_all_rows(tmp_path, micro_batch):
    """In however many micro-batches, sorted, trimmed, of unequal size: one step on `prm_loss`."""
    trainer = make_prime(tmp_path, micro_batch)
    perturb(trainer)
    prm_batch, batch = trainer.step(rows_of(trainer))
    count = 13  # a filter that was not filled: parts of 13 rows cannot be equal
    prm_batch = {k: v[:count] if getattr(v, "ndim", 0) else v for k, v in prm_batch.items()}
    prm_batch["rows"] = torch.tensor(count)
    batch = {k: v[:count] for k, v in batch.items() if getattr(v, "ndim", 0)} | {"player": "prm"}

    before, policy = lora(trainer, "prm"), lora(trainer, "policy")
    model = trainer.accelerator.unwrap_model(trainer.model)
    with trainer.playing("prm"):
        log_ratio = trainer.log_probs("prm", batch, model) - trainer.log_probs(None, batch)
        loss = prm_loss(log_ratio, batch["rewards"], batch["completion_mask"], 0.05)
        named = [(n, p) for n, p in model.named_parameters() if ".prm." in n]
        grads = torch.autograd.grad(loss, [p for _, p in named])
    norm = torch.stack([g.norm() for g in grads]).norm().item()
    trainer.update(prm_batch)
    assert trainer._means["prm/loss"] and trainer._means["prm/grad_norm"] == [
        pytest.approx(norm, rel=1e-3)
    ]
    assert sum(trainer._means["prm/loss"]) / len(trainer._means["prm/loss"]) == pytest.approx(
        loss.item(), rel=1e-5
    )
    assert moved(policy, lora(trainer, "policy")) == 0
    after, compared = lora(trainer, "prm"), 0
    for (name, _), g in zip(named, grads):  # AdamW's first step: lr * g / (|g| + eps)
        large = g.abs() > 1e-5
        step = (after[name] - before[name])[large]
        assert torch.allclose(step, -1e-3 * g.sign()[large], rtol=0, atol=2e-5), name
        compared += int(large.sum())
    assert compared > 1000


def test_the_prms_gradient_is_clipped_at_ten_and_the_policys_at_one(tmp_path):
    players = make_prime(tmp_path).players
    assert (players["prm"].max_grad_norm, players["policy"].max_grad_norm) == (10.0, 1.0)
    assert (players["prm"].lr, players["policy"].lr) == (1e-3, 5e-4)


# ------------------------------------------------------------------ the filter
ROWS = [{"question": str(i), "prompt": [{"content": str(i)}]} for i in range(40)]


def in_processes(world: int, work) -> list:
    """work(rank, gather) in threads; `gather` waits for all of them, as the real one does."""
    barrier, values, results = threading.Barrier(world, timeout=900), [None] * world, [None] * world

    def gather(rank, mine):
        values[rank] = mine
        barrier.wait()
        everyone = [value for part in values for value in part]
        barrier.wait()
        return everyone

    def run(rank):
        try:
            results[rank] = work(rank, lambda mine: gather(rank, mine))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not barrier.broken
    return results


def fill(rank, world, gather, memory, accuracy, questions, loader, rounds, size=2, **bounds):
    """`Prime.fill_batch` of one process. accuracy(rank, question) -> share of right responses."""
    trainer = SimpleNamespace(
        cfg=Args(questions=questions, group_size=size, max_refills=rounds, **bounds),
        memory=json.loads(json.dumps(memory)),  # as after a checkpoint
        train_dataset=ROWS,
        accelerator=SimpleNamespace(reduce=lambda x, _: x),
        state=SimpleNamespace(global_step=0),
        gather=gather,
        my_share=lambda items: items[rank::world],
        report_filter=lambda *_: None,
        tried=[],
    )

    def rollout(_, rows):
        rewards = []
        for row in rows[::size]:
            trainer.tried.append(row["question"])
            right = round(accuracy(rank, row["question"]) * size)
            rewards += [1.0] * right + [0.0] * (size - right)
        mask = torch.ones(len(rows), 3, dtype=torch.long)
        texts = [row["question"] for row in rows]
        return {
            "player": "policy",
            "rewards": torch.tensor(rewards),
            "completion_mask": mask,
            "texts": texts,
        }

    def concat(groups):
        trainer.trained = [group["texts"][0] for group in groups]
        return {"completion_mask": torch.cat([group["completion_mask"] for group in groups])}

    trainer.rollout, trainer.concat = rollout, concat
    trainer.further_question = lambda n: Prime.further_question(trainer, n)
    Prime.fill_batch(trainer, loader)
    return trainer


@pytest.mark.parametrize(
    "size, bounds, kept",
    [
        (4, {}, [1, 2, 3]),
        (4, {"keep_low": 0.2, "keep_high": 0.8}, [1, 2, 3]),  # the paper's, at its K
        (8, {}, [1, 2, 3, 4, 5, 6, 7]),
        (8, {"keep_low": 0.2, "keep_high": 0.8}, [2, 3, 4, 5, 6]),
        (8, {"keep_high": 0.5}, [1, 2, 3, 4]),
        (3, {}, [1, 2]),  # 1/3 and 1 - 1/3 in float32 and in float64
        (7, {}, [1, 2, 3, 4, 5, 6]),
        (49, {}, [*range(1, 49)]),
        (2, {}, [1]),
        (4, {"keep_low": 0.0, "keep_high": 1.0}, [0, 1, 2, 3, 4]),
    ],
)
def test_the_filter_keeps_groups_with_right_and_wrong_responses(size, bounds, kept):
    """Question q has q right responses of `size`."""
    rows = [{"question": str(q), "prompt": [{"content": str(q)}]} for q in range(size + 1)]
    share = lambda rank, q: int(q) / size  # noqa: E731
    gather = lambda mine: mine  # noqa: E731
    done = fill(0, 1, gather, {}, share, size + 1, rows, rounds=1, size=size, **bounds)
    assert [int(q) for q in done.trained] == kept


def test_further_questions_come_until_the_batch_is_full():
    """One process: groups that are all right or all wrong are passed over, in order of the data."""
    good = {"1", "39", "37"}
    accuracy = lambda rank, q: 0.5 if q in good else int(q) % 2  # noqa: E731
    (first,) = in_processes(1, lambda r, g: fill(r, 1, g, {}, accuracy, 3, ROWS[:3], 6))
    assert first.tried == ["0", "1", "2", "39", "38", "37"] and first.trained == ["1", "39", "37"]
    assert first.memory["filter"] == [{"waiting": [], "drawn": 3}]


def test_groups_beyond_the_batch_give_their_questions_back():
    good = lambda rank, q: 0.5 if q != "0" else 0  # noqa: E731
    (first,) = in_processes(1, lambda r, g: fill(r, 1, g, {}, good, 3, ROWS[:3], 6))
    assert first.trained == ["1", "2", "39"]
    left = first.memory["filter"][0]["waiting"]
    assert [row["question"] for row in left] == ["38", "37"]
    (second,) = in_processes(1, lambda r, g: fill(r, 1, g, first.memory, good, 3, ROWS[3:6], 6))
    assert second.tried == ["38", "37", "3"] and second.trained == second.tried
    left = second.memory["filter"][0]["waiting"]
    assert [row["question"] for row in left] == ["4", "5"]  # the loader's, for the next step


def test_two_processes_train_on_as_many_groups_and_lose_none():
    """The first one fills its batch sooner. What it has beyond the other's groups is sampled again,
    and a resumed run draws on where each process had stopped."""

    def accuracy(rank, question):  # the second process keeps every third question
        return 0.5 if rank == 0 or int(question) % 3 == 0 else 0

    def step(memory, loader):
        return in_processes(
            2, lambda r, g: fill(r, 2, g, memory, accuracy, 2, loader[r::2], rounds=2)
        )

    first, second = step({}, ROWS[:4])
    assert first.tried[:2] == ["0", "2"] and second.tried[:2] == ["1", "3"]
    assert not set(first.tried) & set(second.tried)  # each process draws its own
    assert len(first.trained) == len(second.trained) == 2
    kept = [q for q in first.tried if accuracy(0, q) == 0.5]
    assert first.memory["filter"] == second.memory["filter"]  # the first one saves the checkpoint
    waiting = [[row["question"] for row in part["waiting"]] for part in first.memory["filter"]]
    assert waiting[0] == kept[2:]
    assert [part["drawn"] for part in first.memory["filter"]] == [2, 2]

    later = step(first.memory, ROWS[4:8])
    assert later[0].tried[: len(waiting[0])] == waiting[0][:2]
    tried = first.tried + later[0].tried
    assert sorted(q for q in tried if tried.count(q) > 1) == sorted(waiting[0] * 2)
    new = [q for q in later[1].tried if q not in {"5", "7"}]
    assert not set(new) & set(second.tried)  # it does not draw the same ones again


def test_the_shorter_process_decides_how_many_groups_are_trained():
    accuracy = lambda rank, q: 0.5 if rank == 0 or q == "1" else 1  # noqa: E731
    first, second = in_processes(
        2, lambda r, g: fill(r, 2, g, {}, accuracy, 2, ROWS[:4][r::2], rounds=2)
    )
    assert first.trained == ["0"] and second.trained == ["1"]
    assert [row["question"] for row in first.memory["filter"][0]["waiting"]] == first.tried[1:]


def test_further_questions_wrap_around_a_small_data_set():
    trainer = SimpleNamespace(train_dataset=ROWS[:5], my_share=lambda items: items[1::2])
    drawn = [Prime.further_question(trainer, n)["question"] for n in range(1, 6)]
    assert drawn == ["3", "1", "3", "1", "3"]


# ------------------------------------------------------------------ the script
def steps(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "epoch" in row]


def is_trained(folder, player) -> bool:
    adapter = {n: t for n, t in weights(folder).items() if n.startswith(f"{player}/")}
    return any(t.abs().max() > 0 for name, t in adapter.items() if "lora_B" in name)


def test_a_run_trains_both(finished):
    folder, _, _ = finished("prime.py")
    rows = steps(folder)
    assert len(rows) == 4 and rows[0]["prm/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert all(abs(row["prm/loss"] - math.log(2)) > 1e-6 for row in rows[1:])
    samples = [row["co/samples"] for row in rows]
    assert all(b > a and (b - a) % 16 == 0 for a, b in zip([0, *samples], samples))
    for row in rows:
        assert 0 < row["prm/grad_norm"] < 10 and 0 < row["policy/grad_norm"] < 10
        assert 0 <= row["prm/accuracy"] <= 1 and 0 < row["co/groups_kept"] <= 1
        assert row["co/tokens_per_kept_group"] * row["co/groups_kept"] > 8  # a token each at least
    assert is_trained(folder, "policy") and is_trained(folder, "prm")
    memory = json.loads((folder / "checkpoint-4" / "memory.json").read_text())
    assert memory["samples"] == samples[-1] and len(memory["filter"]) == 1


def test_a_prm_that_is_not_trained(tmp_path, brief):
    folder = tmp_path / "run"
    brief("prime.py", *small("prime.py", folder, "--steps", 1, "--no-process-reward"))
    assert is_trained(folder, "policy") and not is_trained(folder, "prm")
    assert not any(key.startswith("prm/") for key in steps(folder)[0])


def test_a_run_with_an_offline_prm(tmp_path, brief):
    folder, offline = tmp_path / "run", "--steps 2 --prm-update none --prm-warmup 1".split()
    brief("prime.py", *small("prime.py", folder, *offline))
    first, second = steps(folder)
    assert "prm/loss" in first and "policy/loss" not in first
    assert "policy/loss" in second and "prm/loss" not in second
    assert 0 <= second["prm/accuracy"] <= 1  # how long it stays right is the paper's question
    assert is_trained(folder, "policy") and is_trained(folder, "prm")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--prm-update none", "--prm-update none needs --prm-warmup"),
        ("--prm-warmup 4", "--prm-warmup 4 must be less than --steps 4"),
        ("--prm-warmup -1", "--prm-warmup -1 must be at least 0"),
    ],
)
def test_warmups_that_make_no_sense_are_refused(tmp_path, flags, message):
    assert message in refused("prime.py", *small("prime.py", tmp_path / "run", *flags.split()))
    assert not (tmp_path / "run").exists()


def test_evaluation_samples_first_and_several_times():
    """In one order each time, so that an untrained policy meets the same random numbers."""
    held_out = [{"question": f"q{i}", "answer": str(i)} for i in range(3)]
    asked = []

    def generate_all(name, prompts, greedy=False):
        asked.append((name, [prompt[-1]["content"] for prompt in prompts], greedy))
        # q0: 1 of 2 samples right, q1: both, q2: none; greedily q0 and q1
        texts = ["0", "7", "1", "1", "7", "7"] if not greedy else ["0", "1", "7"]
        return [rf"\boxed{{{text}}}" for text in texts]

    trainer = SimpleNamespace(generate_all=generate_all, cfg=SimpleNamespace(eval_samples=2))
    result = evaluate(trainer, held_out)
    assert result == {"policy/accuracy": 0.5, "policy/greedy": pytest.approx(2 / 3)}
    twice = ["q0", "q0", "q1", "q1", "q2", "q2"]
    assert asked == [("policy", twice, False), ("policy", ["q0", "q1", "q2"], True)]


def test_a_filter_that_nothing_passes_ends_in_a_sentence(tmp_path):
    narrow = "--keep-low 0.55 --keep-high 0.6 --max-refills 2".split()  # no group of 8 can have it
    message = refused("prime.py", *small("prime.py", tmp_path / "run", *narrow))
    assert "in 2 rounds no group of 8" in message and "the accuracy is" in message
