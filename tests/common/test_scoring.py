"""common/fast/scoring.py: each saving gives what the plain computation gives."""

import functools
from dataclasses import replace
from types import SimpleNamespace

from common.checked import CoTrainer, Player
from common.core.batch import Batch
from common.fast import scoring
from common.run.models import load_model

import pytest
import torch
import torch.nn.functional as F
from conftest import make_players, perturb, relative
from torch.utils.checkpoint import checkpoint
from trainers import SHAPE
from transformers import (
    AutoModelForCausalLM,
    BioGptConfig,
    BioGptForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)


# ------------------------------------------------------------------ the scored forward pass
@pytest.fixture(scope="module")
def model():
    """In float64, where what is the same is equal to 1e-9."""
    model, _ = load_model("tiny", ["a", "b"], 4, False, seed=0)
    perturb(model)
    return model.get_base_model().double()


def some_rows(prompts: int, each: int, T=9, P=7) -> Batch:
    """`prompts` different prompts of unlike length, `each` rows of each, completions of unlike
    length."""
    generator = torch.Generator().manual_seed(prompts * 10 + each)
    B = prompts * each
    start = (torch.arange(prompts) % 4).repeat_interleave(each)
    end = torch.randint(1, T + 1, (B,), generator=generator)
    prompt = torch.randint(5, 40, (prompts, P), generator=generator)
    return Batch(
        "a",
        prompt.repeat_interleave(each, 0),
        (torch.arange(P) >= start[:, None]).long(),
        torch.randint(5, 40, (B, T), generator=generator),
        (torch.arange(T) < end[:, None]).long(),
        row=torch.arange(B),
    )


def plain(base, batch, temperature=1.0):
    """Log-probs and entropies through all logits, every row by itself, without any padding."""
    B, T = batch.completion_ids.shape
    logps, entropies = (torch.zeros(B, T, dtype=base.dtype) for _ in range(2))
    for i in range(B):
        prompt, completion = (
            ids[i][mask[i].bool()]
            for ids, mask in (
                (batch.prompt_ids, batch.prompt_mask),
                (batch.completion_ids, batch.completion_mask),
            )
        )
        n = len(completion)
        logits = base(input_ids=torch.cat([prompt, completion])[None]).logits[0, -n - 1 : -1]
        logp = (logits / temperature).log_softmax(-1)
        logps[i, :n] = logp.gather(1, completion[:, None]).squeeze(1)
        entropies[i, :n] = -(logp.exp() * logp).sum(-1).detach()
    return logps, entropies


def tokens_run(base, monkeypatch) -> list[int]:
    """To be read afterwards: how many tokens each pass through the layers had."""
    tokens, forward = [], base.base_model.forward

    def counted(**inputs):
        tokens.append(inputs["input_ids"].numel())
        return forward(**inputs)

    monkeypatch.setattr(base.base_model, "forward", counted)
    return tokens


def assert_score_is_plain(base, batch, temperature, monkeypatch, of=".a.") -> list[int]:
    """Log-probs, entropies and gradient; returns the tokens of the passes that `score` took."""
    draw = {"generator": torch.Generator().manual_seed(0), "dtype": base.dtype}
    weight = torch.randn(batch.completion_ids.shape, **draw)
    named = {n: p for n, p in base.named_parameters() if of in n}
    tokens, found = [], []
    for function in (plain, scoring.token_logps):
        logps, entropies = function(base, batch, temperature)
        gradients = torch.autograd.grad((logps * weight).sum(), named.values())
        found.append((logps.detach(), entropies.detach(), dict(zip(named, gradients))))
        tokens = tokens or tokens_run(base, monkeypatch)
    for ours, expected in zip(found[1][:2], found[0][:2]):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)
    assert relative(found[1][2], found[0][2]) <= 1e-6  # norms are float32
    return tokens


def different_beginnings(batch) -> int:
    """How many tokens differ by what they are or by what precedes them, last ones left out."""
    found = set()
    for i in range(len(batch)):
        row = []
        row += batch.prompt_ids[i][batch.prompt_mask[i].bool()].tolist()
        row += batch.completion_ids[i][batch.completion_mask[i].bool()].tolist()
        found |= {tuple(row[:end]) for end in range(1, len(row))}
    return len(found)


