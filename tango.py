r"""RL Tango: train a generator and the verifier of its steps, in turns (Zha et al. 2025,
arXiv:2505.15034).

    python tango.py                                       the embedded model on a CPU, 5 minutes
    python tango.py --verifier none --steps 33            plain GRPO, as many generator steps
    python tango.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU, 4-bit

The loop (algorithm 1; all updates by `CoTrainer.loss`, in common/cotrainer.py)
    ver_warmup verifier steps; then repeat gen_steps generator steps, ver_steps verifier steps

    GENERATOR  sample M solutions per question; the verifier judges every step of each, once
               A = (1 - alpha) * A_outcome + alpha * A_step                                eq. 4-7
    VERIFIER   sample one solution per question, and M judgements of it
               r = [final verdict == answer is right] + 0.8 * format, classes reweighted   eq. 8-9

RL sees no step labels. The verifier is paid for its final verdict and its format, so it learns to
judge steps only as far as that helps the final verdict; the embedded one has been taught to, and
shares some of the generator's misconceptions. The generator is paid for its answer and for the
verdicts on its steps, never for the final verdict: to flatter that gains it nothing.

What we changed and it matters (the full list is in docs/tango.md)
    1. Both players are LoRA adapters on one base, which is also the reference of both.
    2. The loss is a mean over all tokens of the batch; the paper averages within each sequence
       first, the released code within micro-batches of 4.
    3. Groups of 8, 128 rows a step (paper: 5, 1,280).
    4. No supervised warm-up of the generator: the model must already know the format.
    5. Chat messages with our own system prompts, not plain text for base models.

Shapes: P questions, M samples each, B = P * M rows, T completion tokens, K steps of a solution.
"""

import re
from dataclasses import dataclass
from typing import Literal

from common.advantage import group_advantage, step_return_to_go
from common.args import Count, CountOrZero, GroupSize, RunArgs, Share, Tokens, Weight, per_model
from common.cotrainer import CoTrainer, Player
from common.errors import UserError
from common.launch import launch
from common.run import mean, plain_errors
from common.tasks.answers import is_correct, prompt, solve, solve_prompt, split_steps, step_ends
from common.tasks.math import load_questions
from common.tasks.verdicts import read_verdict
from common.tiny.tasks import gold_steps, parse_question, step_labels

import torch
import tyro


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/args.py
    steps: Count = 48
    """optimiser steps, both players together (paper: 440, of which 300 are the generator's)"""
    questions: Count = 16
    """P, questions per step and process (paper: 256)"""
    group_size: GroupSize = 8
    """M, solutions of a question, or judgements of a solution (paper: 5)"""
    lr: Weight = per_model(tiny=2e-3, real=2e-5)
    """learning rate of both adapters, constant (paper: 1e-6, all weights)"""
    kl: Weight = 0.001
    """weight of the k3 penalty towards the base (paper: 0.001); 0 saves the reference pass"""
    gen_steps: CountOrZero = 3
    """N_g, generator steps per cycle (paper: 3)"""
    ver_steps: CountOrZero = 1
    """N_v, verifier steps per cycle (paper: 1)"""
    ver_warmup: CountOrZero = 4
    """verifier steps before everything else (paper: 40 of 440)"""
    alpha: Share = 0.1
    """weight of the step advantage at the start (paper: 0.1); it falls to 0.001 by the end"""
    verifier: Literal["co-trained", "frozen", "none"] = "co-trained"
    """ablation: never trained, or none (plain GRPO); all --steps are then the generator's"""
    generator: Literal["co-trained", "frozen"] = "co-trained"
    """ablation: train the verifier only"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a solution (released code: 2048)"""
    judgement_tokens: Tokens = per_model(tiny=112, real=1024)
    """length limit of a judgement (released code: 4096)"""

    def check(self):
        if self.generator == "frozen" and self.verifier != "co-trained":
            raise UserError(
                f"--generator frozen with --verifier {self.verifier} leaves nobody to train."
            )
        if self.gen_steps + self.ver_steps == 0:
            raise UserError("--gen-steps 0 and --ver-steps 0: a cycle needs a step of one of them.")


