"""From arguments to a trained run: what the `main` of every script does, in order."""

import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from common import fast
from common.checked import check_players
from common.core import plain
from common.core.cotrainer import Player, with_adapters
from common.core.errors import ScriptError
from common.fast import vllm
from common.run.args import RunArgs
from common.run.machine import on_gpu
from common.run.memory import plan_memory
from common.run.models import load_model
from common.run.report.recording import Recorder
from common.run.session import begin, start_run

from accelerate.utils import gather_object
from datasets import Dataset
from trl import GRPOConfig

WITHOUT_EFFECT = """learning_rate max_grad_norm temperature max_completion_length beta loss_type
epsilon epsilon_high delta importance_sampling_level entropy_coef top_entropy_quantile
use_bias_correction_kl scale_rewards reward_weights weight_decay top_p top_k min_p
repetition_penalty generation_kwargs chat_template_kwargs use_vllm mask_truncated_completions
num_iterations gradient_accumulation_steps steps_per_generation max_steps num_train_epochs seed
data_seed output_dir run_name report_to save_steps save_strategy save_total_limit eval_steps
eval_strategy logging_steps num_generations per_device_train_batch_size"""
"""Fields of GRPOConfig that GRPOTrainer would obey. Here they are arguments, or belong to players.
"""


def launch(
    Trainer: type,
    args,
    *,
    load: Callable,
    evaluate: Callable,
    curves: dict[str, list[str]],
    prompt: Callable | None = None,
    group_size: int | None = None,
    config: dict | None = None,
    **more,
):
    """Trains to the end, or to Ctrl-C, and returns the trainer.

    Args:
        Trainer: the script's CoTrainer.
        args: the script's arguments.
        load: args -> (training rows, held-out rows).
        evaluate: (trainer, held-out rows) -> metrics. It is called before the first step, every
            --eval-every steps, and at the end.
        curves: title of a panel of the report -> its metrics. The first metric of each panel is
            also printed in the step's line.
        prompt: a training row's question -> its messages. With it, `step` gets --questions rows,
            each group_size times in a row. Without it `step` gets no rows that it could use.
        group_size: by default --group-size.
        config: fields of GRPOConfig in which the paper differs.
        more: what the Trainer takes besides.

    Raises:
        UserError: an argument, a file or the machine does not allow the run.
        ScriptError: the script makes a mistake.
    """
    check_config(config or {})
    script = sys.modules[Trainer.__module__].__file__
    begin(args.model)
    players = players_of(Trainer, args)
    args = plan_memory(args, players)  # with --dry-run the end
    if args.rollouts:
        vllm.find_base(args.rollouts)  # before anything is loaded
    train, held_out = load(args)
    with start_run(args, script, train, held_out) as run:
        adapters = [*dict.fromkeys(player.adapter for player in players.values())]
        model, tokenizer = load_model(
            args.model, adapters, args.lora_rank, args.four_bit, args.seed, args.plain
        )
        if prompt:
            group_size = group_size or args.group_size
            rows = args.questions * group_size
            data = [{"prompt": prompt(row["question"]), **row} for row in train]
        else:  # Trainer needs rows to loop over: one step's
            group_size = rows = 2
            data = [{"prompt": [{"role": "user", "content": ""}]}] * rows * run.processes
        config = grpo_config(args, run.folder, rows, group_size, **config or {})
        data = Dataset.from_list(data)
        trainer = Trainer(model, players, args, config, data, tokenizer, train, held_out, **more)
        trainer.engine = trainer.sampler = plain if args.plain else fast
        trainer.recorder = Recorder(trainer, run.folder / "rollouts.jsonl")
        if args.rollouts:
            word = gather_object([secrets.token_hex(4)])[0]  # the same on all processes
            trainer.sampler = vllm.Server(args.rollouts, run.folder, word)
            trainer.generation_batch_size = 1 << 30  # the server makes its own batches
            trainer.sampler.check(trainer)
            trainer.add_callback(trainer.sampler)
        run.train(trainer, evaluate, curves)
    return trainer


def check_config(fields: dict):
    if useless := fields.keys() & {*WITHOUT_EFFECT.split()}:
        raise ScriptError(
            f"GRPOConfig({min(useless)}=...) would have no effect, or lead the run astray: rates, "
            f"lengths and temperatures belong to each Player, loss and advantages to the script, "
            f"and kl, steps, seed, out, save_every and their like are arguments"
        )


def players_of(Trainer: type, args) -> dict[str, Player]:
    """Returns what `define_players` returns, with the names of the adapters filled in."""
    try:
        players = with_adapters(Trainer.define_players(args))
    except (TypeError, AttributeError) as error:
        sentence = f"define_players must be a @staticmethod, args -> {{name: Player}}: {error}"
        raise ScriptError(sentence).with_traceback(error.__traceback__) from None
    check_players(players)
    return players


# ------------------------------------------------------------------ for TRL
def grpo_config(args: RunArgs, folder: Path, rows: int, group_size: int = 2, **more) -> GRPOConfig:
    """Returns the configuration of TRL's trainer. It has no learning rates, lengths or
    temperatures, which belong to the players, and no loss, which is in common/core/cotrainer.py.

    Args:
        rows: rows that the data loader gives each process for one optimiser step.
        group_size: how often the data loader repeats each question. A script that does not use the
            loader's rows takes 2, the least that TRL allows.
        more: fields of GRPOConfig in which a paper differs.
    """
    gpu = on_gpu(args.model)
    options = {
        "output_dir": str(folder),
        "seed": args.seed,
        "max_steps": args.steps,
        "per_device_train_batch_size": rows,  # `CoTrainer.update` makes micro-batches
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_generations": group_size,
        "max_grad_norm": 0.0,  # `CoTrainer.update` clips
        "lr_scheduler_type": "constant",
        "logging_steps": 1,  # the player is a property of the step
        "save_steps": args.save_every,
        "report_to": args.report_to,
        "project": "duet",  # for trackers, as run_name is; a resumed run keeps its name
        "run_name": Path(folder).name,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "gradient_checkpointing": args.gradient_checkpointing == "on",
        "gradient_checkpointing_kwargs": {"use_reentrant": False},  # autograd.grad needs it
        "bf16": gpu,
        "use_cpu": not gpu,  # Apple's GPU is not used: nothing here was ever tried on it
        "optim": "adamw_torch_fused",
    }
    return GRPOConfig(**options | more)
