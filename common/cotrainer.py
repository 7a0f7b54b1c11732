"""CoTrainer: several players in one `GRPOTrainer`, each a LoRA adapter on one shared base.

TRL keeps doing what it does: the loop, sampling, reward calls, group advantages, the clipped loss, optimiser, schedule,
logging, checkpoints, `accelerate launch`. `CoTrainer` adds three verbs, and each update trains exactly one adapter:

    act(player, prompts) -> texts     sample without training (the verifier judging, a solver estimating difficulty)
    turn(player, rows)   -> batch     TRL's own rollouts, rewards and group advantages, for that player
    join(batches)        -> batch     several turns of ONE adapter in one update, padded to one shape

and, for a paper in which a second player learns in the same step, before the trainer's own update:

    update(batch)                     one optimiser step of the current player's adapter on this batch, at once

A script overrides `_generate_and_score_completions(rows)`, plays its paper's turns with these verbs, writes
`batch["advantages"]` where the paper needs per-token credit, (B, T), or another normalisation, and returns the batch.
On the way it may call `become(player)`, `gather(list)` over processes and `log_metric(name, value)`, and keep in `memory`,
a dict, what must survive a checkpoint.

This is the only file that overrides TRL. It relies on internals, so requirements.txt pins trl==1.16.* and
tests/test_trl_contract.py fails first if they move. What is overridden, and why:

    create_optimizer                         one AdamW with a parameter group per adapter, so that each has its own lr
    _generate_and_score_completions          (by the script) whose turn it is
    _calculate_rewards                       keeps texts and rewards, which TRL's batch leaves out
    _prepare_inputs                          a few rows are recorded;
                                             rows that cannot matter are dropped, micro-batches sorted by length and trimmed
    _tokenize_prompts                        a model's text cannot pass for the template's own marks
    _generate_single_turn                    common/sampling.py on a CPU, where it is about twice as fast as `generate`
    _get_per_token_logps_and_entropies       log-probs through common/logprob.py; a prompt that rows share is run once
    _compute_loss, log                       metrics under the player's name; a NaN stops the run
    _save_checkpoint, _load_from_checkpoint  `memory`: what a script keeps between steps
    create_model_card                        none: it could not name the base, nor say what the paper's players are

Shapes: P questions, G samples each, B = P * G rows, T completion tokens, H hidden, V vocabulary.
"""

import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.answers import token_texts
from common.data import UserError
from common.logprob import NonFiniteError, linear_logprob
from common.sampling import can_sample, sample

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import DynamicCache, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

RECORDED_TOKENS = 512  # of an answer, in rollouts.jsonl

PREFILL_TOKENS = 64
"""Tokens per row that go through the model at once when `generate` reads prompts."""


@dataclass
class Player:
    """What TRL keeps once per trainer and co-training needs once per player."""

    rewards: list[Callable]
    """reward functions, called as TRL calls them (empty for a player that only acts)"""
    lr: float
    """learning rate of its adapter"""
    max_tokens: int
    """completion length limit"""
    group_size: int = 8
    """rows whose rewards are compared with each other"""
    temperature: float = 1.0
    """sampling temperature in its turns"""
    adapter: str = ""
    """adapter it plays with; empty = one named after the player"""


