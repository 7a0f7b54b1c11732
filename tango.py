r"""RL Tango (Zha et al. 2025, arXiv:2505.15034): train a generator and a generative verifier together, with GRPO.

The loop (paper, algorithm 1)
    first, `ver_warmup` VERIFIER steps; then repeat
    GENERATOR step, 3 times   sample M solutions per question; the verifier judges every step of each, once
                              A = (1 - alpha) * A_outcome + alpha * A_step                             eq. 4-7
    VERIFIER step, once       sample ONE solution per question, and M judgements of it
                              r = [final verdict == gold verdict] + 0.8 * format, classes balanced     eq. 8-9
    There are no step labels anywhere: the verifier learns to judge steps through its final verdict alone, and its final
    verdict never reaches the generator's reward, which sees only the gold answer and the step verdicts.

Where we differ from the paper [P] or the released code [C], and why
     1. QLoRA: both players are adapters on one base, and the reference of both is that base. [P, C: two full models.]
     2. Chat messages with a system prompt of our own; [P, C] plain text with a worked example, for base models.
     3. Token mean over the whole batch ("dapo"). [P] mean per sequence; [C] mean per micro-batch of 4.
     4. No entropy bonus, as in [P]; [C] has 0.001. The KL term, k3 with 0.001, is in both, and here.
     5. A step ends with the token that holds the end of `</step>`, found from token ids. [C] re-encodes decoded text and
        takes the token after it.
     6. A step without a verdict makes the count differ, and all step rewards of that solution are dropped; [C] lets it
        merge with the next step first, to the same effect.
     7. The class counts are updated before they are used, as in [C]; algorithm 1 lists them after.
     8. GRPO only. [C]'s REINFORCE++ has a bug that makes its step advantage zero, its RLOO a factor 10 not in [P].
     9. Group of 8, not 5, and far smaller batches: one CPU or GPU, not 32. lr is LoRA's, about 20 times full training's.
    10. No phase 0 (SFT of the generator): the embedded model knows the format, and so does an instruction-tuned one.

Run
    python tango.py                                                                # embedded default, CPU, five minutes
    python tango.py --verifier none                                                # plain GRPO, for comparison
    python tango.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      # one GPU, both players in 4-bit

Shapes: P questions, M samples each, B = P * M rows, T completion tokens, K steps of a solution.
"""

import re
from dataclasses import dataclass
from typing import Literal

from common.advantage import group_advantage, step_return_to_go
from common.answers import is_correct, split_steps, step_ends
from common.cotrainer import CoTrainer, Player
from common.data import UserError, load_questions
from common.memory import check_memory, machine_options
from common.model import load_model
from common.run import check_batch, fill_in, mean, plain_errors, start_run
from common.tiny.tasks import gold_steps, parse_question, step_labels

import torch
import tyro
from datasets import Dataset
from trl import GRPOConfig


