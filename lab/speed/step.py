"""A GRPO step and its parts, ours against TRL's: python -m lab.speed.step

    python -m lab.speed.step --model smollm2 --dataset mawps.jsonl --group 4 --micro-batch 4 \\
        --questions 4 --tokens 48

Two copies of one model with the same LoRA adapter, in TRL's GRPOTrainer and in ours, and the same
rows: half of a group is rewarded. Compared are
    sampling     against `generate`; greedy tokens must be equal
    update       loss and backward pass of one batch of rollouts, half of whose groups are constant;
                 the gradients must agree. Both make one update per batch, so the ratio is 1, take a
                 mean over the tokens of the batch, and compute the entropy, which both log
    whole step   sampling, rewards, advantages, loss and backward pass; all groups count
See side_by_side.py for what is written.
"""

import copy
import os
import tempfile
from pathlib import Path
from unittest.mock import patch

from common.checked import CoTrainer, Player
from common.core.batch import Batch
from common.core.cotrainer import with_adapters
from common.core.draws import row_key
from common.fast.layers import FrozenLinear, FusedLora
from common.fast.sampling import sample
from common.run.args import RunArgs
from common.run.launch import grpo_config
from common.run.models import SHARED_KEYS, load_model
from common.tasks.math import load_questions
from common.tiny import TINY
from lab.speed.side_by_side import arguments, keep, with_memory
from tango import solve_prompt

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

# what `load_model` sets for our runs is not set in theirs
without_us = patch.dict(os.environ, {SHARED_KEYS: "0"})


# ------------------------------------------------------------------ two trainers
def player(model: str, names: list[str], four_bit: bool):
    """(a model whose first adapter, "player", does something, its tokenizer)."""
    model, tokenizer = load_model(model, names, 16, four_bit, 0)
    for name, parameter in model.named_parameters():
        if "lora_B.player." in name:
            torch.nn.init.normal_(parameter, 0.0, 0.01)
    return model, tokenizer