@pytest.mark.parametrize("prompts, each", [(2, 4), (6, 1), (1, 1)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_scores_and_gradient_are_those_of_plain_logits(
    model, monkeypatch, prompts, each, checkpointing
):
    """What rows begin with alike runs once and padding never, recomputed or not."""
    if checkpointing:
        for layer in model.base_model.layers:
            monkeypatch.setattr(layer, "gradient_checkpointing", True)
            again = functools.partial(checkpoint, use_reentrant=False)
            monkeypatch.setattr(layer, "_gradient_checkpointing_func", again, raising=False)
        monkeypatch.setattr(model, "training", True)
    batch = some_rows(prompts, each)
    tokens = assert_score_is_plain(model, batch, 0.7, monkeypatch)
    assert tokens == [different_beginnings(batch)] < [16 * prompts * each]


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config])
def test_other_shapes_and_rows_that_are_equal(monkeypatch, config):
    torch.manual_seed(0)
    base = config(**SHAPE | {"num_hidden_layers": 2})
    model = AutoModelForCausalLM.from_config(base).double().requires_grad_(False)
    for layer in model.base_model.layers:
        layer.self_attn.v_proj.weight.requires_grad_()
    batch = some_rows(3, 2)
    # two rows are equal to the last token, and one begins as a longer one does
    batch = batch.take(torch.tensor([0, 0, 2, 2, 4, 5]))
    batch.completion_mask[2, 1:] = 0
    tokens = assert_score_is_plain(model, batch, 1.0, monkeypatch, ".v_proj.weight")
    assert tokens == [different_beginnings(batch)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("completion", [64, 65])
def test_on_a_gpu_padding_has_a_finite_gradient(monkeypatch, completion):
    """cuDNN's attention gives NaN for 320 tokens; `score` leaves out the last one."""
    monkeypatch.setattr("common.core.model.on_gpu", lambda _: True)
    model, _ = load_model("tiny", ["player"], 4, True, seed=0)
    batch = some_rows(6, 1, T=completion, P=256)
    batch.prompt_mask *= (torch.arange(256) >= 40 * torch.arange(6)[:, None]).long()
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "row")
    batch = replace(batch, **{name: getattr(batch, name).cuda() for name in names})
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.autocast("cuda", torch.bfloat16):
        logp, _ = scoring.token_logps(model.get_base_model(), batch, 1.0)
    gradients = torch.autograd.grad(logp.sum(), trained)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("one_row", [True, False])
def test_padding_in_front_of_all_rows_moves_their_places(model, monkeypatch, one_row):
    """Which changes nothing but how numbers are rounded: prime.py measures its noise by that."""
    monkeypatch.setattr(scoring, "has_plain_attention", lambda _: one_row)
    batch, places, forward = some_rows(3, 1), [], model.base_model.forward

    def seen(**inputs):
        places.append(inputs["position_ids"][0, 0].item())
        return forward(**inputs)

    monkeypatch.setattr(model.base_model, "forward", seen)
    ids, mask = (F.pad(x, (1, 0)) for x in (batch.prompt_ids, batch.prompt_mask))
    padded = replace(batch, prompt_ids=ids, prompt_mask=mask)
    with torch.no_grad():
        one, two = (scoring.token_logps(model, b, 1.0)[0] for b in (batch, padded))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-4)
    assert places == [0, 1] and not torch.equal(one, two)


def test_prompts_that_differ_only_in_their_padding_are_not_taken_for_one(model, monkeypatch):
    """The same token ids, once a token and once padding."""
    ids = torch.randint(5, 40, (1, 12), generator=torch.Generator().manual_seed(0)).expand(4, 12)
    ones = torch.ones(4, 12, dtype=torch.long)
    parts = ids[:, :7], ones[:, :7], ids[:, 7:], ones[:, 7:]
    batch = Batch("a", *parts, row=torch.arange(4))
    batch.prompt_mask[2:, :3] = 0
    assert_score_is_plain(model, batch, 1.0, monkeypatch)
    logps, _ = plain(model, batch)
    assert (logps[0] - logps[2]).abs().max() > 1e-3


