"""Prompts to token ids, and their completions: by transformers' `generate`, or by `sample` for
small models on a CPU, where most of what `generate` costs is overhead.

What `sample` does differently, all of it exact: a prompt that several rows share (the rows of a
group), and what unlike prompts begin with, is run once and its cache copied; rows that have ended
are dropped; the cache is written in place instead of being concatenated anew at every token; LoRA
weights are merged into weights in float32 while sampling, by swapping pointers, and the old weights
are put back untouched.
"""

import functools
import re
from contextlib import contextmanager
from os.path import commonprefix

from common.logprob import float32_product

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

PREFILL_TOKENS = 64
"""Tokens per row that go through the model at once when `generate` reads prompts. Read all at once,
they would need more memory in the MLP than the KV cache takes."""
WORTH_A_PASS = 32
"""So many tokens, which unlike prompts begin with, get a pass through the model of their own."""


def has_plain_attention(model) -> bool:
    """Whether `sample` supports this model: full attention in every layer, no sliding window, no
    recurrent state.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(config, "sliding_window", None)


@torch.no_grad()
def complete(model, prompt_ids, max_tokens, temperature, eos_ids, pad_id) -> list[list[int]]:
    """Token ids of one completion per prompt: by `sample`, which says what it is given, or by
    `generate`.
    """
    base = model.get_base_model()
    with without_checkpointing(model):  # under checkpointing no layer fills a cache
        if base.device.type == "cpu" and has_plain_attention(base):
            return sample(model, prompt_ids, max_tokens, temperature, eos_ids, pad_id)[0]
        ids = [torch.tensor(prompt) for prompt in prompt_ids]
        mask = [torch.ones_like(prompt) for prompt in ids]
        settings = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_k=0,  # its default of 50 is another distribution than the one that is scored
            eos_token_id=eos_ids,
            pad_token_id=pad_id,
            prefill_chunk_size=PREFILL_TOKENS,
            disable_compile=True,
        )
        with float32_logits(base):
            written = model.generate(
                input_ids=pad_sequence(ids, True, pad_id, padding_side="left").to(base.device),
                attention_mask=pad_sequence(mask, True, 0, padding_side="left").to(base.device),
                generation_config=settings,
            )[:, max(map(len, prompt_ids)) :]  # (B, T)
    ends = torch.isin(written, torch.tensor(eos_ids, device=written.device)).int().cumsum(1)
    lengths = (ends == 0).sum(1) + 1  # with the end token; slicing stops at T where there is none
    return [row[:n] for row, n in zip(written.tolist(), lengths.tolist())]


@torch.no_grad()
def sample(
    model,
    prompt_ids: list[list[int]],
    max_tokens: int,
    temperature: float,
    eos_ids: list[int],
    pad_id: int,
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
        (token ids of each row, the log-prob of each token under what it was drawn from).
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone, head, device = base.base_model, base.get_output_embeddings(), base.device
    eos = torch.tensor(eos_ids, device=device)
    with _merged(model):
        hidden, cache, mask, position = _prefill(backbone, prompt_ids, max_tokens, pad_id, device)
        width = mask.shape[1] - max_tokens
        tokens = torch.full((len(prompt_ids), max_tokens), -1, device=device)  # (B, T)
        logps = torch.zeros(len(prompt_ids), max_tokens, device=device)  # (B, T)
        # rows of `tokens` that the cache still holds, and which of those have ended
        alive = torch.arange(len(prompt_ids), device=device)
        ended = torch.zeros(len(prompt_ids), dtype=torch.bool, device=device)
        for t in range(max_tokens):
            token, logp = _draw(_logits(head, hidden), temperature)  # (b,), (b,)
            live = ~ended
            tokens[alive[live], t] = token[live]
            logps[alive[live], t] = logp[live]
            ended |= torch.isin(token, eos)
            count = int((~ended).sum())
            if count == 0 or t == max_tokens - 1:
                break
            if count <= 0.75 * len(ended):  # dropping copies the cache: not for every single row
                keep = (~ended).nonzero().squeeze(1)
                rows = (alive, token, mask, position, ended)
                alive, token, mask, position, ended = (row[keep] for row in rows)
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[keep], layer.values[keep]
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


def _draw(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(b, V) -> a token of each row and its log-prob, (b,) each; temperature 0 = the likeliest."""
    logp = torch.log_softmax(logits / (temperature or 1.0), dim=-1)  # (b, V)
    if temperature > 0:
        # the first token at which the sum of probabilities reaches u in (0, all of it]: one random
        # number a row, where `multinomial` draws one for each token of the vocabulary
        cdf = logp.exp().cumsum(-1, dtype=torch.float64)  # (b, V)
        u = (1 - torch.rand(len(cdf), 1, device=cdf.device, dtype=cdf.dtype)) * cdf[:, -1:]
        token = torch.searchsorted(cdf, u)  # (b, 1)
    else:
        token = logits.argmax(-1, keepdim=True)
    return token.squeeze(1), logp.gather(1, token).squeeze(1)


