"""Mistakes in what a script hands to CoTrainer. Each of them once gave a plausible run with wrong
gradients, or an error that did not name it.

What is certainly wrong raises a ScriptError. What nearly certainly is prints a warning, once a run.
docs/your-own-script.md lists what cannot be known, and where it shows.
"""

import difflib
import functools
import inspect
import itertools
import math
import random
import re
from collections.abc import Callable, Hashable
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakKeyDictionary

from common.batch import Batch
from common.errors import ScriptError, say
from common.run.memory import QUESTION_TOKENS
from common.run.models import not_taught

import torch

TWICE = (
    "at a second update its samples are not the player's own any more, and the loss has no ratio "
    "that would say so"
)
NUMBERS = itertools.count()
ROLES = ("system", "user", "assistant", "tool")
TRLS = "completion completions completion_ids prompts trainer_state log_extra log_metric".split()
WARNED = set()  # sentences of this process


class Fate:
    """What is remembered of one rollout, by its number in `Batch.rollouts`."""

    trained = frozenset()  # players that have been trained on it
    rewarded = False  # by `set_rewards`
    rewards: torch.Tensor | None = None  # (B,), of which the advantages are made
    part: tuple | None = None  # (batch, its advantages) as `concat` has copied them

    def __init__(self, batch: Batch):
        self.player, self.advantages = batch.player, batch.advantages


class Memory:
    """What is remembered of one trainer."""

    def __init__(self, trainer):
        self.attributes = {*vars(trainer)}  # those that are not the script's own
        self.fates = {}  # number of a rollout -> Fate
        self.idle = {}  # player -> its latest updates in a row without a gradient
        self.texts = {}  # player -> the texts of its latest rollout
        self.looked_at = set()  # players whose own loss was looked at
        self.train_questions = None  # texts, once an evaluation has asked
        self.stepped = False


MEMORY = WeakKeyDictionary()  # trainer -> Memory


def begin(trainer):
    """A trainer is ready; what it has now is not the script's."""
    MEMORY[trainer] = Memory(trainer)


def remember(trainer, batch: Batch):
    """A rollout, as it is returned."""
    number = next(NUMBERS)
    batch.rollouts, fate = [number], Fate(batch)
    if batch.advantages is not None:
        check_size(batch.player, batch.rewards)
        fate.rewards = batch.rewards.clone()
    MEMORY[trainer].fates[number] = fate
    MEMORY[trainer].texts[batch.player] = batch.texts
    if trainer.state.global_step == 0 and len(batch):
        check_estimate(trainer, batch)
    if trainer.state.global_step == 0 and len(batch) >= 16:
        if (cut := cut_share(trainer, batch)) >= 0.95:
            warn_once(f"{cut:.0%} of the {batch.player}'s completions are cut at its max_tokens")


def check_estimate(trainer, batch: Batch):
    """Whether the memory was planned for prompts as long as the first ones are."""
    name, reads = batch.player, trainer.player_named(batch.player).reads
    longest, planned = int(batch.prompt_mask.sum(1).max()), QUESTION_TOKENS + reads
    if longest > planned:
        warn_once(
            f"prompts of the {name} have up to {longest} tokens, and memory was planned for "
            f"{planned}: {QUESTION_TOKENS} of instructions and question, and its reads={reads} of "
            f"other players' texts. The run may need more memory than --dry-run says"
        )


def fates(trainer, batch: Batch) -> list[Fate]:
    return [MEMORY[trainer].fates[number] for number in batch.rollouts]


def warn_once(sentence: str, more: str = ""):
    """more: what differs each time, such as a text that is quoted."""
    if sentence not in WARNED:
        WARNED.add(sentence)
        say(f"warning: {sentence}{more}")


def ending(text: str) -> str:
    """The last words of a text, quoted."""
    return repr(" ".join(text.split()[-8:])[-160:])


