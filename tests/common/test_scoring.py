"""common/scoring.py: each saving gives what the plain computation gives."""

from common import scoring
from common.errors import UserError
from common.model import load_model

import pytest
import torch
from conftest import gradients, make_trainer, moved, perturb
from transformers import Qwen2Config, Qwen2ForCausalLM


# ------------------------------------------------------------------ the scored forward pass
@pytest.fixture(scope="module")
def model():
    model, tokenizer = load_model("tiny", ["a", "b"], 4, False, seed=0)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.02
    scoring.install_scoring(model.get_base_model())
    return model


def some_rows(prompts: int, each: int, T=9, P=7):
    """ids and mask (B, P + T): `prompts` different prompts of unlike length, `each` rows of each,
    completions of unlike length."""
    generator = torch.Generator().manual_seed(prompts * 10 + each)
    B = prompts * each
    prompt = torch.randint(5, 40, (prompts, P), generator=generator).repeat_interleave(each, 0)
    completion = torch.randint(5, 40, (B, T), generator=generator)
    start = (torch.arange(prompts) % 4).repeat_interleave(each)
    end = torch.randint(1, T + 1, (B,), generator=generator)
    left = (torch.arange(P) >= start[:, None]).long()
    right = (torch.arange(T) < end[:, None]).long()
    return torch.cat([prompt, completion], 1), torch.cat([left, right], 1), T


def plain(model, ids, mask, T, temperature):
    """Log-probs and entropies through all logits, every row by itself, without any padding."""
    logps, entropies = torch.zeros(len(ids), T), torch.zeros(len(ids), T)
    for i, (row, seen) in enumerate(zip(ids, mask.bool())):
        length = int(seen[-T:].sum())
        logits = model(input_ids=row[seen][None]).logits[0, -length - 1 : -1] / temperature
        logp = logits.log_softmax(-1)
        logps[i, :length] = logp.gather(1, row[seen][-length:, None]).squeeze(1)
        entropies[i, :length] = -(logp.exp() * logp).sum(-1).detach()
    return logps, entropies


def tokens_run(base, monkeypatch) -> list[int]:
    """To be read afterwards: how many tokens each pass through the layers had."""
    tokens, forward = [], base.base_model.forward

    def counted(**inputs):
        tokens.append(inputs["input_ids"].numel())
        return forward(**inputs)

    monkeypatch.setattr(base.base_model, "forward", counted)
    return tokens


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("prompts, each, passes", [(2, 4, 2), (1, 3, 2), (6, 1, 1)])
def test_scores_and_gradient_are_those_of_plain_logits(
    model, monkeypatch, prompts, each, passes, temperature
):
    """Rows that share a prompt take two passes: prompts once, then completions."""
    ids, mask, T = some_rows(prompts, each)
    weight = torch.randn(ids.shape[0], T, generator=torch.Generator().manual_seed(0))
    found = []
    for way in ("plain", "ours"):
        model.zero_grad(set_to_none=True)
        if way == "plain":
            logps, entropies = plain(model, ids, mask, T, temperature)
        else:
            tokens = tokens_run(model.get_base_model(), monkeypatch)
            score = (T, temperature)
            logps, entropies = model(input_ids=ids, attention_mask=mask, score=score)
            assert len(tokens) == passes and (passes == 1 or sum(tokens) < ids.numel())
        (logps * weight).sum().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((logps.detach(), entropies.detach(), grads))
    for ours, expected in zip(found[1][:2], found[0][:2]):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    scale = max(g.abs().max() for g in found[0][2].values())
    assert found[0][2].keys() == found[1][2].keys()
    assert moved(found[0][2], found[1][2]) <= 1e-4 * scale


def test_prompts_that_differ_only_in_their_padding_are_not_taken_for_one(model):
    """The same token ids, once a token and once padding."""
    ids = torch.randint(5, 40, (1, 12), generator=torch.Generator().manual_seed(0)).expand(4, 12)
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[2:, :3] = 0
    expected, _ = plain(model, ids, mask, 5, 1.0)
    with torch.no_grad():
        got, _ = model(input_ids=ids, attention_mask=mask, score=(5, 1.0))
    torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-4)
    assert (got[0] - got[2]).abs().max() > 1e-3


def test_under_checkpointing_prompts_are_not_shared_and_nothing_changes(model):
    ids, mask, T = some_rows(2, 4)
    expected, _ = model(input_ids=ids, attention_mask=mask, score=(T, 1.0))
    try:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert model.get_base_model().is_gradient_checkpointing
        got, _ = model(input_ids=ids, attention_mask=mask, score=(T, 1.0))
        got.sum().backward()
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_without_the_keyword_the_forward_pass_is_as_it_was(model):
    ids, mask, _ = some_rows(2, 2)
    assert model(input_ids=ids, attention_mask=mask).logits.shape[:2] == ids.shape