def test_models_with_a_sliding_window_run_row_by_row(monkeypatch):
    """What a token sees goes by its place in its row."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    torch.manual_seed(0)
    sliding = Qwen2ForCausalLM(Qwen2Config(**SHAPE, **window))
    batch = some_rows(2, 4)
    expected, _ = plain(sliding, batch)
    tokens = tokens_run(sliding, monkeypatch)
    got, _ = scoring.token_logps(sliding, batch, 1.0)
    assert tokens == [8 * 15] and batch.prompt_ids.shape == (8, 7)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_moves_no_token_of_a_model_that_learned_a_vector_per_place(attention):
    """BioGPT. HunYuan's norms after the rotation and Ministral's scaled queries notice it, too."""
    torch.manual_seed(0)
    config = BioGptConfig(**SHAPE, initializer_range=0.2, attn_implementation=attention)
    model = BioGptForCausalLM(config).eval()
    batch = some_rows(2, 4)
    expected, _ = plain(model, batch)
    got, _ = scoring.token_logps(model, batch, 1.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


# ------------------------------------------------------------------ micro-batches
def a_batch(lengths, advantages=None, prompts=None):
    B, T = len(lengths), max(lengths) + 2  # wider than its longest row
    P = max(prompts or [3]) + 1
    prompts = torch.tensor(prompts or [3] * B)
    return Batch(
        "a",
        torch.arange(B)[:, None].expand(B, P),
        (torch.arange(P) >= P - prompts[:, None]).long(),
        torch.arange(B)[:, None] * 100 + torch.arange(T),
        (torch.arange(T) < torch.tensor(lengths)[:, None]).long(),
        row=torch.arange(B),
        total_tokens=sum(lengths),
        rewards=torch.arange(B).float(),
        notes=[{"row": i} for i in range(B)],
        advantages=None if advantages is None else torch.tensor(advantages),
    )


def parts_of(batch, size: int) -> list[Batch]:
    """The micro-batches of an update without a KL term."""
    cfg = SimpleNamespace(micro_batch=size)
    trainer = SimpleNamespace(engine=scoring, kl=0.0, all_rows=False, cfg=cfg)
    return [batch.take(rows) for rows in CoTrainer.micro_batches(trainer, batch)]


def rows_of(part) -> list[int]:
    return part.rewards.int().tolist()


def test_rows_of_one_prompt_stay_together_in_order():
    lengths = [5, 9, 2, 3, 1, 8]  # of prompts x, y, x, z, y, z
    ids = torch.tensor([[0, 7], [0, 8], [0, 7], [7, 7], [0, 8], [7, 7]])
    seen = torch.tensor([[0, 1], [0, 1], [0, 1], [1, 1], [0, 1], [1, 1]])
    written = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    batch = Batch("a", ids, seen, written, written, row=torch.arange(6))
    assert scoring.in_order(batch).tolist() == [2, 0, 3, 5, 4, 1]
    # the same tokens, one of them padding: another prompt
    batch.prompt_mask[2] = 1
    assert scoring.in_order(batch).tolist() == [2, 0, 3, 5, 4, 1]
    batch.completion_mask[0] = 1  # x is longest now; its other row has a prompt of its own
    assert scoring.in_order(batch).tolist()[0] == 2


def test_parts_hold_the_live_rows_by_length_each_trimmed_to_its_own():
    lengths, prompts = [9, 2, 7, 4, 1, 8], [3, 6, 2, 4, 5, 1]
    batch = a_batch(lengths, [1.0, 1.0, 0.0, -1.0, 0.5, 2.0], prompts)
    parts = parts_of(batch, 2)
    assert [rows_of(part) for part in parts] == [[4, 1], [3, 5], [0]]
    for part in parts:
        rows = rows_of(part)
        assert part.player == "a" and part.total_tokens == sum(lengths)
        assert part.completion_ids.shape == (len(rows), max(lengths[i] for i in rows))
        assert part.completion_ids[:, 0].tolist() == [100 * i for i in rows]
        assert part.prompt_mask.shape == (len(rows), max(prompts[i] for i in rows))
        assert part.prompt_mask[:, -1].all() and part.completion_mask[:, 0].all()
        assert part.prompt_mask.sum(1).tolist() == [prompts[i] for i in rows]
        assert part.completion_mask.sum(1).tolist() == [lengths[i] for i in rows]
        assert part.notes == [{"row": i} for i in rows]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("dead", [0, 2, 5, 6])
def test_any_number_of_rows_and_any_size(dead, size):
    """Every live row once, in as few parts of nearly one size as there can be."""
    batch = a_batch([5, 4, 3, 2, 1, 6], [0.0] * dead + [1.0] * (6 - dead))
    parts = [rows_of(part) for part in parts_of(batch, size)]
    sizes = [len(rows) for rows in parts]
    assert sorted(sum(parts, [])) == [*range(dead, 6)] and len(parts) == -(-(6 - dead) // size)
    assert not parts or max(sizes) <= size and max(sizes) - min(sizes) <= 1


class Remembers(CoTrainer):
    def add_up_gradients(self, name, parameters):
        super().add_up_gradients(name, parameters)
        assert self.model.get_base_model().is_gradient_checkpointing == (
            self.cfg.gradient_checkpointing == "on"
        )
        self.remembered = {str(i): p.grad.clone() for i, p in enumerate(parameters)}


def test_activation_checkpointing_gives_the_same_gradient(tmp_path):
    """In a run: sampling in between keeps no activations."""

    def step(trainer, rows):
        torch.manual_seed(0)
        batch = trainer.rollout("ann", rows)
        batch.advantages = torch.linspace(-1, 1, 8)
        return [batch]

    found, texts = [], []
    for checkpointing in ("off", "on"):
        (folder := tmp_path / checkpointing).mkdir()
        options = {
            "kl": 0.1,
            "steps": 1,
            "kind": Remembers,
            "gradient_checkpointing": checkpointing,
        }
        trainer = make_players(folder, {"ann": Player([], 1e-3, 12, 4)}, step, 3, **options)
        perturb(trainer)
        trainer.train()
        found.append(trainer.remembered)
        texts.append((folder / "rollouts.jsonl").read_text())
    assert relative(*found) <= 1e-5 and texts[0] == texts[1]