def their_config(run: RunArgs, rows: int, group: int = 2, **more) -> GRPOConfig:
    """The same loss as ours, and as many rows to an optimiser step."""
    parts, folder = max(1, rows // run.micro_batch), Path(tempfile.mkdtemp())
    more |= {"gradient_accumulation_steps": parts, "steps_per_generation": parts}
    more |= {"loss_type": "dapo", "beta": 0.0}
    return grpo_config(run, folder, run.micro_batch, group, save_strategy="no", **more)


def alternate(completions, **_) -> list[float]:
    """A reward function."""
    return [float(i % 2) for i in range(len(completions))]


def two_trainers(args, model, tokenizer, rows: list[dict]) -> tuple[GRPOTrainer, CoTrainer]:
    run = RunArgs(args.model, micro_batch=args.micro_batch, gradient_checkpointing="off")
    run.steps, run.kl = 1, 0.0
    data = Dataset.from_list(rows)
    config = their_config(run, len(rows), args.group, max_completion_length=args.tokens)
    other = copy.deepcopy(model)
    for module in other.modules():  # as it is without us
        if isinstance(module, FrozenLinear | FusedLora):
            module.__class__ = type(module).__bases__[-1]
    theirs = GRPOTrainer(other, alternate, config, data, processing_class=tokenizer)
    theirs.model.train()
    theirs.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    players = with_adapters({"player": Player([alternate], 1e-3, args.tokens, args.group)})
    config = grpo_config(run, Path(tempfile.mkdtemp()), len(rows), args.group)
    return theirs, CoTrainer(model, players, run, config, data, tokenizer)


# ------------------------------------------------------------------ update
def their_gradient(trainer: GRPOTrainer, batch: dict) -> dict:
    trainer.model.zero_grad(set_to_none=True)
    count = trainer.args.steps_per_generation
    for part in split_tensor_dict(shuffle_sequence_dict(batch), count):
        trainer._compute_loss(trainer.model, part).backward()
    return gradients(trainer)


def our_gradient(trainer: CoTrainer, batch: Batch) -> dict:
    """As CoTrainer.update takes it, without the optimiser."""
    trainer.model.zero_grad(set_to_none=True)
    with trainer.playing("player"):
        for rows in trainer.micro_batches(batch):
            trainer.loss(batch.take(rows))[0].backward()
    return gradients(trainer)


def gradients(trainer) -> dict:
    return {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


def update(theirs: GRPOTrainer, ours: CoTrainer, rows: list[dict], repeats: int) -> list[dict]:
    batch = ours.rollout("player", rows)
    batch.advantages[: len(rows) // 2] = 0.0  # half of the groups constant
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    tensors = {name: getattr(batch, name) for name in names}
    tensors["num_items_in_batch"] = torch.tensor(batch.total_tokens)
    methods = {
        "TRL's": without_us(lambda: their_gradient(theirs, tensors)),
        "ours": lambda: our_gradient(ours, batch),
    }
    found, last = with_memory(methods, repeats)
    scale = max(grad.abs().max() for grad in last["TRL's"].values())
    distance = max((last["ours"][n] - grad).abs().max() for n, grad in last["TRL's"].items())
    assert distance < 1e-3 * scale, f"gradients differ by {distance / scale:.1e}"
    return [row | {"gradient_difference": float(distance / scale)} for row in found]


# ------------------------------------------------------------------ sampling, and all of it
def by_generate(model, tokenizer, prompts, tokens: int, ends=(), **more):
    """What `generate` returns: sequences (B, P + T), and what `more` asks for. Without `ends` every
    row has all tokens.
    """
    ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
    inputs = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    settings = {"max_new_tokens": tokens, "do_sample": True, "top_k": 0}
    settings |= {"pad_token_id": tokenizer.pad_token_id, "return_dict_in_generate": True}
    settings |= {"eos_token_id": ends} if ends else {"min_new_tokens": tokens}
    with torch.no_grad():
        return model.generate(**inputs.to(model.device), **settings | more)


def by_sample(model, tokenizer, prompts, tokens: int, ends=(), temperature=1.0) -> list[list[int]]:
    ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
    keys = [row_key(i) for i in range(len(ids))]
    return sample(model, ids, tokens, temperature, list(ends), keys)[0]


def sampling(theirs: GRPOTrainer, ours: CoTrainer, rows: list[dict], repeats: int) -> list[dict]:
    tokenizer, prompts = ours.processing_class, [row["prompt"] for row in rows]
    limit = ours.players["player"].max_tokens
    asked = tokenizer, prompts, limit, ours.eos_token_ids
    its_model, our_model = theirs.model.eval(), ours.model.eval()
    greedy = by_sample(our_model, *asked, temperature=0.0)
    greedy = tokenizer.pad({"input_ids": greedy}, padding_side="right", return_tensors="pt")
    its = by_generate(its_model, *asked, do_sample=False)
    assert torch.equal(greedy["input_ids"], its.sequences[:, -greedy["input_ids"].shape[1] :].cpu())
    methods = {
        "`generate`": without_us(lambda: by_generate(its_model, *asked)),
        "ours": lambda: by_sample(our_model, *asked),
    }
    found = with_memory(methods, repeats)[0]
    its_model.train(), our_model.train()
    return found


def whole(theirs: GRPOTrainer, ours: CoTrainer, rows: list[dict], repeats: int) -> list[dict]:
    def their_step():
        batch = theirs._generate_and_score_completions(rows)
        their_gradient(theirs, {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)})

    def our_step():
        our_gradient(ours, ours.rollout("player", rows))

    return with_memory({"TRL's": without_us(their_step), "ours": our_step}, repeats)[0]


def main():
    parser = arguments(__doc__, repeats=15)
    parser.add_argument("--model", default=str(TINY), help="a folder")
    parser.add_argument("--dataset", default="tiny")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=80, help="length limit of a solution")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = player(args.model, ["player"], False)
    questions = load_questions(args.dataset, args.questions, 8, seed=0)[0]
    rows = [{"prompt": solve_prompt(r["question"])} for r in questions for _ in range(args.group)]
    theirs, ours = two_trainers(args, model, tokenizer, rows)
    name = "embedded" if args.model == str(TINY) else Path(args.model).name
    about = f"{name}, {len(rows)} rows of at most {args.tokens} tokens, {args.threads} thread"
    about += "s" * (args.threads > 1)
    parts = {"sampling": sampling, "loss and backward": update, "whole step": whole}
    for part, measure in parts.items():
        found = measure(theirs, ours, rows, args.repeats)
        keep([{"what": f"{part}, {about}"} | row for row in found], args.out)


if __name__ == "__main__":
    main()