class CoTrainer(GRPOTrainer):
    """See the top of this file. `memory` is a JSON-able dict that is saved with every checkpoint."""

    def __init__(self, model, players: dict[str, Player], args: GRPOConfig, kl: float = 0.0, rows_at_once: int = 256, **kwargs):
        for name, player in players.items():
            player.adapter = player.adapter or name
        self.players = players
        self.rows_at_once = rows_at_once  # in sampling: what bounds the KV cache
        self.memory = {}
        self.player = next(iter(players))
        rows = args.per_device_train_batch_size * args.steps_per_generation
        for name, player in players.items():
            if rows % player.group_size:
                raise UserError(
                    f"{rows} rows per step and process are not a multiple of the {name}'s group of {player.group_size}."
                )
        # beta = 0 here: with a ready PeftModel and beta != 0 TRL would look for an adapter called "default" and copy it.
        # Set afterwards, TRL takes as reference the adapter named "ref" if there is one, else the base, adapters off.
        args.beta = 0.0
        args.weight_decay = 0.0  # it would move an adapter whose gradient is exactly zero
        args.logging_steps = 1  # the player is a property of the step
        args.logging_nan_inf_filter = False  # we want to see a NaN, and stop
        super().__init__(model, [lambda completions, **_: [0.0] * len(completions)], args, **kwargs)
        self.beta = kl
        self._trainable()
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:  # on a 4-bit base TRL has made them bfloat16, in which Adam's steps of 1e-5 vanish
                parameter.data = parameter.data.float()
        _install_scoring(model.get_base_model())
        self.add_callback(_SkipFlatSteps(self))

    # ------------------------------------------------------------------ the three verbs
    def become(self, name: str):
        """Make `name` the player that samples, is scored and is trained from here on."""
        player = self.players[name]
        self.player = name
        self.model.set_adapter(player.adapter)
        self._trainable()
        self.num_generations = player.group_size
        self.max_completion_length = player.max_tokens
        self.temperature = player.temperature
        self.reward_funcs = player.rewards
        self.reward_func_names = [f.__name__ for f in player.rewards]
        self.reward_processing_classes = [None] * len(player.rewards)
        self.reward_weights = torch.ones(len(player.rewards))
        self._set_sampling(player.max_tokens, player.temperature)
        if self.use_vllm:
            self._last_loaded_step = -1  # vLLM holds the weights of the player before

    @torch.no_grad()
    def act(self, name: str, prompts: list, greedy: bool = False) -> list[str]:
        """Sample one text per prompt from `name`, without training on it. Every process gives its own prompts."""
        before = self.player
        self.become(name)
        if greedy:
            self._set_sampling(self.players[name].max_tokens, 0.0)
        texts = []
        if prompts:
            completion_ids, _ = self._generate_single_turn(*self._tokenize_prompts(prompts), 1)
            texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        self.become(before)
        return texts

    def turn(self, name: str, rows: list[dict]) -> dict:
        """One round of `name`: a completion per row, its reward, and TRL's group-normalised advantages.

        Args:
            rows: as TRL wants them, {"prompt": ..., columns for the reward functions}; groups adjacent.

        Returns:
            TRL's batch (prompt_ids, prompt_mask, completion_ids, completion_mask (B, T), advantages (B,), ...), with
            rewards (B,) float, texts (B strings) and notes (B dicts, see `record`) added, all of this process.
        """
        self.become(name)
        with self._metrics_named(name):
            batch = GRPOTrainer._generate_and_score_completions(self, rows)
        self._trainable()  # the reference pass of a KL term leaves only one adapter so
        mine = slice(self.accelerator.process_index * len(rows), (self.accelerator.process_index + 1) * len(rows))
        batch["rewards"] = self._rewards_per_func.nansum(1)[mine]  # (B,)
        batch["texts"] = self._texts
        batch["notes"] = [
            # the last message is the user's; a reward function may leave rows out, which are NaN
            {"player": name, "prompt": row["prompt"][-1]["content"], "rewards": {k: r for k, r in paid if r == r}}
            for row, paid in zip(rows, [zip(self.reward_func_names, r) for r in self._rewards_per_func[mine].tolist()])
        ]
        return batch

    def join(self, batches: list[dict]) -> dict:
        """Several turns of one adapter as one batch, for one update on all of them.

        Prompts are padded on the left and completions on the right to the widest; advantages become (B, T)."""
        pad_id = self.processing_class.pad_token_id
        joined = {"num_items_in_batch": sum(batch["num_items_in_batch"] for batch in batches)}
        for batch in batches:
            if batch["advantages"].dim() == 1:
                batch["advantages"] = batch["advantages"][:, None] * batch["completion_mask"]  # (B,) -> (B, T)
        for key in batches[0].keys() - joined.keys():
            values = [batch[key] for batch in batches]
            if isinstance(values[0], list):  # texts, notes
                joined[key] = [value for of_one in values for value in of_one]
                continue
            if values[0].dim() == 2:
                width = max(v.shape[1] for v in values)
                left = key.startswith("prompt")
                fill = pad_id if key.endswith("_ids") else 0
                values = [F.pad(v, (width - v.shape[1], 0) if left else (0, width - v.shape[1]), value=fill) for v in values]
            joined[key] = torch.cat(values)
        return joined

    def update(self, batch: dict):
        """One optimiser step of the current player's adapter on this batch, at once: TRL's loss, micro-batch by micro-batch,
        outside of the trainer's own step, whose batch is still to come."""
        self.record(batch)
        outer = self.current_gradient_accumulation_steps
        self.current_gradient_accumulation_steps = self.args.steps_per_generation
        model = self.accelerator.unwrap_model(self.model)  # gradients are exchanged by hand, in step_adapter
        for micro_batch in self._micro_batches(batch, self.args.steps_per_generation):
            self.backward_now(self._compute_loss(model, micro_batch), self.players[self.player].adapter)
        self.current_gradient_accumulation_steps = outer
        if not self.flat:
            norm = self.step_adapter(self.players[self.player].adapter, self.args.max_grad_norm)
            self.log_metric(f"{self.player[:3]}/grad_norm", norm)
        self.model.zero_grad(set_to_none=True)

    def backward_now(self, loss: torch.Tensor, adapter: str):
        """Add the gradient of `loss` to the adapter's, without DDP noticing: loss.backward() would fire DDP's hooks, which
        then take this adapter to be part of the trainer's own backward pass."""
        parameters = [p for n, p in self.model.named_parameters() if f".{adapter}." in n]
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True)):
            if g is not None:
                p.grad = g if p.grad is None else p.grad + g

    def step_adapter(self, adapter: str, max_norm: float) -> float:
        """The one AdamW's step on the gradients `adapter` has, averaged over processes and clipped; returns their norm.
        All other adapters have no gradient now and are left alone, momentum included."""
        parameters = [p for n, p in self.model.named_parameters() if f".{adapter}." in n and p.grad is not None]
        for p in parameters:
            p.grad = self.accelerator.reduce(p.grad, "mean")
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()
        if not math.isfinite(norm):
            raise self._diverged(f"grad_norm is {norm}")
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's wrapper would wait for its turn
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    # ------------------------------------------------------------------ overrides: the training phase
    def create_optimizer(self, model=None):
        """One AdamW, one parameter group per adapter. An adapter without gradient (None) is left alone by AdamW."""
        if self.optimizer is None:
            adapters = {player.adapter: player.lr for player in self.players.values()}
            groups = [
                {
                    "params": [p for n, p in self.model.named_parameters() if f".{adapter}." in n and "lora_" in n],
                    "lr": lr,
                    "weight_decay": self.args.weight_decay,  # Trainer gives it per group: left out, AdamW's own 0.01 counts
                }
                for adapter, lr in adapters.items()
            ]
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self._texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
        self._rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards_per_func

    def _tokenize_prompts(self, prompts: list):
        """A player's prompt quotes what another one wrote. `<|im_end|>` spelled out in ordinary tokens would be read as the end
        of the message, and the writer could go on in the judge's place: such marks are blanked in what is quoted."""
        added = self.processing_class.added_tokens_decoder.values()  # Llama's <|start_header_id|> is in no named list
        special = {*self.processing_class.all_special_tokens, *(str(token) for token in added if token.special)}
        marks = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
        return super()._tokenize_prompts(
            [[{**message, "content": marks.sub(" ", message["content"])} for message in prompt] for prompt in prompts]
        )

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        if self.use_vllm:  # it schedules rows by itself
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, has_tool_images)
        neutral = self.top_p == 1.0 and not self.top_k and not self.min_p and self.repetition_penalty == 1.0
        ours = neutral and self.accelerator.device.type == "cpu" and can_sample(self.model)
        settings = self.generation_config
        temperature = settings.temperature if settings.do_sample else 0.0
        completions = []
        for start in range(0, len(prompt_ids), self.rows_at_once):
            part = prompt_ids[start : start + self.rows_at_once]
            if ours:
                model, pad_id = self.accelerator.unwrap_model(self.model), self.processing_class.pad_token_id
                ids, _ = sample(model, part, settings.max_new_tokens, temperature, self.eos_token_ids, pad_id)
            else:
                # TRL switches checkpointing on again after it, and with it one more hook on the embedding every time
                self.accelerator.unwrap_model(self.model).get_base_model().disable_input_require_grads()
                ids, _ = super()._generate_single_turn(part, images, multimodal_fields, num_generations, has_tool_images)
            completions += ids
        return completions, None  # TRL wants log-probs only where sampler and trainer disagree (vLLM)

    def _prepare_inputs(self, rows):
        """TRL's, with exact savings in place of its shuffle (the order of rows inside a step is immaterial).

        A row whose advantages are all zero has zero gradient if there is no KL term and no entropy bonus: it is dropped
        before the forward pass. Rows are sorted by length and each micro-batch is trimmed to its own longest prompt and
        completion. The loss divides by `num_items_in_batch`, the tokens of *all* rows, so the gradient is unchanged."""
        steps = self.args.steps_per_generation
        if self._step % steps == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(rows)
            self.record(batch)
            self._buffered_inputs = self._micro_batches(batch, steps)
        return self._buffered_inputs[self._step % steps]

    def _micro_batches(self, batch: dict, count: int) -> list[dict]:
        """The batch in `count` parts; parts that are not needed are empty and come first (DDP exchanges at the last)."""
        micro = self.args.per_device_train_batch_size
        live = (batch["advantages"].reshape(len(batch["advantages"]), -1) != 0).any(1)  # (B,)
        self.flat = self.beta == 0.0 and not self.accelerator.reduce(live.sum(), "sum").item()
        order = torch.argsort(batch["completion_mask"].sum(1), stable=True)
        needed = min(count, math.ceil(len(order) / micro))
        # what makes it exact: no KL, no entropy bonus, and a normaliser that counts the tokens of the whole batch
        if self.beta == 0.0 and not self._entropy_bonus_enabled and self.loss_type in ("dapo", "cispo"):
            # TRL gathers over processes in every micro-batch: all need as many rows and parts as the one with the most
            rows_left = max(self.gather([max(1, int(live.sum()))]))
            needed = math.ceil(rows_left / micro)
            order = torch.cat([order[live[order]], order[~live[order]]])[:rows_left]
        parts = [{}] * (count - needed)
        for index in torch.tensor_split(order, needed):
            rows = {k: v[index] if v.dim() else v for k, v in batch.items() if isinstance(v, torch.Tensor)}
            prompt, completion = (int(rows[f"{part}_mask"].sum(1).max()) for part in ("prompt", "completion"))
            for key, value in rows.items():
                if value.dim() == 2:
                    rows[key] = value[:, -prompt:] if key.startswith("prompt") else value[:, :completion]
            parts.append(rows)
        return parts

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **_):
        """(log-probs, entropies, None), the first two (B, T): TRL's contract, computed by common/logprob.py."""
        logps, entropies = [], []
        size = batch_size or len(input_ids)
        for start in range(0, len(input_ids), size):
            ids, mask = input_ids[start : start + size], attention_mask[start : start + size]
            # through the wrapped model's forward, so that DDP sees it; see _install_scoring
            try:
                with self.accelerator.autocast():
                    logp, entropy = model(input_ids=ids, attention_mask=mask, score=(logits_to_keep, self.temperature))
            except NonFiniteError:
                raise self._diverged("hidden states are no longer finite") from None
            logps.append(logp)
            entropies.append(entropy)
        return torch.cat(logps), torch.cat(entropies), None

    def _compute_loss(self, model, inputs):
        if not inputs:  # a part that was not needed: a zero that backward accepts
            return 0.0 * next(p for n, p in model.named_parameters() if f".{self.players[self.player].adapter}." in n).sum()
        with self._metrics_named(self.player):
            return super()._compute_loss(model, inputs)

    # ------------------------------------------------------------------ overrides: logging and checkpoints
    def log(self, logs: dict, start_time: float | None = None):
        for key in ("loss", "grad_norm"):
            if key in logs and not math.isfinite(float(logs[key])):
                raise self._diverged(f"{key} is {logs[key]}")
        prefix = f"{self.player[:3]}/"
        super().log({prefix + k if k in ("loss", "grad_norm", "learning_rate") else k: v for k, v in logs.items()}, start_time)

    def create_model_card(self, *_, **__):
        pass

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            # written last: a checkpoint without it was cut short
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            (folder / "memory.json").write_text(json.dumps(self.memory))

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Every adapter by its own name; Trainer would load into the active one."""
        for adapter in {player.adapter for player in self.players.values()}:
            state = load_file(Path(resume_from_checkpoint) / adapter / "adapter_model.safetensors")
            set_peft_model_state_dict(self.model, state, adapter_name=adapter)
        self.memory = json.loads((Path(resume_from_checkpoint) / "memory.json").read_text())

    def record(self, batch: dict):
        """A few rows of this update for rollouts.jsonl, see docs/report.md. Whatever a script adds to a row's note is kept.

        Args:
            batch: completion_ids and completion_mask (B, T), advantages (B,) or (B, T), and notes, B dicts with player,
                prompt and rewards; without notes nothing is recorded."""
        if not self.accelerator.is_main_process:
            return
        with open(Path(self.args.output_dir) / "rollouts.jsonl", "a") as file:
            for i in rows_to_show(batch.get("notes", [])):
                there = batch["completion_mask"][i].bool()  # (T,)
                ids, A = batch["completion_ids"][i][there], batch["advantages"][i].expand_as(there)[there]  # (T_i,) each
                row = {
                    "step": self.state.global_step + 1,
                    **batch["notes"][i],
                    "length": len(ids),
                    "tokens": token_texts(ids[:RECORDED_TOKENS].tolist(), self.processing_class),
                    "advantages": [float(f"{a:.4g}") for a in A[:RECORDED_TOKENS].tolist()],
                }
                file.write(json.dumps(row) + "\n")

    # ------------------------------------------------------------------ small things
    def _diverged(self, what: str) -> UserError:
        return UserError(
            f"step {self.state.global_step}: the {self.player}'s {what}. The run stops here and keeps its last checkpoint "
            f"in {self.args.output_dir}; a lower --lr is the first thing to try."
        )

    def gather(self, values: list) -> list:
        """The lists of all processes, one after the other."""
        return gather_object(values)

    def log_metric(self, name: str, value: float):
        """A number for metrics.jsonl under its full name, such as "ver/balanced_accuracy"."""
        self._metrics["train"][name].append(value)

    @contextmanager
    def _metrics_named(self, name: str):
        """TRL's own metric names get the first three letters of the player: gen/reward, ver/entropy."""
        outer, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        try:
            yield
        finally:
            inner, self._metrics["train"] = self._metrics["train"], outer
            named = ("num_tokens", "co/", *(f"{player[:3]}/" for player in self.players))  # already
            for key, values in inner.items():
                outer[key if key.startswith(named) else f"{name[:3]}/{key}"].extend(values)

    def _set_sampling(self, max_tokens: int, temperature: float):
        """The generation settings TRL builds once, for this player. Temperature 0 = greedy."""
        if self.use_vllm:  # it has settings of its own, and TRL builds no others
            self.vllm_generation.max_completion_length, self.vllm_generation.temperature = max_tokens, temperature
            return
        sample = temperature > 0
        self.generation_kwargs = {
            **self.generation_kwargs,
            "max_new_tokens": max_tokens,
            "do_sample": sample,
            "temperature": temperature if sample else 1.0,
        }
        # prompts are read PREFILL_TOKENS a row at a time: all at once, the MLP would need more memory than the KV cache
        chunks = {"prefill_chunk_size": PREFILL_TOKENS, "disable_compile": True}
        self.generation_config = GenerationConfig(**self.generation_kwargs, **chunks)

    def _trainable(self):
        """All adapters keep requires_grad: set_adapter would turn the idle ones off, and DDP fixes its list at the start.
        An idle adapter is not part of the graph, so its gradient is None and AdamW does not touch it."""
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_(any(f".{p.adapter}." in name for p in self.players.values()))


