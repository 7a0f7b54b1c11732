"""What a script hands to CoTrainer, held against what can be trained on. Each of these mistakes
once gave a plausible run with wrong gradients, or an error that did not name it.

What is certainly wrong raises a ScriptError. What nearly certainly is prints a warning, once a run.
docs/your-own-script.md lists what cannot be known, and where it shows.
"""

import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Hashable
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from common.batch import Batch
from common.errors import ScriptError, say
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


class Memory:
    """What is remembered of one trainer."""

    def __init__(self, trainer):
        self.attributes = {*vars(trainer)}  # those that are not the script's own
        self.fates = {}  # number of a rollout -> Fate
        self.idle = {}  # player -> its latest updates in a row without a gradient
        self.stepped = False


MEMORY = WeakKeyDictionary()  # trainer -> Memory


def begin(trainer):
    """A trainer is ready; what it has now is not the script's."""
    MEMORY[trainer] = Memory(trainer)


def remember(trainer, batch: Batch):
    """A rollout, as it is returned."""
    number = next(NUMBERS)
    batch.rollouts, fate = [number], Fate()
    if batch.advantages is not None:
        fate.rewards = batch.rewards.clone()
    MEMORY[trainer].fates[number] = fate


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


def check_config(fields: dict):
    """Of GRPOConfig, from a script: GRPOTrainer would heed these, and here they stand elsewhere."""
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
    check_gold(name, rows)


def stripped(question: str) -> str:
    """The same for questions that differ in spaces at their ends or those of their lines."""
    return "\n".join(line.rstrip() for line in question.strip().splitlines())


def check_gold(name: str, rows: list[dict]):
    """Whether every prompt shows its gold answer where the question does not, or the reference
    solution. A single one may: a judge's, about a right solution.
    """
    answers, references = [], []
    for row in rows:
        question, answer = str(row.get("question", "")), str(row.get("answer", ""))
        text, reference = row["prompt"][-1]["content"].replace(question, ""), row.get("reference")
        word = rf"(?<![\w.]){re.escape(answer)}(?![\w.]|\.\d)"
        answers.append(bool(answer) and re.search(word, text) is not None)
        long = isinstance(reference, str) and len(reference) > 20
        references.append(long and reference in text)
    different = len({str(row.get("answer")) for row in rows})
    if different >= 2 and all(references):
        warn_once(f"every prompt of the {name} shows its row's reference solution")
    elif different >= 4 and all(answers):
        warn_once(f"every prompt of the {name} shows its row's gold answer")


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


def check_metric(name: str, values: torch.Tensor):
    """What `log_mean` is given."""
    if "/" not in name or name.startswith("eval/"):
        raise ScriptError(
            f"log_mean: {name!r} must begin with a player's name or with co, and a slash; "
            f"eval/ is for held-out figures"
        )
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


# ------------------------------------------------------------------ batches
def check_concat(trainer, batches: list[Batch], players: dict):
    """players: name -> Player, of the batches and of the whole, which is scored as they are."""
    if len({id(batch) for batch in batches}) < len(batches):
        raise ScriptError(f"concat: one batch is among them twice: {TWICE}")
    for what in ("adapter", "temperature"):
        if len({getattr(player, what) for player in players.values()}) != 1:
            found = ", ".join(f"{name}: {getattr(p, what)}" for name, p in players.items())
            raise ScriptError(f"concat: batches must be of one {what}; got {found}")
    optional = ("advantages", "rewards", "base_logps", "total_tokens")
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
    if any(adapter in fate.trained for fate in fates(trainer, batch)):
        raise ScriptError(f"a batch of the {name} has been trained on already: {TWICE}")
    own_loss = type(trainer).loss.__qualname__ != "CoTrainer.loss"  # it may do without
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
    for fate in fates(trainer, batch):
        fate.trained |= {adapter}


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


def check_learning(trainer, batch: Batch, norm: float):
    """After an update: had its player, or one of the rollouts that `concat` has joined, nothing to
    learn from several times in a row, or has it next to nothing at the start of the run?
    """
    for key, part in _rollouts(batch):
        name, A = part.player, part.advantages
        rewards = torch.tensor([]) if part.rewards is None else part.rewards
        idle = norm == 0 or (part.source is not None and A is not None and not A.any())
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
    ends = batch.lengths()[:, None] - 1  # (B, 1)
    last = batch.completion_ids.gather(1, ends)[:, 0].tolist()
    cut = sum(token not in trainer.eos_token_ids for token in last) / len(last)
    longer = f"a longer limit ({cut:.0%} of its completions are cut), " if cut > 0.5 else ""
    warm_up = "a warm-up on the format (python -m common.run.warm_up SCRIPT --help)"
    helps = f"{longer}a model that follows the instructions, or {warm_up}"
    return f"One of its completions ends {ending(batch.texts[0])}. What helps: {helps}."


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
    return {n: repr(v) if isinstance(v, plain) else str(type(v)) for n, v in values.items()}


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
