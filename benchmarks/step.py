"""A GRPO step and its parts, ours against TRL's: python benchmarks/step.py

    python benchmarks/step.py --model smollm2 --dataset mawps.jsonl --group 4 --micro-batch 4 \\
        --questions 4 --tokens 48

Two copies of one model with the same LoRA adapter, in TRL's GRPOTrainer and in ours, and the same
rows: half of a group is rewarded. Compared are
    sampling     against `generate`; greedy tokens must be equal
    update       loss and backward pass of one batch of rollouts; the gradients must agree. Both
                 compute one update per batch, so a ratio of 1, and a mean over the tokens of the
                 batch. Entropy is computed by both, because both log it. Half of the groups are
                 constant, and with --kl there is the k3 penalty, for which TRL's
                 use_bias_correction_kl has to be off; the base's log-probs are given to both.
    whole step   sampling, rewards, advantages, loss and backward pass; all groups count
See side_by_side.py for what is written.
"""

import copy
import tempfile
from pathlib import Path

from side_by_side import arguments, compared, in_turn, keep  # isort: skip
from common.adapters import with_adapters
from common.args import RunArgs, grpo_config
from common.cotrainer import CoTrainer, Player
from common.model import TINY
from common.sampling import sample
from common.scoring import in_parts, live_rows
from common.tasks.math import load_questions
from tango import solve_prompt

import torch
from datasets import Dataset
from logprob import peak_mib
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict


# ------------------------------------------------------------------ two trainers
def two_adapters(base) -> tuple:
    """The same LoRA adapter on two copies of the base, called "default" and "player"."""
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    theirs = get_peft_model(copy.deepcopy(base), lora)
    ours = get_peft_model(base, lora, adapter_name="player")
    parameters = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            draw = torch.Generator().manual_seed(len(name))
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.02
            parameters[name.replace(".default.", ".player.")].data = parameter.data.clone()
    return theirs, ours


def alternate(completions, **_) -> list[float]:
    """A reward function."""
    return [float(i % 2) for i in range(len(completions))]


def two_trainers(args, tokenizer, rows: list[dict]) -> tuple[GRPOTrainer, CoTrainer]:
    steps = len(rows) // args.micro_batch
    shared = {"output_dir": tempfile.mkdtemp(), "bf16": False, "report_to": "none", "max_steps": 1}
    shared |= {"per_device_train_batch_size": args.micro_batch, "steps_per_generation": steps}
    shared |= {"gradient_accumulation_steps": steps, "gradient_checkpointing": False}
    own = {"num_generations": args.group, "max_completion_length": args.tokens, "beta": 0.0}
    own |= {"use_bias_correction_kl": False, "loss_type": "dapo"}
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    other, model = two_adapters(base)
    theirs = GRPOTrainer(other, alternate, GRPOConfig(**shared, **own), **data)
    theirs.beta = args.kl  # set now, because TRL would make a reference model of its own
    players = with_adapters({"player": Player([alternate], 1e-3, args.tokens, args.group)})
    run = RunArgs(args.model, micro_batch=args.micro_batch, checkpointing="off")
    run.steps, run.kl = 1, args.kl
    config = grpo_config(run, tempfile.mkdtemp(), len(rows), args.group)
    ours = CoTrainer(model, players, run, config, data["train_dataset"], tokenizer)
    theirs.model.train()
    theirs.current_gradient_accumulation_steps = steps
    return theirs, ours


# ------------------------------------------------------------------ update
def their_gradient(trainer: GRPOTrainer, batch: dict) -> dict:
    trainer.model.zero_grad(set_to_none=True)
    count = trainer.args.steps_per_generation
    for part in split_tensor_dict(shuffle_sequence_dict(batch), count):
        trainer._compute_loss(trainer.model, part).backward()
    return gradients(trainer)


def our_gradient(trainer: CoTrainer, batch: dict) -> dict:
    """As CoTrainer.update takes it, without the optimiser."""
    trainer.model.zero_grad(set_to_none=True)
    live = live_rows(batch, trainer.kl)
    with trainer.playing("player"):
        for part in in_parts(batch, live, trainer.cfg.micro_batch):
            trainer.loss(part).backward()
    return gradients(trainer)


def gradients(trainer) -> dict:
    found = [(name, p.grad) for name, p in trainer.model.named_parameters() if p.grad is not None]
    return {name.replace(".default.", ".player."): grad for name, grad in found}


