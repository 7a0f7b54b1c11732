"""Ways to sample rollouts from a 4-bit base with an active LoRA adapter.

    python benchmarks/rollouts.py --data FOLDER

    generate          transformers' generate, as common/adapters.py calls it on a GPU
    generate_batch    transformers' continuous batching: paged cache, rows come and go at every step
    sample            common/sampling.py: a prompt is read once for its group, ended rows are
                      dropped
    static            the same, with nothing that changes shape from token to token, so that a whole
                      step is one CUDA graph; adapters in the base's precision meanwhile. A
                      candidate for common/sampling.py, not used by it

Prompts are GSM8K's in groups of 8. Weights are random (see one_gpu.py, also for FOLDER), so all
rows have the full length. Every cell is a JSON file in --out; a method that fails leaves its error
there. `--shapes tiny` runs on a CPU in a minute.
"""

import argparse
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from common.model import add_players  # noqa: E402
from common.sampling import PREFILL_TOKENS, _merged, _prefill, sample  # noqa: E402
from tango import solve_prompt  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402
from one_gpu import RESULTS, SHAPES, Cells, Work, random_model  # noqa: E402
from transformers import DynamicCache, GenerationConfig  # noqa: E402
from transformers.cache_utils import DynamicLayer  # noqa: E402
from transformers.generation import ContinuousBatchingConfig  # noqa: E402

GROUP = 8


# ------------------------------------------------------------------ one CUDA graph per token
class FixedSlots(DynamicLayer):
    """A layer's keys and values, written at a position that is a tensor, read to a fixed end."""

    def __init__(self, filled, at: torch.Tensor):
        super().__init__()
        self.keys, self.values, self.at, self.is_initialized = filled.keys, filled.values, at, True
        for reserved in (self.keys, self.values):
            reserved[:, :, filled.filled :] = 0  # never read with a weight, but 0 * NaN is NaN

    def update(self, key_states, value_states, *_, **__):
        self.keys.index_copy_(2, self.at, key_states)
        self.values.index_copy_(2, self.at, value_states)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]

    def get_seq_length(self) -> int:
        return self.end - 1


class Decoder:
    """`step()` samples a token of every row, all in place: a CUDA graph of it can be replayed.

    Shapes: B rows, S slots of the cache, T tokens at most.
    """

    def __init__(self, base, prefilled: tuple, max_tokens: int, temperature: float, eos, pad_id):
        """prefilled: what common.sampling._prefill returns."""
        hidden, cache, mask, position = prefilled
        rows, slots, device = len(hidden), mask.shape[1], hidden.device
        self.backbone, self.head = base.base_model, base.get_output_embeddings()
        self.temperature, self.eos, self.pad_id = temperature, eos, pad_id
        self.width = slots - max_tokens
        self.mask = mask[:, None, None].clone()  # (B, 1, 1, S)
        self.mask[..., self.width :] = False  # a slot counts once it is written
        self.at = torch.tensor([self.width], device=device)
        self.t = torch.zeros(1, dtype=torch.long, device=device)
        self.position = position[:, None] + 1  # (B, 1)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.tokens = torch.full((rows, max_tokens), -1, device=device)  # (B, T)
        self.token = torch.zeros(rows, dtype=torch.long, device=device)
        self.cache = DynamicCache()
        self.cache.layers = [FixedSlots(layer, self.at) for layer in cache.layers]
        self.choose(hidden)

    def choose(self, hidden: torch.Tensor):
        """hidden (B, H) -> the next token of every row that has not ended."""
        logits = self.head(hidden).float()  # (B, V)
        if self.temperature > 0:
            p = torch.softmax(logits / self.temperature, dim=-1)
            token = (p / torch.empty_like(p).exponential_()).argmax(-1)  # a sample, without a sync
        else:
            token = logits.argmax(-1)
        self.tokens.index_copy_(1, self.t, torch.where(self.ended, -1, token)[:, None])
        self.token.copy_(torch.where(self.ended, self.pad_id, token))
        self.ended |= torch.isin(token, self.eos)
        self.t += 1

    def step(self):
        self.mask.index_fill_(3, self.at, True)
        states = self.backbone(
            input_ids=self.token[:, None],
            attention_mask=self.mask[..., : self.end],
            position_ids=self.position,
            past_key_values=self.cache,
        ).last_hidden_state
        self.choose(states[:, -1])
        self.position += 1
        self.at += 1

    def read_to(self, end: int):
        self.end = end
        for layer in self.cache.layers:
            layer.end = end

    def keep(self, rows: torch.Tensor):
        for name in ("mask", "position", "ended", "tokens", "token"):
            setattr(self, name, getattr(self, name)[rows])
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


@torch.no_grad()
def sample_static(
    model, prompt_ids, max_tokens, temperature, eos_ids, pad_id, window: int = 128
) -> list[list[int]]:
    """As `common.sampling.sample`, but returns token ids only.

    Every `window` tokens ended rows are dropped and a new graph is made, which attends to that much
    more. Without a GPU the steps run as they are.
    """
    base = model.get_base_model()
    eos = torch.tensor(eos_ids, device=base.device)
    with _merged(model), adapters_in(model, base.dtype):
        prefilled = _prefill(base.base_model, prompt_ids, max_tokens, pad_id, base.device)
        decoder = Decoder(base, prefilled, max_tokens, temperature, eos, pad_id)
        result = torch.full((len(prompt_ids), max_tokens), -1, device=base.device)
        alive = torch.arange(len(prompt_ids), device=base.device)
        pool = torch.cuda.graph_pool_handle() if base.device.type == "cuda" else None
        for first in range(1, max_tokens, window):
            count = min(window, max_tokens - first)
            decoder.read_to(decoder.width + first - 1 + count)
            play(decoder.step, count, pool)
            result[alive] = decoder.tokens
            left = (~decoder.ended).nonzero().squeeze(1)
            if not len(left):
                break
            if len(left) <= 0.75 * len(alive):
                alive = alive[left]
                decoder.keep(left)
        if max_tokens == 1:
            result = decoder.tokens
    return [[token for token in row if token >= 0] for row in result.tolist()]


