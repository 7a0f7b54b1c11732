"""Sampling by `sample`; by common/core/plain.py if a model has more than plain attention.

Most of the time of transformers' `generate` is overhead: a token of a 1.5B model is 2,300 small
kernels, and Python starts each of them. `sample` saves time in these ways, and all are exact:
    on a GPU all kernels of a token are started together, as a CUDA graph
    a prompt that several rows share runs once, and its cache is copied; so does a beginning that
        different prompts share
    rows that have ended are dropped
    the cache is written in place; it is not concatenated anew for every token
    small float32 weights have their LoRA weights merged in while sampling, and are packed once on a
        CPU; other weights are rounded and unpacked once and not for every token. The old weights
        are put back untouched
"""

import copy
from contextlib import contextmanager
from os.path import commonprefix

from common.core import plain
from common.core.draws import uniform
from common.core.plain import read_at_once
from common.fast.layers import prepared
from common.fast.logprob import float32_product

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from transformers.cache_utils import DynamicCache, DynamicLayer

SMALL = 1 << 18
"""Entries of the largest layer that is merged. In a larger layer A and B hardly take time, and
merged copies of all layers would take the memory of a second model.
"""
SEGMENT = {"cpu": 1, "cuda": 128}
"""Tokens between checks for ended rows. On a GPU this is also the life of a CUDA graph; to record a
graph takes the Python of a token."""
ALIGNED = {"cpu": 1, "cuda": 16}
"""The number of tokens that attention sees is a multiple of this. With other numbers a GPU's
kernels copy the mask in every layer.
"""
BLOCK = 256
"""Tokens of the vocabulary whose probabilities are added up first; then the token is looked for
among the tokens of a block.
"""
WORTH_A_PASS = 32
"""Tokens of the shortest common beginning of different prompts that gets a pass of its own."""


def has_plain_attention(model) -> bool:
    """Whether `sample` supports this model. Every layer must have full attention, by the function
    that takes a mask, without a sliding window or a recurrent state. A dynamic rope is not
    supported, because it looks at positions from Python.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "")
    full = kinds == {"full_attention"} and not getattr(config, "sliding_window", None)
    sdpa = getattr(config, "_attn_implementation", None) in (None, "sdpa")
    return full and sdpa and "dynamic" not in rope


def generate(model, prompt_ids, max_tokens, temperature, eos_ids, keys) -> tuple[list, list]:
    """Returns what `plain.generate` does. `sample` computes it if it supports the model."""
    by = sample if has_plain_attention(model.get_base_model()) else plain.generate
    return by(model, prompt_ids, max_tokens, temperature, eos_ids, keys)


@torch.no_grad()
def sample(
    model,
    prompt_ids: list[list[int]],
    max_tokens: int,
    temperature: float,
    eos_ids: list[int],
    keys: list[int],
) -> tuple[list[list[int]], list[list[float]]]:
    """Returns what `plain.generate` does, token for token. Arguments are the same."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    segment = SEGMENT[base.device.type]
    with _merged(model):
        texts = _Texts(base, prompt_ids, max_tokens, temperature, eos_ids, keys)
        # on a CPU a token takes a twentieth less time with tensors that autograd never knows; a
        # CUDA graph has nothing left to save
        untracked = torch.inference_mode if segment == 1 else torch.no_grad
        with prepared(model), untracked():
            for written in range(1, max_tokens, segment):
                ended = texts.rows["ended"]  # (b,)
                if ended.all():
                    break
                if ended.sum() >= 0.25 * len(ended):  # not for every row: it copies the cache
                    texts.drop(ended)
                count = min(segment, max_tokens - written)
                texts.see(written + count - 1)
                _repeat(texts.step, count, texts.rows["ended"])
    lengths = (texts.tokens >= 0).sum(1).tolist()
    return tuple(
        [row[:n] for row, n in zip(values.tolist(), lengths)]
        for values in (texts.tokens, texts.logps)
    )