GAMMA = 0.8  # weight of the verifier's format reward (paper sec. 4)
CLASS_EMA = 0.8  # decay of the class counts (paper sec. 3.3)

# ------------------------------------------------------------------ prompts and parsing
VERIFY = r"""You are given a problem and a solution in numbered steps. Check the steps one after the
other, by your own calculation. Write one <step> </step> block for each step of the solution, ending
in its verdict, \boxed{CORRECT} or \boxed{INCORRECT}, then the verdict on the solution as a whole,
in exactly this form:
<step_verification>
<step>3*2 is 6, as the step says. \boxed{CORRECT}</step>
</step_verification>
<final_verification>\boxed{CORRECT}</final_verification>"""


def verify_prompt(question: str, solution: str) -> list[dict]:
    """The verifier is told how many steps to judge, and never sees the gold answer."""
    count = len(split_steps(solution))
    return prompt(VERIFY, f"Problem: {question}\nSolution:\n{solution}\nVerify its {count} steps.")


BOXED = r"\\box(?:ed)?\{(CORRECT|INCORRECT)\}"
VERDICTS = ("CORRECT", "INCORRECT")
SECTION = re.compile(r"<step_verification>(.*?)</step_verification>", re.DOTALL)


def parse_judgement(text: str) -> tuple[list[bool], bool | None]:
    r"""(verdict of each step, final verdict); a final verdict that cannot be read is None.

    >>> parse_judgement(r"<step_verification><step>7\boxed{CORRECT}</step></step_verification>"
    ...                 r"<final_verification>\boxed{INCORRECT}</final_verification>")
    ([True], False)
    """
    section = SECTION.search(text)
    # a verdict that a step quotes is none: the final one comes after the steps, a step's at its end
    _, opened, final = text[section.end() if section else 0 :].rpartition("<final_verification>")
    final, closed, _ = final.partition("</final_verification>")
    verdict = read_verdict(final, VERDICTS) if opened and closed else None
    steps = split_steps(section[1]) if section else []
    verdicts = [read_verdict(step, VERDICTS) for step in steps]
    final = None if verdict is None else verdict == "CORRECT"
    return [v == "CORRECT" for v in verdicts if v], final


def solution_format(text: str) -> float:
    """How well a solution keeps to its format, in [0, 1]. Not a reward: it decides only whether a
    judgement must have as many verdicts as the solution has steps.
    """
    answer = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if not answer:
        return 0.0
    score, steps = 1.0, len(split_steps(text))
    if not re.fullmatch(r"\s*\\boxed\{.*\}\s*", answer[1], re.DOTALL):
        score -= 0.8
    score -= 0.8 if steps == 0 else 0.4 if steps < 3 else 0.0
    return max(0.0, score)


def judgement_format(text: str, solution: str) -> float:
    """How well a judgement keeps to the format, in [0, 1] (the released code's deductions)."""
    match = re.fullmatch(
        r"\s*<step_verification>(.*)</step_verification>"
        r"\s*<final_verification>(.*?)</final_verification>\s*",
        text,
        re.DOTALL,
    )
    if not match:
        return 0.0
    score, verdicts = 1.0, parse_judgement(text)[0]
    countable = solution_format(solution) >= 0.6
    if not re.fullmatch(rf"\s*{BOXED}\s*", match[2], re.IGNORECASE):
        score -= 0.8
    if not split_steps(match[1]) or (countable and len(verdicts) != len(split_steps(solution))):
        score -= 0.8
    if re.sub(r"<step>.*?</step>", "", match[1], flags=re.DOTALL).strip():
        score -= 0.4
    return max(0.0, score)


# ------------------------------------------------------------------ rewards, called by TRL
def outcome_reward(completions, answer, **_) -> list[float]:
    """Generator: r_out = [answer == gold]. Nothing of the verifier's is in it."""
    return [float(is_correct(c[0]["content"], gold)) for c, gold in zip(completions, answer)]