def test_models_with_a_sliding_window_do_not_share_prompts(monkeypatch):
    """Their caches drop what has slid out of the window."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    torch.manual_seed(0)
    sliding = Qwen2ForCausalLM(Qwen2Config(**shape, **heads, **window))
    scoring.install_scoring(sliding)
    ids, mask, T = some_rows(2, 4)
    tokens = tokens_run(sliding, monkeypatch)
    got, _ = sliding(input_ids=ids, attention_mask=mask, score=(T, 1.0))
    assert tokens == [ids.numel()]
    expected, _ = plain(sliding, ids, mask, T, 1.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("setting", scoring.UNSUPPORTED_HEADS)
def test_heads_we_do_not_score_are_refused(setting):
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    base = Qwen2ForCausalLM(Qwen2Config(num_attention_heads=2, num_key_value_heads=2, **shape))
    setattr(base.config, setting, 1.0)  # switched off
    scoring.install_scoring(base)
    setattr(base.config, setting, 30.0)
    with pytest.raises(UserError, match=setting):
        scoring.install_scoring(base)


# ------------------------------------------------------------------ micro-batches
def a_batch(lengths, advantages=None, prompts=None):
    B, T = len(lengths), max(lengths) + 2  # wider than its longest row
    P = max(prompts or [3]) + 1
    prompts = torch.tensor(prompts or [3] * B)
    batch = {
        "player": "a",
        "prompt_ids": torch.arange(B)[:, None].expand(B, P),
        "prompt_mask": (torch.arange(P) >= P - prompts[:, None]).long(),
        "completion_ids": torch.arange(B)[:, None] * 100 + torch.arange(T),
        "completion_mask": (torch.arange(T) < torch.tensor(lengths)[:, None]).long(),
        "num_items_in_batch": torch.tensor(sum(lengths)),
        "rewards": torch.arange(B).float(),
        "texts": [str(i) for i in range(B)],
        "notes": [{} for _ in range(B)],
    }
    return batch | ({} if advantages is None else {"advantages": torch.tensor(advantages)})


def rows_of(part) -> list[int]:
    return part["rewards"].int().tolist()


def test_rows_that_count():
    batch = a_batch([3, 3, 3], [1.0, 0.0, -1.0])
    assert scoring.live_rows(batch, kl=0.0).tolist() == [True, False, True]
    assert scoring.live_rows(batch, kl=0.1).all()  # all of them have a KL term
    per_token = torch.zeros(3, 5)
    per_token[1, 2] = -0.1
    batch["advantages"] = per_token
    assert scoring.live_rows(batch, kl=0.0).tolist() == [False, True, False]
    del batch["advantages"]  # a loss of the script's own
    assert scoring.live_rows(batch, kl=0.0).all()


def test_like_with_like_keeps_rows_of_one_prompt_together():
    lengths = [5, 9, 2, 3, 1, 8]  # of prompts x, y, x, z, y, z
    batch = {
        "prompt_ids": torch.tensor([[0, 7], [0, 8], [0, 7], [7, 7], [0, 8], [7, 7]]),
        "prompt_mask": torch.tensor([[0, 1], [0, 1], [0, 1], [1, 1], [0, 1], [1, 1]]),
        "completion_mask": (torch.arange(9) < torch.tensor(lengths)[:, None]).long(),
    }
    assert scoring.like_with_like(batch).tolist() == [2, 0, 3, 5, 4, 1]
    # the same tokens, one of them padding: another prompt
    batch["prompt_mask"][2] = 1
    assert scoring.like_with_like(batch).tolist() == [2, 0, 3, 5, 4, 1]
    batch["completion_mask"][0] = (
        1  # x is the longest now, but its other row has a prompt of its own
    )
    assert scoring.like_with_like(batch).tolist()[0] == 2
    assert scoring.like_with_like(batch, sharing=False).tolist() == [4, 2, 3, 5, 0, 1]


def test_micro_batches_hold_the_live_rows_by_length_each_trimmed_to_its_own():
    lengths, prompts = [9, 2, 7, 4, 1, 8], [3, 6, 2, 4, 5, 1]
    batch = a_batch(lengths, [1.0, 1.0, 0.0, -1.0, 0.5, 2.0], prompts)
    live = scoring.live_rows(batch, 0.0)
    parts = scoring.micro_batches(batch, live, 5, 2)
    assert [rows_of(part) for part in parts] == [[4, 1], [3, 5], [0]]
    for part in parts:
        rows = rows_of(part)
        assert part["player"] == "a" and part["num_items_in_batch"] == sum(lengths)
        assert part["completion_ids"].shape == (len(rows), max(lengths[i] for i in rows))
        assert part["completion_ids"][:, 0].tolist() == [100 * i for i in rows]
        assert part["prompt_mask"].shape == (len(rows), max(prompts[i] for i in rows))
        assert part["prompt_mask"][:, -1].all() and part["completion_mask"][:, 0].all()
        assert part["prompt_mask"].sum(1).tolist() == [prompts[i] for i in rows]
        assert part["completion_mask"].sum(1).tolist() == [lengths[i] for i in rows]
        assert "texts" not in part and "notes" not in part


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 100])
@pytest.mark.parametrize("count", [1, 3, 5, 6])
def test_any_count_and_size(count, size):
    """As many rows as asked for, dead ones if need be, in as few parts of like size as fit."""
    batch = a_batch([5, 4, 3, 2, 1, 6], [0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    parts = scoring.micro_batches(batch, scoring.live_rows(batch, 0.0), count, size)
    rows = [i for part in parts for i in rows_of(part)]
    assert len(rows) == len(set(rows)) == count and set(rows[:2]) <= {1, 4}
    assert count == 1 or {1, 4} <= set(rows)
    sizes = [len(rows_of(part)) for part in parts]
    assert max(sizes) <= size and len(sizes) == -(-count // size) and max(sizes) - min(sizes) <= 1


# ------------------------------------------------------------------ the gradient stays the same
def rollouts(trainer, per_token):
    """One batch with two groups, the second one flat."""
    trainer.model.train()
    torch.manual_seed(0)
    rows = [trainer.train_dataset[0]] * 4 + [trainer.train_dataset[3]] * 4
    batch = trainer.rollout("generator", rows)
    A = torch.tensor([1.0, -0.5, 0.25, -0.75, 0, 0, 0, 0])
    T = batch["completion_mask"].shape[1]
    ramp = A[:, None] * torch.linspace(1, 2, T) * batch["completion_mask"]
    return batch | {"advantages": ramp if per_token else A}


def gradient_of(trainer, micro_batches):
    trainer.model.zero_grad(set_to_none=True)
    for part in micro_batches:
        trainer._compute_loss(trainer.model, part).backward()
    return gradients(trainer)


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_dead_rows_trimming_and_micro_batches_change_nothing(tmp_path, kl):
    trainer = make_trainer(tmp_path, kl=kl)
    perturb(trainer)
    for per_token in (False, True):
        batch = rollouts(trainer, per_token)
        whole = {k: v for k, v in batch.items() if k not in ("texts", "notes")}
        expected = gradient_of(trainer, [whole])
        for count in (1, 2, 8):
            trainer.args.per_device_train_batch_size = 8 // count
            parts = trainer.micro_batches(batch)
            rows = sum(len(part["completion_ids"]) for part in parts)
            assert rows == (4 if kl == 0 else 8)  # with a KL term every row counts
            if kl == 0 and count == 1:
                longest = int(batch["completion_mask"][:4].sum(1).max())
                assert parts[0]["completion_ids"].shape[1] == longest
            got = gradient_of(trainer, parts)
            assert expected.keys() == got.keys() and all(".generator." in name for name in got)
            assert moved(expected, got) <= 1e-5 * max(g.abs().max() for g in expected.values())


def test_a_step_needs_no_more_rows_than_it_has(tmp_path):
    """A filter may leave fewer rows than a step holds. The micro-batches that are not needed come
    first, because DDP exchanges gradients at the last one, and have a loss of 0."""
    trainer = make_trainer(tmp_path, micro_batch=1)
    batch = rollouts(trainer, False)
    few = {k: v if k in ("player", "num_items_in_batch") else v[:3] for k, v in batch.items()}
    trainer.step = lambda rows: [few]
    trainer._step = 0
    seen = [trainer._prepare_inputs([])]
    for trainer._step in range(1, 8):
        seen.append(trainer._prepare_inputs([]))
    assert [len(part.get("completion_ids", [])) for part in seen] == [0] * 5 + [1] * 3
    trainer.model.zero_grad(set_to_none=True)
    loss = trainer._compute_loss(trainer.model, seen[0])
    loss.backward()
    assert loss.item() == 0 and all((g == 0).all() for g in gradients(trainer).values())
