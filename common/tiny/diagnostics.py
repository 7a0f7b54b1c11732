"""What gold labels of the small model's questions say of solutions in steps, and of the verdicts on
them. RL sees none of it.
"""

from common.tasks.answers import split_steps
from common.tiny.tasks import LEVELS, gold_steps, is_checked, parse_question, sounds_sure

TRUST = {"who is fooled": ["co/wrong_steps_accepted", "co/sounds_sure", "verifier/checked"]}


def panels(dataset: str) -> dict[str, list[str]]:
    """Returns the report's panels of what `report_steps` logs; none where it logs nothing."""
    return TRUST if dataset in LEVELS else {}


def report_steps(trainer, rows: list[dict], batch, verdicts: list[list[bool]]):
    """Logs and notes the truth about the steps of B solutions and, where these were judged, about
    the verdicts; nothing if one of the B questions is not one of the small model.

    verdicts: of each solution. batch.extras["judgement"]: their texts, absent where none was asked.
    """
    gold = [gold_steps(row["question"], text) for row, text in zip(rows, batch.texts)]
    if None in gold:
        return
    trainer.log_mean("generator/step_accuracy", [right for labels in gold for right in labels])
    if "judgement" not in batch.extras:
        return
    for note, labels in zip(batch.notes, gold):
        note["gold"] = labels
    # wrong steps that are accepted are what a generator exploits when it games its verifier
    both = [zip(v, labels) for v, labels in zip(verdicts, gold) if len(v) == len(labels)]
    accepted = [verdict for pairs in both for verdict, right in pairs if not right]
    trainer.log_mean("co/wrong_steps_accepted", accepted)
    # how it does so: `!` sounds sure, and is seldom checked; `:28*5=18` is a check
    steps = [step for text in batch.texts for step in split_steps(text)]
    judged = [step for text in batch.extras["judgement"] for step in split_steps(text)]
    trainer.log_mean("co/sounds_sure", [sounds_sure(step) for step in steps])
    trainer.log_mean("verifier/checked", [is_checked(step) for step in judged])
    asked = sum(len(parse_question(row["question"])[1]) for row in rows)
    trainer.log_mean("co/steps_left_out", 1 - len(steps) / asked)
