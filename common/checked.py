"""CoTrainer with guards. It computes the same as the CoTrainer of core/cotrainer.py: each verb
looks at what it is given, calls the core's verb, and remembers what the guards of later calls need.

Every guard is for a mistake that once gave a plausible run with wrong gradients. If something is
certainly wrong, it raises a ScriptError; if something is probably wrong, it prints a warning, once.
A mistake at which Python itself fails has no guard. docs/your-own-script.md lists mistakes that no
guard can see, and what shows them. `checks = False` in a script's class turns all guards off.
"""

import itertools
import math
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.core import cotrainer
from common.core.batch import Batch
from common.core.cotrainer import Player
from common.core.errors import ScriptError, say
from common.core.lists import stripped
from common.run.memory import QUESTION_TOKENS
from common.run.models import not_taught

import torch

__all__ = ["CoTrainer", "Player"]

IDLE = 3  # updates in a row without a gradient
ROLES = ("system", "user", "assistant", "tool")
COMMON = str(Path(__file__).parent)
TRLS = "completion completions completion_ids prompts trainer_state log_extra log_metric".split()


@dataclass(eq=False)
class Fate:
    """What the guards remember of a rollout, or of a joined batch. Every batch that has rows of it
    holds a reference.
    """

    player: str
    rewards: torch.Tensor | None  # (B,), from which the advantages were made
    advantages: torch.Tensor | None  # as the verb that made the batch left them
    rewarded: bool = False  # by `set_rewards`
    trained: dict = field(default_factory=dict)  # adapter -> numbers of the rows it was trained on
    parts: list = field(default_factory=list)  # of a joined batch: (batch, copy of its advantages)
    line: str = ""  # of the script, which made it

    def __deepcopy__(self, _):
        return self  # a copy of a batch has the same fate

    @classmethod
    def of(cls, batch: Batch, **more):
        made_of = None if batch.rewards is None else batch.rewards.clone()
        return cls(batch.player, made_of, batch.advantages, line=line_of_the_script(), **more)


