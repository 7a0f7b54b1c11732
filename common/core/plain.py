"""Sampling and scoring in the plainest way. `--plain` runs this file, and common/fast/ must give
the same numbers.

CoTrainer calls three functions of this file, or of common/fast/ in its place: `generate`,
`token_logps` and `in_order`. A vLLM server (common/fast/vllm.py) has the same `generate`.

Shapes: B rows, P prompt tokens, T completion tokens, H hidden units, V tokens of the vocabulary.
"""

import functools
from contextlib import contextmanager

from common.core.batch import Batch
from common.core.draws import uniform

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor

READ_AT_ONCE = {"cpu": 512, "cuda": 64}
"""Tokens of each row that go through the model in one pass while prompts are read. If a long prompt
were read in a single pass, the MLP would need more memory than the KV cache takes.
"""


def read_at_once(kind: str, gpu_bytes: int | None = None) -> int:
    """Returns how many tokens of each row this kind of device reads in one pass: READ_AT_ONCE. A
    GPU reads as many for each 24 GiB of its memory.

    gpu_bytes: a GPU's memory; by default the memory of the GPU that is there.
    """
    if kind == "cuda" and gpu_bytes is None:
        gpu_bytes = torch.cuda.get_device_properties().total_memory
    return READ_AT_ONCE[kind] * max(1, (gpu_bytes or 0) // (24 << 30))


# ------------------------------------------------------------------ sampling
@torch.no_grad()
def generate(
    model,
    prompt_ids: list[list[int]],
    max_tokens: int,
    temperature: float,
    eos_ids: list[int],
    keys: list[int],
) -> tuple[list[list[int]], list[list[float]]]:
    """Samples one completion per prompt by transformers' `generate`, from
    softmax(logits / temperature) over the whole vocabulary.

    Args:
        model: a PeftModel; its active adapter plays. It must not checkpoint activations.
        prompt_ids: token ids of each row's prompt.
        max_tokens: length limit.
        temperature: 0 takes the likeliest token.
        eos_ids: tokens that end a completion; the completion keeps its end token.
        keys: a number for each row, from `draws.row_key`, which decides the row's random numbers.

    Returns:
        (token ids of each row, the log-prob of each token in nats). The log-probs are at this
        temperature, or at 1 if it is 0.
    """
    base, pad_id = model.get_base_model(), eos_ids[0] if eos_ids else 0  # masked, so any id does
    ids = [torch.tensor(prompt) for prompt in prompt_ids]
    mask = [torch.ones_like(prompt) for prompt in ids]
    settings = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,  # because `Drawn` draws
        eos_token_id=eos_ids,
        pad_token_id=pad_id,
        prefill_chunk_size=read_at_once(base.device.type),
        disable_compile=True,
    )
    drawn = Drawn(temperature, torch.tensor(keys, device=base.device))
    with float32_logits(base):
        texts = model.generate(
            input_ids=pad_sequence(ids, True, pad_id, padding_side="left").to(base.device),
            attention_mask=pad_sequence(mask, True, 0, padding_side="left").to(base.device),
            generation_config=settings,
            logits_processor=[drawn],
        )
    logps = torch.cat(drawn.logps, 1)  # (B, T)
    written = texts[:, max(map(len, prompt_ids)) :]  # (B, T)
    ends = torch.isin(written, torch.tensor(eos_ids, device=written.device)).int().cumsum(1)
    lengths = ((ends == 0).sum(1) + 1).tolist()  # with the end token; T where there is none
    return tuple([r[:n] for r, n in zip(x.tolist(), lengths)] for x in (written, logps))


class Drawn(LogitsProcessor):
    """Draws each row's next token, and leaves `generate` no other token to take.

    logps: T tensors (B, 1), the log-probs of the tokens that were drawn.
    """

    def __init__(self, temperature: float, keys: torch.Tensor):
        self.temperature, self.keys, self.logps = temperature, keys, []

    def __call__(self, ids, logits):
        logp = torch.log_softmax(logits / (self.temperature or 1.0), dim=-1)  # (B, V)
        if self.temperature > 0:
            token = draw(logp, uniform(self.keys, len(self.logps)))  # (B, 1)
        else:
            token = logp.argmax(-1, keepdim=True)
        self.logps.append(logp.gather(1, token))
        return torch.full_like(logits, -torch.inf).scatter(1, token, 0.0)


def draw(logp: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Returns a token of each row, (B, 1): the first token at which the sum of the probabilities up
    to it reaches u times the sum of all probabilities.

    Args:
        logp: (B, V) log-probs.
        u: (B,), uniform in (0, 1].
    """
    sums = logp.exp().cumsum(-1, dtype=torch.float64)  # (B, V)
    token = torch.searchsorted(sums, u[:, None] * sums[:, -1:])
    return token.clamp(max=logp.shape[1] - 1)  # in NaNs the search ends one place too far


@contextmanager
def float32_logits(base):
    """Inside this block the head gives float32 logits, as in training. The loss sets the ratio to
    1, so a difference between sampling and training would not show in it.
    """
    head = base.get_output_embeddings()
    original, head.forward = head.forward, functools.partial(logits_of, head)
    try:
        yield
    finally:
        head.forward = original


def logits_of(head, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the logits of some states, (..., H) -> (..., V), in float32, or in float64 if the
    states are float64.
    """
    with torch.autocast(hidden.device.type, enabled=False):  # it would round the product
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(wide) @ head.weight.to(wide).T


# ------------------------------------------------------------------ scoring
def token_logps(base, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the log-prob of each completion token, the entropy of the distribution that the
    token is drawn from), (B, T) each, in nats, 0 outside the mask. The distribution is
    softmax(logits / temperature).

    Args:
        base: the causal LM in the PeftModel; its active adapter is scored.
        batch: B rows.
        temperature: what the logits are divided by, > 0.
    """
    ids, mask, places = batch.joined()  # (B, P + T) each
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


# ------------------------------------------------------------------ micro-batches
def in_order(batch: Batch) -> torch.Tensor:
    """Returns the row numbers, (B,), in the order in which micro-batches are cut, which is here the
    order of the batch.
    """
    return torch.arange(len(batch))
