r"""V-STaR: a generator is trained on its right solutions, a verifier on right and wrong ones
(Hosseini et al. 2024, arXiv:2402.06457); and the verifiers one could take instead, side by side.

    python vstar.py                                       the embedded model on a CPU, 2 minutes
    python vstar.py --verifier prm                        another verifier, the same solutions
    python vstar.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU, 4-bit

The loop (algorithm 1).  D_gen: right solutions, D_ver: all of them, with z = the answer is right
    for t = 1 .. iterations
        k solutions y of every question x by the generator G;  the right ones join D_gen, all D_ver
        G = the first model fine-tuned on D_gen:  loss = - mean of log G(y | x) per token
    V = the first model trained on D_ver:
        dpo        - log sigmoid(r(x, y+) - r(x, y-)),  r = beta log(V / G_sft)
        orm        BCE of z and p = sigmoid of a logit at the end of y
        prm        the same at the end of every step; its z by completions from there
        genrm      - log V(Yes or No | x, y, "Is it right?")                     arXiv:2408.15240
        genrm-cot  the same behind a rationale, p(Yes) averaged over several
    best of k: of N solutions by G the one with the highest score, for dpo log V(y | x)

The losses are in `VStar.loss`; nothing is sampled to be paid. The verifier never reaches the
generator: V-STaR is data that grow, and a late verifier. --verifier-in-loop closes the loop, in
which the authors saw no gain.

What we changed and it matters (the full list is in docs/vstar.md)
    1. Generator and verifier are LoRA adapters on one base, which is G_sft: the model as it is
       given. What it was fine-tuned on is not in D_gen.
    2. Fixed numbers of optimiser steps instead of epochs, so that iterations are equally long.
    3. An outcome or process verifier has no head of its own: its logit is log p("+") - log p("-")
       of the next token. Math-Shepherd reads its scores so, too.
    4. Rationales are the model's own that agree with z; for the paper they were written with the
       reference solution in sight.

Shapes: B rows or pairs, b of them in a micro-batch, T completion tokens, N solutions of a question.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from common.args import Count, CountOrZero, RunArgs, Scale, Several, Tokens, Weight, per_model
from common.cotrainer import CoTrainer, Player
from common.errors import UserError
from common.launch import launch
from common.pairs import (
    as_completions,
    chosen_and_rejected,
    completion_batch,
    in_passes,
    pair_batch,
)
from common.run import mean, plain_errors
from common.sampling import special_tokens
from common.tasks.answers import boxed, is_correct, prompt, solve, solve_prompt, split_steps
from common.tasks.math import load_questions

import torch
import torch.nn.functional as F
import tyro


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/args.py
    steps: Count = 96
    """optimiser steps, the generator's in all iterations and then the verifier's"""
    ver_steps: CountOrZero = 48
    """of these the verifier's; the others must be a multiple of --iterations"""
    questions: Count = 32
    """solutions, or pairs of them, per step and process"""
    micro_batch: Count = per_model(tiny=16, real=4)
    """rows or pairs per forward and backward pass"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the generator's adapter, constant"""
    ver_lr: Weight = per_model(tiny=3e-4, real=2e-5)
    """learning rate of the verifier's, constant"""
    iterations: Count = 3
    """T, rounds of sampling (paper: 3)"""
    pool: Count = per_model(tiny=192, real=1024)
    """questions that are sampled from in every iteration (paper: all of GSM8K)"""
    samples: Several = per_model(tiny=8, real=16)
    """k, solutions of each (paper: 16)"""
    restart: bool = True
    """every iteration starts from the first model; ablation: it goes on from the last one"""
    verifier: Literal["dpo", "orm", "prm", "genrm", "genrm-cot"] = "dpo"
    """what the verifier is, and how it is trained; without --verifier-in-loop the generator is the
    same with all of them"""
    beta: Scale = 0.1
    """of --verifier dpo, scale of the log-ratios"""
    step_samples: Several = 4
    """of --verifier prm, completions from the end of a step (Math-Shepherd: 8)"""
    step_labels: Literal["hard", "soft"] = "hard"
    """of --verifier prm: one of them is right, or the share of them that are"""
    aggregate: Literal["min", "prod", "last"] = "min"
    """of --verifier prm: a solution's score from those of its steps (Math-Shepherd: min)"""
    rationales: Several = 4
    """K, of --verifier genrm-cot, rationales a score is the mean of (paper: 32)"""
    verifier_in_loop: bool = False
    """ablation: the verifier is trained in every iteration, and D_gen takes the half of the right
    solutions that it likes best"""
    eval_every: CountOrZero = 0
    """steps between evaluations on held-out questions; 0 = only first and last"""
    candidates: Several = 16
    """N, solutions of each held-out question that are ranked (paper: 128)"""
    solution_tokens: Tokens = per_model(tiny=80, real=512)
    """length limit of a solution"""
    judgement_tokens: Tokens = per_model(tiny=112, real=512)
    """of --verifier genrm-cot, length limit of a rationale"""

    def check(self):
        own = self.steps - self.ver_steps
        if own < 0 or own % self.iterations:
            raise UserError(
                f"--steps {self.steps} without --ver-steps {self.ver_steps} leaves the generator "
                f"{own}, which is not a multiple of --iterations {self.iterations}."
            )
        if self.verifier_in_loop and (self.ver_steps % self.iterations or not self.ver_steps):
            raise UserError(
                f"--ver-steps {self.ver_steps} must be a multiple of --iterations "
                f"{self.iterations} above 0, as --verifier-in-loop needs it."
            )