# ------------------------------------------------------------------ players
WITHOUT_EFFECT = """learning_rate max_grad_norm temperature max_completion_length beta loss_type
epsilon epsilon_high delta importance_sampling_level entropy_coef top_entropy_quantile
use_bias_correction_kl scale_rewards reward_weights weight_decay top_p top_k min_p
repetition_penalty generation_kwargs chat_template_kwargs use_vllm mask_truncated_completions
num_iterations gradient_accumulation_steps steps_per_generation max_steps num_train_epochs seed
data_seed output_dir run_name report_to save_steps save_strategy save_total_limit eval_steps
eval_strategy logging_steps num_generations per_device_train_batch_size"""


def check_config(fields: dict, curves: dict):
    """What `launch` is given. GRPOTrainer would heed these fields of GRPOConfig, and here they
    stand elsewhere.
    """
    if odd := [title for title, names in curves.items() if not isinstance(names, list)]:
        raise ScriptError(f"curves: {odd[0]!r} needs a list of metrics; got {curves[odd[0]]!r:.60}")
    if useless := fields.keys() & {*WITHOUT_EFFECT.split()}:
        raise ScriptError(
            f"GRPOConfig({min(useless)}=...) would have no effect, or lead the run astray: rates, "
            f"lengths and temperatures belong to each Player, loss and advantages to the script, "
            f"and kl, steps, seed, out, save_every and their like are arguments"
        )


def check_players(players: dict):
    """name -> Player. Metrics begin with a player's name, and those of a batch of several with
    their adapter's; an adapter has one learning rate and one clipping norm.
    """
    for name, player in players.items():
        for other, its in players.items():
            for what in ("lr", "max_grad_norm"):
                one, two = getattr(player, what), getattr(its, what)
                if player.adapter == its.adapter and one != two:
                    raise ScriptError(
                        f"{name!r} and {other!r} play with one adapter, which has one {what}; "
                        f"got {one} and {two}"
                    )
        functions = player.rewards if isinstance(player.rewards, list | tuple) else [None]
        names = [getattr(function, "__name__", None) for function in functions]
        if None in names or len(set(names)) < len(names):
            raise ScriptError(
                f"the rewards of {name!r} must be a list of functions with names of their own, by "
                f"which they are logged; got {player.rewards!r:.80}"
            )
        if name in ("co", "eval") or "/" in name:
            raise ScriptError(f"a player cannot be called {name!r}: other metrics begin with it")
        counts = (player.group_size, player.max_tokens)
        if not all(isinstance(n, int) and n >= 1 for n in counts) or player.lr < 0:
            raise ScriptError(
                f"{name!r}: group_size {player.group_size} and max_tokens {player.max_tokens} must "
                f"be whole numbers from 1, lr {player.lr} at least 0"
            )
        owner = players.get(player.adapter, player)
        if owner.adapter != player.adapter:
            raise ScriptError(
                f"{name!r} plays with the adapter {player.adapter!r}, the name of the player "
                f"{player.adapter!r}, who plays with {owner.adapter!r}"
            )


# ------------------------------------------------------------------ rollouts
def check_prompts(trainer, name: str, prompts: list):
    """Of a rollout or of `generate`: messages, of which the last is not the player's own."""
    if not prompts:  # of a process that has none
        return
    for prompt in prompts:
        messages = prompt if isinstance(prompt, list) and prompt else [None]
        if not all(
            isinstance(m, dict) and "role" in m and isinstance(m.get("content"), str)
            for m in messages
        ):
            example = '[{"role": "user", "content": "..."}]'
            raise ScriptError(
                f"a prompt of the {name} must be messages, as {example}; got {prompt!r:.80}"
            )
        for message in messages:
            if message["role"] not in ROLES:
                raise ScriptError(
                    f"a prompt of the {name} has the role {message['role']!r}, which chat "
                    f"templates leave out or misread; it can be {', '.join(ROLES)}"
                )
        if messages[-1]["role"] in ("assistant", "system"):
            raise ScriptError(
                f"a prompt of the {name} ends with a message of the {messages[-1]['role']}; the "
                f"last one must be the user's, which the {name} answers"
            )
    texts = [prompt[-1]["content"].strip() for prompt in prompts]
    if not any(texts):
        raise ScriptError(
            f"the {name} is asked nothing: all prompts are empty, as those of the rows are that "
            f"step gets without a `prompt` function in launch"
        )
    for sentence, more in not_taught(trainer.cfg.model, name, texts):
        warn_once(sentence, more)
    if trainer.asked_in_evaluation is not None:
        check_evaluated(trainer, texts)