class CoTrainer(cotrainer.CoTrainer):
    """See the top of this file, and of common/core/cotrainer.py."""

    checks = True
    """False turns all guards off."""

    def __init__(self, model, players: dict[str, Player], *rest, **more):
        if self.checks and "saved" in vars(self):
            raise ScriptError("set self.saved after super().__init__, which makes it")
        if self.checks:
            check_players(players)
        super().__init__(model, players, *rest, **more)
        self.begin_checks()

    def begin_checks(self):
        self.warned = set()  # sentences
        self.sampled_for, self.trained_for = set(), set()  # players
        self.idle = {}  # player, or rollout of a joined batch -> idle updates, in a row
        self.latest_texts = {}  # player -> the texts of its latest rollout
        self.losses_seen = set()  # players whose own loss was looked at
        self.asked_in_training = None  # texts, once an evaluation has asked
        # names of the trainer's own attributes; all that come later are the script's
        self.attributes = None
        self.attributes = {*vars(self)}

    def warn_once(self, sentence: str, more: str = ""):
        """Prints a warning, the first time only. more: what differs each time, such as a quoted
        text.
        """
        if self.checks and sentence not in self.warned:
            self.warned.add(sentence)
            say(f"warning: {sentence}{more}")

    # ------------------------------------------------------------------ a run
    def train(self, *args, **more):
        found = super().train(*args, **more)
        # A player may share its adapter with players that are trained, so nothing else shows this.
        # A resumed run has not seen its first steps, so it says nothing.
        for name in sorted(self.sampled_for - self.trained_for) if not self._resumed_at else ():
            player, adapters = self.players[name], {p.adapter for p in self.players.values()}
            if self.checks and player.lr > 0 and len(adapters) < len(self.players):
                say(f"note: nobody was trained on what `rollout` sampled of the {name} in this run")
        return found

    def run_step(self, rows):
        if not self.checks:
            return super().run_step(rows)
        asked, first = [questions_and_answers(row) for row in rows], not self.trained_last
        with self.keeping_state("`step`", data=first):
            batches = super().run_step(rows)
        if asked != [questions_and_answers(row) for row in rows]:
            self.warn_once(
                "`step` has overwritten the question or the answer of a row that it was given; "
                "reward functions see the new one. Make another row: row | {...}"
            )
        # or the processes would wait for each other in vain
        if len(set(counts := self.gather([len(batches)]))) > 1:
            raise ScriptError(
                f"step returned {', '.join(map(str, counts))} batches on the processes; all must "
                f"train the same players"
            )
        return batches

    def run_evaluation(self, evaluate):
        with self.keeping_state("`evaluate`"):
            return super().run_evaluation(evaluate)

    @contextmanager
    def keeping_state(self, where: str, data: bool = True):
        """Warns of an attribute that the block has set or changed and that no checkpoint keeps:
        a resumed run would not have it. data: looks at the rows of the data, too, which takes time.

        Raises:
            ScriptError: an entry of self.saved cannot become JSON.
        """
        before = own_state(self, data)
        yield
        for name, value in own_state(self, data).items() if self.checks else ():
            if before.get(name) != value:
                self.warn_once(
                    f"self.{name} was set or changed in {where}; a resumed run would not have it. "
                    f"What a checkpoint keeps is self.saved"
                )
        for key, value in self.saved.items() if self.checks else ():
            if not is_json({key: value}):
                raise ScriptError(
                    f"self.saved[{key!r}] cannot be kept in a checkpoint, which is JSON: numbers, "
                    f"texts, lists, and dicts whose keys are texts; of a tensor take .tolist()"
                )

    # ------------------------------------------------------------------ sampling
    def rollout(self, name: str, rows: list[dict]) -> Batch:
        if self.checks:
            self.check_rollout(name, rows)
        batch = super().rollout(name, rows)
        self.remember_rollout(batch)
        return batch

    def remember_rollout(self, batch: Batch):
        batch.rollouts = [Fate.of(batch)]
        self.latest_texts[batch.player] = batch.texts
        self.sampled_for.add(batch.player)
        if self.checks and self.state.global_step == 0 and len(batch):
            self.check_first_rollout(batch)

    def generate_ids(self, name: str, prompts: list, *rest, **more):
        if self.checks:
            self.check_prompts(name, prompts)
        return super().generate_ids(name, prompts, *rest, **more)

    def check_prompts(self, name: str, prompts: list):
        """Checks that prompts have known roles, end with the user's message and are not empty.
        Warns if the small model was not taught to answer them, or if `evaluate` asks training
        questions.
        """
        if not prompts:  # of a process that has none
            return
        for prompt in prompts:
            for message in prompt:
                if message["role"] not in ROLES:
                    raise ScriptError(
                        f"a prompt of the {name} has the role {message['role']!r}, which chat "
                        f"templates leave out or misread; it can be {', '.join(ROLES)}"
                    )
            if prompt[-1]["role"] in ("assistant", "system"):
                raise ScriptError(
                    f"a prompt of the {name} ends with a message of the {prompt[-1]['role']}; the "
                    f"last one must be the user's, which the {name} answers"
                )
        texts = [prompt[-1]["content"].strip() for prompt in prompts]
        if not any(texts):
            raise ScriptError(
                f"the {name} is asked nothing: all prompts are empty, as those of the rows are "
                f"that step gets without a `prompt` function in launch"
            )
        for sentence, more in not_taught(self.cfg.model, name, texts):
            self.warn_once(sentence, more)
        if self.asked_in_evaluation is not None:
            if self.asked_in_training is None:
                asked = {stripped(str(row.get("question", ""))) for row in self.train_rows}
                self.asked_in_training = asked - self.held_out_questions
            if sum(stripped(text) in self.asked_in_training for text in texts) > len(texts) / 2:
                self.warn_once("`evaluate` asks training questions: its figures are not held out")

    def check_rollout(self, name: str, rows: list[dict]):
        """Checks that rows are groups of one prompt, and that no question is held out."""
        player = self.player_named(name)
        G, counts = player.group_size, self.gather([len(rows)])
        if player.rewards and len(set(counts)) > 1:
            functions = ", ".join(function.__name__ for function in player.rewards)
            raise ScriptError(
                f"the {name} has {', '.join(map(str, counts))} rows on the processes; with reward "
                f"functions ({functions}) all need as many, because TRL gathers the rewards"
            )
        if not rows:  # of a process that has none
            return
        prompts = [row["prompt"] for row in rows]
        self.check_prompts(name, prompts)
        if player.lr and not player.temperature and G > 1:
            raise ScriptError(
                f"the {name} decodes greedily, so the {G} completions of a group are the same, and "
                f"nothing is compared; to learn, it needs a temperature"
            )
        for first in range(0, len(rows), G):
            group = prompts[first : first + G]
            if any(prompt != group[0] for prompt in group):
                raise ScriptError(
                    f"rows {first} to {first + G - 1} for the {name} are a group, whose rewards "
                    f"are compared with each other, but their prompts differ; repeat each row {G} "
                    f"times in a row, give the player its group_size, or group_size=1 and "
                    f"set_rewards(batch, rewards, groups=[a key of each row])"
                )
        copies = math.gcd(*(len([*same]) for _, same in itertools.groupby(map(str, prompts))))
        # only in the first step: later, two prompts can be equal because they quote equal texts
        at_start, several = self.state.global_step == 0, copies < len(rows)
        if at_start and several and 1 < G < copies and copies % G == 0:
            self.warn_once(
                f"each prompt of the {name} comes {copies} times in a row, and its group_size is "
                f"{G}: completions of one prompt are not all compared with each other"
            )
        self.check_held_out(name, rows)
        taken = {*TRLS} & {*rows[0]} if player.rewards else ()
        if taken:
            raise ScriptError(
                f"a column of the {name}'s rows cannot be called {min(taken)!r}: TRL gives the "
                f"reward functions something else by that name"
            )
        self.check_gold(name, rows)

    def check_held_out(self, name: str, rows: list[dict]):
        """Checks that no row asks a held-out question. Warns if a prompt of a row without a
        question quotes one in a line of its own, such as `Problem: 3+4`: a player may have written
        it by chance.
        """
        shown = {row["prompt"][-1]["content"] for row in rows if "question" not in row}
        asked = [*shown, *(str(row["question"]) for row in rows if "question" in row)]
        seen = [q for q in asked if {q, stripped(q)} & self.held_out_questions]
        if seen:
            raise ScriptError(
                f"rollout trains the {name} on a held-out question ({seen[0]!r:.60}); take "
                f"self.train_rows, or `generate` if nothing is to be trained"
            )
        begins = {}  # first line -> held-out questions
        for question in self.held_out_questions if shown else ():
            begins.setdefault(question.partition("\n")[0].strip(), []).append(question)
        for text in map(stripped, shown):
            lines = [part for line in text.splitlines() for part in (line, line.split(": ", 1)[-1])]
            quoted = [q for line in lines for q in begins.get(line.strip(), ()) if q in text]
            if quoted:
                self.warn_once(
                    f"a prompt of the {name}, who is trained on it, quotes a held-out question",
                    f" ({quoted[0]!r:.60})",
                )

    def check_gold(self, name: str, rows: list[dict]):
        """Warns if every prompt shows its row's gold answer or reference solution. An answer in the
        question, or in a player's text that the prompt quotes, does not count.
        """
        written = {text for texts in self.latest_texts.values() for text in texts if text}
        answers, references, golds = [], [], set()
        for row in {(r["prompt"][-1]["content"], r.get("answer")): r for r in rows}.values():
            text, reference = row["prompt"][-1]["content"], row.get("reference")
            long = isinstance(reference, str) and len(reference) > 20
            references.append(long and reference in text)
            judged = [each for each in written if each in text]
            for each in judged:
                text = text.replace(each, " ")
            if judged and "answer" not in row and self.state.global_step == 0:
                row = asked_about(self, text) | row
            question, answer = str(row.get("question", "")), str(row.get("answer", ""))
            text, golds = text.replace(question, ""), golds | {answer}
            word = rf"(?<![\w.]){re.escape(answer)}(?![\w.]|\.\d)"
            answers.append(bool(answer) and re.search(word, text) is not None)
        if len(golds) >= 2 and all(references):
            self.warn_once(f"every prompt of the {name} shows its row's reference solution")
        elif len(golds) >= 4 and all(answers):
            self.warn_once(f"every prompt of the {name} shows its row's gold answer")

    def check_first_rollout(self, batch: Batch):
        """Warns if the memory was planned for shorter prompts, or if completions do not end."""
        name, reads = batch.player, self.player_named(batch.player).reads
        longest, planned = int(batch.prompt_mask.sum(1).max()), QUESTION_TOKENS + reads
        if longest > planned:
            self.warn_once(
                f"prompts of the {name} have up to {longest} tokens, and memory was planned for "
                f"{planned}: {QUESTION_TOKENS} of instructions and question, and its reads={reads} "
                f"of other players' texts. The run may need more memory than --dry-run says"
            )
        if len(batch) >= 16 and (cut := self.cut_share(batch)) >= 0.95:
            self.warn_once(f"{cut:.0%} of the {name}'s completions are cut at its max_tokens")

    def cut_share(self, batch: Batch) -> float:
        """Returns the share of completions that have no end token."""
        ends = batch.lengths()[:, None] - 1  # (B, 1)
        last = batch.completion_ids.gather(1, ends)[:, 0].tolist()
        return sum(token not in self.eos_token_ids for token in last) / max(1, len(last))

    # ------------------------------------------------------------------ rewards
    def call_rewards(self, name: str, *rest) -> torch.Tensor:
        each = super().call_rewards(name, *rest)  # (B, functions)
        for function, rewards in zip(self.player_named(name).rewards, each.T):
            if len(rewards) and rewards.isnan().all():
                called = function.__name__
                self.warn_once(f"{called} gave none of the {name}'s completions a reward")
        return each

    def set_rewards(self, batch, rewards, groups=None):
        batches = batch if isinstance(batch, list) else [batch]
        if self.checks:
            self.check_rewards(batches, rewards, groups)
        super().set_rewards(batch, rewards, groups)
        for batch in batches:
            for fate in batch.rollouts:
                fate.rewarded, fate.rewards = True, batch.rewards.clone()
                fate.advantages = batch.advantages

    def check_rewards(self, batches: list[Batch], rewards, groups):
        wanted = sum(map(len, batches))
        for what, given in (("rewards", rewards), ("groups", groups)):
            if given is not None and len(given) != wanted:
                raise ScriptError(
                    f"set_rewards: {what} must have an entry for each of the {wanted} rows; got "
                    f"{len(given)}"
                )
        for batch in batches:
            name, fates = batch.player, batch.rollouts
            if any(fate.rewarded for fate in fates):
                raise ScriptError(
                    f"set_rewards: the {name}'s batch has its rewards already; the second ones "
                    f"would take their place. Set the sum once"
                )
            grouped = groups is not None or self.player_named(name).group_size > 1
            if grouped and len(fates) == 1 and not same(batch.advantages, fates[0].advantages):
                raise ScriptError(
                    f"set_rewards would replace the advantages that you have given the {name}'s "
                    f"batch; write batch.advantages after it"
                )

    # ------------------------------------------------------------------ batches
    def concat(self, batches: list[Batch]) -> Batch:
        if self.checks and len({id(batch) for batch in batches}) < len(batches):
            raise ScriptError("concat: one batch is among them twice; it is trained on once")
        for batch in batches if self.checks else ():
            if batch.advantages is not None:
                self.check_advantages(batch)
            self.check_joins(batch, batches)
        joined = super().concat(batches)
        parts = [(b, None if b.advantages is None else b.advantages.clone()) for b in batches]
        joined.rollouts = [Fate.of(joined, parts=parts)]
        return joined

    def check_joins(self, batch: Batch, batches: list[Batch]):
        """Checks what one batch that is joined must have in common with the others."""
        player = self.player_named(batch.player)
        scored = self.player_named(self.player_named(batches[0].player).adapter)
        if (player.temperature or 1.0) != (scored.temperature or 1.0):
            [other] = [name for name, its in self.players.items() if its is scored]
            raise ScriptError(
                f"concat: the {batch.player} samples at temperature {player.temperature:g}, and "
                f"the joined batch would be scored at {scored.temperature or 1.0:g}, as the "
                f"{other}'s; give them one temperature, or return their batches one by one"
            )
        if batch.kl_weights is None and any(other.kl_weights is not None for other in batches):
            raise ScriptError(
                f"concat: the {batch.player}'s batch has no kl_weights, and another batch has; "
                f"all of them need kl_weights, (B,)"
            )

    def update(self, batch: Batch):
        if self.checks:
            try:
                self.check_batch(batch)
            except ScriptError as error:  # `step` has returned by now: its lines are not on the way
                for line in dict.fromkeys(fate.line for fate in batch.rollouts):
                    error.add_note(f"The batch was made in {line}.")
                raise
            self.remember_training(batch, self.player_named(batch.player).adapter)
        super().update(batch)

    def remember_training(self, batch: Batch, adapter: str):
        for fate in batch.rollouts:
            fate.trained.setdefault(adapter, set()).update(batch.row.tolist())
            self.trained_for.add(fate.player)
            for part, _ in fate.parts:
                self.remember_training(part, adapter)

    def check_batch(self, batch: Batch):
        """Checks that this batch can be trained on as it is."""
        if self.asked_in_evaluation is not None:
            raise ScriptError("update inside of `evaluate` would train on held-out questions")
        name, A, mask = batch.player, batch.advantages, batch.completion_mask
        adapter = self.player_named(name).adapter
        if not self.player_named(name).lr:
            self.warn_once(f"the {name} is frozen (its lr is 0), so an update leaves it as it is")
        for writer in {note["player"] for note in batch.notes} & self.players.keys():
            if self.players[writer].adapter != adapter:
                raise ScriptError(
                    f"the {name} cannot be trained on what the {writer} has written: its samples "
                    f"are not the {name}'s own"
                )
        own_loss = type(self).loss is not cotrainer.CoTrainer.loss  # it may need no advantages
        self.check_trained_once(batch, adapter, own_loss)
        self.check_parts(batch, own_loss)
        if A is None and not own_loss:
            raise ScriptError(
                f"the {name}'s batch has no advantages. A player without reward functions has none "
                f"before set_rewards(batch, rewards); with groups of one row they come from "
                f"groups=..., or you write batch.advantages"
            )
        if A is not None:
            self.check_advantages(batch)
        if (mask[..., 1:] > mask[..., :-1]).any() or not mask[..., :1].all():
            raise ScriptError(
                "completion_mask must be ones, at least one, and then zeros: it says where a "
                "completion ends; advantages of 0 leave tokens out of the loss"
            )
        lists = {"texts": batch.texts, "notes": batch.notes}
        for key, value in (lists | batch.extras | batch.token_extras).items():
            has_rows = isinstance(value, list) or torch.is_tensor(value) and value.dim()
            if has_rows and len(value) not in (len(mask), 0 if key in lists else len(mask)):
                raise ScriptError(
                    f"the {name}'s batch has {len(mask)} rows, and its {key} {len(value)}; give "
                    f"{key} an entry for each row. For a batch of fewer rows there is "
                    f"batch.take(rows), which cuts all lists and tensors alike"
                )
        if own_loss:
            self.check_shares(batch)

    def check_parts(self, batch: Batch, own_loss: bool):
        """Checks that the batches that `concat` has joined had their advantages before."""
        for part, copied in [pair for fate in batch.rollouts for pair in fate.parts]:
            if not same(part.advantages, copied):
                raise ScriptError(
                    f"advantages of the {part.player} were set after concat had copied them, "
                    f"without effect; set them before"
                )
            if batch.advantages is None and copied is None and not own_loss:
                raise ScriptError(
                    f"concat has joined a batch of the {part.player} that had no advantages; call "
                    f"set_rewards(batch, rewards) before concat, or write its batch.advantages"
                )

    def check_trained_once(self, batch: Batch, adapter: str, own_loss: bool):
        """Checks that no row is trained on twice. Two things are allowed to a script with a loss of
        its own. A player may learn from another player's rollout, as PRIME's reward model does. And
        several updates may take disjoint rows of a rollout, because the loss can have PPO's ratio.
        """
        rows = set(batch.row.tolist())
        for fate in batch.rollouts:
            before = set().union(*fate.trained.values())
            if own_loss:
                before = fate.trained.get(adapter, set()) & rows
            if before:
                raise ScriptError(
                    f"a batch of the {batch.player} has been trained on already: at a second "
                    f"update its samples are not the player's own any more, and CoTrainer.loss has "
                    f"no ratio that would say so. Write a loss with the ratio "
                    f"(logp - batch.sampled_logps).exp() for updates on batch.take(rows) of "
                    f"disjoint rows"
                )
            for part, _ in fate.parts:
                self.check_trained_once(part, adapter, own_loss)

    def check_advantages(self, batch: Batch):
        name, A, mask = batch.player, batch.advantages, batch.completion_mask
        if A.shape not in (mask.shape, mask.shape[:1]):
            wanted = f"(B,) or (B, T), here {tuple(mask.shape[:1])} or {tuple(mask.shape)}"
            raise ScriptError(f"the {name}'s advantages must be {wanted}; got {tuple(A.shape)}")
        if A.requires_grad:
            raise ScriptError(f"the {name}'s advantages have a gradient: detach() them")
        if not A.isfinite().all():
            row = int((~A.isfinite()).nonzero()[0, 0])
            raise ScriptError(f"the {name}'s advantages must be finite; they are not in row {row}")
        made_of = batch.rollouts[0].rewards if len(batch.rollouts) == 1 else None
        if made_of is not None and not torch.equal(
            batch.rewards.nan_to_num(), made_of[batch.row].nan_to_num()
        ):
            raise ScriptError(
                f"batch.rewards of the {name} has changed, and the advantages are still those of "
                f"the rewards before; use set_rewards(batch, rewards)"
            )

    # ------------------------------------------------------------------ losses
    def score(self, batch: Batch):
        if self.checks and not self.turns:
            raise ScriptError(
                "score belongs in `loss`, or in `with self.playing(name)`: here nobody plays. In "
                "`step`, take self.log_probs(name, batch)"
            )
        return super().score(batch)

    def check_shares(self, batch: Batch):
        """Looks at a script's own loss, once for each player. Warns if the shares of the rows do
        not add up, if they are divided by nothing, or if rows that are left out have a gradient.
        """
        name, A = batch.player, batch.advantages
        # with several processes a `loss` may wait for the others, and a process may have no rows
        if name in self.losses_seen or self.accelerator.num_processes > 1:
            return
        self.losses_seen.add(name)
        rows = [*self.micro_batches(batch)[:1]]
        left_out = not (A is None or self.kl or self.all_rows)
        idle = (A.reshape(len(A), -1) == 0).all(1).nonzero()[:, 0] if left_out else []
        sums = dict(self._sums)
        with self.playing(name):
            if rows:
                with torch.no_grad():
                    self.check_sums(batch, rows[0])
            if len(idle):
                loss = self.share(batch.take(idle[: self.cfg.micro_batch]))
                its = self.parameters_of(self.player_named(name).adapter)
                if loss.requires_grad and any(g.any() for g in torch.autograd.grad(loss, its)):
                    self.warn_once(
                        f"the {name}'s loss has a gradient in rows whose advantages are 0, and "
                        f"these are left out; set all_rows = True in your class"
                    )
        self._sums = sums

    def share(self, part: Batch) -> torch.Tensor:
        found = self.loss(part)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
            raise ScriptError(
                "loss must return two things: this micro-batch's share of the loss, and a dict of "
                "tensors by name, which are logged; an empty dict logs nothing"
            )
        return found[0]

    def check_sums(self, batch: Batch, rows: torch.Tensor):
        """Compares the loss of a micro-batch with those of its halves, of its rows taken twice, and
        of a batch that has more tokens. rows: the micro-batch's, (b,).
        """
        name, A = batch.player, batch.advantages
        # a group's advantages add up to 0, and so would its loss, whatever it is divided by
        alike = replace(batch, advantages=None if A is None else torch.ones_like(A))
        whole = self.share(alike.take(rows))
        if len(rows) < 2:
            return
        one, other = [self.share(alike.take(part)) for part in rows.tensor_split(2)]
        twice = self.share(alike.take(torch.cat([rows, rows])))
        # in bfloat16 the log-probs of a row depend on the rows beside it, but hardly on itself
        rounding = 1e-4 if self.model.dtype == torch.float32 else 1e-2
        size = max(abs(whole), abs(one), abs(other), 0.01)
        if abs(whole - one - other) > 0.1 * size or abs(twice - 2 * whole) > rounding * size:
            self.warn_once(
                f"the {name}'s loss of a micro-batch is not the sum of those of its halves: divide "
                f"every term by a number of the whole batch, such as batch.total_tokens, and take "
                f"no mean over the micro-batch"
            )
        if A is None or not batch.total_tokens:
            return
        numbers = {key: 2 * x for key, x in batch.extras.items() if isinstance(x, int | float)}
        larger = replace(alike, total_tokens=2 * batch.total_tokens, extras=batch.extras | numbers)
        tokens = alike.take(rows).completion_mask.sum()
        if abs(whole) > 0.5 * tokens and self.share(larger.take(rows)) == whole:
            self.warn_once(
                f"the {name}'s loss is divided by nothing, so it grows with the number of tokens; "
                f"divide by a number of the whole batch, such as batch.total_tokens"
            )

    # ------------------------------------------------------------------ nothing to learn from
    def teaches_nothing(self, batch: Batch, norm: float) -> bool:
        idle = flat = super().teaches_nothing(batch, norm)
        # it may still follow the KL term
        if self.kl and batch.advantages is not None and not self.all_rows:
            flat = not any(self.gather([bool(batch.advantages.any())]))
        for key, part in rollouts_in(batch) if self.checks else ():
            its = part.source is not None and part.advantages is not None
            self.check_learning(key, part, flat or its and not part.advantages.any())
        return idle

    def check_learning(self, key, batch: Batch, idle: bool):
        """Warns after an update if a player had nothing to learn from several times in a row, or if
        nearly all its rewards are equal at the start of the run.

        key: the player's name, or the key of one of the rollouts that `concat` has joined.
        """
        name = batch.player
        rewards = torch.tensor([]) if batch.rewards is None else batch.rewards
        self.idle[key] = self.idle.get(key, 0) + 1 if idle else 0
        if self.idle[key] == IDLE:
            what = f"{IDLE} updates in a row of the {name} taught it nothing: all advantages were 0"
            self.warn_once(what, f". {self.what_helps(batch)}")
        values, counts = rewards[~rewards.isnan()].unique(return_counts=True)
        if self.state.global_step == 0 and counts.sum() >= 16:
            share, value = (counts.max() / counts.sum()).item(), values[counts.argmax()].item()
            if share >= 0.95:
                what = f"{share:.0%} of the {name}'s rewards are {value:g}, next to nothing"
                self.warn_once(f"{what} to learn from", f". {self.what_helps(batch)}")

    def what_helps(self, batch: Batch) -> str:
        if not batch.texts:
            return ""
        R = torch.tensor([]) if batch.rewards is None else batch.rewards[~batch.rewards.isnan()]
        if len(R) and (top := R.max().item()) > 0 and (R == top).float().mean() >= 0.95:
            return f"Its rewards are {top:g}, and if none can be higher, nothing is left to learn."
        cut = self.cut_share(batch)
        longer = f"a longer limit ({cut:.0%} of its completions are cut), " if cut > 0.5 else ""
        warm_up = "a warm-up on the format (python -m common.run.warm_up SCRIPT --help)"
        helps = f"{longer}a model that follows the instructions, or {warm_up}"
        ending = repr(" ".join(batch.texts[0].split()[-8:])[-160:])
        return f"One of its completions ends {ending}. What helps: {helps}."