LAMBDA = 0.25  # weight of the solutions in genrm's loss (arXiv:2408.15240: 1/4 on GSM8K)
GOOD, BAD = "+", "-"  # the tokens whose difference is the logit of orm and prm
YES, NO = ("Yes", " Yes", "yes"), ("No", " No", "no")  # what genrm may say
OPENING = "<final_verification>"  # a rationale ends here, and the verdict follows
VERDICTS = (r"\boxed{CORRECT}", r"\boxed{INCORRECT}")
CLOSING = OPENING.replace("<", "</")

# ------------------------------------------------------------------ prompts and parsing
VERIFY = r"""You are given a problem and a solution in numbered steps. Check the steps one after the
other, by your own calculation. Write one <step> </step> block for each step of the solution, ending
in its verdict, \boxed{CORRECT} or \boxed{INCORRECT}, then the verdict on the solution as a whole,
in exactly this form:
<step_verification>
<step>3*2 is 6, as the step says. \boxed{CORRECT}</step>
</step_verification>
<final_verification>\boxed{CORRECT}</final_verification>"""

ASK = "You are given a problem and a solution. Is its answer right? Say Yes or No, nothing else."


def ask_prompt(question: str, solution: str) -> list[dict]:
    return prompt(ASK, f"Problem: {question}\nSolution:\n{solution}\nIs it right?")


def verify_prompt(question: str, solution: str) -> list[dict]:
    count = len(split_steps(solution))
    return prompt(VERIFY, f"Problem: {question}\nSolution:\n{solution}\nVerify its {count} steps.")


def beginnings(solution: str) -> list[str]:
    """The solution up to the end of each of its steps; the last one is all of it."""
    found, place = [], 0
    for step in split_steps(solution):
        block = f"<step>{step}</step>"
        place = solution.index(block, place) + len(block)
        found.append(solution[:place])
    return [*found[:-1], solution]


def rationale(text: str) -> tuple[str, bool] | None:
    """(a judgement up to its final verdict, is that CORRECT); None if there is none to read."""
    thoughts, opening, rest = text.rpartition(OPENING)
    said = [verdict for verdict in VERDICTS if rest.strip().startswith(verdict)]
    return (thoughts + opening, said[0] == VERDICTS[0]) if opening and said else None


# ------------------------------------------------------------------ the paper's mathematics
def dpo_loss(chosen, ref_chosen, rejected, ref_rejected, beta: float) -> torch.Tensor:
    """- log sigmoid(r(y+) - r(y-)), r = beta (log V - log G_sft): (B,) sums of log-probs -> (B,).

    Sums, never means: a mean over tokens would rank by another thing than it is trained for.
    """
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