def check_evaluated(trainer, texts: list[str]):
    """What `evaluate` asks."""
    memory = MEMORY[trainer]
    if memory.train_questions is None:
        asked = {stripped(str(row.get("question", ""))) for row in trainer.train_rows}
        memory.train_questions = asked - trainer.held_out_questions
    if sum(stripped(text) in memory.train_questions for text in texts) > len(texts) / 2:
        warn_once("`evaluate` asks training questions: its figures are not held out")


def check_rollout(trainer, name: str, rows: list[dict]):
    """Prompts, groups, and questions that training must not see."""
    player = trainer.player_named(name)
    group_size, counts = player.group_size, trainer.gather([len(rows)])
    if player.rewards and len(set(counts)) > 1:
        functions = ", ".join(function.__name__ for function in player.rewards)
        raise ScriptError(
            f"the {name} has {', '.join(map(str, counts))} rows on the processes; with reward "
            f"functions ({functions}) all need as many, because TRL gathers the rewards"
        )
    if not rows:  # of a process that has none
        return
    prompts = [row.get("prompt") for row in rows]
    check_prompts(trainer, name, prompts)
    if len(rows) % group_size:
        raise ScriptError(
            f"{len(rows)} rows for the {name} are not a multiple of its group of {group_size}"
        )
    if player.lr and not player.temperature and group_size > 1:
        raise ScriptError(
            f"the {name} decodes greedily, so the {group_size} completions of a group are the "
            f"same, and nothing is compared; to learn, it needs a temperature"
        )
    for first in range(0, len(rows), group_size):
        group = prompts[first : first + group_size]
        if any(prompt != group[0] for prompt in group):
            last = first + group_size - 1
            raise ScriptError(
                f"rows {first} to {last} for the {name} are a group, whose rewards are compared "
                f"with each other, but their prompts differ; repeat each row {group_size} times in "
                f"a row, give the player its group_size, or group_size=1 and "
                f"set_rewards(batch, rewards, groups=[a key of each row])"
            )
    copies = math.gcd(*(len([*same]) for _, same in itertools.groupby(map(str, prompts))))
    # later on, different prompts may hold the same text of a player
    at_start, several = trainer.state.global_step == 0, copies < len(rows)
    if at_start and several and 1 < group_size < copies and copies % group_size == 0:
        warn_once(
            f"each prompt of the {name} comes {copies} times in a row, and its group_size is "
            f"{group_size}: completions of one prompt are not all compared with each other"
        )
    columns = {tuple(sorted(row)) for row in rows}
    if len(columns) > 1:
        odd = set.symmetric_difference(*map(set, list(columns)[:2]))
        raise ScriptError(f"rows for the {name} differ in their columns: {', '.join(sorted(odd))}")
    asked = [str(row.get("question")) for row in rows]
    seen = [q for q in asked if {q, stripped(q)} & trainer.held_out_questions]
    if seen:
        raise ScriptError(
            f"rollout trains the {name} on a held-out question ({seen[0]!r:.60}); take "
            f"self.train_rows, or `generate` if nothing is to be trained"
        )
    taken = {*TRLS} & {*rows[0]} if player.rewards else ()
    if taken:
        raise ScriptError(
            f"a column of the {name}'s rows cannot be called {min(taken)!r}: TRL gives the reward "
            f"functions something else by that name"
        )
    check_gold(trainer, name, rows)


def stripped(question: str) -> str:
    """The same for questions that differ in spaces at their ends or those of their lines."""
    return "\n".join(line.rstrip() for line in question.strip().splitlines())