def _prefill(backbone, prompt_ids: list[list[int]], max_tokens: int, pad_id: int, device):
    """Run what all prompts begin with once, the rest of each different prompt once, left-padded,
    and copy its cache to the rows that share it.

    Returns:
        The last states (B, H); the cache; the mask (B, width + max_tokens) over everything that
        will be in it; the position of each row's last token (B,).
    """
    unique = list(dict.fromkeys(map(tuple, prompt_ids)))
    place = {prompt: i for i, prompt in enumerate(unique)}
    rows = torch.tensor([place[tuple(prompt)] for prompt in prompt_ids], device=device)  # (B,)
    width, L = max(map(len, unique)), common_beginning(unique)
    ids = torch.full((len(unique), width - L), pad_id)  # (U, width - L): the rest of each
    mask = torch.ones(len(unique), width + max_tokens, dtype=torch.bool)
    for i, prompt in enumerate(unique):
        ids[i, width - len(prompt) :] = torch.tensor(prompt[L:])
        mask[i, L : L + width - len(prompt)] = False
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
    shared = DynamicCache()
    if L:
        backbone(input_ids=torch.tensor([unique[0][:L]], device=device), past_key_values=shared)
        shared.batch_repeat_interleave(len(unique))
    states = backbone(
        input_ids=ids,
        attention_mask=mask[:, :width].long(),
        position_ids=positions[:, L:],
        past_key_values=shared,
    ).last_hidden_state
    cache = DynamicCache()
    cache.layers = [_Slots(layer, rows, width + max_tokens) for layer in shared.layers]
    return states[rows, -1], cache, mask[rows], positions[rows, -1]


def common_beginning(prompts: list) -> int:
    """How many tokens all of these different prompts begin with, instructions mostly; 0 if they are
    not worth a pass of their own. Never all of a prompt.
    """
    length = min(len(commonprefix(prompts)), min(map(len, prompts)) - 1)
    return length if len(prompts) > 1 and length >= WORTH_A_PASS else 0


class _Slots(DynamicLayer):
    """A layer's keys and values, in memory for the whole completion: (B, heads, length, D)."""

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

    def get_seq_length(self) -> int:
        return self.filled


@contextmanager
def _merged(model):
    """W + scaling * B A in place of W while sampling, which saves half of a small model's products.

    In float32 only. Trap: bfloat16 has 8 bits for a number, so most entries of a young adapter are
    too small to change W at all, and the base would sample in the player's place. Quantised layers
    stay as they are, too. The old weights are put back by pointer, so nothing drifts.
    """
    swapped = []
    for module in model.modules():
        if isinstance(module, LoraLinear) and not module.disable_adapters and not module.merged:
            names = [name for name in module.active_adapters if name in module.lora_A]
            weight = module.get_base_layer().weight
            if weight.dtype == torch.float32 and names:
                swapped.append((module, weight.data))
                weight.data = weight.data + sum(map(module.get_delta_weight, names))
                module.merged_adapters = names
    try:
        yield
    finally:
        for module, weight in swapped:
            module.get_base_layer().weight.data = weight
            module.merged_adapters = []


# ------------------------------------------------------------------ around it
@contextmanager
def float32_logits(base):
    """Inside of this block the head gives float32 logits, as those are that training scores.

    Rounded to bfloat16 they would be 0.02 to 0.03 nats off, unseen: the ratio is set to 1.
    """
    head = base.get_output_embeddings()
    original, head.forward = head.forward, functools.partial(_logits, head)
    try:
        yield
    finally:
        head.forward = original


def _logits(head, hidden: torch.Tensor) -> torch.Tensor:
    """(..., H) -> (..., V) in float32, whatever the dtype of the weights."""
    with torch.autocast(hidden.device.type, enabled=False):  # it would round the product again
        logits = float32_product(hidden.flatten(0, -2), head.weight.T)
    return logits.unflatten(0, hidden.shape[:-1])


@contextmanager
def without_checkpointing(model):
    """Inside of this block no activation is recomputed: without a gradient none is kept.

    TRL's own switch adds one more hook to the embedding every time it is turned on again.
    """
    modules = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in modules:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in modules:
            module.gradient_checkpointing = True


# ------------------------------------------------------------------ prompts
def tokenize(prompts: list[list[dict]], tokenizer) -> list[list[int]]:
    """Messages through the model's chat template -> token ids, up to where the answer begins.

    Every spelling of a special token in a message becomes a space. A player's prompt quotes what
    another one wrote: `<|im_end|>`, spelled out in ordinary tokens, would be read as the end of the
    message, and the writer could go on in the judge's place.
    """
    marks = re.compile("|".join(map(re.escape, special_tokens(tokenizer))))
    prompts = [[m | {"content": marks.sub(" ", m["content"])} for m in p] for p in prompts]
    return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]


def special_tokens(tokenizer) -> list[str]:
    """Their spellings, the longest first."""
    # Llama's <|start_header_id|> is in no list of named special tokens
    added = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    return sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
