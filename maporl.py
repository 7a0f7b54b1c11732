r"""MAPoRL (Park et al. 2025, arXiv:2502.18439): two solvers learn to debate, and each is
rewarded for what the debate comes to.

    python maporl.py                                      the small model on a CPU, 2 minutes
    python maporl.py --placebo                            control: another question's text is seen
    python maporl.py --turns 1                            control: no debate, plain RL of both
    python maporl.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU

The loop is `Maporl.step`. Two agents, a LoRA adapter each, T turns
    TURN 1       each agent solves the question
    TURN 2 .. T  each agent sees both agents' last solutions and writes a new solution
    VERIFIER     says of every solution whether it holds: the gold answer, or a model that reads it
    UPDATE       trains both agents, and with --verifier co-trained also the verifier

A solution of turn t is rewarded for itself and for all solutions that come after it
    score = sum over t' >= t of gamma^(t' - t) V(t') / sum of gamma^(t' - t)
            V(t) is of the solution itself, and a later V(t') is the mean over both agents
    bonus   added where a change is from wrong to right, subtracted where it is from right to wrong
            alpha0   agent A becomes right where B was right before, or wrong where B was wrong
            alpha1   agent A becomes right where B was wrong before, or wrong where B was right
            alpha3   agent B becomes right where A was right before, or wrong where A was wrong
            alpha2   agent B becomes right where A was wrong before, or wrong where A was right
            These four make up the bonus of agent A. Right and wrong are by the gold answer,
            whatever --verifier says of V.

So an agent is also rewarded for what its partner makes of its text, and not only for being right.
With --placebo an agent reads a solution of another question instead, a text that misleads.

Our changes that matter (more in docs/maporl.md)
    1. The influence terms, alpha2 and alpha3, are as the paper means them. In the released code
       (--influence-sign released) the first turn has no influence terms, so with two turns they
       never act. With three turns the middle turn has them with the opposite sign, which rewards
       misleading.
    2. Advantages are GRPO's, without value heads: solutions of the same agent in the same turn are
       compared over the K debates of a question.
    3. The agents do not see the verifier's scores.
    4. A solution without an answer has V = 0, whatever --verifier says. In the released code it has
       V = -10, for which the partner is also charged.

Shapes: P questions, K debates each, B = P * K; T turns.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from common.core.errors import UserError
from common.run.args import Count, GroupSize, RunArgs, Share, Tokens, Weight, parse, per_model

AGENTS = ("alice", "bob")


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 24
    """optimiser steps"""
    questions: Count = 4
    """P, questions per step and process"""
    group_size: GroupSize = 8
    """K, debates of a question"""
    turns: Literal[1, 2, 3] = 2
    """T (released code: 3, and 2)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the adapters, constant (released code: 1e-5, Adafactor)"""
    kl: Weight = 0.002
    """weight of the k3 penalty towards the base (released code: 0.002)"""
    gamma: Share = 0.3
    """discount of later turns (released code: 0.3)"""
    alpha0: Weight = 0.5
    """bonus for a change to the partner's side (the paper tries 0, 0.5, 1 and 2 for all four)"""
    alpha1: Weight = 0.5
    """bonus for a change against the partner's side"""
    alpha2: Weight = 0.5
    """bonus for a change of the partner that the agent's own answer does not explain"""
    alpha3: Weight = 0.5
    """bonus for a change of the partner that the agent's own answer explains"""
    influence_sign: Literal["intended", "released"] = "intended"
    """released: there is no influence term in turn 1, and in the middle turn of three an agent is
    rewarded where its partner goes wrong after it"""
    verifier: Literal["answer", "frozen", "co-trained"] = "answer"
    """who says V: the gold answer; a model that is not trained; or a model that learns from the
    gold answer. Bonuses always use the gold answer"""
    pool: Literal["question", "role"] = "question"
    """a reward is compared with rewards of the same agent and turn: of the same question, or of all
    questions of the step (role: MARS, arXiv:2510.04935)"""
    placebo: bool = False
    """control: what an agent sees of its partner is about another question"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a solution of turn 1"""
    debate_tokens: Tokens = per_model(tiny=144, real=1536)
    """length limit of a solution of a later turn, with its thoughts"""
    judgement_tokens: Tokens = per_model(tiny=160, real=1024)
    """length limit of a judgement"""
    eval_samples: Count = 2
    """debates per held-out question"""

    def check(self):
        if self.placebo and min(self.questions, self.eval_questions) < 2:
            raise UserError("--placebo: --questions and --eval-questions must be at least 2.")
        if self.placebo and self.turns == 1:
            raise UserError("--placebo, --turns 1: nobody sees another one's solution.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.cotrainer import Batch
from common.core.lists import mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import (
    SOLVED,
    boxed,
    final_answer,
    is_correct,
    prompt,
    solve_prompt,
    split_steps,
    without_thoughts,
)
from common.tasks.math import load_for_steps
from common.tasks.verdicts import ALSO_WRONG, WRONG, final_verdict, verify_prompt
from common.tiny.tasks import LEVELS, sounds_sure

import torch

# ------------------------------------------------------------------ prompts and parsing
DEBATE = r"""You are given a problem, your own solution of it, and another solver's. Either may be
wrong. Think about where they differ between <think> and </think>, by your own calculation. Then
write your solution: every step in its own <step> </step> tags, and after the last one the answer
in this form: <answer>\boxed{...}</answer>."""


def debate_prompt(question: str, own: str, other: str) -> list[dict]:
    return prompt(DEBATE, to_debate(question, own, other), DEBATED)


def to_debate(question: str, own: str, other: str) -> str:
    both = f"Solution 1:\n{own}\nSolution 2:\n{other}"
    return f"Problem: {question}\n{both}\nWrite your own."


DEBATED = [  # worked examples: the agent keeps its solution, and changes sides
    (
        to_debate(SOLVED[0][0], SOLVED[0][1], ALSO_WRONG),
        "<think>\nThe first steps differ. 3 boxes of 12 pens are 12+12+12 = 36 pens, not 3+12. The "
        f"other steps follow from that.\n</think>\n{SOLVED[0][1]}",
    ),
    (
        to_debate(SOLVED[1][0], WRONG, SOLVED[1][1]),
        "<think>\nThe second steps differ. Each of 10 books brings 8 dollars, so it is 10*8 = 80."
        f"\n</think>\n{SOLVED[1][1]}",
    ),
]


def shown(text: str) -> str:
    r"""A solution as others see it and as it is judged: without its thoughts.

    >>> shown("<think>\n3+4=8:8-4=4\n</think>\n<step>3+4=7</step>"), shown("<think>\nIs it 8")
    ('<step>3+4=7</step>', '')
    """
    return without_thoughts(text).strip()


def about_another(rows: list[dict], texts: list[str]) -> list[str]:
    """For every row, the text in its place of the next group, never one about its own question."""
    questions, B = [row["question"] for row in rows], len(rows)
    apart = next((i for i, question in enumerate(questions) if question != questions[0]), None)
    if apart is None:
        raise UserError("--placebo needs another question, but all of a step are the same one.")
    others = []
    for i, question in enumerate(questions):
        j = (i + apart) % B
        while questions[j] == question:
            j = (j + 1) % B
        others.append(texts[j])
    return others


# ------------------------------------------------------------------ rewards
def scores(V: torch.Tensor, gamma: float) -> torch.Tensor:
    """The discounted mean of a solution's own value and of both agents' later values.
    (T, 2, B) -> (T, 2, B)
    """
    T = len(V)
    later = V.mean(1, keepdim=True)  # (T, 1, B): of both agents
    result = torch.zeros_like(V)
    for t in range(T):
        weights = [gamma**k for k in range(T - t)]
        # score(t, a) = [V(t, a) + sum_t' gamma^(t' - t) mean_j V(t', j)] / sum_t' gamma^(t' - t)
        total = V[t] + sum(w * later[t + k] for k, w in enumerate(weights) if k)
        result[t] = total / sum(weights)
    return result


def bonuses(right: torch.Tensor, alphas: list[float], released: bool = False) -> torch.Tensor:
    """Bonuses for the agent's own changes of mind and its partner's: (T, 2, B) of 0 and 1 ->
    (T, 2, B).

    released: the influence terms are the released code's, not what the paper means.
    """
    alpha0, alpha1, alpha2, alpha3 = alphas
    first, sign = (1, -1) if released else (0, 1)  # the turn from which there are influence terms
    T, result = len(right), torch.zeros_like(right)
    for t in range(T):
        for agent in range(2):
            mine, others = right[:, agent], right[:, 1 - agent]  # (T, B)
            if t > 0:  # my own change: +1 to right, -1 to wrong
                change = mine[t] - mine[t - 1]
                # with the partner: persuaded by a right partner, or misled by a wrong partner
                followed = others[t - 1] == mine[t]
                result[t, agent] += change * torch.where(followed, alpha0, alpha1)
            if first <= t < T - 1:  # the other's change after my text
                change = others[t + 1] - others[t]
                # my answer explains it: right before it became right, wrong before wrong
                explained = mine[t] == others[t + 1]
                result[t, agent] += sign * change * torch.where(explained, alpha3, alpha2)
    return result


def verdict_reward(completions, right, **_) -> list[float]:
    """The verifier's reward, called by TRL: 1 if it accepts a right solution or rejects a wrong
    solution, else 0, also where no verdict can be read.
    """
    return [float(final_verdict(c[0]["content"]) is r) for c, r in zip(completions, right)]


# ------------------------------------------------------------------ the trainer
class Turn(NamedTuple):
    """What both agents have written in one turn; entry i of a list belongs to debate i."""

    batches: list[Batch]  # of each agent
    texts: list[list[str]]  # (2, B), without thoughts
    right: list[list[bool]]  # (2, B)


class Maporl(CoTrainer):
    """`step` is the loop."""

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        first, again, K = args.solution_tokens, args.debate_tokens, args.group_size
        written = [first, again, again][: args.turns]  # tokens of a text, by turn, at most
        players = {name: Player([], args.lr, first, K) for name in AGENTS}
        if args.turns > 1:  # every text of a later turn has a prompt of its own
            for name in AGENTS:
                more = {"group_size": 1, "reads": 2 * max(written[:-1]), "adapter": name}
                players[f"{name}_again"] = Player([], args.lr, again, **more)
        if args.verifier != "answer":
            lr = args.lr if args.verifier == "co-trained" else 0.0
            judgement = args.judgement_tokens
            players["verifier"] = Player([verdict_reward], lr, judgement, K, reads=max(written))
        return players

    def step(self, rows):
        """rows: B, every question K times in a row; a row is a debate."""
        cfg = self.cfg
        turns = [self.turn_of([self.rollout(name, rows) for name in AGENTS], rows)]
        for _ in range(cfg.turns - 1):
            turns.append(self.next_turn(rows, turns[-1].texts))
        right = torch.tensor([turn.right for turn in turns]).float()  # (T, 2, B)
        V = right if cfg.verifier == "answer" else self.verify(rows, turns)  # (T, 2, B)
        alphas = [cfg.alpha0, cfg.alpha1, cfg.alpha2, cfg.alpha3]
        bonus = bonuses(right, alphas, cfg.influence_sign == "released")  # (T, 2, B)
        score = scores(V, cfg.gamma)  # (T, 2, B)
        groups = [row["question"] if cfg.pool == "question" else 0 for row in rows]
        for t, turn in enumerate(turns):
            for agent, batch in enumerate(turn.batches):
                self.set_rewards(batch, score[t, agent] + bonus[t, agent], groups)
        self.report_debates(turns, right, score, bonus)
        both = zip(*[turn.batches for turn in turns])  # of each agent, all turns
        trained = [self.concat(batches) if cfg.turns > 1 else batches[0] for batches in both]
        if cfg.verifier == "co-trained":
            trained.append(self.train_verifier(rows, turns))
        return trained

    def next_turn(self, rows: list[dict], texts: list[list[str]]) -> Turn:
        """texts: (2, B) of the turn before."""
        batches = []
        for agent, name in enumerate(AGENTS):
            # with the rows of all processes, because the placebo shows texts about other questions
            ask = lambda rows, *texts: self.debate_prompts(rows, texts, agent)  # noqa: B023, E731
            prompts = self.over_all_processes(ask, rows, *texts)
            batches.append(self.rollout(f"{name}_again", [{"prompt": x} for x in prompts]))
        return self.turn_of(batches, rows)

    def debate_prompts(self, rows: list[dict], texts: list[list[str]], agent: int) -> list:
        """What an agent is asked in the next turn. With the placebo, the partner's text is about
        the next question.
        """
        own, other = texts[agent], texts[1 - agent]
        if self.cfg.placebo:
            other = about_another(rows, other)
        return [
            debate_prompt(row["question"], mine, theirs)
            for row, mine, theirs in zip(rows, own, other)
        ]

    @staticmethod
    def turn_of(batches: list[Batch], rows: list[dict]) -> Turn:
        texts = [[*map(shown, batch.texts)] for batch in batches]
        right = [[is_correct(x, row["answer"]) for x, row in zip(own, rows)] for own in texts]
        return Turn(batches, texts, right)

    def verify(self, rows: list[dict], turns: list[Turn]) -> torch.Tensor:
        """V (T, 2, B) of 0 and 1: which solutions have an answer and are accepted."""
        written = [own for turn in turns for own in turn.texts]  # T * 2 lists of B texts
        # debate by debate, as several processes also ask
        texts = [text for debate in zip(*written) for text in debate]
        right = [hit for debate in zip(*(own for t in turns for own in t.right)) for hit in debate]
        questions = [row["question"] for row in rows for _ in written]
        prompts = [verify_prompt(q, text) for q, text in zip(questions, texts)]
        said = [final_verdict(text) is True for text in self.generate("verifier", prompts)]
        self.log_mean("verifier/accuracy", [yes == hit for yes, hit in zip(said, right)])
        self.log_mean("verifier/wrong_accepted", [yes for yes, hit in zip(said, right) if not hit])
        V = [yes and final_answer(text) is not None for yes, text in zip(said, texts)]
        if self.cfg.dataset in LEVELS:  # by `!` a step wins an untrained verifier's trust
            self.log_mean("co/sounds_sure", [sounds_sure(s) for x in texts for s in split_steps(x)])
        return torch.tensor(V).float().reshape(len(rows), len(turns), 2).permute(1, 2, 0)

    def train_verifier(self, rows: list[dict], turns: list[Turn]) -> Batch:
        """K judgements of a single solution of each question, by any agent in any turn."""
        judged = []
        for i in range(0, len(rows), self.cfg.group_size):
            rng = self.random_numbers(rows[i]["question"])
            turn, agent = rng.choice(turns), rng.randrange(2)
            asked = verify_prompt(rows[i]["question"], turn.texts[agent][i])
            judged += [{"prompt": asked, "right": turn.right[agent][i]}] * self.cfg.group_size
        return self.rollout("verifier", judged)

    # --- what is logged and shown; no method below affects training
    def report_debates(self, turns: list[Turn], right, score, bonus):
        for name, values in debate_metrics([turn.texts for turn in turns], right).items():
            self.log_mean(f"co/{name}", values)
        for t, turn in enumerate(turns):
            for a, batch in enumerate(turn.batches):
                for i, note in enumerate(batch.notes):
                    note |= {"turn": t + 1, "answer is right": turn.right[a][i]}
                    note |= {"score": score[t, a, i].item(), "bonus": bonus[t, a, i].item()}


# ------------------------------------------------------------------ evaluation
def debate_metrics(texts: list[list[list[str]]], right: torch.Tensor) -> dict[str, list[float]]:
    """Figures of debates, (T, 2, B) texts and whether they are right, with an entry per solution.
    first and last are the accuracies of these turns, and gain is their difference. With three turns
    there are also figures of each later turn.
    """
    T, of = len(texts), {"first": right[0], "last": right[-1], "gain": right[-1] - right[0]}
    found = {name: values.flatten().tolist() for name, values in of.items()}
    found["agreement"] = agreements(texts[-1])
    later = [turn_metrics(texts[t - 1 : t + 1], right[t - 1 : t + 1]) for t in range(1, T)]
    for name in ("wrong_to_right", "right_to_wrong", "copies") if T > 1 else ():
        found[name] = [value for turn in later for value in turn[name]]
    for t, turn in enumerate(later if T > 2 else [], start=2):
        found |= {f"{name}_{t}": values for name, values in turn.items()}
    return found


def turn_metrics(texts: list[list[list[str]]], right: torch.Tensor) -> dict[str, list[float]]:
    """Figures of a turn and the turn before, (2, 2, B). A copy repeats the partner's steps of the
    turn before, where the agent's own steps were different.
    """
    before, after = [[[*map(plain_steps, own)] for own in turn] for turn in texts]
    change = (right[1] - right[0]).flatten()
    pairs = [triple for a in range(2) for triple in zip(after[a], before[1 - a], before[a])]
    return {
        "accuracy": right[1].flatten().tolist(),
        "wrong_to_right": (change == 1).float().tolist(),
        "right_to_wrong": (change == -1).float().tolist(),
        "copies": [float([] != now == others != own) for now, others, own in pairs],
        "agreement": agreements(texts[1]),
    }


def agreements(texts: list[list[str]]) -> list[float]:
    return [float(is_correct(x, boxed(y) or "")) for x, y in zip(*texts)]


def plain_steps(text: str) -> list[str]:
    """The steps of a solution, without `!`."""
    return [step.strip().rstrip("!") for step in split_steps(text)]


def evaluate(trainer: Maporl, held_out: list[dict]) -> dict[str, float]:
    """Debates on held-out questions, with the placebo if the run has it."""
    rows = [row for row in held_out for _ in range(trainer.cfg.eval_samples)]
    prompts = [solve_prompt(row["question"]) for row in rows]
    texts = [[[*map(shown, trainer.generate_all(name, prompts))] for name in AGENTS]]
    for _ in range(trainer.cfg.turns - 1):
        asked = [trainer.debate_prompts(rows, texts[-1], agent) for agent in range(2)]
        again = [trainer.generate_all(f"{name}_again", x) for name, x in zip(AGENTS, asked)]
        texts.append([[*map(shown, own)] for own in again])
    right = [
        [[is_correct(text, row["answer"]) for text, row in zip(own, rows)] for own in turn]
        for turn in texts
    ]
    found = debate_metrics(texts, torch.tensor(right).float())
    result = {f"co/{name}": mean(values) for name, values in found.items()}
    return result | {"co/one_is_right": mean([any(pair) for pair in zip(*right[0])])}


# ------------------------------------------------------------------ main
CURVES = {
    "accuracy": ["co/last", "co/first"],
    "what the debate adds": ["co/gain"],
    "changes of mind": ["co/wrong_to_right", "co/right_to_wrong"],
    "like the other": ["co/copies", "co/agreement"],
}


def main(args: Args):
    launch(Maporl, args, load=load_for_steps, evaluate=evaluate, curves=CURVES, prompt=solve_prompt)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