# ------------------------------------------------------------------ arguments
@dataclass
class Args:
    # --- alike in all six scripts; what is None depends on the model, see SMALL and REAL below
    model: str = "tiny"
    """the embedded default, a hub id or a folder"""
    dataset: str = "tiny"
    """the embedded questions, a hub id (openai/gsm8k) or a .jsonl file with question and answer"""
    out: str | None = None
    """run folder, runs/tango-<time>-<seed> if not given; given again, the run goes on where it stopped"""
    seed: int = 0
    """of adapters, questions and sampling"""
    steps: int = 48
    """optimiser steps of both players together"""
    questions: int = 16
    """P, questions per step and process (paper: 256)"""
    group_size: int = 8
    """M, solutions of one question, or judgements of one solution (paper: 5)"""
    micro_batch: int | None = None
    """rows per forward and backward pass (embedded 32, real 8); questions * group_size must be a multiple"""
    lr: float | None = None
    """learning rate of the adapters, constant (embedded 2e-3, real 2e-5; paper: 1e-6, all weights)"""
    kl: float = 0.001
    """weight of the k3 KL term to the base (paper: 0.001); 0 saves the reference pass and all rows without advantage"""
    lora_rank: int = 16
    """rank of each adapter"""
    four_bit: bool = torch.cuda.is_available()
    """base in 4-bit NF4; works on a CPU too, slowly"""
    rows_at_once: int | None = None
    """most rows sampled at a time, which bounds the KV cache (embedded 256, real 64)"""
    eight_bit_adam: bool = False
    """Adam's moments in 8 bits, paged to the CPU where the GPU is full"""
    vllm: bool = False
    """sample with vLLM, which needs a GPU and --no-four-bit"""
    dry_run: bool = False
    """print how much memory this needs, load nothing, and end"""
    eval_every: int = 16
    """steps between evaluations on held-out questions; 0 = only first and last"""
    eval_questions: int = 512
    """held-out questions"""
    save_every: int = 20
    """steps between checkpoints"""
    show_every: int = 20
    """steps between samples shown; 0 = never"""
    report_to: str = "none"
    """any tracker that transformers knows: trackio, wandb, tensorboard"""
    # --- the paper
    gen_steps: int = 3
    """N_g, generator steps per cycle (paper: 3)"""
    ver_steps: int = 1
    """N_v, verifier steps per cycle (paper: 1)"""
    ver_warmup: int = 20
    """verifier-only steps before all else (paper: 40 of 440)"""
    alpha: float = 0.1
    """weight of the step advantage at the start; falls to 0.001 exponentially over the generator's steps"""
    verifier: Literal["co-trained", "frozen", "none"] = "co-trained"
    """ablation: a verifier that is never trained, or no step rewards at all (plain GRPO)"""
    generator: Literal["co-trained", "frozen"] = "co-trained"
    """ablation: train the verifier only"""
    solution_tokens: int | None = None
    """length limit of a solution (embedded 64, real 1024; paper: 2048)"""
    judgement_tokens: int | None = None
    """length limit of a judgement (embedded 96, real 1024; paper: 4096)"""


SMALL = {"lr": 2e-3, "solution_tokens": 64, "judgement_tokens": 96}
REAL = {"lr": 2e-5, "solution_tokens": 1024, "judgement_tokens": 1024}
GAMMA = 0.8  # weight of the verifier's format reward (paper sec. 4)
CLASS_EMA = 0.8  # decay of the class counts (paper sec. 3.3)
BEST_OF = 4  # solutions per question from which the verifier picks, in evaluation

# ------------------------------------------------------------------ prompts and parsing
SOLVE = r"""Solve the problem step by step. Put every step in its own <step> </step> tags, and after the last one the answer
in this form: <answer>\boxed{...}</answer>. Write nothing outside of these tags.
For example, for 15-(3*2):
<step>First the bracket: 3*2 = 6.</step>
<step>Then 15-6 = 9.</step>
<answer>\boxed{9}</answer>"""

VERIFY = r"""You are given a problem and a solution in numbered steps. Check the steps one after the other, by your own
calculation. Write one <step> </step> block for each step of the solution, ending in its verdict, \boxed{CORRECT} or
\boxed{INCORRECT}, then the verdict on the solution as a whole, in exactly this form:
<step_verification>
<step>3*2 is 6, as the step says. \boxed{CORRECT}</step>
</step_verification>
<final_verification>\boxed{CORRECT}</final_verification>"""


def solve_prompt(question: str) -> list[dict]:
    return [{"role": "system", "content": SOLVE}, {"role": "user", "content": question}]


def verify_prompt(question: str, solution: str) -> list[dict]:
    """The verifier is told how many steps to judge, and never sees the gold answer."""
    count = len(split_steps(solution))
    user = f"Problem: {question}\nSolution:\n{solution}\nVerify its {count} steps."
    return [{"role": "system", "content": VERIFY}, {"role": "user", "content": user}]


BOXED = r"\\box(?:ed)?\{(CORRECT|INCORRECT)\}"
SECTION = re.compile(r"<step_verification>(.*?)</step_verification>", re.DOTALL)
FINAL = re.compile(rf"<final_verification>\s*{BOXED}\.?\s*</final_verification>", re.IGNORECASE)


def parse_judgement(text: str) -> tuple[list[bool], bool | None]:
    r"""(verdict of each step, final verdict); a final verdict that cannot be read is None.

    >>> parse_judgement(r"<step_verification><step>7\boxed{CORRECT}</step><step>8\boxed{INCORRECT}</step>"
    ...                 r"</step_verification><final_verification>\boxed{INCORRECT}</final_verification>")
    ([True, False], False)
    """
    section = SECTION.search(text)
    final = FINAL.search(text, section.end() if section else 0)  # after the steps: what one of them quotes is no verdict
    steps = []
    for step in split_steps(section[1]) if section else []:
        verdict = re.search(rf"{BOXED}\.?\s*$", step, re.IGNORECASE)  # at its end, for the same reason
        if verdict:
            steps.append(verdict[1].upper() == "CORRECT")
    return steps, final[1].upper() == "CORRECT" if final else None


