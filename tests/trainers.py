"""Trainers without a model, to which completions are given; one of four players that are no
paper's; and log-probs by hand."""

import math
import statistics
from types import SimpleNamespace

from common.checked import Player
from common.core.batch import Batch
from common.core.cotrainer import with_adapters
from common.tasks.answers import solve_prompt
from common.tiny.tasks import gold_solution

import torch
from conftest import make_players

QUESTION = "(38+4)*7 mod 61"  # 42, 50
RIGHT = gold_solution(QUESTION)
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # of a small model
WRONG = "<step>38+4=41</step>\n<step>41*7=43</step>\n<answer>\\boxed{43}</answer>"


def solution(answer, step="") -> str:
    return rf"<step>x={answer}{step}</step><answer>\boxed{{{answer}}}</answer>"


C, X = r"\boxed{CORRECT}", r"\boxed{INCORRECT}"


def judgement(*verdicts, final=C, section=None) -> str:
    """section: what stands there instead of a step for each verdict."""
    if section is None:
        section = "\n".join(f"<step>so it is {v}</step>" for v in verdicts)
    end = f"<final_verification>{final}</final_verification>"
    return f"<step_verification>\n{section}\n</step_verification>\n{end}"


def twice(*questions: str, **more) -> list[dict]:
    """Rows of a step; the gold answer is 7."""
    rows = [{"question": q, "answer": "7", "prompt": [{"content": q}]} | more for q in questions]
    return [row for row in rows for _ in range(2)]


class Characters:
    """A tokenizer with a token per character, and 4 at the end."""

    eos_token_id, all_special_tokens, added_tokens_decoder = 4, ["<|end|>"], {}

    def __call__(self, text, add_special_tokens=False):
        return SimpleNamespace(input_ids=[ord(c) + 10 for c in text])

    def decode(self, ids):
        return "".join(chr(i - 10) for i in ids if i != 4)

    def batch_decode(self, ids, skip_special_tokens=True):
        return [*map(self.decode, ids)]


def without_model(kind, cfg, texts=(), **attributes):
    """A trainer of a script's class without a model, in one process: what its players write is
    given.

    texts: in the order in which they are written, or player -> its texts; the ids of one that ends
    with … have no end token, as if it had been cut. `asked` remembers (player, the prompt's last
    message), `prefix` the beginnings of completions, `logged` all values of each metric.
    """

    class WithoutModel(kind):
        def __init__(self):
            self.cfg, self.asked, self.prefix, self.logged, self.saved = cfg, [], [], {}, {}
            self.players, self._sums = with_adapters(kind.define_players(cfg)), {}
            of_each = isinstance(texts, dict)
            self.texts = {n: [*its] for n, its in texts.items()} if of_each else [*texts]
            self.state, self.processing_class = SimpleNamespace(global_step=0), Characters()
            self.args = SimpleNamespace(seed=getattr(cfg, "seed", 0))
            self.accelerator = SimpleNamespace(num_processes=1, process_index=0, device="cpu")
            self.eos_token_ids = [Characters.eos_token_id]
            self.asked_in_evaluation = None
            self.held_out, self.held_out_questions = [], set()
            self.begin_checks()
            vars(self).update(attributes)

        def generate(self, name, prompts, greedy=False):
            self.asked += [(name, prompt[-1]["content"]) for prompt in prompts]
            texts = self.texts.get(name, []) if isinstance(self.texts, dict) else self.texts
            return [texts.pop(0) for _ in prompts]

        def generate_ids(self, name, prompts, greedy=False, prefix=None):
            self.prefix += self.processing_class.batch_decode(prefix or [])
            encode, end = self.processing_class, [Characters.eos_token_id]
            texts = self.generate(name, prompts)
            return [encode(text).input_ids + end * (text[-1:] != "…") for text in texts]

        def rollout(self, name, rows):
            texts = self.generate(name, [row["prompt"] for row in rows])
            ids = [self.processing_class(text).input_ids for text in texts]
            batch = Batch.of(name, [[0]] * len(rows), ids, -1, "cpu")
            rewards, completions = torch.zeros(len(rows)), [[{"content": text}] for text in texts]
            for function in kind.define_players(cfg)[name].rewards:
                columns = {key: [row[key] for row in rows] for key in rows[0]}
                found = function(completions, **columns)
                rewards += torch.tensor([math.nan if r is None else r for r in found])
            batch.texts, batch.rewards = texts, rewards
            self.remember_rollout(batch)
            batch.notes = [{"player": name, "rewards": {}} for _ in rows]
            return batch

        def concat(self, batches):
            self.batches = {batch.player: batch for batch in batches}
            return batches

        def gather(self, values):
            return values

        def log_mean(self, name, values):
            values = values if isinstance(values, list) else [values]
            self.logged[name] = self.logged.get(name, []) + values

    for name in vars(kind).keys() & {"rollout", "concat"}:
        delattr(WithoutModel, name)  # a test's own class may have another one
    return WithoutModel()


