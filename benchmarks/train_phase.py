"""Loss and backward pass of a batch, ours against TRL's own: python benchmarks/train_phase.py

One batch of rollouts, half of its groups constant, ragged lengths, on two copies of one model with
one LoRA adapter: TRL's GRPOTrainer with its own `_compute_loss` and micro-batches, CoTrainer with
its own. Both compute the same: one update per batch, so a ratio of 1; a mean over the tokens of the
batch; and with --kl the k3 penalty as in the papers, for which TRL's use_bias_correction_kl has to
be off. The log-probs of the base are given to both. Entropy is computed by both, because both log
it. The gradients must agree. See side_by_side.py for what is written.
"""

import copy
import tempfile

from side_by_side import arguments, compared, in_turn, keep  # isort: skip
from common.adapters import with_adapters
from common.advantage import group_advantage
from common.args import RunArgs, grpo_config
from common.cotrainer import CoTrainer, Player
from common.model import TINY
from common.scoring import in_parts, live_rows

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

SHAPES = {  # rows, group, micro-batch, longest prompt, longest completion
    "embedded": (128, 8, 32, 64, 64),
    "qwen2.5-0.5b": (16, 4, 4, 64, 96),
}


def load(shape: str):
    if shape == "embedded":
        return AutoModelForCausalLM.from_pretrained(TINY)
    import gpu

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(gpu.SHAPES["0.5b"])


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


def rollouts(shape: str, vocabulary: int, pad_id: int) -> dict:
    """Random tokens. Completions have uniform lengths; prompts are alike in a group."""
    rows, group, _, longest_prompt, longest = SHAPES[shape]
    draw = torch.Generator().manual_seed(1)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=draw)

    lengths = integers(longest_prompt // 3, longest_prompt + 1, rows // group)
    prompt_lengths = lengths.repeat_interleave(group)  # (B,)
    lengths = integers(longest // 6, longest + 1, rows)  # (B,)
    prompt_mask = (torch.arange(longest_prompt).flip(0) < prompt_lengths[:, None]).long()
    completion_mask = (torch.arange(longest) < lengths[:, None]).long()  # (B, T)
    prompts = integers(5, vocabulary, rows // group, longest_prompt).repeat_interleave(group, 0)
    completions = integers(5, vocabulary, *completion_mask.shape)
    rewards = integers(0, 2, rows).float()
    rewards[: rows // 2] = 1.0  # half of the groups constant
    return {
        "prompt_ids": torch.where(prompt_mask.bool(), prompts, pad_id),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.where(completion_mask.bool(), completions, pad_id),
        "completion_mask": completion_mask,
        "advantages": group_advantage(rewards, group),
        "num_items_in_batch": completion_mask.sum(),
    }


def two_trainers(shape: str, tokenizer, kl: float) -> tuple[GRPOTrainer, CoTrainer]:
    rows, group, micro_batch, _, longest = SHAPES[shape]
    steps = rows // micro_batch
    shared = {"output_dir": tempfile.mkdtemp(), "bf16": False, "report_to": "none", "max_steps": 1}
    shared |= {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": steps}
    shared |= {"steps_per_generation": steps, "gradient_checkpointing": False}
    own = {"num_generations": group, "max_completion_length": longest, "loss_type": "dapo"}
    own |= {"use_bias_correction_kl": False, "beta": 0.0}

    def no_reward(completions, **_):
        return [0.0] * len(completions)

    dataset = Dataset.from_list([{"prompt": "3+4 mod 100"}] * rows)
    data = {"train_dataset": dataset, "processing_class": tokenizer}
    other, model = two_adapters(load(shape))
    theirs = GRPOTrainer(other, no_reward, GRPOConfig(**shared, **own), **data)
    theirs.beta = kl  # set now, because TRL would make a reference model of its own
    players = with_adapters({"player": Player([no_reward], 1e-3, longest, group)})
    args = RunArgs(micro_batch=micro_batch, checkpointing="off")
    args.steps, args.kl = 1, kl
    config = grpo_config(args, tempfile.mkdtemp(), rows, group)
    ours = CoTrainer(model, players, args, config, dataset, tokenizer)
    theirs.model.train()
    theirs.current_gradient_accumulation_steps = steps
    return theirs, ours


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


def measure(shape: str, repeats: int, kl: float) -> list[dict]:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    vocabulary = len(tokenizer) if shape == "embedded" else 151936
    theirs, ours = two_trainers(shape, tokenizer, kl)
    batch = rollouts(shape, vocabulary, tokenizer.pad_token_id)
    if kl:
        logps = ours.log_probs(None, batch)  # (B, T) of the base, under the name that each gives it
        batch |= {"ref_per_token_logps": logps, "base_logps": logps}
    methods = {
        "TRL's": lambda: their_gradient(theirs, batch),
        "ours": lambda: our_gradient(ours, batch | {"player": "player"}),
    }
    times, last = in_turn(methods, repeats)
    scale = max(grad.abs().max() for grad in last["TRL's"].values())
    distance = max((last["ours"][n] - grad).abs().max() for n, grad in last["TRL's"].items())
    threads = torch.get_num_threads()
    what = f"loss and backward of a batch, {shape}, {threads} thread{'s' * (threads > 1)}"
    what += ", with a KL term" if kl else ""
    found = {"what": what, "gradient_difference": float(distance / scale)}
    return [found | row for row in compared(times)]


def main():
    parser = arguments(__doc__, repeats=25)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the KL penalty")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for shape in args.shapes:  # a step of the large one takes a minute
        repeats = args.repeats if shape == "embedded" else min(args.repeats, 3)
        keep(measure(shape, repeats, args.kl), args.out)


if __name__ == "__main__":
    main()
