"""Sampling without the waste: `sample`, for small models and CPUs, where the overhead of `generate` is the bill.

What it does differently, all exact: a prompt that several rows share (the G rows of a group) is run once and its cache
copied; rows that have ended are dropped; the cache is written in place instead of being concatenated anew at every token;
LoRA weights are merged while sampling, by swapping pointers, and the old weights put back untouched.
"""

from contextlib import contextmanager

import torch
from peft.tuners.lora import Linear as LoraLinear
from transformers.cache_utils import DynamicCache, DynamicLayer


def can_sample(model) -> bool:
    """Whether `sample` supports this model: full attention in every layer (no sliding window, no recurrent state)."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(config, "sliding_window", None)


@torch.no_grad()
def sample(
    model, prompt_ids: list[list[int]], max_tokens: int, temperature: float, eos_ids: list[int], pad_id: int
) -> tuple[list[list[int]], list[list[float]]]:
    """One completion per prompt, from softmax(logits / temperature) over the whole vocabulary.

    Args:
        model: a (PEFT) causal LM; its active adapter plays.
        prompt_ids: token ids of each row's prompt; equal prompts are run once.
        max_tokens: length limit.
        temperature: 0 = greedy, token for token what `generate` gives.
        eos_ids: tokens that end a completion (kept in it).
        pad_id: padding for prompts of unlike length.

    Returns:
        (token ids, log-prob of each sampled token under the distribution it was drawn from) per row.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone, head, device = base.base_model, base.get_output_embeddings(), base.device
    eos = torch.tensor(eos_ids, device=device)
    with _merged(model):
        hidden, cache, mask, position = _prefill(backbone, prompt_ids, max_tokens, pad_id, device)
        width = mask.shape[1] - max_tokens
        tokens = torch.full((len(prompt_ids), max_tokens), -1, device=device)  # (B, T)
        logps = torch.zeros(len(prompt_ids), max_tokens, device=device)  # (B, T)
        alive = torch.arange(len(prompt_ids), device=device)  # rows of `tokens` that the cache still holds
        ended = torch.zeros(len(prompt_ids), dtype=torch.bool, device=device)  # of those
        for t in range(max_tokens):
            logits = head(hidden).float()  # (b, V)
            if temperature > 0:
                logp = torch.log_softmax(logits / temperature, dim=-1)
                # exponential race: argmax_v p_v / E_v with E_v ~ Exp(1) is a draw from p
                token = (logp - torch.empty_like(logp).exponential_().log()).argmax(-1)  # (b,)
            else:
                logp = torch.log_softmax(logits, dim=-1)
                token = logits.argmax(-1)
            live = ~ended
            tokens[alive[live], t] = token[live]
            logps[alive[live], t] = logp.gather(1, token[:, None]).squeeze(1)[live]
            ended |= torch.isin(token, eos)
            count = int((~ended).sum())
            if count == 0 or t == max_tokens - 1:
                break
            if count <= 0.75 * len(ended):  # dropping copies the cache: not for every single row
                keep = (~ended).nonzero().squeeze(1)
                alive, token, mask, position, ended = alive[keep], token[keep], mask[keep], position[keep], ended[keep]
                for layer in cache.layers:
                    layer.select(keep)
            position = position + 1
            hidden = backbone(
                input_ids=token[:, None],
                attention_mask=mask[:, None, None, : width + t + 1],  # 4D: taken as it is
                position_ids=position[:, None],
                past_key_values=cache,
            ).last_hidden_state[:, -1]
    lengths = (tokens >= 0).sum(1).tolist()
    return (
        [row[:n] for row, n in zip(tokens.tolist(), lengths)],
        [row[:n] for row, n in zip(logps.tolist(), lengths)],
    )


def _prefill(backbone, prompt_ids: list[list[int]], max_tokens: int, pad_id: int, device):
    """The different prompts, run once and left-padded, their caches copied to the rows that share them.

    Returns the last states (B, H), the cache, the mask (B, width + max_tokens) over everything that will be in it, and the
    position of each row's last token (B,)."""
    unique = list(dict.fromkeys(map(tuple, prompt_ids)))
    place = {prompt: i for i, prompt in enumerate(unique)}
    rows = torch.tensor([place[tuple(prompt)] for prompt in prompt_ids], device=device)  # (B,) -> its prompt
    width = max(map(len, unique))
    ids = torch.full((len(unique), width), pad_id)
    mask = torch.ones(len(unique), width + max_tokens, dtype=torch.bool)
    for i, prompt in enumerate(unique):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, : width - len(prompt)] = False
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
    shared = DynamicCache()
    states = backbone(
        input_ids=ids, attention_mask=mask[:, :width].long(), position_ids=positions, past_key_values=shared
    ).last_hidden_state
    cache = DynamicCache()
    cache.layers = [_Slots(layer, rows, width + max_tokens) for layer in shared.layers]
    return states[rows, -1], cache, mask[rows], positions[rows, -1]


class _Slots(DynamicLayer):
    """A layer's keys and values in memory reserved for the whole completion: (B, heads, width + max_tokens, D)."""

    def __init__(self, prefilled: DynamicLayer, rows: torch.Tensor, length: int):
        super().__init__()
        self.filled = prefilled.keys.shape[-2]
        shape = (len(rows), prefilled.keys.shape[1], length, prefilled.keys.shape[3])
        self.keys, self.values = prefilled.keys.new_empty(shape), prefilled.values.new_empty(shape)
        self.keys[:, :, : self.filled] = prefilled.keys[rows]
        self.values[:, :, : self.filled] = prefilled.values[rows]
        self.is_initialized = True

    def update(self, key_states, value_states, *_, **__):
        end = self.filled + key_states.shape[-2]
        self.keys[:, :, self.filled : end] = key_states
        self.values[:, :, self.filled : end] = value_states
        self.filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def select(self, keep: torch.Tensor):
        self.keys, self.values = self.keys[keep], self.values[keep]

    def get_seq_length(self) -> int:
        return self.filled


@contextmanager
def _merged(model):
    """W + scaling * B A in place of W while sampling: half the matrix products of a small model. Quantised layers stay
    as they are. The original weights are put back by pointer, so nothing drifts."""
    swapped = []
    for module in model.modules():
        if isinstance(module, LoraLinear) and not module.disable_adapters and not module.merged:
            names = [name for name in module.active_adapters if name in module.lora_A]
            weight = module.get_base_layer().weight
            if weight.is_floating_point() and names:
                swapped.append((module, weight.data))
                weight.data = weight.data + sum(module.get_delta_weight(name) for name in names).to(weight.dtype)
                module.merged_adapters = names
    try:
        yield
    finally:
        for module, weight in swapped:
            module.get_base_layer().weight.data = weight
            module.merged_adapters = []