def solution_format(text: str) -> float:
    """How well a solution keeps to the format, in [0, 1]. Not a reward: it says whether its steps can be counted."""
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
    whole = r"\s*<step_verification>(.*)</step_verification>\s*<final_verification>(.*?)</final_verification>\s*"
    match = re.fullmatch(whole, text, re.DOTALL)
    if not match:
        return 0.0
    score = 1.0
    if not re.fullmatch(rf"\s*{BOXED}\s*", match[2], re.IGNORECASE):
        score -= 0.8
    if not split_steps(match[1]):
        score -= 0.8
    elif len(parse_judgement(text)[0]) != len(split_steps(solution)) and solution_format(solution) >= 0.6:
        score -= 0.8
    if re.sub(r"<step>.*?</step>", "", match[1], flags=re.DOTALL).strip():
        score -= 0.4
    return max(0.0, score)


# ------------------------------------------------------------------ rewards: one number per row, called by TRL
def outcome_reward(completions, answer, **_) -> list[float]:
    """Generator: r_out = [answer == gold]. Nothing of the verifier's is in it."""
    return [float(is_correct(c[0]["content"], gold)) for c, gold in zip(completions, answer)]


def verdict_reward(completions, label, **_) -> list[float]:
    """Verifier: [final verdict == gold verdict], 0 if there is none (eq. 8, first term)."""
    return [float(parse_judgement(c[0]["content"])[1] is right) for c, right in zip(completions, label)]


def format_reward(completions, solution, **_) -> list[float]:
    """Verifier: 0.8 * format, 0 without a final verdict, however tidy the rest (eq. 8, second term)."""
    texts = [c[0]["content"] for c in completions]
    readable = [parse_judgement(text)[1] is not None for text in texts]
    return [GAMMA * judgement_format(t, s) if ok else 0.0 for t, s, ok in zip(texts, solution, readable)]


# ------------------------------------------------------------------ the paper's mathematics
def alpha_at(n: int, total: int, alpha: float) -> float:
    """Weight of the step advantage after n of `total` generator steps: a0 * exp(-n ln(a0 / 1e-3) / total), at least 1e-3."""
    return max(1e-3, alpha * (1e-3 / alpha) ** (n / max(1, total))) if alpha > 0 else 0.0