# ------------------------------------------------------------------ players
def check_players(players: dict[str, Player]):
    """Checks names and shared adapters. Metrics begin with a player's name, or with the adapter's
    name if a batch has rows of several players. An adapter has a single learning rate and a single
    clipping norm.

    players: name -> Player.

    Raises:
        ScriptError: a name is taken, or two players of an adapter have different settings.
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
        called = [function.__name__ for function in player.rewards]
        if len(set(called)) < len(called):
            most = max(called, key=called.count)
            raise ScriptError(
                f"two reward functions of {name!r} have one name, {most!r}; metrics and report "
                f"know them by their names, so give them different ones"
            )
        if name in ("co", "eval") or "/" in name:
            raise ScriptError(f"a player cannot be called {name!r}: other metrics begin with it")
        owner = players.get(player.adapter, player)
        if owner.adapter != player.adapter:
            raise ScriptError(
                f"{name!r} plays with the adapter {player.adapter!r}, the name of the player "
                f"{player.adapter!r}, who plays with {owner.adapter!r}"
            )


# ------------------------------------------------------------------ texts and state
def asked_about(trainer, text: str) -> dict:
    """Returns the training row whose question a verifier's prompt shows, or {}."""
    ours = (row for row in trainer.train_rows if row.get("question") and "answer" in row)
    return next((row for row in ours if row["question"] in text), {})