def check_gold(trainer, name: str, rows: list[dict]):
    """Whether every prompt shows its gold answer, where neither the question does nor a player's
    text in it, or the reference solution. A single one may: a judge's, about a right solution.
    """
    written = {text for texts in MEMORY[trainer].texts.values() for text in texts if text}
    answers, references, golds = [], [], set()
    for row in {(r["prompt"][-1]["content"], r.get("answer")): r for r in rows}.values():
        text, reference = row["prompt"][-1]["content"], row.get("reference")
        long = isinstance(reference, str) and len(reference) > 20
        references.append(long and reference in text)
        judged = [each for each in written if each in text]
        for each in judged:
            text = text.replace(each, " ")
        if judged and "answer" not in row and trainer.state.global_step == 0:
            row = _asked_about(trainer, text) | row
        question, answer = str(row.get("question", "")), str(row.get("answer", ""))
        text, golds = text.replace(question, ""), golds | {answer}
        word = rf"(?<![\w.]){re.escape(answer)}(?![\w.]|\.\d)"
        answers.append(bool(answer) and re.search(word, text) is not None)
    if len(golds) >= 2 and all(references):
        warn_once(f"every prompt of the {name} shows its row's reference solution")
    elif len(golds) >= 4 and all(answers):
        warn_once(f"every prompt of the {name} shows its row's gold answer")


def _asked_about(trainer, text: str) -> dict:
    """The training row whose question a judge's prompt shows."""
    ours = (row for row in trainer.train_rows if row.get("question") and "answer" in row)
    return next((row for row in ours if row["question"] in text), {})


def checked(function: Callable) -> Callable:
    """The same reward function; what it returns is looked at before TRL takes it."""
    if inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    def call(completions, **columns):
        try:
            inspect.signature(function).bind(completions=completions, **columns)
        except TypeError as error:
            its = ", ".join(["completions", *sorted(columns)])
            raise ScriptError(
                f"{function.__name__} cannot be called: {error}. It is given {its}"
            ) from None
        rewards = function(completions=completions, **columns)
        if not hasattr(rewards, "__len__") or len(rewards) != len(completions):
            raise ScriptError(
                f"{function.__name__} must return a list of {len(completions)} rewards, one per "
                f"completion; got {rewards!r:.60}"
            )
        return rewards

    return call


def check_metric(trainer, name: str, values: torch.Tensor):
    """What `log_mean` is given."""
    if "/" not in name or name.startswith("eval/"):
        raise ScriptError(
            f"log_mean: {name!r} must begin with a player's name or with co, and a slash; "
            f"eval/ is for held-out figures"
        )
    first, known = name.partition("/")[0], {*trainer.players, "co"}
    known |= {player.adapter for player in trainer.players.values()}
    if first not in known and (meant := difflib.get_close_matches(first, known, 1, 0.8)):
        warn_once(f"log_mean: {name} begins with no player's name; is it {meant[0]}?")
    if values.isnan().any():
        warn_once(f"log_mean: {name} was logged as NaN; a share of nothing is an empty list")


def check_rewards(trainer, batch: Batch, rewards, groups: list | None):
    """What `set_rewards` is given, of which the advantages will be made."""
    if not isinstance(batch, Batch):
        raise ScriptError(f"set_rewards: the first argument must be a batch; got {batch!r:.60}")
    name, its = batch.player, fates(trainer, batch)
    if len(its) != 1:
        raise ScriptError(
            "set_rewards: this batch is not what one rollout returned; where concat has joined "
            "several, set the rewards of each one before"
        )
    if its[0].rewarded:
        raise ScriptError(
            f"set_rewards: the {name}'s batch has its rewards already; the second ones would take "
            f"their place. Set the sum once"
        )
    try:
        rewards = torch.as_tensor(rewards)
    except (TypeError, ValueError, RuntimeError):
        raise ScriptError(
            f"set_rewards: rewards must be numbers, NaN where nobody judged; got {rewards!r:.80}"
        ) from None
    wanted = batch.rewards.shape
    if rewards.shape != wanted:
        raise ScriptError(
            f"set_rewards: the {name}'s rewards must be ({wanted[0]},), one per row; got "
            f"{tuple(rewards.shape)}"
        )
    if rewards.is_floating_point() and rewards.isinf().any():
        raise ScriptError(f"set_rewards: a reward of the {name} is infinite")
    check_size(name, rewards)
    grouped = groups is not None or trainer.player_named(name).group_size > 1
    if grouped and not _equal(batch.advantages, its[0].advantages):
        raise ScriptError(
            f"set_rewards would replace the advantages that you have given the {name}'s batch; "
            f"write batch.advantages after it"
        )
    if groups is not None and len(groups) != len(rewards):
        raise ScriptError(
            f"set_rewards: groups must have a key for each of the {len(rewards)} rows; got "
            f"{len(groups)}"
        )
    if groups is not None and not all(isinstance(key, Hashable) for key in groups):
        raise ScriptError(f"set_rewards: keys of groups are texts or numbers; got {groups!r:.60}")
    if groups and len(set(groups)) == len(groups):
        raise ScriptError("set_rewards: every row is a group of its own; nothing is compared")
    its[0].rewarded, its[0].rewards = True, rewards.to(batch.rewards).clone()