class _Texts:
    """Completions while they are written. Everything that changes with a token changes in place,
    because a CUDA graph reads and writes the same memory every time.

    tokens, logps: (B, T); tokens are -1 after the end.
    rows: tensors of the b rows that are still written, (b, ...) each: a row's place in `tokens`,
        whether it has ended, its last token, that token's position, the key of its draws, and the
        mask of its cache.
    """

    def __init__(self, base, prompt_ids, max_tokens: int, temperature: float, eos_ids, keys):
        self.backbone, self.head = base.base_model, base.get_output_embeddings()
        self.temperature, device = temperature, base.device
        self.eos = torch.tensor(eos_ids, dtype=torch.long, device=device)
        read = _prefill(self.backbone, prompt_ids, max_tokens, device)
        hidden, self.cache, mask, position = read
        B, self.width = len(prompt_ids), max(map(len, prompt_ids))
        self.tokens = torch.full((B, max_tokens), -1, device=device)
        self.logps = torch.zeros(B, max_tokens, device=device)
        self.column = self.cache.layers[0].column  # (1,), the column of the newest tokens
        self.rows = {"place": torch.arange(B, device=device), "mask": mask, "position": position}
        self.rows["ended"] = torch.zeros(B, dtype=torch.bool, device=device)
        self.rows["token"] = torch.zeros_like(position)
        self.rows["key"] = torch.tensor(keys, device=device)
        self.take(hidden)

    def take(self, hidden: torch.Tensor):
        """Draws a token of each row. hidden: the row's last states, (b, H)."""
        ended = self.rows["ended"]
        self.column += 1
        nth = self.column - self.width  # (1,): the token's place in the completion
        u = uniform(self.rows["key"], nth)
        token, logp = _draw(_logits(self.head, hidden), self.temperature, u)  # (b,), (b,)
        at = self.rows["place"], nth
        self.tokens[at] = torch.where(ended, -1, token)
        self.logps[at] = torch.where(ended, 0.0, logp)
        ended |= (token[:, None] == self.eos).any(1)
        self.rows["token"][:] = token
        self.rows["position"] += 1

    def step(self):
        """Runs the newest tokens through the model, and draws the next tokens."""
        self.rows["mask"].index_fill_(1, self.column, 0.0)
        seen = self.rows["mask"][:, : self.cache.layers[0].end]
        states = self.backbone(
            input_ids=self.rows["token"][:, None],
            attention_mask=seen[:, None, None],  # transformers takes a 4D mask as it is
            position_ids=self.rows["position"][:, None],
            past_key_values=self.cache,
        ).last_hidden_state
        self.take(states[:, -1])

    def drop(self, ended: torch.Tensor):
        alive = (~ended).nonzero().squeeze(1)
        self.rows = {name: values[alive] for name, values in self.rows.items()}
        self.cache.batch_select_indices(alive)

    def see(self, tokens: int):
        """Lets attention see the prompt and this many tokens after it."""
        for layer in self.cache.layers:
            layer.end = _aligned(self.width + tokens, self.column.device)