def rows_to_show(notes: list[dict]) -> list[int]:
    """Of each player two prompts, and of each of these two answers: the first one, and the first that was rewarded otherwise,
    or else the last. Prompts with such an answer come first: contrast shows credit, and the metrics show proportions."""
    groups = defaultdict(lambda: defaultdict(list))  # player -> prompt -> its rows
    for i, note in enumerate(notes):
        groups[note["player"]][note["prompt"]].append(i)
    chosen = []
    for of_player in groups.values():
        pairs = []
        for first, *others in of_player.values():
            otherwise = [i for i in others if notes[i]["rewards"] != notes[first]["rewards"]]
            pairs.append((not otherwise, [first, *(otherwise[:1] or others[-1:])]))
        chosen += [i for _, pair in sorted(pairs, key=lambda pair: pair[0])[:2] for i in pair]
    return chosen


class _SkipFlatSteps(TrainerCallback):
    """A step whose advantages are all zero must not move anything, but Adam's momentum would."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **_):
        if self.trainer.flat:
            self.trainer.optimizer.zero_grad(set_to_none=True)


def _install_scoring(base):
    """Let `model(..., score=(T, temperature))` return (logprob, entropy), both (B, T), of the last T tokens.

    A keyword of forward, because only a forward through the outermost wrapper keeps DDP's gradient exchange alive. TRL
    patches the same place for its own fused head; without the keyword its forward runs, so generation is unchanged."""
    for setting in ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"):
        if getattr(base.config.get_text_config(), setting, None) not in (None, 1.0):
            raise UserError(f"--model {base.config._name_or_path}: heads with {setting} are not supported.")
    original = base.forward

    @functools.wraps(original)  # keeps the signature: generate() validates its arguments against it
    def forward(*args, score=None, **kwargs):
        if score is None:
            return original(*args, **kwargs)
        length, temperature = score
        input_ids, attention_mask = kwargs["input_ids"], kwargs["attention_mask"]
        hidden = _hidden_states(base, input_ids, attention_mask, length)  # (B, T, H): the state before each token
        targets, valid = input_ids[:, -length:], attention_mask[:, -length:].bool()  # (B, T)
        head = base.get_output_embeddings()
        logp, entropy = linear_logprob(hidden[valid], head.weight, targets[valid], head.bias, temperature)  # (N,) each
        zeros = torch.zeros(valid.shape, dtype=logp.dtype, device=logp.device)
        return zeros.masked_scatter(valid, logp), zeros.masked_scatter(valid, entropy)  # (B, T)

    base.forward = forward


def _hidden_states(base, input_ids, attention_mask, length: int):
    """(B, P + T) -> (B, T, H), the states that predict the last T tokens. Rows with the same prompt run it once: its keys
    and values are copied to every row, and their gradients flow back through the copies."""
    marked = 2 * input_ids[:, :-length] + attention_mask[:, :-length]  # token and padding in one number
    prompts, rows = torch.unique(marked, dim=0, return_inverse=True)  # (U, P), (B,)
    # not with activation checkpointing, which cannot keep a cache
    if marked.shape[1] == 1 or len(prompts) > len(rows) / 2 or base.is_gradient_checkpointing or not can_sample(base):
        states = base.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return states[:, -length - 1 : -1]
    # without their last token, which runs with every row: so no state of a prompt is needed, only its keys and values
    cache = DynamicCache()
    base.base_model(input_ids=prompts[:, :-1] // 2, attention_mask=prompts[:, :-1] % 2, past_key_values=cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[rows], layer.values[rows]
    return base.base_model(
        input_ids=input_ids[:, -length - 1 : -1], attention_mask=attention_mask[:, :-1], past_key_values=cache
    ).last_hidden_state
