"""common/sampling.py against `generate` and against the distribution it claims to draw from."""

from common.model import load_model
from common.sampling import _merged, can_sample, sample
from common.tasks.math import load_questions

import pytest
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM


@pytest.fixture(scope="module")
def player():
    model, tokenizer = load_model("tiny", ["a", "b"], 4, False, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
    questions = [row["question"] for row in load_questions("tiny", 6, 4, seed=0)[0]]
    prompts = [prompt_of(tokenizer, question) for question in questions]
    return model, tokenizer, [p for p in prompts for _ in range(3)]


def prompt_of(tokenizer, user: str) -> list[int]:
    messages = [{"role": "user", "content": user}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return rendered["input_ids"]


def greedy(model, prompts, limit, stop, pad):
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    tokens = {"eos_token_id": stop, "pad_token_id": pad}
    config = GenerationConfig(max_new_tokens=limit, do_sample=False, **tokens)
    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    rows = out[:, width:].tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]


@pytest.mark.parametrize("adapter", ["a", "b"])
@pytest.mark.parametrize("limit", [1, 5, 64])
def test_greedy_tokens_equal_generate(player, adapter, limit):
    model, tokenizer, prompts = player
    model.set_adapter(adapter)
    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ours = sample(model, prompts, limit, 0.0, [stop], pad)[0]
    assert ours == greedy(model, prompts, limit, stop, pad)


def test_the_base_with_adapters_off(player):
    model, tokenizer, prompts = player
    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    with model.disable_adapter():
        ours = sample(model, prompts, 20, 0.0, [stop], pad)[0]
        assert ours == greedy(model, prompts, 20, stop, pad)


def test_log_probs_are_those_of_the_sampled_tokens(player):
    model, tokenizer, prompts = player
    torch.manual_seed(0)
    ids, logps = sample(model, prompts, 40, 0.8, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    assert len({tuple(row) for row in ids}) > 6  # rows of a group differ
    for prompt, completion, logp in zip(prompts, ids, logps):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
        log_p = (logits[len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
        expected = log_p.gather(1, torch.tensor(completion)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(logp), expected, rtol=0, atol=1e-4)
        assert tokenizer.eos_token_id not in completion[:-1]


def test_first_tokens_follow_the_distribution(player):
    """2,000 draws from one prompt: within five standard deviations of its probabilities."""
    model, tokenizer, prompts = player
    user = "Propose a question."
    prompt, draws = prompt_of(tokenizer, user), 2000
    torch.manual_seed(1)
    tokens = [tokenizer.eos_token_id], tokenizer.pad_token_id
    ids, _ = sample(model, [prompt] * draws, 2, 1.0, *tokens)
    first = ids[0][0]
    with torch.no_grad():
        p = model(input_ids=torch.tensor([prompt + [first]])).logits[0, -1].softmax(-1)
    second = [row[1] for row in ids if row[0] == first]
    for token in p.topk(5).indices.tolist():
        share = sum(t == token for t in second) / len(second)
        expected = p[token].item()
        deviation = (expected * (1 - expected) / len(second)) ** 0.5
        assert abs(share - expected) <= 5 * deviation + 1e-9


def test_merging_leaves_no_trace(player):
    model, _, _ = player
    before = {n: (p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}
    with pytest.raises(RuntimeError), _merged(model):
        assert any(not torch.equal(p, before[n][1]) for n, p in model.named_parameters())
        raise RuntimeError
    for n, p in model.named_parameters():
        assert p.data_ptr() == before[n][0] and torch.equal(p, before[n][1])


def test_models_with_other_attention_are_left_to_generate():
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    full = Qwen2ForCausalLM(Qwen2Config(**shape))
    sliding = Qwen2ForCausalLM(
        Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=0, **shape)
    )
    assert can_sample(full) and not can_sample(sliding)