def verdict_loss(logit: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """BCE of p = sigmoid(logit) and z in [0, 1], soft labels too: (B,) each -> (B,)."""
    return -(z * F.logsigmoid(logit) + (1 - z) * F.logsigmoid(-logit))


def aggregated(scores: list[float], how: str) -> float:
    """A solution's score from those of its steps; one without steps is scored as one step."""
    return {"min": min, "prod": math.prod, "last": lambda s: s[-1]}[how](scores)


def best_of_k(correct: list[bool], k: int) -> float:
    """How often the best of k of the N solutions is right, over all choices of k.

    correct: of each solution, the one with the highest score first. The one at place i is the best
    of C(N - i - 1, k - 1) of all C(N, k) choices.
    """
    N = len(correct)
    best = [math.comb(N - i - 1, k - 1) * c for i, c in enumerate(correct[: N - k + 1])]
    return sum(best) / math.comb(N, k)


# ------------------------------------------------------------------ the trainer
class VStar(CoTrainer):
    """`step` is algorithm 1, `loss` has all losses.

    `saved` holds D_gen and D_ver, rows {question, solution, right, iteration}, and what the
    verifier is taught, the same on all processes.
    """

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.pool = self.train_rows[: self.cfg.pool]
        self.rows_per_step = self.cfg.questions * self.accelerator.num_processes
        self.saved = {"iteration": -1, "D_gen": [], "D_ver": [], "lessons": [], "taught": -1}

    @staticmethod
    def players(args: Args) -> dict[str, Player]:
        solution, judgement = args.solution_tokens, args.judgement_tokens
        return {
            "generator": Player([], args.lr, solution),
            "verifier": Player([], args.ver_lr, judgement, reads=solution, rows=2),
        }

    def step(self, rows):
        """rows: not used, data are made once per iteration."""
        now = self.state.global_step
        name, t = player_at(now, self.cfg)
        if self.saved["iteration"] < t:
            self.start_iteration(t)
        if name == "generator":
            some = in_passes(self.saved["D_gen"], now * self.rows_per_step, self.rows_per_step, "G")
            texts = [(solve_prompt(row["question"]), row["solution"], 1.0) for row in some]
            return [self.text_batch("generator", texts)]
        if self.saved["taught"] < t:
            self.start_verifier(t)
        first, count = now * self.rows_per_step, self.rows_per_step
        return [self.lesson(in_passes(self.saved["lessons"], first, count, "V"))]

    # --- data
    def start_iteration(self, t: int):
        """k solutions of every question by the generator as it is; then it starts from the base."""
        cfg = self.cfg
        asked = [row for row in self.pool for _ in range(cfg.samples)]
        solutions = self.in_parallel(self.attempts, asked)
        new = [s | {"iteration": t} for s in solutions if s["whole"]]  # else a form is learnt
        right = [row for row in new if row["right"]]
        if cfg.verifier_in_loop and t > 0:
            right = self.better_half(right)
        known = {(row["question"], row["solution"]) for row in self.saved["D_gen"]}
        for row in right:  # a solution is learnt once, however often it is written
            if (row["question"], row["solution"]) not in known:
                known.add((row["question"], row["solution"]))
                self.saved["D_gen"].append(row)
        if not self.saved["D_gen"]:
            raise UserError(
                f"iteration {t}: {len(new)} of {len(asked)} solutions have steps and a box, and "
                f"none is right; --samples {cfg.samples} or --pool {cfg.pool} may be larger."
            )
        self.saved["D_ver"] += new
        self.saved["iteration"] = t
        if cfg.restart:
            self.restart("generator")
        self.report_solutions(solutions)

    def better_half(self, right: list[dict]) -> list[dict]:
        """Of each question's right solutions those that the verifier likes best."""
        scores, of = self.in_parallel(self.scores, right), {}
        for row, score in zip(right, scores):
            of.setdefault(row["question"], []).append((score, row))
        ranked = [sorted(some, key=lambda pair: -pair[0]) for some in of.values()]
        return [row for some in ranked for _, row in some[: (len(some) + 1) // 2]]

    def attempts(self, rows: list[dict]) -> list[dict]:
        texts = self.generate("generator", [solve_prompt(row["question"]) for row in rows])
        special = special_tokens(self.processing_class)  # spelled out they would become tokens
        return [
            {
                "question": row["question"],
                "solution": text.strip(),
                "right": is_correct(text, row["answer"]),
                "whole": boxed(text) is not None
                and bool(split_steps(text))
                and not any(token in text for token in special),
                "answer": row["answer"],
            }
            for row, text in zip(rows, texts)
        ]

    def restart(self, name: str):
        """The adapter is the base again: its B are zero, and Adam knows nothing of it."""
        state = self.own_optimizer().state
        for key, p in self.model.named_parameters():
            if f".{name}." in key:
                state.pop(p, None)
                if "lora_B" in key:
                    p.data.zero_()

    def start_verifier(self, t: int):
        """What the verifier is taught, from all solutions so far, right and wrong ones alike."""
        rng = random.Random(f"{self.cfg.seed} {t}")
        of = {z: [row for row in self.saved["D_ver"] if row["right"] is z] for z in (True, False)}
        if not (of[True] and of[False]):
            one = "right" if of[True] else "wrong"
            raise UserError(f"all solutions are {one}: there is nothing to tell apart.")
        count = min(len(of[True]), len(of[False]))
        balanced = [row for z in of for row in rng.sample(of[z], count)]
        rng.shuffle(balanced)
        lessons = [row | {"z": float(row["right"])} for row in balanced]  # of orm and genrm
        if self.cfg.verifier == "dpo":
            lessons = self.preferences(rng)
        elif self.cfg.verifier == "prm":
            lessons = self.judged_steps(lessons)
        elif self.cfg.verifier == "genrm-cot":
            lessons = self.rationales(lessons)
        if not lessons:
            nothing = "no question has a right and a wrong solution"
            if self.cfg.verifier == "genrm-cot":
                nothing = f"no rationale within --judgement-tokens {self.cfg.judgement_tokens}"
            raise UserError(f"--verifier {self.cfg.verifier}: {nothing} to learn from.")
        self.saved["lessons"], self.saved["taught"] = lessons, t

    def preferences(self, rng: random.Random) -> list[dict]:
        """Pairs of a right and a wrong solution of one question, as many as right ones."""
        wrong = {}
        for row in self.saved["D_ver"]:
            if not row["right"]:
                wrong.setdefault(row["question"], []).append(row["solution"])
        return [
            row | {"rejected": rng.choice(wrong[row["question"]])}
            for row in self.saved["D_ver"]
            if row["right"] and row["question"] in wrong
        ]

    def judged_steps(self, rows: list[dict]) -> list[dict]:
        """Every beginning of some solutions, with z by what comes of it (Math-Shepherd)."""
        starts = [
            row | {"part": part}
            for row in rows[: len(self.pool)]
            for part in beginnings(row["solution"])
        ]
        return self.in_parallel(self.with_step_labels, starts)

    def with_step_labels(self, starts: list[dict]) -> list[dict]:
        n, tokenizer = self.cfg.step_samples, self.processing_class
        open_ = [i for i, start in enumerate(starts) if start["part"] != start["solution"]]
        asked = [starts[i] for i in open_ for _ in range(n)]
        begun = [tokenizer(s["part"], add_special_tokens=False).input_ids for s in asked]
        prompts = [solve_prompt(start["question"]) for start in asked]
        ids = self.generate_ids("generator", prompts, begun=begun)
        rest = tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []
        # a box in the part is none that the completion has come to
        right = [is_correct(text, s["answer"]) for s, text in zip(asked, rest)]
        z = {i: right[j * n : (j + 1) * n] for j, i in enumerate(open_)}
        label = any if self.cfg.step_labels == "hard" else mean
        return [
            start | {"z": float(label(z[i])) if i in z else start["z"]}
            for i, start in enumerate(starts)
        ]

    def rationales(self, rows: list[dict]) -> list[dict]:
        """One rationale of each solution, kept if its verdict is right."""
        some = rows[: 4 * len(self.pool)]
        prompts = [verify_prompt(row["question"], row["solution"]) for row in some]
        special = special_tokens(self.processing_class)
        texts = self.generate_all("verifier", prompts)
        found = [None if any(s in text for s in special) else rationale(text) for text in texts]
        return [
            row | {"rationale": said[0]}
            for row, said in zip(some, found)
            if said and said[1] is row["right"]
        ]

    # --- batches
    def lesson(self, rows: list[dict]) -> dict:
        """A batch for the verifier; rows: everyone's."""
        kind, device = self.cfg.verifier, self.accelerator.device
        if kind in ("genrm", "genrm-cot"):
            # L = SFT(verify) + lambda SFT(right solutions), from either half of the rows
            half = len(rows) // 2
            asked = [self.judged_text(row) for row in rows[:half]]
            good = [row for row in rows[half:] if row["right"]]
            asked += [(solve_prompt(r["question"]), r["solution"], LAMBDA) for r in good]
            return self.text_batch("verifier", asked)
        mine = self.my_share(rows)
        prompts = [solve_prompt(row["question"]) for row in mine]
        if kind == "dpo":
            pairs = [(self.ids(row["solution"]), self.ids(row["rejected"])) for row in mine]
        else:
            pairs = [self.both_verdicts(row.get("part", row["solution"])) for row in mine]
        batch = pair_batch("verifier", prompts, pairs, self.processing_class, device)
        batch["z"] = torch.tensor([row["z"] if kind != "dpo" else 1.0 for row in mine]).to(device)
        batch["notes"] = [{"player": "verifier", "prompt": row["question"]} for row in mine]
        return batch

    def judged_text(self, row: dict) -> tuple[list, str, float]:
        if self.cfg.verifier == "genrm":
            asked = ask_prompt(row["question"], row["solution"])
            return asked, (YES if row["right"] else NO)[0], 1.0
        asked = verify_prompt(row["question"], row["solution"])
        return asked, row["rationale"] + VERDICTS[not row["right"]] + CLOSING, 1.0

    def text_batch(self, player: str, texts: list[tuple]) -> dict:
        """(prompt, text, weight) of everyone -> a batch whose rows' weights sum the losses of
        either weight to weight * (mean over its tokens).
        """
        ids = [self.ids(text) for _, text, _ in texts]
        tokens = Counter()
        for (_, _, weight), row in zip(texts, ids):
            tokens[weight] += len(row)
        rows = [(p, row, w / tokens[w]) for (p, _, w), row in zip(texts, ids)]
        while len(rows) % self.accelerator.num_processes:  # all processes need as many
            rows.append((*rows[-1][:2], 0.0))
        prompts, ids, weights = zip(*self.my_share(rows))
        tokenizer, device = self.processing_class, self.accelerator.device
        batch = completion_batch(list(prompts), list(ids), tokenizer, device)
        batch["notes"] = [{"player": player, "prompt": p[-1]["content"]} for p in prompts]
        row, weight = torch.arange(len(ids)), torch.tensor(weights)
        return batch | {"player": player, "row": row.to(device), "weight": weight.to(device)}

    def ids(self, text: str) -> list[int]:
        """As the model would have written it, with an end token."""
        ids = self.processing_class(text, add_special_tokens=False).input_ids
        return [*ids, self.processing_class.eos_token_id]

    def both_verdicts(self, text: str) -> tuple[list[int], list[int]]:
        """The text, and behind it the token for good, and the one for bad."""
        tokenizer = self.processing_class
        good, bad = (tokenizer(x, add_special_tokens=False).input_ids[-1:] for x in (GOOD, BAD))
        ids = tokenizer(text, add_special_tokens=False).input_ids
        return ids + good, ids + bad

    # --- losses
    def loss(self, batch):
        """The share of a micro-batch: of pairs, a mean over the pairs of the step; of texts, the
        weighted mean over their tokens.
        """
        if "weight" in batch:
            logp, _ = self.score(batch)  # (b, T)
            likelihood = logp.sum(1)  # (b,)
            self.log_mean(f"{batch['player']}/logp", likelihood)
            self.report_texts(batch, logp)
            return -(likelihood * batch["weight"]).sum()  # - mean over tokens
        both = as_completions(batch)  # 2b rows: right or good, wrong or bad, ...
        logp = self.score(both)[0]  # (2b, T)
        first, second = chosen_and_rejected(logp.sum(1))  # (b,) each
        if self.cfg.verifier == "dpo":
            with torch.no_grad(), self.playing(None):  # G_sft is the base
                ref = self.score(both)[0]  # (2b, T)
            ref_first, ref_second = chosen_and_rejected(ref.sum(1))
            losses = dpo_loss(first, ref_first, second, ref_second, self.cfg.beta)  # (b,)
            margin = (first - ref_first) - (second - ref_second)
        else:
            # the same tokens but for the last one: a difference of sums is one of its log-probs
            margin = first - second  # (b,)
            losses = verdict_loss(margin, batch["z"])
        self.report_pairs(batch, both, logp, losses, margin)
        return losses.sum() / self.rows_per_step

    # --- scores
    def scores(self, rows: list[dict]) -> list[float]:
        """Of each row's solution, by the verifier as it is; only their order is used."""
        kind = self.cfg.verifier
        if not rows:
            return []
        if kind == "dpo":
            prompts = [solve_prompt(row["question"]) for row in rows]
            return self.likelihoods(prompts, [self.ids(row["solution"]) for row in rows])
        if kind == "genrm":
            asked = [ask_prompt(row["question"], row["solution"]) for row in rows]
            return self.p_yes(asked, [""] * len(rows), (YES, NO))
        if kind == "genrm-cot":
            return self.p_yes_after_thought(rows)
        parts = [
            beginnings(row["solution"]) if kind == "prm" else [row["solution"]] for row in rows
        ]
        asked = [
            (solve_prompt(r["question"]), part) for r, some in zip(rows, parts) for part in some
        ]
        pairs = [self.both_verdicts(part) for _, part in asked]
        both = self.likelihoods(
            [p for p, _ in asked for _ in range(2)], [ids for pair in pairs for ids in pair]
        )
        p = iter(torch.sigmoid(torch.tensor(both[::2]) - torch.tensor(both[1::2])).tolist())
        return [aggregated([next(p) for _ in some], self.cfg.aggregate) for some in parts]

    def likelihoods(self, prompts: list, completions: list[list[int]]) -> list[float]:
        """log V(y | x), sums over tokens."""
        tokenizer, device = self.processing_class, self.accelerator.device
        batch = completion_batch(prompts, completions, tokenizer, device)
        return self.log_probs("verifier", batch).sum(1).tolist()

    def p_yes(self, prompts: list, begun: list[str], says: tuple) -> list[float]:
        """p(yes) / (p(yes) + p(no)) of what follows, either summed over the forms it may take.

        Each text is encoded whole, as it was taught: many tokenizers join signs over the border.
        """
        forms, tokenizer = [*says[0], *says[1]], self.processing_class
        texts = [start + form for start in begun for form in forms]
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        logps = torch.tensor(self.likelihoods([p for p in prompts for _ in forms], ids))
        logps = logps.reshape(len(prompts), 2, -1)  # (B, yes and no, forms)
        return logps.logsumexp(2).softmax(1)[:, 0].tolist()

    def p_yes_after_thought(self, rows: list[dict]) -> list[float]:
        """The mean of p(yes) over K rationales; one that comes to no verdict says 1/2."""
        K = self.cfg.rationales
        asked = [verify_prompt(r["question"], r["solution"]) for r in rows for _ in range(K)]
        found = [rationale(text) for text in self.generate("verifier", asked)]
        fine = [i for i, said in enumerate(found) if said]
        begun = [found[i][0] for i in fine]
        said = [(verdict + CLOSING,) for verdict in VERDICTS]
        p = dict(zip(fine, self.p_yes([asked[i] for i in fine], begun, said) if fine else []))
        return [mean([p.get(i, 0.5) for i in range(j * K, (j + 1) * K)]) for j in range(len(rows))]

    # --- what is logged and shown; nothing below affects training
    def report_solutions(self, solutions: list[dict]):
        self.log_mean("generator/accuracy", [row["right"] for row in solutions])
        self.log_mean("co/right_solutions", len(self.saved["D_gen"]))
        self.log_mean("co/all_solutions", len(self.saved["D_ver"]))

    def report_texts(self, batch, logp):
        if 0 in batch["row"]:  # one micro-batch of the step is shown
            notes = [
                {**note, "rewards": {"log-likelihood": total}, "credit": "log-probability"}
                for note, total in zip(batch["notes"], logp.sum(1).tolist())
            ]
            self.record(batch | {"advantages": logp.detach(), "notes": notes})

    def report_pairs(self, batch, both, logp, losses, margin):
        z = batch["z"]
        self.log_mean("verifier/pair_loss", losses)
        self.log_mean("verifier/margin", margin)
        self.log_mean("verifier/pair_accuracy", (margin > 0) == (z > 0.5))
        if 0 in batch["row"]:
            whose = ("right", "wrong") if self.cfg.verifier == "dpo" else (GOOD, BAD)
            notes = [
                {**note, "player": who, "z": label}
                for note, label in zip(batch["notes"], z.tolist())
                for who in whose
            ]
            for note, value in zip(notes, margin.repeat_interleave(2).tolist()):
                note |= {"rewards": {"margin": value}, "credit": "log-probability"}
            self.record(both | {"advantages": logp.detach(), "notes": notes})


def player_at(step: int, cfg: Args) -> tuple[str, int]:
    """(who is trained in this step, the iteration, from 0 on): the generator in all iterations,
    then the verifier; with the verifier in the loop both in each.
    """
    own = (cfg.steps - cfg.ver_steps) // cfg.iterations
    if cfg.verifier_in_loop:
        t, turn = divmod(step, own + cfg.ver_steps // cfg.iterations)
        return "generator" if turn < own else "verifier", t
    t = min(step // own, cfg.iterations - 1) if own else cfg.iterations - 1
    return "generator" if step < own * cfg.iterations else "verifier", t


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: VStar, held_out: list[dict]) -> dict[str, float]:
    """N solutions of every held-out question by the generator, ranked by the verifier; beside it
    the greedy solution, the majority, the mean, and an oracle that takes a right one if there is
    one.
    """
    N = trainer.cfg.candidates
    several = [row for row in held_out for _ in range(N)]
    _, greedy = solve(trainer, "generator", held_out, greedy=True)
    result = {"generator/greedy": mean(greedy)}
    solutions = trainer.in_parallel(trainer.attempts, several)
    scores = trainer.in_parallel(trainer.scores, solutions)
    right, voted, ranked, pairs = [], [], [], []
    for i in range(0, len(solutions), N):
        some, values = solutions[i : i + N], scores[i : i + N]
        right.append([row["right"] for row in some])
        answers = [boxed(row["solution"]) for row in some]
        counts = Counter(answer for answer in answers if answer is not None)
        winner = counts.most_common(1)[0][0] if counts else None
        voted.append(winner is not None and right[-1][answers.index(winner)])
        order = sorted(range(N), key=lambda k: -values[k])
        ranked.append([right[-1][k] for k in order])
        good, bad = ([v for v, r in zip(values, right[-1]) if r is z] for z in (True, False))
        pairs += [float(g > b) + 0.5 * (g == b) for g in good for b in bad]
    result["generator/accuracy"] = mean([mean(row) for row in right])
    result["co/majority"] = mean(voted)
    for k in sorted({k for k in (2, 4, 8, 16, 64) if k < N} | {N}):
        result[f"co/best_of_{k}"] = mean([best_of_k(row, k) for row in ranked])
    result["co/oracle"] = mean([any(row) for row in right])
    if pairs:
        result["verifier/rank_agreement"] = mean(pairs)
    return result


# ------------------------------------------------------------------ main
CURVES = {  # panels of curves.png and report.html; step lines show the first metric of each
    "generator": ["generator/accuracy", "generator/greedy"],
    "verifier": ["verifier/rank_agreement"],
    "best of several": ["co/majority", "co/oracle"],
}


def load(args: Args):
    return load_questions(args.dataset, args.pool, args.eval_questions, args.seed)


def main(args: Args):
    launch(VStar, args, load, evaluate, CURVES)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