def _equal(one, other) -> bool:
    return one is other or all(map(torch.is_tensor, (one, other))) and torch.equal(one, other)


def check_size(name: str, rewards: torch.Tensor):
    """In float32 the square of what is larger is infinite, and all advantages would be 0."""
    if len(large := rewards[rewards.abs() > 1e18]):
        raise ScriptError(
            f"a reward of the {name} is {large[0].item():g}; advantages cannot be made of it"
        )


# ------------------------------------------------------------------ batches
def check_concat(trainer, batches: list[Batch], players: dict):
    """players: name -> Player, of the batches and of the whole, which is scored as they are."""
    if len({id(batch) for batch in batches}) < len(batches):
        raise ScriptError(f"concat: one batch is among them twice: {TWICE}")
    for what in ("adapter", "temperature"):
        if len({getattr(player, what) for player in players.values()}) != 1:
            found = ", ".join(f"{name}: {getattr(p, what)}" for name, p in players.items())
            raise ScriptError(f"concat: batches must be of one {what}; got {found}")
    optional = ("advantages", "rewards", "base_logps", "kl_weights", "total_tokens")
    has = [{n for n in optional if getattr(b, n) is not None} | {*b.extras} for b in batches]
    if odd := set.union(*(has[0] ^ other for other in has)):
        hint = ""
        if "advantages" in odd:
            without = [batch.player for batch in batches if batch.advantages is None]
            hint = f": {_no_advantages(without[0])}"
        raise ScriptError(f"concat: not every batch has {', '.join(sorted(odd))}{hint}")
    for key, value in batches[0].extras.items():
        if not isinstance(value, list) and not (torch.is_tensor(value) and value.dim()):
            raise ScriptError(f"concat: {key} has no rows to join; set it on the joined batch")
    for batch in batches:
        if batch.advantages is not None:
            check_advantages(trainer, batch)
            for fate in fates(trainer, batch):
                fate.part = batch, batch.advantages.clone()


def check_step(trainer, batches):
    """What `step` returned: on all processes as many, or they would wait for each other in vain."""
    if not isinstance(batches, list) or not batches:
        raise ScriptError(
            f"step must return a list of at least one batch; got {batches!r:.60}. To train "
            f"nothing, give one advantages of 0"
        )
    if len(set(counts := trainer.gather([len(batches)]))) > 1:
        raise ScriptError(
            f"step returned {', '.join(map(str, counts))} batches on the processes; all must train "
            f"the same players"
        )