def answering(say, **cfg) -> SimpleNamespace:
    """A trainer without a model, to call a script's `evaluate` with.

    say: (player, the prompt's last message, greedy, how often it was asked before in the same
    call) -> what the player writes; or (player, greedy) -> its texts in order, behind which it
    writes ?. `calls` remembers (player, last messages, greedy).
    """
    calls = []

    def generate_all(player, prompts, greedy=False):
        asked = [prompt[-1]["content"] for prompt in prompts]
        calls.append((player, asked, greedy))
        if isinstance(say, dict):
            texts = say[player, greedy]
            return [texts.pop(0) if texts else "?" for _ in asked]
        return [say(player, user, greedy, asked[:i].count(user)) for i, user in enumerate(asked)]

    return SimpleNamespace(
        generate_all=generate_all,
        in_parallel=lambda fn, items: fn(items),
        cfg=SimpleNamespace(**cfg),
        saved={},
        calls=calls,
    )


def whitened(rows: list[tuple], eps=0.0, added=0.0, scale=True) -> list[float]:
    """Of (x, group), among those of its group: (x - mean) / (sqrt(variance + eps) + added), or
    without the division; 0 where all of it are alike, and for NaN, which is no part of it.
    """
    found = []
    for x, group in rows:
        own = [y for y, other in rows if other == group and y == y]
        if x != x or min(own) == max(own):
            found.append(0.0)
            continue
        deviation = math.sqrt(statistics.variance(own) + eps) + added if scale else 1.0
        found.append((x - statistics.mean(own)) / deviation)
    return found


def close(got, expected, atol=1e-6):
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=atol)


def length_reward(completions, **_):
    return [float(len(c[0]["content"])) for c in completions]


def four_players(folder, step=None, **more):
    """`ann` and `bob` have adapters of their own; `cat` plays with bob's and has no rewards, `dan`
    with bob's, too, at another temperature. step, more: see `make_players`.
    """
    players = {
        "ann": Player([length_reward], 1e-3, 8, group_size=4),
        "bob": Player([length_reward], 2e-3, 8, 4),
        "cat": Player([], 2e-3, 12, 2, adapter="bob"),
        "dan": Player([length_reward], 2e-3, 8, 4, temperature=0.5, adapter="bob"),
    }
    return make_players(folder, players, step, **more)


def some_rows(trainer, count=8) -> list[dict]:
    return [trainer.train_dataset[i // 4] for i in range(count)]


def a_batch(trainer, name, count=8) -> Batch:
    batch = trainer.rollout(name, some_rows(trainer, count))
    batch.advantages = torch.linspace(-1, 1, count)
    return batch


def gathered(trainer) -> dict[str, float]:
    """The metrics of all processes, which are cleared."""
    trainer.model.train()
    trainer.log({})
    found = trainer.state.log_history.pop()
    return {name: value for name, value in found.items() if "/" in name}


def logged(trainer) -> dict[str, float]:
    """The metrics of the step so far."""
    return {name: total / count for name, (total, count) in trainer._sums.items() if count}


def encoded(trainer, text: str) -> list[int]:
    """Its tokens and the end token."""
    tokenizer = trainer.processing_class
    return [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]


def log_probs_by_hand(trainer, player, prompt: list[dict], ids: list[int]) -> list[float]:
    """Of each token of one completion, by a softmax in float64. player: None for the base."""
    tokenizer = trainer.processing_class
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    asked = tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad(), trainer.playing(player):
        logits = trainer.model(input_ids=torch.tensor([asked + ids])).logits[0]
    logps = logits.double().log_softmax(-1)[len(asked) - 1 : -1]
    return [logps[i, token].item() for i, token in enumerate(ids)]


def likelihood(trainer, player, text: str, ended=True) -> float:
    """log-prob of a text as the answer to QUESTION, with its end token or without."""
    ids = encoded(trainer, text)[: None if ended else -1]
    return sum(log_probs_by_hand(trainer, player, solve_prompt(QUESTION), ids))


def loss_in_parts(trainer, batch, size: int = 1) -> float:
    """The loss of a batch, `size` rows at a time, whose metrics are logged."""
    total = 0.0
    with trainer.playing(batch.player):
        for rows in torch.arange(len(batch)).split(size):
            share, shown = trainer.loss(part := batch.take(rows))
            trainer.show_loss(part, shown)
            total += share.item()
    return total