def _draw(logits: torch.Tensor, temperature: float, u: torch.Tensor) -> tuple:
    """Returns a token of each row, and its log-prob, (b,) each. Temperature 0 takes the likeliest.

    Args:
        logits: (b, V).
        temperature: what the logits are divided by.
        u: (b,), uniform in (0, 1].
    """
    if temperature not in (0, 1):
        logits = logits / temperature
    logp = torch.log_softmax(logits, dim=-1)  # (b, V)
    if temperature > 0:
        # `plain.draw` in two parts, so that not every token of the vocabulary is added up in turn:
        # in which block the token lies, and then where it lies in the block
        p = F.pad(logp.exp(), (0, -logp.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        sums = p.sum(-1, dtype=torch.float64).cumsum(-1)  # (b, blocks)
        u = u[:, None] * sums[:, -1:]  # (b, 1)
        block = torch.searchsorted(sums, u).clamp(max=sums.shape[1] - 1)  # (b, 1); or NaN
        u = u - F.pad(sums, (1, 0)).gather(1, block)
        p = p.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)  # (b, BLOCK)
        sums = p.cumsum(-1, dtype=torch.float64)
        u = u.minimum(sums[:, -1:])  # a block's sum may be rounded differently here
        token = block * BLOCK + torch.searchsorted(sums, u)  # (b, 1)
        token = token.clamp(max=logp.shape[1] - 1)
    else:
        token = logits.argmax(-1, keepdim=True)
    return token.squeeze(1), logp.gather(1, token).squeeze(1)


def _aligned(length: int, device) -> int:
    return length + -length % ALIGNED[device.type]


def _repeat(step, count: int, ended: torch.Tensor):
    """Calls step `count` times, or until all rows have ended. On a GPU the second call is recorded
    as a CUDA graph, which is then replayed. The first call makes what a recording must find:
    kernels, and the copies of autocast.
    """
    step()
    if count == 1:
        return
    graph = torch.cuda.CUDAGraph()
    # another thread may use the GPU meanwhile, which is no reason to fail
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for i in range(1, count):
        if i % 16 == 0 and ended.all():  # a look waits for the GPU
            break
        graph.replay()


def _prefill(backbone, prompt_ids: list[list[int]], max_tokens: int, device):
    """Runs the common beginning once, and then the rest of each different prompt once, left-padded.
    Copies the cache to the rows that share a prompt.

    Returns:
        The last states, (B, H); the cache; what attention adds, (B, length of the cache), which is
        0 at a token of the prompt and -inf elsewhere; the position of each row's last token, (B,).
    """
    unique = list(dict.fromkeys(map(tuple, prompt_ids)))
    place = {prompt: i for i, prompt in enumerate(unique)}
    rows = torch.tensor([place[tuple(prompt)] for prompt in prompt_ids], device=device)  # (B,)
    width, L = max(map(len, unique)), common_beginning(unique)
    ids = torch.zeros(len(unique), width - L, dtype=torch.long)  # (U, width - L): the rest of each
    mask = torch.ones(len(unique), width, dtype=torch.bool)
    for i, prompt in enumerate(unique):
        ids[i, width - len(prompt) :] = torch.tensor(prompt[L:])
        mask[i, L : L + width - len(prompt)] = False
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    first = DynamicCache()  # of the common beginning
    if L:
        backbone(input_ids=torch.tensor([unique[0][:L]], device=device), past_key_values=first)
    states, cache = [], DynamicCache()
    at_once = max(1, read_at_once(device.type) * len(prompt_ids) // width)
    for some in torch.arange(len(unique), device=device).split(at_once):
        part = copy.deepcopy(first)
        if L:
            part.batch_repeat_interleave(len(some))
        hidden = backbone(
            input_ids=ids[some],
            attention_mask=mask[some].long(),
            position_ids=positions[some, L:],
            past_key_values=part,
        ).last_hidden_state
        states.append(hidden[:, -1].clone())  # a view would keep all of them
        if not cache.layers:
            column = torch.tensor([width - 1], device=device)
            length = _aligned(width + max_tokens, device)
            cache.layers = [_Slots(x, len(rows), length, column) for x in part.layers]
        mine = torch.isin(rows, some).nonzero().squeeze(1)
        for slots, layer in zip(cache.layers, part.layers):
            slots.keys[mine, :, :width] = layer.keys[rows[mine] - some[0]]
            slots.values[mine, :, :width] = layer.values[rows[mine] - some[0]]
    added = cache.layers[0].keys.new_full((len(rows), length), -torch.inf)
    added[:, :width].masked_fill_(mask[rows], 0.0)
    return torch.cat(states)[rows], cache, added, positions[rows, -1]


def common_beginning(prompts: list) -> int:
    """Returns the number of tokens with which all these different prompts begin, mostly those of
    instructions; 0 if there are fewer than WORTH_A_PASS. It is never a whole prompt.
    """
    length = min(len(commonprefix(prompts)), min(map(len, prompts)) - 1)
    return length if len(prompts) > 1 and length >= WORTH_A_PASS else 0


class _Slots(DynamicLayer):
    """A layer's keys and values, (B, heads, length, D), with memory for the whole completion.

    column: (1,), the column in which the next token is written. A CUDA graph reads it anew each
        time.
    end: the number of columns that attention sees. It is fixed in a CUDA graph.
    """

    def __init__(self, like: DynamicLayer, rows: int, length: int, column: torch.Tensor):
        super().__init__()
        _, heads, self.end, _ = like.keys.shape
        # Trap: attention multiplies masked values by 0, and memory that nobody has set may hold NaN
        self.keys, self.values = (
            x.new_zeros(rows, heads, length, x.shape[-1]) for x in (like.keys, like.values)
        )
        self.column = column
        self.is_initialized = True

    def update(self, key_states, value_states, *_, **__):
        self.keys.index_copy_(2, self.column, key_states)
        self.values.index_copy_(2, self.column, value_states)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]

    def get_seq_length(self) -> int:
        return self.end


@contextmanager
def _merged(model):
    """Inside this block W + scaling * B A takes the place of W, which saves half of the products of
    a small model.

    Only SMALL layers in float32 are merged. Trap: bfloat16 has 8 significant bits, so most entries
    of a young adapter are too small to change W, and the base would sample in place of the player.
    Quantised layers also stay as they are. The old weights are put back by pointer, so nothing
    drifts.
    """
    swapped = []
    for module in model.modules():
        if isinstance(module, LoraLinear) and not module.disable_adapters and not module.merged:
            names = [name for name in module.active_adapters if name in module.lora_A]
            weight = module.get_base_layer().weight
            if weight.dtype == torch.float32 and weight.numel() <= SMALL and names:
                swapped.append((module, weight.data))
                weight.data = weight.data + sum(map(module.get_delta_weight, names))
                module.merged_adapters = names
    try:
        yield
    finally:
        for module, weight in swapped:
            module.get_base_layer().weight.data = weight
            module.merged_adapters = []


def _logits(head, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the logits, (..., V), of states (..., H), in float32 whatever the weights are."""
    with torch.autocast(hidden.device.type, enabled=False):  # it would round the product again
        logits = float32_product(hidden.flatten(0, -2), head.weight.T)
    return logits.unflatten(0, hidden.shape[:-1])