def check_batch(trainer, batch):
    """A batch that is going to be trained on."""
    if trainer.asked_in_evaluation is not None:
        raise ScriptError("update inside of `evaluate` would train on held-out questions")
    if not isinstance(batch, Batch):
        raise ScriptError(f"step must return batches, as rollout or concat make; got {batch!r:.60}")
    name, A, mask = batch.player, batch.advantages, batch.completion_mask
    adapter = trainer.player_named(name).adapter
    for writer in {note["player"] for note in batch.notes} & trainer.players.keys():
        if trainer.players[writer].adapter != adapter:
            raise ScriptError(
                f"the {name} cannot be trained on what the {writer} has written: its samples are "
                f"not the {name}'s own"
            )
    own_loss = type(trainer).loss.__qualname__ != "CoTrainer.loss"  # it may do without
    before = set().union(*(fate.trained for fate in fates(trainer, batch)))
    # with a loss of its own a player may learn from another's rollout, as PRIME's reward model does
    if adapter in before or before and not own_loss:
        raise ScriptError(f"a batch of the {name} has been trained on already: {TWICE}")
    if A is None and not own_loss:
        raise ScriptError(_no_advantages(name))
    if A is not None:
        check_advantages(trainer, batch)
    if (mask[..., 1:] > mask[..., :-1]).any() or not mask[..., :1].all():
        raise ScriptError(
            "completion_mask must be ones, at least one, and then zeros: it says where a "
            "completion ends; advantages of 0 leave tokens out of the loss"
        )
    for key in ("texts", "notes"):
        if (given := getattr(batch, key)) and len(given) != len(mask):
            raise ScriptError(
                f"the {name}'s batch has {len(mask)} rows and {len(given)} {key}; to leave "
                f"rows out, give them advantages of 0"
            )
    for key, value in batch.extras.items():
        has_rows = isinstance(value, list) or torch.is_tensor(value) and value.dim()
        if has_rows and len(value) != len(mask):
            raise ScriptError(
                f"the {name}'s batch has {len(mask)} rows, and batch.extras[{key!r}] has "
                f"{len(value)}"
            )
    for fate in fates(trainer, batch):
        fate.trained |= {adapter}
        part, copied = fate.part or (batch, batch.advantages)
        fate.part = None
        if not _equal(part.advantages, copied):
            raise ScriptError(
                f"advantages of the {part.player} were set after concat had copied them, without "
                f"effect; set them before"
            )
    if own_loss:
        check_shares(trainer, batch)


def check_advantages(trainer, batch: Batch):
    name, A, mask = batch.player, batch.advantages, batch.completion_mask
    if not isinstance(A, torch.Tensor) or not A.is_floating_point():
        kind = A.dtype if isinstance(A, torch.Tensor) else type(A).__name__
        raise ScriptError(f"the {name}'s advantages must be a tensor of floats; got {kind}")
    if A.shape not in (mask.shape, mask.shape[:1]):
        wanted = f"(B,) or (B, T), here {tuple(mask.shape[:1])} or {tuple(mask.shape)}"
        raise ScriptError(f"the {name}'s advantages must be {wanted}; got {tuple(A.shape)}")
    if A.requires_grad:
        raise ScriptError(f"the {name}'s advantages have a gradient: detach() them")
    if not A.isfinite().all():
        row = int((~A.isfinite()).nonzero()[0, 0])
        raise ScriptError(f"the {name}'s advantages must be finite; they are not in row {row}")
    check_unchanged(trainer, batch)


def check_loss(loss):
    """What a script's own `loss` returned."""
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
        raise ScriptError(f"loss must return a scalar with a gradient; got {loss!r:.60}")


def check_shares(trainer, batch: Batch):
    """Once for each player, of a script's own loss: whether the shares of two halves of a
    micro-batch add up to that of the whole, and whether rows that are left out have a gradient.
    """
    name, A, seen = batch.player, batch.advantages, MEMORY[trainer].looked_at
    if name in seen or trainer.accelerator.num_processes > 1:  # `loss` may wait for the others
        return
    seen.add(name)
    rows = [*trainer.micro_batches(batch)[:1]]
    left_out = not (A is None or trainer.kl or trainer.all_rows)
    idle = (A.reshape(len(A), -1) == 0).all(1).nonzero()[:, 0] if left_out else []
    # those of a group add up to 0, and so would its loss, whatever it is divided by
    alike = replace(batch, advantages=None if A is None else torch.ones_like(A))
    with _without_traces(trainer), trainer.playing(name):
        if rows and len(rows[0]) > 1:
            with torch.no_grad():
                parts = rows[0], *rows[0].tensor_split(2)
                shares = [trainer.loss(alike.take(part)) for part in parts]
            numbers = all(torch.is_tensor(share) and not share.dim() for share in shares)
            whole, one, other = shares if numbers else (math.nan,) * 3  # see `check_loss`
            # what is mistaken for a share is no small number
            if abs(whole - one - other) > 0.1 * max(abs(whole), abs(one), abs(other), 0.01):
                warn_once(
                    f"the {name}'s loss of a micro-batch is not the sum of those of its halves: "
                    f"divide by a number of the whole batch, such as batch.total_tokens"
                )
        if len(idle):
            loss = trainer.loss(batch.take(idle[: trainer.cfg.micro_batch]))
            its = trainer.parameters_of(trainer.player_named(name).adapter)
            known = torch.is_tensor(loss) and not loss.dim() and loss.requires_grad
            if known and any(g.any() for g in torch.autograd.grad(loss, its)):
                warn_once(
                    f"the {name}'s loss has a gradient in rows whose advantages are 0, and these "
                    f"are left out; set all_rows = True in your class"
                )