def verdict_reward(completions, label, **_) -> list[float]:
    """Verifier: [final verdict == gold verdict], 0 if there is none (eq. 8, first term)."""
    finals = [parse_judgement(c[0]["content"])[1] for c in completions]
    return [float(final is right) for final, right in zip(finals, label)]


def format_reward(completions, solution, **_) -> list[float]:
    """Verifier: 0.8 * format; 0 without a final verdict, however tidy the rest (eq. 8, second)."""
    texts = [c[0]["content"] for c in completions]
    readable = [parse_judgement(text)[1] is not None for text in texts]
    scores = [judgement_format(text, s) for text, s in zip(texts, solution)]
    return [GAMMA * score if ok else 0.0 for score, ok in zip(scores, readable)]


# ------------------------------------------------------------------ the paper's mathematics
def alpha_at(n: int, total: int, alpha: float) -> float:
    """Weight of the step advantage after n of `total` generator steps."""
    # alpha_n = max(1e-3, a0 * exp(-n ln(a0 / 1e-3) / total)); a smaller a0 stays as it is
    return max(1e-3, alpha * (1e-3 / alpha) ** (n / max(1, total))) if alpha > 1e-3 else alpha


def step_rewards(verdicts: list[list[bool]], ends: list[list[int]]) -> tuple:
    """Eq. 3: r = +-1/K at the last token of each of a solution's K steps.

    Returns:
        (B, K) rewards, (B, K) token indices. A solution with another number of verdicts than steps
        has no step rewards: its are NaN, as is padding, whose indices are -1.
    """
    K = max([len(end) for end in ends] + [1])
    rewards, at = torch.full((len(ends), K), torch.nan), torch.full((len(ends), K), -1)
    for i, (verdict, end) in enumerate(zip(verdicts, ends)):
        at[i, : len(end)] = torch.tensor(end, dtype=torch.long)
        if end and len(verdict) == len(end):
            rewards[i, : len(end)] = torch.tensor([1.0 if v else -1.0 for v in verdict]) / len(end)
    return rewards, at


def tango_advantages(
    outcome, step_rewards, step_ends, mask, group_size: int, alpha: float
) -> torch.Tensor:
    """The generator's per-token advantages, eq. 4-7.

    Args:
        outcome: (B,) in {0, 1}.
        step_rewards: (B, K), NaN = none.
        step_ends: (B, K) token indices, -1 = none.
        mask: (B, T) of 0/1.
        group_size: M.
        alpha: weight of the step advantage.

    Returns:
        (B, T), 0 outside the mask.
    """
    # A_out = (r - mean) / std over the M solutions of a question
    A_out = group_advantage(outcome, group_size)[:, None]  # (B, 1)
    if step_rewards.shape[1] == 0 or alpha == 0:
        return (1 - alpha) * A_out * mask
    # z = the same over ALL step rewards of the M solutions pooled. Trap: 1/K and pooling together
    # favour short solutions among those that are all right; a small alpha bounds the damage.
    z = group_advantage(step_rewards, group_size)  # (B, K)
    pools = step_rewards.reshape(-1, group_size * step_rewards.shape[1])  # (P, M * K)
    alone = ((~pools.isnan()).sum(1) == 1).repeat_interleave(group_size)[:, None]  # (B, 1)
    z = torch.where(alone, step_rewards.nan_to_num(0.0), z)  # a pool of one has mean 0, std 1
    # A_step[t] = SUM of the z of steps that end at or after t: no mean, no discount
    A_step = step_return_to_go(z, step_ends, mask)  # (B, T)
    # A = (1 - alpha) A_out + alpha A_step: normalised apart; the paper found merging less stable
    return ((1 - alpha) * A_out + alpha * A_step) * mask


