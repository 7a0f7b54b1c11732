"""What the verifiers of the scripts make of the same solutions: the experiments `verifiers` and
`verifiers_mawps` of experiments.toml.

The solutions are the base's, to held-out questions of the small model or of --dataset, so no
verifier was trained on one of them. Each script trains as it always does; its evaluation is
replaced by `figures`. A verifier joins by a line in ASK and one in experiments.toml.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common import fast
from common.core.draws import row_key
from common.core.lists import chunk, mean
from common.core.model import tokenize, without_checkpointing
from common.tasks.answers import is_correct, solve_prompt
from common.tasks.math import load_questions
from common.tasks.ranking import pairs_in_order, ranking_figures
from common.tasks.verdicts import verify_prompt
from common.tiny.tasks import LEVELS, gold_steps
from tango import Judgement, parse_judgement, step_f1

QUESTIONS, OF_OTHERS, N = 64, 32, 8  # of the small model, of others; solutions of a question
LONGEST = 112  # tokens of a solution
AT_ONCE = 128  # rows that are sampled together


def solutions_of_the_base(trainer) -> list[dict]:
    """Rows {question, answer, solution, right}, the N of a question adjacent: the same in all runs
    of all scripts on one machine, and in all evaluations of a run, so they are kept on the trainer.
    """
    if hasattr(trainer, "solutions_of_the_base"):
        return trainer.solutions_of_the_base
    dataset = "tiny" if trainer.cfg.dataset in LEVELS else trainer.cfg.dataset
    count = QUESTIONS if dataset == "tiny" else OF_OTHERS
    _, held_out = load_questions(dataset, 1, count, seed=0)
    rows, written = [row for row in held_out for _ in range(N)], []
    ids = tokenize([solve_prompt(row["question"]) for row in rows], trainer.processing_class)
    keys = [row_key("solutions of the base", i) for i in range(len(ids))]
    autocast = trainer.accelerator.autocast()
    with trainer.playing(None), without_checkpointing(trainer.model), autocast:
        for its, of in zip(chunk(ids, AT_ONCE), chunk(keys, AT_ONCE)):
            found = fast.generate(trainer.model, its, LONGEST, 1.0, trainer.eos_token_ids, of)
            written += found[0]
    texts = [text.strip() for text in trainer.decode(written)]
    rows = [row | {"solution": text} for row, text in zip(rows, texts)]
    rows = [row | {"right": is_correct(row["solution"], row["answer"])} for row in rows]
    trainer.solutions_of_the_base = rows
    return rows


def with_tone(row: dict, tone: str) -> dict:
    """The same solution, all of whose steps end in this tone: `!` or nothing."""
    return row | {"solution": re.sub("!*</step>", f"{tone}</step>", row["solution"])}


# ------------------------------------------------------------------ asking
class Asked(NamedTuple):
    scores: list[float]  # of each solution, by which the script itself would rank them
    judgements: Sequence[Judgement] = ()  # where the verifier writes verdicts on steps


def by_a_judgement(accepted: Callable) -> Callable:
    """One sampled judgement: an accepted solution scores more than one that is not, and more
    accepted steps more than fewer. accepted: (verdicts on steps, final verdict) -> bool.
    """

    def ask(trainer, rows):
        prompts = [verify_prompt(row["question"], row["solution"]) for row in rows]
        found = [*map(parse_judgement, trainer.generate("verifier", prompts))]
        return Asked([accepted(*its) + mean(its.verdicts) / 2 for its in found], found)

    return ask


def by_score(trainer, rows):
    """Its own score; and what it writes before, if it does, of each solution the first text."""
    written, generate = [], trainer.generate
    trainer.generate = lambda *given: written.extend(texts := generate(*given)) or texts
    scores = trainer.scores(rows)
    del trainer.generate
    firsts = written[:: len(written) // len(rows)] if written else []
    return Asked(scores, [*map(parse_judgement, firsts)])


def by_V(trainer, rows):
    scored = trainer.scores([row | {"well_formed": True} for row in rows])
    return Asked([row["V"] for row in scored])


def by_implicit_reward(trainer, rows):
    """SUM over t of log prm(y_t) - log base(y_t)."""
    ids = [trainer.encode(row["solution"]) for row in rows]
    batch = trainer.completions("prm", [solve_prompt(row["question"]) for row in rows], ids)
    return Asked((trainer.log_probs("prm", batch) - trainer.log_probs(None, batch)).sum(1).tolist())


def by_slices(trainer, rows):
    """How many of a solution's slices get a YES."""
    cut = [trainer.cut(row["question"], row["solution"], None) for row in rows]
    trainer.judge_once([part for parts in cut for part in parts])
    return Asked([mean(part.verdicts == [1] for part in parts) for parts in cut])


