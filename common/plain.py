"""Sampling and scoring in the plainest way: `--plain` runs this, and common/fast/ must equal it.

CoTrainer asks four things of this module, or of common/fast/ in its place: `complete`,
`token_logps`, `in_order` and `in_parts`.

Shapes: B rows, P prompt tokens, T completion tokens, H hidden units, V tokens of the vocabulary.
"""

import functools
import re
from contextlib import contextmanager

from common.batch import Batch

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

READ_AT_ONCE = {"cpu": 512, "cuda": 64}
"""Tokens per row that go through the model at once while prompts are read; on a GPU for each 24 GiB
that it has. Read all at once, long ones would need more memory in the MLP than the KV cache takes.
"""


def read_at_once(kind: str, gpu_bytes: int | None = None) -> int:
    """READ_AT_ONCE of this kind of device; of a GPU with so much memory, by default this one."""
    if kind == "cuda" and gpu_bytes is None:
        gpu_bytes = torch.cuda.get_device_properties().total_memory
    return READ_AT_ONCE[kind] * max(1, (gpu_bytes or 0) // (24 << 30))


# ------------------------------------------------------------------ prompts
def tokenize(prompts: list[list[dict]], tokenizer) -> list[list[int]]:
    """Applies the model's chat template to messages -> token ids, up to where the answer begins.

    Every spelling of a special token in a message becomes a space. A player's prompt quotes another
    player's text, and a `<|im_end|>` in this text would be read as the end of the message: the
    writer could go on in the judge's place.
    """
    marks = re.compile("|".join(map(re.escape, special_tokens(tokenizer))))
    prompts = [[m | {"content": marks.sub(" ", m["content"])} for m in p] for p in prompts]
    return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]


def special_tokens(tokenizer) -> list[str]:
    """Returns the spellings of all special tokens, the longest first."""
    # Llama's <|start_header_id|> is in no list of named special tokens
    added = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    return sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)


# ------------------------------------------------------------------ sampling
@torch.no_grad()
def complete(model, prompt_ids, max_tokens, temperature, eos_ids, pad_id) -> tuple[list, list]:
    """Samples one completion per prompt by transformers' `generate`, from
    softmax(logits / temperature) over the whole vocabulary.

    Args:
        model: a (PEFT) causal LM; its active adapter plays.
        prompt_ids: token ids of each row's prompt.
        max_tokens: length limit.
        temperature: 0 = greedy.
        eos_ids: tokens that end a completion, which keeps them.
        pad_id: padding for prompts of unlike length.

    Returns:
        (token ids of each row, the log-prob of each token when it was drawn: [], because `generate`
        keeps none).
    """
    base = model.get_base_model()
    ids = [torch.tensor(prompt) for prompt in prompt_ids]
    mask = [torch.ones_like(prompt) for prompt in ids]
    settings = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=temperature > 0,
        temperature=temperature or 1.0,
        top_k=0,  # its default of 50 is another distribution than the one that is scored
        eos_token_id=eos_ids,
        pad_token_id=pad_id,
        prefill_chunk_size=read_at_once(base.device.type),
        disable_compile=True,
    )
    with without_checkpointing(model), float32_logits(base):  # else no layer would fill a cache
        written = model.generate(
            input_ids=pad_sequence(ids, True, pad_id, padding_side="left").to(base.device),
            attention_mask=pad_sequence(mask, True, 0, padding_side="left").to(base.device),
            generation_config=settings,
        )[:, max(map(len, prompt_ids)) :]  # (B, T)
    ends = torch.isin(written, torch.tensor(eos_ids, device=written.device)).int().cumsum(1)
    lengths = (ends == 0).sum(1) + 1  # with the end token; slicing stops at T where there is none
    return [row[:n] for row, n in zip(written.tolist(), lengths.tolist())], []


@contextmanager
def float32_logits(base):
    """Inside this block the head gives float32 logits, as in training. The loss sets the ratio to
    1, so it could not show a difference between sampling and training.
    """
    head = base.get_output_embeddings()
    original, head.forward = head.forward, functools.partial(logits_of, head)
    try:
        yield
    finally:
        head.forward = original


def logits_of(head, hidden: torch.Tensor) -> torch.Tensor:
    """(..., H) -> (..., V) in float32, or in float64 where the states are."""
    with torch.autocast(hidden.device.type, enabled=False):  # it would round the product
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(wide) @ head.weight.to(wide).T


@contextmanager
def without_checkpointing(model):
    """Turns activation checkpointing off inside this block, which needs no gradient.

    Trap: TRL's own switch adds one more hook to the embedding every time it is turned on again.
    """
    modules = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in modules:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in modules:
            module.gradient_checkpointing = True


# ------------------------------------------------------------------ scoring
def token_logps(base, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log softmax(logits / temperature) of each completion token, and the entropy of the
    distribution that the token is drawn from, in nats.

    Args:
        base: the causal LM inside of the PeftModel; its active adapter is scored.
        batch: of B rows.

    Returns:
        (B, T) each, 0 outside of the mask.
    """
    ids, mask, places = joined(batch)  # (B, P + T) each
    targets, valid = batch.completion_ids, batch.completion_mask.bool()  # (B, T)
    P = batch.prompt_ids.shape[1]
    run = {"input_ids": ids, "attention_mask": mask, "position_ids": places, "use_cache": False}
    states = base.base_model(**run).last_hidden_state[:, P - 1 : -1]  # (B, T, H): before each token
    logits = logits_of(base.get_output_embeddings(), states[valid])  # (N, V)
    logp = torch.log_softmax(logits / temperature, dim=-1)  # (N, V)
    entropy = -(logp.exp() * logp).sum(-1)  # (N,)
    of_token = logp.gather(1, targets[valid][:, None]).squeeze(1)  # (N,)
    zeros = torch.zeros(valid.shape, dtype=logp.dtype, device=logp.device)
    return zeros.masked_scatter(valid, of_token), zeros.masked_scatter(valid, entropy)  # (B, T)


def joined(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Joins prompt and completion to one text -> token ids, mask and position ids, (B, P + T) each.

    Position ids skip padding, because some models' attention depends on absolute positions. There
    is one exception: padding in front of *all* rows moves the positions, by which prime.py measures
    rounding.
    """
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], 1)
    first = int((mask.sum(0) == 0)[: batch.prompt_ids.shape[1]].sum())
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0) + first


# ------------------------------------------------------------------ micro-batches
def in_order(batch: Batch) -> torch.Tensor:
    """Returns (B,) row numbers in the order of the batch."""
    return torch.arange(len(batch))


def in_parts(batch: Batch, size: int, all_rows=True) -> list[Batch]:
    """Cuts the batch into parts of at most `size` rows, in order. `all_rows` is for common/fast/,
    which may leave rows out; here it has no effect.
    """
    return [batch.take(rows) for rows in in_order(batch).split(size) if len(rows)]