def class_weights(labels: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Eq. 9: labels (B,) bool and running counts (2,) of wrong and right -> (B,), mean 1.

    The paper: without it the verifier of a mostly wrong generator learns to say INCORRECT always.
    """
    s = counts.clamp(min=1e-6).rsqrt()[labels.long()]  # (B,): 1 / sqrt(count of the row's class)
    return s * len(s) / s.sum()


# ------------------------------------------------------------------ the trainer
class Tango(CoTrainer):
    """`step` is algorithm 1. CoTrainer samples, scores, computes the loss and updates."""

    @staticmethod
    def players(args: Args) -> dict[str, Player]:
        M, solution, judgement = args.group_size, args.solution_tokens, args.judgement_tokens
        rewards = [verdict_reward, format_reward]
        return {
            "generator": Player([outcome_reward], args.lr, solution, M),
            "verifier": Player(rewards, args.lr, judgement, M, reads=solution),
        }

    def step(self, rows):
        """rows: B, every question M times in a row."""
        if self.player_at(self.state.global_step) == "generator":
            return [self.generator_step(rows)]
        return [self.verifier_step(rows[:: self.cfg.group_size])]

    def player_at(self, step: int) -> str:
        """Warm-up, then cycles of N_g generator and N_v verifier steps, generator first."""
        cfg = self.cfg
        if cfg.verifier != "co-trained":
            return "generator"
        if cfg.generator == "frozen" or step < cfg.ver_warmup:
            return "verifier"
        turn = (step - cfg.ver_warmup) % (cfg.gen_steps + cfg.ver_steps)
        return "generator" if turn < cfg.gen_steps else "verifier"

    def generator_step(self, rows):
        batch = self.rollout("generator", rows)  # texts, rewards (B,), completion_mask (B, T)
        alpha = self.alpha()
        verdicts, ends = [[]] * len(rows), [[]] * len(rows)
        if alpha > 0:
            # one each, at temperature 1: a stochastic verifier is harder to game, the paper says
            asked = [verify_prompt(r["question"], text) for r, text in zip(rows, batch["texts"])]
            batch["judgements"] = self.generate("verifier", asked)
            # its final verdict is for the metrics only
            verdicts = [parse_judgement(judgement)[0] for judgement in batch["judgements"]]
            ends = self.ends_of_steps(batch)
        r_step, at = (x.to(batch["rewards"].device) for x in step_rewards(verdicts, ends))  # (B, K)
        batch["advantages"] = tango_advantages(
            batch["rewards"], r_step, at, batch["completion_mask"], self.cfg.group_size, alpha
        )  # (B, T)
        self.report_generator(rows, batch, alpha, verdicts, ends)
        self.report_credit(batch, batch["rewards"], alpha)
        return batch

    def verifier_step(self, questions):
        M = self.cfg.group_size
        solutions = self.generate("generator", [q["prompt"] for q in questions])  # ONE each
        judged = [
            {
                **question,
                "prompt": verify_prompt(question["question"], solution),
                "solution": solution,
                "label": is_correct(solution, question["answer"]),
            }
            for question, solution in zip(questions, solutions)
            for _ in range(M)  # a group is M judgements of one solution
        ]
        batch = self.rollout("verifier", judged)
        labels = [row["label"] for row in judged]
        s = self.over_all_processes(self.weights_by_class, labels)  # (B,)
        # The weights come after the group normalisation, which would undo them.
        batch["advantages"] = group_advantage(batch["rewards"], M) * s.to(batch["rewards"])  # (B,)
        self.report_verifier(judged, batch)
        return batch

    def alpha(self) -> float:
        """Its clock counts the generator's steps only."""
        if self.cfg.verifier == "none":
            return 0.0
        now, steps = self.state.global_step, range(self.cfg.steps)
        total = sum(self.player_at(step) == "generator" for step in steps)
        done = sum(self.player_at(step) == "generator" for step in steps[:now])
        return alpha_at(done, total, self.cfg.alpha)

    def ends_of_steps(self, batch) -> list[list[int]]:
        """For every solution, the index of the last token of each of its steps."""
        ids, mask = batch["completion_ids"], batch["completion_mask"].bool()  # (B, T)
        return [step_ends(i[m].tolist(), self.processing_class) for i, m in zip(ids, mask)]

    def weights_by_class(self, labels: list[bool]) -> torch.Tensor:
        """labels: of all processes' rows. The running counts start with the first batch."""
        now = torch.bincount(torch.tensor(labels).long(), minlength=2).float()  # (2,)
        before = torch.tensor(self.saved.get("class_counts", now.tolist()))
        counts = CLASS_EMA * before + (1 - CLASS_EMA) * now
        self.saved["class_counts"] = counts.tolist()
        return class_weights(torch.tensor(labels), counts)

    # --- what is logged and shown; nothing below affects training
    def report_generator(self, rows, batch, alpha, verdicts, ends):
        # the outcome is the only reward; beside another, rewards are no labels: take is_correct
        self.log_mean("generator/accuracy", batch["rewards"])
        self.log_mean("co/alpha", alpha)
        gold = [gold_steps(row["question"], text) for row, text in zip(rows, batch["texts"])]
        self.log_mean("generator/step_accuracy", [g for labels in gold for g in labels or []])
        if "judgements" not in batch:
            return
        dropped = [len(v) != len(e) for v, e in zip(verdicts, ends)]
        self.log_mean("co/step_rewards_dropped", dropped)
        finals = [parse_judgement(judgement)[1] for judgement in batch["judgements"]]
        self.report_verdicts(finals, batch["rewards"].bool().tolist())
        for i, note in enumerate(batch["notes"]):
            note |= {"judgement": batch["judgements"][i], "verdicts": verdicts[i], "gold": gold[i]}
        # what a generator that games its verifier lives on
        pairs = [zip(v, g) for v, g in zip(verdicts, gold) if g and len(v) == len(g)]
        self.log_mean("co/wrong_steps_accepted", [v for pair in pairs for v, g in pair if not g])

    def report_credit(self, batch, outcome, alpha):
        """The two terms of eq. 7; outcome: (B,)."""
        A_out = group_advantage(outcome, self.cfg.group_size)[:, None]  # (B, 1)
        first = (1 - alpha) * A_out * batch["completion_mask"]  # (B, T)
        batch["components"] = {"outcome": first, "step": batch["advantages"] - first}

    def report_verifier(self, judged, batch):
        labels = [row["label"] for row in judged]
        self.log_mean("generator/accuracy", labels)
        parsed = [parse_judgement(text) for text in batch["texts"]]
        self.report_verdicts([final for _, final in parsed], labels)
        for note, row, (verdicts, _) in zip(batch["notes"], judged, parsed):
            note |= {"solution is right": row["label"], "verdicts": verdicts}
            note["gold"] = gold_steps(row["question"], row["solution"])

    def report_verdicts(self, finals: list[bool | None], labels: list[bool]):
        """Co-training that goes wrong shows here first: a verifier of one opinion, or one that is
        kinder than the truth."""
        finals, labels = self.gather(finals), self.gather(labels)
        for key, value in verdict_metrics(finals, labels).items():
            self.log_mean(f"verifier/{key}", value)
        accepted = mean([final is True for final in finals])
        self.log_mean("co/verdict_minus_gold", accepted - mean(labels))


# ------------------------------------------------------------------ evaluation
def verdict_metrics(finals: list[bool | None], labels: list[bool]) -> dict[str, float]:
    """Against gold. A verdict that cannot be read is wrong in both classes; a class that does not
    occur is left out.
    """
    of = {
        label: [final is label for final, truth in zip(finals, labels) if truth == label]
        for label in (True, False)
    }
    rates = {name: mean(of[label]) for name, label in (("tpr", True), ("tnr", False)) if of[label]}
    return {
        "balanced_accuracy": mean(list(rates.values())),
        **rates,
        "says_correct": mean([final is True for final in finals]),
        "parsed": mean([final is not None for final in finals]),
    }


def step_f1(questions: list[str], solutions: list[str], judgements: list[str]) -> float:
    """F1 of finding the wrong steps, against gold step labels that RL never sees. Embedded
    questions only.
    """
    hits = said = wrong = 0
    for question, solution, judgement in zip(questions, solutions, judgements):
        gold, verdicts = step_labels(question, split_steps(solution)), parse_judgement(judgement)[0]
        verdicts = (
            verdicts if len(verdicts) == len(gold) else [True] * len(gold)
        )  # not readable: nothing was found
        hits += sum(not v and not g for v, g in zip(verdicts, gold))
        said += sum(not v for v in verdicts)
        wrong += sum(not g for g in gold)
    return 2 * hits / max(1, said + wrong)


def evaluate(trainer: Tango, held_out: list[dict]) -> dict[str, float]:
    """The generator on held-out questions; the verifier on solutions that the base wrote at step 0,
    so that it is measured on the same ones all along, sampled as in training, and greedily, which
    an untrained one is better at; and both together: the verifier picks the best of a few
    solutions."""
    questions, n = [row["question"] for row in held_out], trainer.cfg.eval_samples

    def judge(rows: list[dict], solutions: list[str], greedy: bool = False) -> list[str]:
        prompts = [verify_prompt(row["question"], s) for row, s in zip(rows, solutions)]
        return trainer.generate_all("verifier", prompts, greedy)

    several = [row for row in held_out for _ in range(n)]
    samples, correct = solve(trainer, "generator", held_out, n)
    likeliest, of_those = solve(trainer, "generator", held_out, greedy=True)
    trainer.saved.setdefault("base_solutions", samples[::n])  # step 0: the generator is the base
    result = {"generator/accuracy": mean(correct), "generator/greedy": mean(of_those)}
    if all(map(parse_question, questions)):  # embedded questions have gold step labels
        for suffix, texts in (("", samples), ("_greedy", likeliest)):
            asked = several if texts is samples else held_out
            gold = [gold_steps(row["question"], text) for row, text in zip(asked, texts)]
            result[f"generator/step_accuracy{suffix}"] = mean([g for steps in gold for g in steps])
    if trainer.cfg.verifier == "none":
        return result
    # the verifier on the base's solutions
    solutions = trainer.saved["base_solutions"]
    right = [is_correct(text, row["answer"]) for text, row in zip(solutions, held_out)]
    for suffix in ("", "_greedy"):
        judgements = judge(held_out, solutions, greedy=suffix != "")
        finals = [parse_judgement(text)[1] for text in judgements]
        for key, value in verdict_metrics(finals, right).items():
            if not suffix or key == "balanced_accuracy":
                result[f"verifier/{key}{suffix}"] = value
        if all(map(parse_question, questions)):
            result[f"verifier/step_f1{suffix}"] = step_f1(questions, solutions, judgements)
    # both: of n solutions of a question, the verifier's favourite; the first quarter of questions
    some = n * max(1, len(held_out) // 4)
    scores = []
    for judgement in judge(several[:some], samples[:some]):
        steps, final = parse_judgement(judgement)
        scores.append((final is True, sum(steps) / max(1, len(steps))))  # ties: share of good steps
    picked = [max(range(i, i + n), key=scores.__getitem__) for i in range(0, some, n)]
    result[f"co/best_of_{n}"] = mean([correct[i] for i in picked])
    result["co/mean_of_same"] = mean(correct[:some])
    return result


# ------------------------------------------------------------------ main
CURVES = {  # panels of curves.png and report.html; step lines show the first metric of each
    "generator": ["generator/accuracy"],
    "verifier": ["verifier/balanced_accuracy", "verifier/tpr", "verifier/tnr"],
    "health": [
        "verifier/says_correct",
        "verifier/parsed",
        "co/verdict_minus_gold",
        "generator/frac_reward_zero_std",
    ],
}


def load(args: Args):
    wanted = args.steps * args.questions * 4  # enough for four processes
    return load_questions(args.dataset, wanted, args.eval_questions, args.seed)


def main(args: Args):
    launch(Tango, args, load, evaluate, CURVES, solve_prompt, args.group_size)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