ASK = {
    "aprm": by_a_judgement(lambda verdicts, final: verdicts != [] and all(verdicts)),
    "coverrl": by_a_judgement(lambda verdicts, final: final is True),
    "gar": by_slices,
    "genrm": by_score,
    "prime": by_implicit_reward,
    "pvg": by_V,
    "rstar": by_score,
    "self_verify": by_a_judgement(lambda verdicts, final: final is True),
    "tango": by_a_judgement(lambda verdicts, final: final is True),
    "vstar": by_score,
}


# ------------------------------------------------------------------ what is measured
def figures(trainer, ask: Callable) -> dict[str, float]:
    """
    rank_agreement    of a right and a wrong solution of one question, how often the right one
                      scores higher; a tie counts one half
    agreement_sure    the same where all steps of wrong solutions end in `!`, and no others
    agreement_meek    the same where all steps of right solutions end in `!`, and no others
    step_f1           of finding the wrong steps, for verifiers that judge steps
    accepted_sure     how many wrong steps of wrong solutions are accepted if they end in `!`
    accepted_meek     how many if they do not
    tokens            that the verifier writes per solution
    accepted_right    how many right solutions a verifier that writes judgements accepts
    accepted_wrong    how many wrong solutions

    Of other questions than the small model's there are the first and the last three, because no
    step has a label, and `!` means nothing.
    """
    rows, before = solutions_of_the_base(trainer), trainer.sampled_tokens
    right = [row["right"] for row in rows]
    gold = [gold_steps(row["question"], row["solution"]) for row in rows]

    def agreement(scores):
        both = zip(chunk(right, N), chunk(scores, N))
        return mean(x for pair in both for x in pairs_in_order(*pair))

    asked = ask(trainer, rows)
    its = ranking_figures(rows, asked.scores, N)
    its |= {"tokens": (trainer.sampled_tokens - before) / len(rows)}
    for name, of in (("right", True), ("wrong", False)):
        said = [j.final is True for j, z in zip(asked.judgements, right) if z is of]
        its |= {f"accepted_{name}": mean(said)} if said else {}
    if None in gold:
        return {f"asked/{key.rpartition('/')[2]}": value for key, value in its.items()}
    its |= {"step_f1": step_f1(gold, asked.judgements)} if asked.judgements else {}
    for name, tones in (("sure", ("!", "")), ("meek", ("", "!"))):  # of wrong and of right ones
        asked = ask(trainer, [with_tone(row, tones[row["right"]]) for row in rows])
        its[f"agreement_{name}"] = agreement(asked.scores)
        triples = zip(asked.judgements, gold, right)
        fit = [zip(j.verdicts, g) for j, g, z in triples if not z and len(j.verdicts) == len(g)]
        its |= {f"accepted_{name}": mean(v for its in fit for v, g in its if not g)} if fit else {}
    return {f"asked/{key.rpartition('/')[2]}": value for key, value in its.items()}


def ask_the_verifier(script):
    """Makes the script's evaluation that of its verifier alone."""
    ask = ASK[script.__name__]
    script.evaluate = lambda trainer, held_out: figures(trainer, ask)