def play(step, count: int, pool):
    """`step` count times; on a GPU once as it is, which also warms up, and then as a graph."""
    if pool is None:
        for _ in range(count):
            step()
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    if count > 1:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):  # recorded, not run
            step()
        for _ in range(count - 1):
            graph.replay()


@contextmanager
def adapters_in(model, dtype):
    """Adapters in the base's precision, as autocast has them in training.

    In float32 every layer would convert its input and its output.
    """
    before = [(p, p.data) for name, p in model.named_parameters() if "lora_" in name]
    for parameter, data in before:
        parameter.data = data.to(dtype)
    try:
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


# ------------------------------------------------------------------ the others
def generate(model, prompt_ids, max_tokens, temperature, eos_ids, pad_id) -> list[list[int]]:
    width = max(map(len, prompt_ids))
    padded = [[pad_id] * (width - len(row)) + row for row in prompt_ids]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompt_ids]
    settings = generation_config(max_tokens, temperature, eos_ids, pad_id)
    settings.prefill_chunk_size, settings.disable_compile = PREFILL_TOKENS, True
    with torch.no_grad():
        ids = model.generate(
            input_ids=torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            generation_config=settings,
        )
    rows = []
    for row in ids[:, width:].tolist():
        ends = [i + 1 for i, token in enumerate(row) if token in eos_ids]
        rows.append(row[: ends[0]] if ends else row)
    return rows


def generation_config(max_tokens, temperature, eos_ids, pad_id) -> GenerationConfig:
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=max_tokens, eos_token_id=eos_ids, pad_token_id=pad_id, **sampling
    )


def generate_batch(model, prompt_ids, max_tokens, temperature, eos_ids, pad_id) -> list[list[int]]:
    paging = {"max_memory_percent": 0.6}
    if model.device.type != "cuda":
        blocks = 4 * len(prompt_ids)
        paging = {"use_cuda_graph": False, "num_blocks": blocks, "max_batch_tokens": 256}
    with torch.no_grad(), adapters_in(model, model.get_base_model().dtype):
        found = model.generate_batch(
            prompt_ids,
            generation_config=generation_config(max_tokens, temperature, eos_ids, pad_id),
            continuous_batching_config=ContinuousBatchingConfig(**paging),
            progress_bar=False,
        )
    if len(found) != len(prompt_ids):
        raise RuntimeError(f"{len(found)} of {len(prompt_ids)} rows came back")
    order = sorted(found, key=lambda name: int(name.rsplit("_", 1)[1]))  # req_0, req_1, ...
    return [found[name].generated_tokens for name in order]


METHODS = {
    "generate": generate,
    "static": sample_static,
    "generate_batch": generate_batch,
    "sample": lambda *a: sample(*a)[0],
}


# ------------------------------------------------------------------ measuring
def measure(model, method, prompt_ids, tokens: int, eos_ids, pad_id) -> dict:
    """A short call first, to warm up; then one to the full length."""
    gpu = torch.cuda.is_available()
    method(model, prompt_ids, min(tokens, 8), 1.0, eos_ids, pad_id)
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated() if gpu else 0
    start = time.perf_counter()
    completions = method(model, prompt_ids, tokens, 1.0, eos_ids, pad_id)
    if gpu:
        torch.cuda.synchronize()
    seconds, count = time.perf_counter() - start, sum(map(len, completions))
    return {
        "seconds": seconds,
        "sampled": count,
        "tokens_per_second": count / seconds,
        "resident": resident,
        "peak": {"rollout": torch.cuda.max_memory_allocated() if gpu else 0},
    }


def prompts(work: Work, rows: int) -> list[list[int]]:
    """Token ids of tango.py's prompts for GSM8K's questions, each GROUP times in a row."""
    questions = work.load_questions(-(-rows // GROUP))
    messages = [solve_prompt(question) for question in questions]
    ids = work.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    return [row for row in ids for _ in range(GROUP)][:rows]


def player(work: Work):
    """The base with one adapter that does something."""
    model = add_players(random_model(work.config, work.device), ["player"], 16, 0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.01)
    return model.eval()


def run_size(size: str, args, cells: Cells):
    work = Work(size, args.data, questions=1)
    model, pad_id = player(work), work.tokenizer.pad_token_id
    eos_ids = [work.tokenizer.eos_token_id]
    for shape in ["8x12"] if size == "tiny" else args.cells:
        rows, tokens = map(int, shape.split("x"))
        ids = prompts(work, rows)
        about = {"size": size, "rows": rows, "tokens": tokens}
        for name in args.methods:
            run = partial(measure, model, METHODS[name], ids, tokens, eos_ids, pad_id)
            kind = f"rollouts-{size}-{shape}"
            cells(f"{kind}-{name}", kind, run, **about, method=name)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files = "gsm8k_train.jsonl and qwen2.5-tokenizer/"
    parser.add_argument("--data", type=Path, required=True, help=files)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--shapes", nargs="+", default=["7b"], choices=SHAPES)
    sizes = "rows x tokens, such as 64x1000 256x2000"
    parser.add_argument("--cells", nargs="+", default=["64x1000"], help=sizes)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--minutes", type=float, default=7.0, help="start nothing that ends later")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    cells = Cells(args.out, args.minutes)
    for size in args.shapes:
        run_size(size, args, cells)


if __name__ == "__main__":
    main()