def rollouts_in(batch: Batch) -> list[tuple]:
    """Returns (key, batch) of each rollout in a batch. A key is the same in every step."""
    if batch.source is None or not batch.notes or batch.advantages is None:
        return [(batch.player, batch)]
    parts = []
    for number in batch.source.unique().tolist():
        part = batch.take((batch.source == number).nonzero()[:, 0])
        part.player = part.notes[0].get("player", batch.player)
        parts.append(((part.player, number), part))
    return parts


def own_state(trainer, data: bool) -> dict[str, str]:
    """Returns the attributes that the script has given its trainer: name -> text. An attribute that
    is not plain data is only known by its type. data: also train_rows and held_out.
    """
    plain = (int, float, str, bool, list, dict, set, tuple, type(None))
    values = {n: v for n, v in vars(trainer).items() if n not in trainer.attributes}
    large = {"train_rows": trainer.train_rows, "held_out": trainer.held_out} if data else {}
    hashes = {n: str([hash(repr(row)) for row in rows]) for n, rows in large.items()}
    texts = {n: repr(v) if isinstance(v, plain) else str(type(v)) for n, v in values.items()}
    return hashes | texts


def is_json(value) -> bool:
    """Whether a value comes back from a JSON file as it was; tuples may become lists."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_json, value))
    return value is None or isinstance(value, str | int | float)


def questions_and_answers(row: dict) -> tuple:
    return row.get("question"), row.get("answer")


def line_of_the_script() -> str:
    """Returns the file and the line outside of common/ from which we are called."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(COMMON) and frame.f_back:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def same(one, other) -> bool:
    return one is other or all(map(torch.is_tensor, (one, other))) and torch.equal(one, other)