@contextmanager
def _without_traces(trainer):
    """What is computed inside changes no metric, no recorded row and no random draw."""
    sums, drawn, trainer.record = dict(trainer._sums), random.getstate(), lambda *_: None
    cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        trainer._sums = sums
        random.setstate(drawn)
        del trainer.record


def _no_advantages(name: str) -> str:
    return (
        f"the {name}'s batch has no advantages. A player without reward functions has none before "
        f"set_rewards(batch, rewards); with groups of one row they come from groups=..., or you "
        f"write batch.advantages"
    )


def check_unchanged(trainer, batch: Batch):
    """Rewards that were written over after the advantages had been made of them."""
    its = fates(trainer, batch)
    made_of = its[0].rewards if len(its) == 1 else None
    if made_of is None or len(made_of) != len(batch):
        return
    if not torch.equal(batch.rewards.nan_to_num(), made_of.nan_to_num()):
        raise ScriptError(
            f"batch.rewards of the {batch.player} has changed, and the advantages are still "
            f"those of the rewards before; use set_rewards(batch, rewards)"
        )


# ------------------------------------------------------------------ nothing to learn from
IDLE = 3  # updates in a row without a gradient


def check_learning(trainer, batch: Batch, idle: bool):
    """After an update: had its player, or one of the rollouts that `concat` has joined, nothing to
    learn from several times in a row, or has it next to nothing at the start of the run?
    """
    whole = idle
    for key, part in _rollouts(batch):
        name, A = part.player, part.advantages
        rewards = torch.tensor([]) if part.rewards is None else part.rewards
        idle = whole or (part.source is not None and A is not None and not A.any())
        count = MEMORY[trainer].idle
        count[key] = count.get(key, 0) + 1 if idle else 0
        if count[key] == IDLE:
            what = f"{IDLE} updates in a row of the {name} had no gradient: all advantages were 0"
            warn_once(what, f". {_what_helps(trainer, part)}")
        values, counts = rewards[~rewards.isnan()].unique(return_counts=True)
        if trainer.state.global_step == 0 and counts.sum() >= 16:
            share, value = (counts.max() / counts.sum()).item(), values[counts.argmax()].item()
            if share >= 0.95:
                what = f"{share:.0%} of the {name}'s rewards are {value:g}, next to nothing"
                warn_once(f"{what} to learn from", f". {_what_helps(trainer, part)}")


def _rollouts(batch: Batch) -> list[tuple]:
    """(key, batch) of each rollout that a batch consists of; the key is the same in every step."""
    if batch.source is None or not batch.notes or batch.advantages is None:
        return [(batch.player, batch)]
    parts = []
    for number in batch.source.unique().tolist():
        part = batch.take((batch.source == number).nonzero()[:, 0])
        part.player = part.notes[0].get("player", batch.player)
        parts.append(((part.player, number), part))
    return parts


def _what_helps(trainer, batch: Batch) -> str:
    if not batch.texts:
        return ""
    R = torch.tensor([]) if batch.rewards is None else batch.rewards[~batch.rewards.isnan()]
    if len(R) and (top := R.max().item()) > 0 and (R == top).float().mean() >= 0.95:
        return f"Its rewards are {top:g}, and if none can be higher, nothing is left to learn."
    cut = cut_share(trainer, batch)
    longer = f"a longer limit ({cut:.0%} of its completions are cut), " if cut > 0.5 else ""
    warm_up = "a warm-up on the format (python -m common.run.warm_up SCRIPT --help)"
    helps = f"{longer}a model that follows the instructions, or {warm_up}"
    return f"One of its completions ends {ending(batch.texts[0])}. What helps: {helps}."


