r"""RL Tango (Zha et al. 2025, arXiv:2505.15034): train a generator and its verifier in turns.

    python tango.py                                       the small model on a CPU, 2 minutes
    python tango.py --verifier none --steps 33            plain GRPO, as many generator updates
    python tango.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU

The loop (algorithm 1; the loss of both players is `CoTrainer.loss` in common/core/cotrainer.py)
    ver_warmup verifier updates; then cycles of gen_steps generator and ver_steps verifier updates
    GENERATOR = `generator_step`
      sample M solutions of each question; the verifier judges each solution once, step by step
      A = (1 - alpha) * A_outcome + alpha * A_step                                      eq. 4-7
    VERIFIER = `verifier_step`
      sample one solution of each question, and M judgements of it
      r = [final verdict is right] + 0.8 * format                                       eq. 8
      A = s (r - mean) / std                                                            eq. 9
      right and wrong solutions are two classes; s is larger in the rarer class

RL sees no labels of steps: the verifier gets better at judging steps only if that improves its
final verdict. (The small model, which comes with the repository, learnt to judge steps before RL.)
The generator is rewarded for its answer and for the verdicts on its steps, and not for the final
verdict.

Our changes that matter (docs/tango.md has more)
    1. Both players are LoRA adapters on one base, which is also the reference of both.
    2. The loss is a mean over all tokens of the batch; the paper averages within sequences first.
    3. Supervised training before RL is a command of its own, for both players:
       common/run/warm_up.py. (--ver-warmup counts RL updates.)
    4. Chat messages with our own system prompts, not plain text for base models.

Shapes: P questions, M samples each, B = P * M rows, T completion tokens, K steps of a solution.
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from common.core.errors import UserError
from common.run.args import (
    Count,
    CountOrZero,
    GroupSize,
    RunArgs,
    Share,
    Tokens,
    Weight,
    parse,
    per_model,
)


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 48
    """updates of both players together (paper: 440, of which 300 are the generator's)"""
    questions: Count = 16
    """P, questions per update and process (paper: 256)"""
    group_size: GroupSize = 8
    """M, solutions of a question, or judgements of a solution (paper: 5)"""
    lr: Weight = per_model(tiny=2e-3, real=2e-5)
    """learning rate of both adapters, constant (paper: 1e-6, all weights)"""
    kl: Weight = 0.001
    """weight of the KL term towards the base (paper: 0.001); 0 saves the reference pass"""
    gen_steps: CountOrZero = 3
    """N_g, generator updates per cycle (paper: 3)"""
    ver_steps: CountOrZero = 1
    """N_v, verifier updates per cycle (paper: 1)"""
    ver_warmup: CountOrZero = 4
    """verifier updates before everything else (paper: 40 of 440)"""
    alpha: Share = 0.1
    """weight of the step advantage in the first generator update (paper: 0.1); 0: no judgements"""
    alpha_end: Share = 0.001
    """what --alpha falls to by the end (paper: 0.001); --alpha 1 --alpha-end 1 keeps it at 1"""
    verifier: Literal["co-trained", "frozen", "none"] = "co-trained"
    """ablation: frozen = untrained, none = plain GRPO; either gives all --steps to the generator"""
    generator: Literal["co-trained", "frozen"] = "co-trained"
    """ablation: train the verifier only"""
    solution_tokens: Tokens = per_model(tiny=112, real=1024)
    """length limit of a solution (released code: 2048)"""
    judgement_tokens: Tokens = per_model(tiny=208, real=1024)
    """length limit of a judgement (released code: 4096)"""

    def check(self):
        if self.generator == "frozen" and self.verifier != "co-trained":
            raise UserError(f"--generator frozen, --verifier {self.verifier}: nobody is trained.")
        if self.gen_steps + self.ver_steps == 0:
            raise UserError("--gen-steps 0 and --ver-steps 0: a cycle needs a step of one of them.")
        if self.alpha_end == 0 < self.alpha:
            raise UserError("--alpha-end 0: alpha decays by a factor, so the end must be above 0.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.advantage import group_advantage, return_to_go
from common.core.errors import say
from common.core.lists import mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import is_correct, solve, solve_prompt, split_steps, step_ends
from common.tasks.math import load_for_steps
from common.tasks.verdicts import final_verdict, read_verdict, verdict_metrics, verify_prompt
from common.tiny.diagnostics import panels, report_steps
from common.tiny.tasks import gold_steps

import torch

GAMMA = 0.8  # weight of the verifier's format reward (paper sec. 4)
CLASS_EMA = 0.8  # decay of the class counts (paper sec. 3.3)

# ------------------------------------------------------------------ prompts and parsing
BOXED = r"\\box(?:ed)?\{(CORRECT|INCORRECT)\}"
VERDICTS = ("CORRECT", "INCORRECT")
SECTION = re.compile(r"<step_verification>(.*?)</step_verification>", re.DOTALL)
# models that nobody has taught often leave out the closing tag; the format reward asks for it
UNCLOSED = re.compile(r"<step_verification>(.*)(?=<final_verification>)", re.DOTALL)


class Judgement(NamedTuple):
    verdicts: list[bool]  # of the steps that have one
    final: bool | None  # None: not readable


def parse_judgement(text: str) -> Judgement:
    """Returns the verdicts of a judgement. A step's verdict is what its block ends with, and the
    final verdict comes after all steps. Verdicts that are quoted elsewhere are ignored.
    """
    section = SECTION.search(text) or UNCLOSED.search(text)
    final = final_verdict(text[section.end() if section else 0 :])
    verdicts = [read_verdict(s, VERDICTS) for s in split_steps(section[1] if section else "")]
    return Judgement([v == "CORRECT" for v in verdicts if v], final)


def has_countable_steps(solution: str) -> bool:
    """Whether a solution keeps to its format. If so, a judgement needs a verdict on each step."""
    answer = re.search(r"<answer>(.*?)</answer>", solution, re.DOTALL)
    in_a_box = answer and re.fullmatch(r"\s*\\boxed\{.*\}\s*", answer[1], re.DOTALL)
    return bool(in_a_box and split_steps(solution))


def judgement_format(text: str, solution: str) -> float:
    """How well a judgement keeps to the format, in [0, 1] (the released code's deductions)."""
    match = re.fullmatch(
        r"(?s)\s*<step_verification>(.*)</step_verification>"
        r"\s*<final_verification>(.*?)</final_verification>\s*",
        text,
    )
    verdicts, final = parse_judgement(text)
    if not match or final is None:  # else tags without a verdict would earn reward
        return 0.0
    score = 1.0
    miscounted = has_countable_steps(solution) and len(verdicts) != len(split_steps(solution))
    if not re.fullmatch(rf"\s*{BOXED}\s*", match[2], re.IGNORECASE):
        score -= 0.8
    if miscounted or not split_steps(match[1]):
        score -= 0.8
    if re.sub(r"<step>.*?</step>", "", match[1], flags=re.DOTALL).strip():
        score -= 0.4
    return max(0.0, score)


# ------------------------------------------------------------------ rewards, called by TRL
def outcome_reward(completions, answer, **_) -> list[float]:
    """Generator: r_out = [answer == gold]. Nothing that the verifier writes is in it."""
    return [float(is_correct(c[0]["content"], gold)) for c, gold in zip(completions, answer)]


def verdict_reward(completions, label, **_) -> list[float]:
    """Verifier: [final verdict == gold verdict], 0 if it is not readable (eq. 8, first term)."""
    finals = [parse_judgement(c[0]["content"]).final for c in completions]
    return [float(final is right) for final, right in zip(finals, label)]


def format_reward(completions, solution, **_) -> list[float]:
    """Verifier: 0.8 * format (eq. 8, second term)."""
    return [GAMMA * judgement_format(c[0]["content"], s) for c, s in zip(completions, solution)]


# ------------------------------------------------------------------ the paper's mathematics
def alpha_at(n: int, total: int, alpha: float, end: float) -> float:
    """Returns the weight of the step advantage after n of `total` generator updates."""
    # alpha_n = max(end, alpha * exp(-n ln(alpha / end) / total)); an alpha below `end` is constant
    return max(end, alpha * (end / alpha) ** (n / max(1, total))) if alpha > end else alpha


def step_rewards(verdicts: list[list[bool]], ends: list[list[int]], device="cpu") -> tuple:
    """Eq. 3: r = +1/K or -1/K at the last token of each of a solution's K steps -> (B, K) rewards
    and (B, K) token indices. In the rows of shorter solutions the rest is NaN in the rewards and -1
    in the indices. If the number of verdicts is not the number of steps, all rewards of the
    solution are NaN, and its A_step is 0. Trap: a rejected step mostly makes A_step negative, so a
    solution can gain if the number of verdicts is wrong.
    """
    K = max([1, *map(len, ends)])
    r_step = torch.full((len(ends), K), torch.nan, device=device)  # (B, K)
    tokens = torch.full((len(ends), K), -1, device=device)  # (B, K)
    for i, (verdict, end) in enumerate(zip(verdicts, ends)):
        tokens[i, : len(end)] = torch.tensor(end, dtype=torch.long)
        if len(verdict) == len(end):
            r_step[i, : len(end)] = (2.0 * torch.tensor(verdict) - 1) / len(end)
    return r_step, tokens


def tango_advantages(outcome, r_step, tokens, mask, group_size: int, alpha) -> tuple:
    """Eq. 4-7: returns (1 - alpha) A_out and alpha A_step of each token. The generator's advantage
    is their sum.
    (B,) outcomes in {0, 1}, (B, K) from `step_rewards`, (B, T) mask, alpha: a number or (B, 1)
    -> (B, T), (B, T)

    >>> r_step, tokens = step_rewards([[True, True], [True, False]], [[1, 3], [1, 3]])
    >>> terms = tango_advantages(torch.tensor([1.0, 0]), r_step, tokens, torch.ones(2, 4), 2, 0.5)
    >>> sum(terms)  # z = [.5, .5], [.5, -1.5]; A_step = 1, 1, .5, .5 and -1, -1, -1.5, -1.5
    tensor([[ 0.8536,  0.8536,  0.6036,  0.6036],
            [-0.8536, -0.8536, -1.1036, -1.1036]])
    """
    # A_out = (r - mean) / std over the M solutions of a question
    A_out = group_advantage(outcome, group_size)[:, None] * mask  # (B, T)
    # z = the same over ALL step rewards of the M solutions pooled. Trap: if all their steps are
    # accepted, solutions with fewer steps have the larger r = 1/K, and so the larger z.
    z = group_advantage(r_step, group_size)  # (B, K)
    # As in the released code, a reward that is alone in its group is not normalised.
    alone = (~r_step.isnan()).unflatten(0, (-1, group_size)).sum((1, 2)) == 1  # (P,)
    z = torch.where(alone.repeat_interleave(group_size)[:, None], r_step.nan_to_num(0.0), z)
    # A_step[t] = SUM of the z of steps that end at or after t: no mean, no discount
    # A missing step has the index -1, which becomes 0, and its z is 0, so it adds nothing there.
    at_ends = torch.zeros_like(A_out).scatter_add(1, tokens.clamp(min=0), z)
    A_step = return_to_go(at_ends, mask)  # (B, T)
    # A = (1 - alpha) A_out + alpha A_step. Each is normalised by itself: the paper found it less
    # stable to add the rewards first.
    return (1 - alpha) * A_out, alpha * A_step


# ------------------------------------------------------------------ the trainer
class Tango(CoTrainer):
    """`step` is algorithm 1. CoTrainer samples, scores, computes the loss and updates."""

    def step(self, rows):
        """rows: B rows; the M rows of a question are adjacent."""
        if self.player_at(self.state.global_step) == "generator":
            return [self.generator_step(rows)]
        return [self.verifier_step(rows[:: self.cfg.group_size])]

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        M, solution, judgement = args.group_size, args.solution_tokens, args.judgement_tokens
        rewards = [verdict_reward, format_reward]
        return {
            "generator": Player([outcome_reward], args.lr, solution, M),
            "verifier": Player(rewards, args.lr, judgement, M, reads=solution),
        }

    def player_at(self, step: int) -> str:
        """Warm-up, then cycles of N_g generator and N_v verifier updates, generator first."""
        cfg = self.cfg
        if cfg.verifier in ("frozen", "none"):
            return "generator"
        if cfg.generator == "frozen" or step < cfg.ver_warmup:
            return "verifier"
        turn = (step - cfg.ver_warmup) % (cfg.gen_steps + cfg.ver_steps)
        return "generator" if turn < cfg.gen_steps else "verifier"

    def generator_step(self, rows):
        """B rows -> a solution of each, and its advantages by the answer and the verdicts."""
        batch = self.rollout("generator", rows)  # texts, rewards (B,)
        alpha, judgements = self.alpha(), [Judgement([], None)] * len(rows)
        if alpha > 0:
            judgements = self.ask_verifier(rows, batch)
        self.set_advantages(batch, batch.rewards, judgements, alpha)
        self.report_generator(rows, batch, judgements, alpha)
        return batch

    def ask_verifier(self, rows, batch) -> list[Judgement]:
        """Returns a judgement of each of B solutions."""
        # Judgements are sampled at temperature 1: the paper says this makes gaming harder.
        prompts = [verify_prompt(row["question"], s) for row, s in zip(rows, batch.texts)]
        batch.extras["judgement"] = self.generate("verifier", prompts)
        return [parse_judgement(text) for text in batch.extras["judgement"]]

    def set_advantages(self, batch, outcome, judgements, alpha):
        """Eq. 3-7: A = (1 - alpha) A_out + alpha A_step, (B, T). alpha: a number or (B, 1)."""
        ids, mask = batch.completion_ids, batch.completion_mask  # (B, T)
        ends = [step_ends(i[m.bool()].tolist(), self.processing_class) for i, m in zip(ids, mask)]
        verdicts = [judgement.verdicts for judgement in judgements]  # of the steps only
        r_step, tokens = step_rewards(verdicts, ends, mask.device)  # (B, K)
        M = self.cfg.group_size
        of_outcome, of_steps = tango_advantages(outcome, r_step, tokens, mask, M, alpha)
        batch.advantages = of_outcome + of_steps  # (B, T)
        batch.components = {"outcome": of_outcome, "step": of_steps}

    def verifier_step(self, questions):
        """Eq. 8-9: P questions -> M judgements of ONE solution each, A = s (r - mean) / std."""
        M = self.cfg.group_size
        judged = []
        for row, solution in zip(questions, self.solutions_to_judge(questions)):
            row = row | {"prompt": verify_prompt(row["question"], solution), "solution": solution}
            row["label"] = is_correct(solution, row["answer"])
            judged += [row] * M  # a group is M judgements of one solution
        batch = self.rollout("verifier", judged)
        s = self.over_all_processes(self.class_weights, [row["label"] for row in judged])  # (B,)
        # All judgements of a group have one s, because they judge one solution. Division by the
        # std of the group would cancel s, so s multiplies after the division.
        batch.advantages = batch.advantages * s.to(batch.advantages)  # (B,)
        self.report_verifier(judged, batch)
        return batch

    def solutions_to_judge(self, questions) -> list[str]:
        """Returns a solution of each of P questions, which the verifier learns to judge."""
        return self.generate("generator", [row["prompt"] for row in questions])

    def alpha(self) -> float:
        """Returns the weight of the step advantage, which falls with the generator's updates."""
        if self.cfg.verifier == "none":
            return 0.0
        steps = [n for n in range(self.cfg.steps) if self.player_at(n) == "generator"]
        done = sum(n < self.state.global_step for n in steps)
        return alpha_at(done, len(steps), self.cfg.alpha, self.cfg.alpha_end)

    def class_weights(self, labels: list[bool]) -> torch.Tensor:
        """Eq. 9: labels of all processes' rows -> s_c, (B,), mean 1. The running counts start
        with those of the first batch. Without weights, the paper says, verifiers learn to say
        INCORRECT always.
        """
        labels = torch.tensor(labels)  # (B,)
        now = torch.bincount(labels.long(), minlength=2).float()  # (2,): of wrong and of right
        before = torch.tensor(self.saved.get("class_counts", now.tolist()))
        counts = CLASS_EMA * before + (1 - CLASS_EMA) * now
        self.saved["class_counts"] = counts.tolist()
        s = counts.clamp(min=1e-6).rsqrt()[labels.long()]  # (B,): 1 / sqrt(count of its class)
        return s * len(s) / s.sum()

    # --- what is logged and shown; nothing below affects training; all processes call it
    def report_generator(self, rows, batch, judgements, alpha):
        # batch.rewards says who is right, because outcome_reward is the only reward function. In a
        # fork with a further reward function, log is_correct here.
        known = ~batch.rewards.isnan()  # (B,): all, unless a fork knows only some answers
        self.log_mean("generator/accuracy", batch.rewards[known])
        self.log_mean("co/alpha", alpha)
        verdicts = [judgement.verdicts for judgement in judgements]
        if "judgement" in batch.extras:
            of_known = [judgement for judgement, k in zip(judgements, known) if k]
            self.report_verdicts(of_known, batch.rewards[known].bool().tolist())
            dropped = [len(v) != len(split_steps(y)) for v, y in zip(verdicts, batch.texts)]
            self.log_mean("co/step_rewards_dropped", dropped)
            for note, text, verdict in zip(batch.notes, batch.extras["judgement"], verdicts):
                note |= {"judgement": text, "verdicts": verdict}
        report_steps(self, rows, batch, verdicts)  # if the questions are the small model's

    def report_verifier(self, judged, batch):
        labels = [row["label"] for row in judged]
        # How many judged solutions are right: P solutions, not the B of `generator/accuracy`.
        self.log_mean("verifier/judged_right", labels)
        judgements = [parse_judgement(text) for text in batch.texts]
        self.report_verdicts(judgements, labels)
        for note, row, judgement in zip(batch.notes, judged, judgements):
            note |= {"solution is right": row["label"], "verdicts": judgement.verdicts}
            note["gold"] = gold_steps(row["question"], row["solution"])

    def report_verdicts(self, judgements: list[Judgement], labels: list[bool]):
        """Logs how verdicts compare with gold. Co-training that goes wrong shows here first."""
        judgements, labels = self.gather(judgements), self.gather(labels)
        if not labels:
            return
        metrics = judgement_metrics(judgements, labels)
        for key, value in metrics.items():
            self.log_mean(f"verifier/{key}", value)
        self.log_mean("co/verdict_minus_gold", metrics["says_correct"] - mean(labels))


# ------------------------------------------------------------------ evaluation
def judgement_metrics(judgements: list[Judgement], labels: list[bool]) -> dict[str, float]:
    """Compares final verdicts with gold. A verdict that cannot be read is wrong in both classes."""
    found = verdict_metrics([judgement.final for judgement in judgements], labels)
    return {name: x for name, x in found.items() if name not in ("accuracy", "best_constant")}


def step_f1(gold: list[list[bool]], judgements: list[Judgement]) -> float:
    """F1 of finding wrong steps. Where verdicts do not fit the steps, no wrong step is found."""
    hits = flagged = wrong = 0
    for labels, (verdicts, _) in zip(gold, judgements):
        wrong += labels.count(False)
        if len(verdicts) == len(labels):
            flagged += verdicts.count(False)
            hits += sum(not v and not label for v, label in zip(verdicts, labels))
    return 2 * hits / max(1, flagged + wrong)


def evaluate_generator(trainer, held_out) -> tuple:
    """Returns (metrics, n samples of each question, whether each sample is right)."""
    several = [row for row in held_out for _ in range(trainer.cfg.eval_samples)]
    samples, right = solve(trainer, "generator", held_out, trainer.cfg.eval_samples)
    greedy, greedy_right = solve(trainer, "generator", held_out, greedy=True)
    result = {"generator/accuracy": mean(right), "generator/greedy": mean(greedy_right)}
    for suffix, rows, texts in (("", several, samples), ("_greedy", held_out, greedy)):
        gold = [gold_steps(row["question"], text) for row, text in zip(rows, texts)]
        if None not in gold:  # all questions are the small model's
            result[f"generator/step_accuracy{suffix}"] = mean([g for steps in gold for g in steps])
    return result, samples, right


def evaluate_verifier(trainer, held_out, solutions) -> dict[str, float]:
    """Asks for judgements twice: sampled, as in training, and greedy. An untrained verifier judges
    better greedily. So compare a sampled figure only with the sampled figure from before training,
    and a greedy figure only with the greedy figure.
    """
    labels = [is_correct(text, row["answer"]) for text, row in zip(solutions, held_out)]
    gold = [gold_steps(row["question"], text) for row, text in zip(held_out, solutions)]
    sampled = judge(trainer, held_out, solutions)
    greedy = judge(trainer, held_out, solutions, greedy=True)
    metrics = judgement_metrics(sampled, labels)
    metrics["balanced_accuracy_greedy"] = judgement_metrics(greedy, labels)["balanced_accuracy"]
    if None not in gold:
        metrics |= {"step_f1": step_f1(gold, sampled), "step_f1_greedy": step_f1(gold, greedy)}
    return {f"verifier/{name}": value for name, value in metrics.items()}


def judge(trainer, rows, solutions: list[str], greedy: bool = False) -> list[Judgement]:
    """Returns the verifier's judgement of each solution."""
    prompts = [verify_prompt(row["question"], text) for row, text in zip(rows, solutions)]
    return [parse_judgement(text) for text in trainer.generate_all("verifier", prompts, greedy)]


def evaluate(trainer: Tango, held_out: list[dict]) -> dict[str, float]:
    """Evaluates each player by itself, and both together: the verifier picks one of n samples."""
    n = trainer.cfg.eval_samples
    result, samples, right = evaluate_generator(trainer, held_out)
    if trainer.cfg.verifier == "none":
        return result
    # The verifier always judges the solutions that the base wrote before training, so a change of
    # these figures comes from the verifier.
    solutions = trainer.saved.setdefault("base_solutions", samples[::n])
    result |= evaluate_verifier(trainer, held_out, solutions)
    # The pick is made for a quarter of the questions. Samples rank by final verdict, and among
    # equal final verdicts by the share of accepted steps.
    count = n * max(1, len(held_out) // 4)
    rows = [row for row in held_out for _ in range(n)][:count]
    scores = []
    for verdicts, final in judge(trainer, rows, samples[:count]):
        scores.append((final is True, sum(verdicts) / max(1, len(verdicts))))
    picked = [max(range(i, i + n), key=scores.__getitem__) for i in range(0, count, n)]
    result[f"co/best_of_{n}"] = mean([right[i] for i in picked])
    result["co/mean_of_same"] = mean(right[:count])
    return result


# ------------------------------------------------------------------ main
CURVES = {  # panels of report.html; each step prints the first metric of every panel
    "generator": ["generator/accuracy"],
    "verifier": ["verifier/balanced_accuracy", "verifier/tpr", "verifier/tnr", "verifier/parsed"],
    "health": ["verifier/says_correct", "co/verdict_minus_gold", "generator/frac_advantage_zero"],
}


def main(args: Args):
    curves = CURVES | panels(args.dataset)
    both = args.generator == args.verifier == "co-trained"
    if both and args.steps <= args.ver_warmup:
        say(f"note: all --steps {args.steps} are --ver-warmup; the generator will not be trained")
    launch(Tango, args, load=load_for_steps, evaluate=evaluate, curves=curves, prompt=solve_prompt)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