def update(theirs: GRPOTrainer, ours: CoTrainer, rows: list[dict], repeats: int) -> list[dict]:
    batch = ours.rollout("player", rows)
    batch["advantages"][: len(rows) // 2] = 0.0  # half of the groups constant
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    if theirs.beta:
        tensors["ref_per_token_logps"] = batch["base_logps"]
    methods = {
        "TRL's": lambda: their_gradient(theirs, tensors),
        "ours": lambda: our_gradient(ours, batch),
    }
    found, last = side_by_side(methods, repeats)
    scale = max(grad.abs().max() for grad in last["TRL's"].values())
    distance = max((last["ours"][n] - grad).abs().max() for n, grad in last["TRL's"].items())
    assert distance < 1e-3 * scale, f"gradients differ by {distance / scale:.1e}"
    return [row | {"gradient_difference": float(distance / scale)} for row in found]


# ------------------------------------------------------------------ sampling, and all of it
def by_generate(trainer: CoTrainer, prompts: list, greedy=False) -> list[list[int]]:
    tokenizer, model = trainer.processing_class, trainer.model
    ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
    inputs = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    ends, width = trainer.eos_token_ids, inputs["input_ids"].shape[1]
    settings = {"max_new_tokens": trainer.players["player"].max_tokens, "do_sample": not greedy}
    settings |= {"top_k": 0, "eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id}
    with torch.no_grad():
        rows = model.generate(**inputs, **settings)[:, width:].tolist()
    stops = [next((i for i, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return [row[: stop + 1] for row, stop in zip(rows, stops)]


def by_sample(trainer: CoTrainer, prompts: list, greedy=False) -> list[list[int]]:
    tokenizer, limit = trainer.processing_class, trainer.players["player"].max_tokens
    ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
    temperature, pad_id = 0.0 if greedy else 1.0, tokenizer.pad_token_id
    return sample(trainer.model, ids, limit, temperature, trainer.eos_token_ids, pad_id)[0]


def sampling(_, ours: CoTrainer, rows: list[dict], repeats: int) -> list[dict]:
    prompts = [row["prompt"] for row in rows]
    ours.model.eval()
    assert by_generate(ours, prompts, True) == by_sample(ours, prompts, True)
    methods = {
        "`generate`": lambda: by_generate(ours, prompts),
        "ours": lambda: by_sample(ours, prompts),
    }
    found = side_by_side(methods, repeats)[0]
    ours.model.train()
    return found


def whole(theirs: GRPOTrainer, ours: CoTrainer, rows: list[dict], repeats: int) -> list[dict]:
    def their_step():
        batch = theirs._generate_and_score_completions(rows)
        their_gradient(theirs, {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)})

    def our_step():
        our_gradient(ours, ours.rollout("player", rows))

    return side_by_side({"TRL's": their_step, "ours": our_step}, repeats)[0]


def side_by_side(methods: dict, repeats: int) -> tuple[list[dict], dict]:
    """(a row for the peer, what each method returned last)."""
    extra = {name: peak_mib(method) for name, method in methods.items()}
    times, last = in_turn(methods, repeats)
    rows = compared(times)
    return [row | {"extra_mib": [extra["ours"], extra[row["against"]]]} for row in rows], last


def main():
    parser = arguments(__doc__, repeats=15)
    parser.add_argument("--model", default=str(TINY), help="a folder")
    parser.add_argument("--dataset", default="tiny")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=80, help="length limit of a solution")
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the KL penalty")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    questions = load_questions(args.dataset, args.questions, 8, seed=0)[0]
    rows = [{"prompt": solve_prompt(r["question"])} for r in questions for _ in range(args.group)]
    theirs, ours = two_trainers(args, tokenizer, rows)
    name = "embedded" if args.model == str(TINY) else Path(args.model).name
    about = f"{name}, {len(rows)} rows of at most {args.tokens} tokens, {args.threads} thread"
    about += "s" * (args.threads > 1) + ", with a KL term" * (args.kl > 0)
    parts = {"sampling": sampling, "loss and backward": update, "whole step": whole}
    for part, measure in parts.items():
        found = measure(theirs, ours, rows, args.repeats)
        keep([{"what": f"{part}, {about}"} | row for row in found], args.out)


if __name__ == "__main__":
    main()