def cut_share(trainer, batch: Batch) -> float:
    """The share of completions that have no end token."""
    ends = batch.lengths()[:, None] - 1  # (B, 1)
    last = batch.completion_ids.gather(1, ends)[:, 0].tolist()
    return sum(token not in trainer.eos_token_ids for token in last) / max(1, len(last))


def never_trained(trainer) -> set[str]:
    """Players on whose rollouts nobody has been trained by this process."""
    its = [*MEMORY[trainer].fates.values()]
    return {fate.player for fate in its} - {fate.player for fate in its if fate.trained}


# ------------------------------------------------------------------ what a checkpoint keeps
@contextmanager
def keeping_state(trainer, where: str, once: bool = False):
    """Around `step` (the first one of a process is enough) and every `evaluate`: what these leave
    behind is compared with what a checkpoint keeps, before a resumed run shows it.
    """
    if once and MEMORY[trainer].stepped:
        yield
        return
    MEMORY[trainer].stepped |= once
    before = _own_state(trainer)
    yield
    for name, value in _own_state(trainer).items():
        if before.get(name) != value:
            warn_once(
                f"self.{name} was set or changed in {where}; a resumed run would not have it. What "
                f"a checkpoint keeps is self.saved"
            )
    check_saved(trainer.saved)


def _own_state(trainer) -> dict[str, str]:
    """The attributes that the script has given its trainer, as text where they are plain."""
    plain = (int, float, str, bool, list, dict, set, tuple, type(None))
    values = {n: v for n, v in vars(trainer).items() if n not in MEMORY[trainer].attributes}
    data = {"train_rows": trainer.train_rows, "held_out": trainer.held_out}  # may be large
    hashes = {n: str([hash(repr(row)) for row in rows]) for n, rows in data.items()}
    texts = {n: repr(v) if isinstance(v, plain) else str(type(v)) for n, v in values.items()}
    return hashes | texts


def check_saved(saved):
    """`saved` must come back from a checkpoint as it went in."""
    if not isinstance(saved, dict):
        raise ScriptError(f"self.saved must be a dict; got {type(saved).__name__}")
    for key, value in saved.items():
        if not _is_json({key: value}):
            raise ScriptError(
                f"self.saved[{key!r}] cannot be kept in a checkpoint, which is JSON: numbers, "
                f"texts, lists, and dicts whose keys are texts; of a tensor take .tolist()"
            )


def _is_json(value) -> bool:
    """Whether it comes back from a file as it went in, but for tuples, which become lists."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)


def check_evaluation(result):
    """What `evaluate` returned."""
    if not isinstance(result, dict):
        raise ScriptError(f"evaluate must return a dict, metric -> number; got {result!r:.60}")
    for key, value in result.items():
        if str(key).startswith("eval/"):
            raise ScriptError(f"evaluate: {key!r} without eval/, which is put before every name")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(key, str) or not number or not math.isfinite(value):
            raise ScriptError(
                f"evaluate: {key!r} must be a finite number; got {value!r:.60}. What nobody could "
                f"measure is left out"
            )


def check_loaded(loaded):
    """What `load` returned: training rows and held-out rows, of each the same columns."""
    if not isinstance(loaded, tuple) or len(loaded) != 2:
        raise ScriptError(f"load must return (training rows, held-out rows); got {loaded!r:.60}")
    for what, rows in zip(("training", "held-out"), loaded):
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ScriptError(f"the {what} rows must be a list of dicts; got {rows!r:.60}")
        for number, row in enumerate(rows):
            if row.keys() != rows[0].keys():
                odd = ", ".join(sorted(row.keys() ^ rows[0].keys()))
                raise ScriptError(f"{what} row {number} differs from row 0 in its columns: {odd}")
            for column in row.keys() & {"question", "answer", "reference"}:
                if not isinstance(row[column], str):
                    raise ScriptError(
                        f"{what} row {number}: {column!r} must be a text; got {row[column]!r:.60}"
                    )
        for column in rows[0] if rows else ():
            kinds = {"number" if type(row[column]) in (int, float) else type(row[column]).__name__
                     for row in rows if row[column] is not None}  # fmt: skip
            if len(kinds) > 1:
                found = ", ".join(sorted(kinds))
                raise ScriptError(f"{what} rows: {column!r} is of several types: {found}")
