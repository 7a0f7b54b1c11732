"""What the health figures of a run say, in words: the lines at the top of its report."""

import math
import re

RECENT = 10  # steps over which a figure is averaged, of those that have it
NOTHING = "No health figure stands out in the last steps."


def in_words(rows: list[dict]) -> list[str]:
    """A sentence for each figure that stands out, the gravest first; else NOTHING. No rows of
    training, no sentence.

    rows: those of metrics.jsonl. The bounds are rules of thumb: they say where to look first.
    """
    evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
    steps = [row for row in rows if not any(key.startswith("eval/") for key in row)]
    names = dict.fromkeys(key for row in steps for key, x in row.items() if _is_number(x))
    if not names:
        return []
    values = {name: [row[name] for row in steps if _is_number(row.get(name))] for name in names}
    now = {name: sum(found[-RECENT:]) / len(found[-RECENT:]) for name, found in values.items()}
    found = _one_opinion(now) + _kinder_than_the_truth(now) + _unreadable(now) + _flat_groups(now)
    found += _no_gradient(values) + _worse_held_out(evaluations) + _no_entropy(values)
    found += _far_from_the_base(now) + _cut(now)
    return found or [NOTHING]


def _is_number(x) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _those(now: dict, ending: str) -> list[tuple[str, float]]:
    """(player, figure) of every metric PLAYER/ending."""
    return [(k.split("/")[0], x) for k, x in now.items() if re.fullmatch(rf"[^/]+/{ending}", k)]


def _one_opinion(now: dict) -> list[str]:
    """A verifier that says the same to nearly everything, although not nearly everything is."""
    found = []
    for ending, word in (("says_correct", "CORRECT"), ("says_yes", "YES")):
        for player, says in _those(now, ending):
            right = says - now["co/verdict_minus_gold"] if "co/verdict_minus_gold" in now else 0.5
            if (says > 0.95 and right < 0.85) or (says < 0.05 and right > 0.15):
                known = f"; {right:.0%} is right" if "co/verdict_minus_gold" in now else ""
                found.append(f"The {player} says {word} to {says:.0%} of everything{known}.")
    if not found:
        for ending, does in (("tpr", "accepts {} right"), ("tnr", "rejects {} wrong")):
            for player, rate in _those(now, ending):
                if rate < 0.1:
                    found.append(f"The {player} {does.format(f'only {rate:.0%} of what is')}.")
    return found


def _kinder_than_the_truth(now: dict) -> list[str]:
    """A generator that is paid more than it deserves may be learning just that."""
    return [
        f"Judged or paid {x:.2f} more than is true, on average ({metric})."
        for metric in ("co/verdict_minus_gold", "co/flattery", "co/paid_minus_true")
        if (x := now.get(metric, 0.0)) > 0.25
    ]


def _unreadable(now: dict) -> list[str]:
    read = [(player, 1 - x) for player, x in _those(now, "parsed")]
    lost = read + _those(now, "silent") + _those(now, "unparsable") + _those(now, "unreadable")
    return [f"{x:.0%} of what the {player} writes cannot be read." for player, x in lost if x > 0.2]


def _flat_groups(now: dict) -> list[str]:
    return [
        f"In {x:.0%} of the {player}'s groups all rewards are alike; these teach nothing."
        for player, x in _those(now, "frac_reward_zero_std")
        if x > 0.8
    ]


def _no_gradient(values: dict) -> list[str]:
    """Nobody pays it, or all is paid alike."""
    return [
        f"The {player}'s gradient was zero in its last {len(last)} steps; it learns nothing."
        for player, _ in _those(values, "grad_norm")
        if len(last := values[f"{player}/grad_norm"][-RECENT:]) > 2 and not any(last)
    ]


def _worse_held_out(evaluations: list[dict]) -> list[str]:
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    return [
        f"Held out, {key[5:]} fell from {first[key]:.2f} to {x:.2f}."
        for key, x in last.items()
        if key.endswith("accuracy") and _is_number(x) and _is_number(first.get(key))
        if first[key] - x > 0.05
    ]


def _no_entropy(values: dict) -> list[str]:
    """Against its own first steps: what is little differs from model to model."""
    found = []
    for player, _ in _those(values, "entropy"):
        all_steps = values[f"{player}/entropy"]
        before, now = (sum(x) / len(x) for x in (all_steps[:RECENT], all_steps[-RECENT:]))
        if len(all_steps) > RECENT and now < 0.1 * before:
            found.append(
                f"The {player}'s entropy fell from {before:.2g} to {now:.2g} nats per token; it "
                f"tries hardly anything new."
            )
    return found


def _far_from_the_base(now: dict) -> list[str]:
    return [
        f"The {player} is {x:.1f} nats per token away from the base."
        for player, x in _those(now, "kl")
        if x > 1
    ]


def _cut(now: dict) -> list[str]:
    return [
        f"{x:.0%} of the {player}'s completions are cut at the length limit."
        for player, x in _those(now, "completions/clipped_ratio")
        if x > 0.2
    ]