def step_rewards(verdicts: list[list[bool]], ends: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Eq. 3: r = +-1/K at the last token of each of a solution's K steps -> (B, K) rewards, (B, K) token indices.

    A solution whose number of verdicts differs from its number of steps has none: its rewards are NaN, as is padding."""
    width = max([len(e) for e in ends] + [1])
    rewards, at = torch.full((len(ends), width), torch.nan), torch.full((len(ends), width), -1)
    for i, (verdict, end) in enumerate(zip(verdicts, ends)):
        at[i, : len(end)] = torch.tensor(end, dtype=torch.long)
        if end and len(verdict) == len(end):
            rewards[i, : len(end)] = torch.tensor([1.0 if v else -1.0 for v in verdict]) / len(end)
    return rewards, at


def tango_advantages(outcome, step_rewards, step_ends, mask, group_size: int, alpha: float) -> torch.Tensor:
    """The generator's per-token advantages, eq. 4-7.

    Args:
        outcome: (B,) in {0, 1}.  step_rewards: (B, K), NaN = none.  step_ends: (B, K) token indices, -1 = none.
        mask: (B, T) of 0/1.  group_size: M.  alpha: weight of the step advantage.

    Returns:
        (B, T), 0 outside the mask.
    """
    # A_out = (r - mean) / std over the M solutions of a question
    A_out = group_advantage(outcome, group_size)[:, None]  # (B, 1)
    if step_rewards.shape[1] == 0 or alpha == 0:
        return (1 - alpha) * A_out * mask
    # The same over ALL step rewards of the M solutions pooled. Trap: 1/K and pooling together are not length-neutral,
    # among all-correct solutions the short one wins; a small alpha bounds the damage.
    z = group_advantage(step_rewards, group_size)  # (B, K)
    alone = (~step_rewards.isnan()).reshape(-1, group_size * step_rewards.shape[1]).sum(1) == 1  # (P,)
    alone = alone.repeat_interleave(group_size)[:, None]
    z = torch.where(alone, step_rewards.nan_to_num(0.0), z)  # a pool of one has mean 0, std 1
    # A_step[t] = SUM of the normalised rewards of steps ending at or after t: no mean, no discount
    A_step = step_return_to_go(z, step_ends, mask)  # (B, T)
    # normalised separately, then mixed: merging the rewards first was unstable
    return ((1 - alpha) * A_out + alpha * A_step) * mask


def class_weights(labels: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Eq. 9: s = 1 / sqrt(count of the row's class), scaled to mean 1 over the batch. Without it the verifier of a mostly
    wrong generator learns to say INCORRECT always.

    labels: (B,) bool, all processes'.  counts: (2,) running counts of wrong and right.  Returns (B,)."""
    s = counts.clamp(min=1e-6).rsqrt()[labels.long()]  # (B,)
    return s * len(s) / s.sum()


# ------------------------------------------------------------------ the trainer: one optimiser step
class Tango(CoTrainer):
    """Inherited: sampling, reward calls, log-probs, the clipped loss, the optimiser, logging, checkpoints.
    Here: whose turn it is, what the players are asked, and the advantages."""

    def __init__(self, model, script: Args, **kwargs):
        self.script = script
        M = script.group_size
        players = {
            "generator": Player([outcome_reward], script.lr, script.solution_tokens, M),
            "verifier": Player([verdict_reward, format_reward], script.lr, script.judgement_tokens, M),
        }
        super().__init__(model, players, kl=script.kl, rows_at_once=script.rows_at_once, **kwargs)
        self.example = ""

    def player_at(self, step: int) -> str:
        """Warm-up, then cycles of N_g generator and N_v verifier steps, generator first."""
        s = self.script
        if s.verifier != "co-trained":
            return "generator"
        if s.generator == "frozen" or step < s.ver_warmup:
            return "verifier"
        return "generator" if (step - s.ver_warmup) % (s.gen_steps + s.ver_steps) < s.gen_steps else "verifier"

    def _generate_and_score_completions(self, rows):
        """rows: B of them, every question M times in a row."""
        return self.generator_step(rows) if self.player_at(self.state.global_step) == "generator" else self.verifier_step(rows)

    def generator_step(self, rows):
        batch = self.turn("generator", rows)  # M solutions per question, outcome rewards (B,)
        solutions, mask = batch["texts"], batch["completion_mask"]  # (B, T)
        # alpha's clock counts the generator's steps only
        total = sum(self.player_at(step) == "generator" for step in range(self.script.steps))
        done = sum(self.player_at(step) == "generator" for step in range(self.state.global_step))
        alpha = alpha_at(done, total, self.script.alpha) if self.script.verifier != "none" else 0.0
        verdicts, ends = [[]] * len(rows), [[]] * len(rows)
        if alpha > 0:
            # One judgement per solution, sampled at temperature 1 on purpose: a verifier that is never sure is harder to game
            prompts = [verify_prompt(row["question"], solution) for row, solution in zip(rows, solutions)]
            judgements = self.act("verifier", prompts)
            parsed = [parse_judgement(text) for text in judgements]
            verdicts = [steps for steps, _ in parsed]  # the final verdict is for the metrics only
            ids = [row[m.bool()].tolist() for row, m in zip(batch["completion_ids"], mask)]
            ends = [step_ends(tokens, self.processing_class) for tokens in ids]
            self.log_verifier([final for _, final in parsed], batch["rewards"].bool().tolist())
            self.log_metric("co/step_rewards_dropped", mean(self.gather([len(v) != len(e) for v, e in zip(verdicts, ends)])))
            self.example = f"--- {rows[0]['question']}\n{solutions[0]}\n--- the verifier\n{judgements[0]}\n---"
            for note, row, text, judgement, steps in zip(batch["notes"], rows, solutions, judgements, verdicts):
                note |= {"judgement": judgement, "verdicts": steps, "gold": gold_steps(row["question"], text)}
        r_step, at = step_rewards(verdicts, ends)  # (B, K) each
        device = mask.device
        batch["advantages"] = tango_advantages(
            batch["rewards"], r_step.to(device), at.to(device), mask, self.script.group_size, alpha
        )  # (B, T)
        self.log_metric("gen/accuracy", mean(self.gather(batch["rewards"].tolist())))
        self.log_metric("co/alpha", alpha)
        return batch

    def verifier_step(self, rows):
        M = self.script.group_size
        questions = rows[::M]  # P
        solutions = self.act("generator", [row["prompt"] for row in questions])  # ONE each
        labels = [is_correct(solution, row["answer"]) for solution, row in zip(solutions, questions)]
        # The group is M judgements of one solution, all with the same label; judgements that all agree teach nothing
        judged = [
            {**row, "prompt": verify_prompt(row["question"], solution), "solution": solution, "label": label}
            for row, solution, label in zip(questions, solutions, labels)
            for _ in range(M)
        ]
        batch = self.turn("verifier", judged)
        A = group_advantage(batch["rewards"], M)  # (B,)
        # The class weights come after the group normalisation, which would undo them. Counts of all processes' rows.
        everyone = torch.tensor(self.gather([row["label"] for row in judged]))
        now = torch.bincount(everyone.long(), minlength=2).float()
        before = torch.tensor(self.memory.get("class_counts", now.tolist()))
        counts = CLASS_EMA * before + (1 - CLASS_EMA) * now  # the first batch starts the average
        self.memory["class_counts"] = counts.tolist()
        rank = self.accelerator.process_index
        weights = class_weights(everyone, counts)[rank * len(judged) : (rank + 1) * len(judged)]
        batch["advantages"] = A * weights.to(A.device)  # (B,)
        self.log_verifier([parse_judgement(text)[1] for text in batch["texts"]], [row["label"] for row in judged])
        for note, row, judgement in zip(batch["notes"], judged, batch["texts"]):
            note |= {"solution is right": row["label"], "verdicts": parse_judgement(judgement)[0]}
            note["gold"] = gold_steps(row["question"], row["solution"])
        self.log_metric("gen/accuracy", mean(self.gather(labels)))
        return batch

    def log_verifier(self, finals: list[bool | None], labels: list[bool]):
        """How co-training goes wrong shows here first: a verifier of one opinion, or one kinder than the truth."""
        finals, labels = self.gather(finals), self.gather(labels)
        for key, value in verdict_metrics(finals, labels).items():
            self.log_metric(f"ver/{key}", value)
        self.log_metric("co/verdict_minus_gold", mean([final is True for final in finals]) - mean(labels))


# ------------------------------------------------------------------ evaluation
def verdict_metrics(finals: list[bool | None], labels: list[bool]) -> dict[str, float]:
    """Against gold. A verdict that cannot be read is wrong in both classes; a class that does not occur is left out."""
    of = {label: [final is label for final, truth in zip(finals, labels) if truth == label] for label in (True, False)}
    rates = {name: mean(of[label]) for name, label in (("tpr", True), ("tnr", False)) if of[label]}
    return {
        "balanced_accuracy": mean(list(rates.values())),
        **rates,
        "says_correct": mean([final is True for final in finals]),
        "parsed": mean([final is not None for final in finals]),
    }


def step_f1(questions: list[str], solutions: list[str], judgements: list[str]) -> float:
    """F1 of finding the wrong steps, against gold step labels that are never trained on. Embedded questions only."""
    hits = said = wrong = 0
    for question, solution, judgement in zip(questions, solutions, judgements):
        gold, verdicts = step_labels(question, split_steps(solution)), parse_judgement(judgement)[0]
        verdicts = verdicts if len(verdicts) == len(gold) else [True] * len(gold)  # not readable: nothing was found
        hits += sum(not v and not g for v, g in zip(verdicts, gold))
        said += sum(not v for v in verdicts)
        wrong += sum(not g for g in gold)
    return 2 * hits / max(1, said + wrong)


def evaluate(trainer: Tango, held_out: list[dict]) -> dict[str, float]:
    """The generator on held-out questions; the verifier on solutions that the base wrote once, so that it is measured on
    the same ones all along; and both together: the verifier picks the best of a few."""
    state = trainer.accelerator
    rows = held_out[state.process_index :: state.num_processes]
    prompts = [solve_prompt(row["question"]) for row in rows]

    def right(texts: list[str], of: list[dict]) -> list[bool]:
        return [is_correct(text, row["answer"]) for text, row in zip(texts, of)]

    if "base_solutions" not in trainer.memory:  # step 0: the generator is still the base
        trainer.memory["base_solutions"] = trainer.gather(trainer.act("generator", prompts))
        trainer.memory["base_order"] = trainer.gather([row["question"] for row in rows])
    result = {
        "gen/greedy": mean(trainer.gather(right(trainer.act("generator", prompts, greedy=True), rows))),
        "gen/accuracy": mean(trainer.gather(right(trainer.act("generator", prompts), rows))),
    }
    if trainer.script.verifier != "none":
        written = dict(zip(trainer.memory["base_order"], trainer.memory["base_solutions"]))
        solutions = [written[row["question"]] for row in rows]
        judgements = trainer.act("verifier", [verify_prompt(r["question"], s) for r, s in zip(rows, solutions)])
        finals = trainer.gather([parse_judgement(text)[1] for text in judgements])
        for key, value in verdict_metrics(finals, trainer.gather(right(solutions, rows))).items():
            result[f"ver/{key}"] = value
        if all(parse_question(row["question"]) for row in held_out):  # of all processes: each takes part in the next line
            everything = [trainer.gather(x) for x in ([r["question"] for r in rows], solutions, judgements)]
            result["ver/step_f1"] = step_f1(*everything)
        some = [row for row in rows[: max(1, len(rows) // BEST_OF)] for _ in range(BEST_OF)]
        samples = trainer.act("generator", [solve_prompt(row["question"]) for row in some])
        opinions = trainer.act("verifier", [verify_prompt(r["question"], s) for r, s in zip(some, samples)])
        scores = []
        for text in opinions:
            steps, final = parse_judgement(text)
            scores.append((final is True, sum(steps) / max(1, len(steps))))  # the verdict, then the share of good steps
        best = [max(range(i, i + BEST_OF), key=scores.__getitem__) for i in range(0, len(some), BEST_OF)]
        correct = right(samples, some)
        result[f"co/best_of_{BEST_OF}"] = mean(trainer.gather([correct[i] for i in best]))
        result["co/mean_of_same"] = mean(trainer.gather(correct))
    return result


# ------------------------------------------------------------------ main
CURVES = {
    "generator": ["gen/accuracy"],
    "verifier": ["ver/balanced_accuracy", "ver/tpr", "ver/tnr"],
    "health": ["ver/says_correct", "ver/parsed", "co/verdict_minus_gold", "gen/frac_reward_zero_std"],
}


def main(args: Args):
    args = fill_in(args, SMALL, REAL)
    check_batch(args.questions, args.group_size, args.micro_batch)
    if args.generator == "frozen" and args.verifier != "co-trained":
        raise UserError(f"--generator frozen with --verifier {args.verifier} leaves nobody to train.")
    if min(args.gen_steps, args.ver_steps) < 0 or args.gen_steps + args.ver_steps == 0:
        raise UserError(f"--gen-steps {args.gen_steps} and --ver-steps {args.ver_steps}: a cycle needs a step of one of them.")
    check_memory(args, [(0, args.solution_tokens), (args.solution_tokens, args.judgement_tokens)], adapters=2)
    train, held_out = load_questions(args.dataset, args.steps * args.questions * 4, args.eval_questions, args.seed)
    run = start_run(args, __file__, train, held_out)
    if args.steps <= args.ver_warmup and args.verifier == args.generator == "co-trained":
        run.say(f"note: --ver-warmup {args.ver_warmup} takes all --steps {args.steps}, the generator is never trained")
    model, tokenizer = load_model(args.model, ["generator", "verifier"], args.lora_rank, args.four_bit, args.seed)
    accumulation = args.questions * args.group_size // args.micro_batch
    config = GRPOConfig(
        output_dir=str(run.folder),
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,  # one optimiser step per batch of rollouts: strictly on-policy, the ratio is 1
        num_generations=args.group_size,
        max_completion_length=args.solution_tokens,
        loss_type="dapo",  # token mean over the whole batch
        scale_rewards="group",
        max_grad_norm=1.0,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.999,
        save_steps=args.save_every,
        save_total_limit=2,
        report_to=args.report_to,
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=True,  # the idle adapter has no gradient
        **machine_options(args),  # bfloat16, checkpointing, Adam in 8 bits, vLLM
    )
    rows = [{"prompt": solve_prompt(row["question"]), **row} for row in train]
    trainer = Tango(model, args, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    run.train(trainer, lambda: evaluate(trainer, held_out), args, CURVES)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
