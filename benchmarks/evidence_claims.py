"""What evidence.py's runs show: measures of one run, and the claims of the papers that are made of
them. A claim says what the paper reports, which measure of which variants answers to it here, and
nothing about the outcome: that is computed.

Variants are compared seed by seed. An interval is Student's 95 % interval of the mean over seeds,
of the paired difference, or of the paired ratio (of its logarithm); what does not lie wholly on one
side of "no difference" is called not separated.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from evidence import having, read

# two-sided 95 % quantiles of Student's t with n - 1 degrees of freedom
STUDENT = dict(zip(range(2, 11), (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)))
WINDOW = 5  # steps over which accuracy in training is averaged before it counts as reached


# ------------------------------------------------------------------ measures of one run
def last(key: str) -> Callable[[dict], float]:
    """A held-out figure after training."""
    return lambda run: run["evaluations"][-1].get(f"eval/{key}", math.nan)


def first(key: str) -> Callable[[dict], float]:
    """The same before training."""
    return lambda run: run["evaluations"][0].get(f"eval/{key}", math.nan)


def gain(key: str) -> Callable[[dict], float]:
    """What training has added to a held-out figure."""
    return lambda run: last(key)(run) - first(key)(run)


def at_the_end(key: str, steps: int = 5) -> Callable[[dict], float]:
    """The mean of a metric over the last steps that have it."""

    def measure(run: dict) -> float:
        values = [step[key] for step in having(run, key)][-steps:]
        return statistics.mean(values) if values else math.nan

    return measure


def area(key: str) -> Callable[[dict], float]:
    """The mean of a metric over all steps that have it."""
    return at_the_end(key, 10**9)


def needed(level: float, key: str, of: str = "steps") -> Callable[[dict], float]:
    """What it takes until the moving average of an accuracy in training first reaches a level: the
    steps that have it (see `having`), or the tokens sampled by all players in all steps so far, or
    another running count. Infinite if a run never gets there. Training questions are fresh ones
    each step, answered before they are trained on.
    """

    def measure(run: dict) -> float:
        values, tokens, own = [], 0, having(run, key)
        for step in run["steps"]:
            tokens += step.get("co/sampled_tokens", 0)
            if step not in own:
                continue
            values.append(step[key])
            recent = values[-WINDOW:]
            if len(recent) == WINDOW and statistics.mean(recent) >= level:
                return {"steps": len(values), "tokens": tokens}.get(of) or step[of]
        return math.inf

    return measure


def whole(of: str, key: str) -> Callable[[dict], float]:
    """What a run takes in all, in the units of `needed`."""

    def measure(run: dict) -> float:
        if of == "tokens":
            return sum(step.get("co/sampled_tokens", 0) for step in run["steps"])
        own = having(run, key)
        return len(own) if of == "steps" else own[-1][of]

    return measure


# ------------------------------------------------------------------ over seeds
def interval(values: list[float]) -> tuple[float, float, float]:
    """(mean, low, high); one value has no interval."""
    middle = statistics.mean(values)
    if len(values) < 2:
        return middle, math.nan, math.nan
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return middle, middle - half, middle + half


def ratios(above: list[float], below: list[float]) -> tuple[float, float, float]:
    """(geometric mean, low, high) of the paired ratios."""
    logs = [math.log(a / b) for a, b in zip(above, below)]
    return tuple(math.exp(x) for x in interval(logs))


def runs_of(name: str, variant: str) -> dict[int, dict]:
    return {r["seed"]: r for r in read(name)["runs"] if r["variant"] == variant}


@dataclass
class Claim:
    name: str
    experiment: str
    says: str
    """what the paper claims, and what is compared here"""
    paper: str
    """its figures"""
    measure: Callable[[dict], float]
    variants: tuple[str, ...]
    """one: its mean; two: the second compared with the first"""
    kind: str = "difference"
    """of two: "difference" second - first, or "ratio" first / second; of one: "gain" if its measure
    is a difference already, which is held against 0
    """
    percent: bool = True
    limit: Callable[[dict], float] | None = None
    """of a ratio: what a run that never gets there has taken at least"""


def result(claim: Claim) -> dict | None:
    """A row of docs/evidence/summary.json; None before every variant has a run."""
    runs = [runs_of(claim.experiment, variant) for variant in claim.variants]
    seeds = sorted(set.intersection(*(set(found) for found in runs)))
    if not seeds:
        return None
    values, never = [], [0] * len(runs)
    for i, found in enumerate(runs):
        values.append([])
        for seed in seeds:
            value = claim.measure(found[seed])
            if math.isinf(value):
                never[i] += 1
                value = claim.limit(found[seed])
            values[i].append(value)
    if len(runs) == 1:
        ours, low, high = interval(values[0])
        neutral = 0.0
    elif claim.kind == "ratio":
        ours, low, high, neutral = *ratios(*values), 1.0
    else:
        ours, low, high = interval([b - a for a, b in zip(*values)])
        neutral = 0.0
    verdict = "one variant"
    if len(runs) == 2 or claim.kind == "gain":
        apart = low > neutral or high < neutral
        verdict = "separated" if apart else "not separated"
    return {
        "claim": claim.name,
        "says": claim.says,
        "paper": claim.paper,
        "ours": _plain(ours),
        "low": _plain(low),
        "high": _plain(high),
        "kind": claim.kind if len(runs) == 2 or claim.kind == "gain" else "mean",
        "verdict": verdict,
        "seeds": len(seeds),
        "variants": list(claim.variants),
        "means": [_plain(statistics.mean(found)) for found in values],
        "never": never,
        "command": f"python benchmarks/evidence.py {claim.experiment}",
    }


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


@dataclass
class Page:
    page: str
    """docs/PAGE.md"""
    note: str
    """what the paper says, and what is measured here; never the outcome"""
    columns: dict[str, tuple[Callable[[dict], float], bool]]
    """title -> (measure, whether it is shown in per cent)"""
    start: dict[str, Callable[[dict], float]]
    """the same before training, for the columns that have it"""
    panels: list[tuple]
    """of the figure: (title, x, metric, variants)"""


ACCURACY = "generator/accuracy"
CLAIMS, PAGES = [], {}
ALL = ()  # variants, in a panel

# ------------------------------------------------------------------ tango
HELD_OUT = {
    "accuracy": "generator/accuracy",
    "greedy": "generator/greedy",
    "steps right": "generator/step_accuracy",
    "steps right, greedy": "generator/step_accuracy_greedy",
    "verifier, balanced": "verifier/balanced_accuracy",
    "verifier, greedy": "verifier/balanced_accuracy_greedy",
    "step F1": "verifier/step_f1",
    "step F1, greedy": "verifier/step_f1_greedy",
}

# twice the untrained accuracy; of the half that was to be reached, no run comes near
TO_LEVEL = {of: needed(0.2, ACCURACY, of) for of in ("steps", "tokens")}
WHOLE = {of: whole(of, ACCURACY) for of in ("steps", "tokens")}
ANSWER_OR_VERIFIER = ("answer only", "co-trained")

CLAIMS += [
    Claim(
        "tango-speed",
        "tango",
        "generator steps to an accuracy of .2, the answer alone / co-trained",
        "3.3x",
        TO_LEVEL["steps"],
        ANSWER_OR_VERIFIER,
        "ratio",
        limit=WHOLE["steps"],
    ),
    Claim(
        "tango-tokens",
        "tango",
        "the same in tokens that all players sampled",
        "-",
        TO_LEVEL["tokens"],
        ANSWER_OR_VERIFIER,
        "ratio",
        limit=WHOLE["tokens"],
    ),
    Claim(
        "tango-gold",
        "tango",
        "the control: steps to .2, the answer alone / verdicts that are always right",
        "-",
        TO_LEVEL["steps"],
        ("answer only", "gold step verdicts"),
        "ratio",
        limit=WHOLE["steps"],
    ),
    Claim(
        "tango-random",
        "tango",
        "the other control: accuracy with a coin's verdicts, against the answer alone",
        "-",
        last(ACCURACY),
        ("answer only", "random step verdicts"),
    ),
    Claim(
        "tango-accuracy",
        "tango",
        "accuracy after 60 steps of the generator, the answer alone against co-trained",
        "higher",
        last(ACCURACY),
        ANSWER_OR_VERIFIER,
    ),
    Claim(
        "tango-accuracy-rate",
        "tango",
        "the same, both at one learning rate",
        "higher",
        last(ACCURACY),
        ("answer only, at 1e-3", "co-trained"),
    ),
    Claim(
        "tango-paper-alpha",
        "tango",
        "the same with the paper's small alpha, each at its rate",
        "higher",
        last(ACCURACY),
        ("answer only", "co-trained, the paper's alpha"),
    ),
    Claim(
        "tango-paper-alpha-rate",
        "tango",
        "accuracy after 60 steps, the answer alone against co-trained with the paper's small alpha",
        "higher",
        last(ACCURACY),
        ("answer only, at 1e-3", "co-trained, the paper's alpha"),
    ),
    Claim(
        "tango-paper-alpha-frozen",
        "tango",
        "with that alpha, a frozen verifier against one trained along",
        "-",
        last(ACCURACY),
        ("frozen verifier, the paper's alpha", "co-trained, the paper's alpha"),
    ),
    Claim(
        "tango-paper-alpha-random",
        "tango",
        "the control: with that alpha, a coin's verdicts against those of a trained verifier",
        "-",
        last(ACCURACY),
        ("random step verdicts, the paper's alpha", "co-trained, the paper's alpha"),
    ),
    Claim(
        "tango-paper-alpha-coin",
        "tango",
        "what such a coin costs: the answer alone against it, at one learning rate",
        "-",
        last(ACCURACY),
        ("answer only, at 1e-3", "random step verdicts, the paper's alpha"),
    ),
    Claim(
        "tango-paper-alpha-verdicts",
        "tango",
        "what a frozen verifier's verdicts bring there: the answer alone against them, at one rate",
        "-",
        last(ACCURACY),
        ("answer only, at 1e-3", "frozen verifier, the paper's alpha"),
    ),
    Claim(
        "tango-frozen",
        "tango",
        "accuracy at alpha = .5, a frozen verifier against one that is trained along",
        "-",
        last(ACCURACY),
        ("frozen verifier", "co-trained"),
    ),
    Claim(
        "tango-right-for-wrong-reason",
        "tango",
        "steps right after training, the answer alone against co-trained",
        "-",
        last("generator/step_accuracy"),
        ANSWER_OR_VERIFIER,
    ),
    Claim(
        "tango-verifier",
        "tango",
        "step F1, what co-training adds to the untrained verifier, sampled",
        "rises",
        gain("verifier/step_f1"),
        ("co-trained",),
        "gain",
    ),
    Claim(
        "tango-verifier-greedy",
        "tango",
        "the same, decoded greedily",
        "rises",
        gain("verifier/step_f1_greedy"),
        ("co-trained",),
        "gain",
    ),
    Claim(
        "tango-class-weights",
        "tango",
        "the verifier's balanced accuracy, without class weights against with them",
        "collapses without",
        last("verifier/balanced_accuracy"),
        ("co-trained, no class weights", "co-trained"),
    ),
    Claim(
        "tango-class-weights-f1",
        "tango",
        "the same, its step F1",
        "-",
        last("verifier/step_f1"),
        ("co-trained, no class weights", "co-trained"),
    ),
    Claim(
        "frozen-gamed",
        "gamed",
        "paid by the verifier alone: accuracy, frozen against co-trained",
        "-",
        last(ACCURACY),
        ("frozen", "co-trained"),
    ),
    Claim(
        "frozen-gamed-steps",
        "gamed",
        "the same: wrong steps that the verifier accepts in the end",
        "-",
        at_the_end("co/wrong_steps_accepted"),
        ("frozen", "co-trained"),
    ),
]

PAGES["tango"] = Page(
    "tango",
    """The paper: GRPO's final accuracy in 3.3x fewer steps of the generator, a verifier that learns
    to judge steps without step labels, and one that collapses without class weights. Here on long
    chains, `--dataset tiny-hard`. Two controls show the range: verdicts that are always right, and
    a coin's. Steps are the generator's; its accuracy in training is that on fresh questions,
    averaged over five steps. The advantage's two terms weigh alike all along (alpha = .5), because
    at the paper's alpha of .1, falling to .001, little is left of the verifier to compare; three
    variants have the paper's. These and the answer alone at their rate got three more seeds when
    the result of five was known, so their intervals are a little too narrow.""",
    {
        **{title: (last(key), True) for title, key in HELD_OUT.items()},
        "steps to .2": (TO_LEVEL["steps"], False),
        "steps to .3": (needed(0.3, ACCURACY), False),
        "tokens to .2": (TO_LEVEL["tokens"], False),
    },
    {title: first(key) for title, key in HELD_OUT.items()},
    [
        (
            "accuracy on fresh questions, alpha = .5",
            "gen_step",
            ACCURACY,
            [
                "answer only",
                "co-trained",
                "gold step verdicts",
                "frozen verifier",
                "random step verdicts",
            ],
        ),
        (
            "the same, the paper's alpha",
            "gen_step",
            ACCURACY,
            [
                "answer only, at 1e-3",
                "co-trained, the paper's alpha",
                "frozen verifier, the paper's alpha",
                "random step verdicts, the paper's alpha",
            ],
        ),
        (
            "verifier, balanced accuracy",
            "step",
            "verifier/balanced_accuracy",
            ["co-trained", "co-trained, no class weights"],
        ),
    ],
)
PAGES["gamed"] = Page(
    "tango",
    """What a verifier is worth as the only judge: the generator is paid for its verdicts on steps
    and for nothing else (alpha = 1). The frozen one believes a part of what the generator believes
    wrongly.""",
    {
        **{title: (last(key), True) for title, key in HELD_OUT.items()},
        "wrong steps accepted, last 5 steps": (at_the_end("co/wrong_steps_accepted"), True),
    },
    {title: first(key) for title, key in HELD_OUT.items()},
    [
        ("accuracy on fresh questions", "gen_step", ACCURACY, ALL),
        (
            "wrong steps accepted",
            "gen_step",
            "co/wrong_steps_accepted",
            ALL,
        ),
    ],
)

# ------------------------------------------------------------------ tango.py, paid for luck
STEPS_RIGHT = "generator/step_accuracy"
CLAIMS += [
    Claim(
        "lucky-steps",
        "lucky",
        "steps right, paid for the answer alone: if it is odd or even as it should be against if "
        "it is right",
        "-",
        last(STEPS_RIGHT),
        ("odd or even counts", "the number counts"),
    ),
    Claim(
        "lucky-co-trained",
        "lucky",
        "steps right where every second wrong answer is paid: the answer alone against co-trained",
        "-",
        last(STEPS_RIGHT),
        ("odd or even counts", "odd or even, co-trained"),
    ),
    Claim(
        "lucky-frozen",
        "lucky",
        "the same, a frozen verifier against one that is trained along",
        "-",
        last(STEPS_RIGHT),
        ("odd or even, frozen verifier", "odd or even, co-trained"),
    ),
    Claim(
        "lucky-true-verdicts",
        "lucky",
        "steps right, the answer alone against step verdicts that are always right",
        "-",
        last(STEPS_RIGHT),
        ("odd or even counts", "odd or even, true verdicts"),
    ),
]
PAGES["lucky"] = Page(
    "right-for-the-wrong-reason",
    """An answer counts if it is odd or even as the right one is, in the reward and in the
    verifier's labels; evaluations ask for the number. 40 steps of the generator, alpha = .5 where
    there are verdicts. *Paid* is what the reward said in the last five steps; the rest is held
    out.""",
    {
        "paid": (at_the_end(ACCURACY), True),
        **{title: (last(HELD_OUT[title]), True) for title in list(HELD_OUT)[:5]},
    },
    {title: first(HELD_OUT[title]) for title in list(HELD_OUT)[:5]},
    [
        ("paid", "gen_step", ACCURACY, ALL),
        ("steps that are right", "gen_step", STEPS_RIGHT, ALL),
    ],
)

# ------------------------------------------------------------------ prime
POLICY = "policy/accuracy"
# half as much again as the untrained accuracy, and twice as much
SAMPLES = {level: needed(level, POLICY, "co/samples") for level in (0.3, 0.4)}
CLAIMS += [
    Claim(
        f"prime-samples-{level:g}{'' if variant == 'PRIME' else '-offline'}",
        "prime",
        f"samples, filtered ones{warm_up} included, to an accuracy of {level:g}: outcome only / "
        f"{variant}",
        paper,
        SAMPLES[level],
        ("outcome only", variant),
        "ratio",
        limit=whole("co/samples", POLICY),
    )
    for level in SAMPLES
    for variant, paper, warm_up in (
        ("PRIME", "2.5x", ""),
        ("offline PRM", "-", " and those of the PRM's warm-up"),
    )
]
CLAIMS.append(
    Claim(
        "prime-accuracy",
        "prime",
        "accuracy after 40 steps, outcome only against PRIME",
        "36.9 against 41.0 in the mean",
        last(POLICY),
        ("outcome only", "PRIME"),
    )
)
PAGES["prime"] = Page(
    "prime",
    """The paper: token rewards of an online PRM reach the outcome-only baseline's reward in 2.5x
    fewer samples, and a PRM that stays as it was is worth less. Levels are .3 and .4 in place of .5
    and .75: they were set when the sweep and two of the reported seeds had shown that hardly a run
    comes to .5.""",
    {
        "accuracy": (last(POLICY), True),
        "greedy": (last("policy/greedy"), True),
        **{f"samples to {level:g}": (f, False) for level, f in SAMPLES.items()},
        "samples in all": (whole("co/samples", POLICY), False),
        "PRM right, last 5 steps": (at_the_end("prm/accuracy"), True),
    },
    {"accuracy": first(POLICY), "greedy": first("policy/greedy")},
    [
        ("accuracy before the filter", "step", POLICY, ALL),
        ("accuracy before the filter", "co/samples", POLICY, ALL),
    ],
)

# ------------------------------------------------------------------ gar
REASONER = "reasoner/accuracy"
ROWS = {"4 fixed discriminator": "58.6", "5 trained, R_a only": "59.4"}
ROWS |= {"6 trained, R_d only": "60.2", "7 trained, both": "61.3"}
CLAIMS += [
    Claim(
        f"gar-table4-row{variant[0]}",
        "gar",
        f"accuracy, row 2 (plain GRPO) against row {variant}",
        f"56.3 against {paper} (AIME24)",
        last(REASONER),
        ("2 GRPO, exact match only", variant),
    )
    for variant, paper in ROWS.items()
]
CLAIMS.append(
    Claim(
        "gar-table4-row7-greedy",
        "gar",
        "the same, decoded greedily",
        "-",
        last("reasoner/greedy"),
        ("2 GRPO, exact match only", "7 trained, both"),
    )
)
SLICES = ("reference", "generated_right", "generated_wrong", "sound", "unsound")
PAGES["gar"] = Page(
    "gar",
    """The paper's table 4, on two sets of 30 problems and without a spread: each row is better than
    the one before. Row 1 is the untrained model; row 3, a critic that was not taught to judge
    slices, is left out.""",
    {
        "accuracy": (last(REASONER), True),
        "greedy": (last("reasoner/greedy"), True),
        **{f"YES to {s.replace('_', ' ')}": (last(f"discriminator/yes_{s}"), True) for s in SLICES},
    },
    {"accuracy": first(REASONER), "greedy": first("reasoner/greedy")},
    [
        ("accuracy on fresh questions", "step", REASONER, ALL),
        *[
            (f"P(YES), {kind.replace('_', ' ')}", "step", f"discriminator/yes_{kind}", ALL)
            for kind in SLICES[1:3]
        ],
    ],
)

# ------------------------------------------------------------------ cure
CODER, TESTER = "coder/accuracy", "tester/accuracy"
CLAIMS += [
    Claim(
        f"cure-coevolve-{role}",
        "cure",
        f"right {what}, only the {role} trained against both: equally many updates as {role}, "
        "twice as many of the adapter that both share",
        paper,
        last(f"{role}/accuracy"),
        (f"only the {role}", "both"),
    )
    for role, what, paper in (("coder", "programs", "-"), ("tester", "tests", "-"))
]
CLAIMS += [
    Claim(
        f"cure-{rate}",
        "cure",
        f"{rate}, the base's wrong programs that {what} tests let pass: simple reward against ours",
        paper,
        last(f"tester/{rate}_base"),
        ("only the tester, simple reward", "only the tester"),
    )
    for rate, what, paper in (("p01", "right", "42.2 to 36.5"), ("p00", "wrong", "14.7 to 9.1"))
]
CLAIMS.append(
    Claim(
        "cure-simple-tests",
        "cure",
        "right tests, simple reward against ours",
        "-",
        last(TESTER),
        ("only the tester, simple reward", "only the tester"),
    )
)
CURE = {
    "right programs": CODER,
    "right tests": TESTER,
    "p01, base's programs": "tester/p01_base",
    "p00, base's programs": "tester/p00_base",
    "mu": "co/mu",
    "best of 4 by 4 tests": "co/best_of_4",
    "best of 16 by 16 tests": "co/best_of_16",
}
PAGES["cure"] = Page(
    "cure",
    """The paper, on far harder tasks: coder and tester make each other better, and the precision
    reward ends with tests that let fewer wrong programs pass than the simple one's.""",
    {title: (last(key), True) for title, key in CURE.items()},
    {title: first(key) for title, key in CURE.items()},
    [
        ("coder: right programs", "step", CODER, ALL),
        ("tester: right tests", "step", TESTER, ALL),
        ("tester: p00", "step", "tester/p00", ALL),
    ],
)

# ------------------------------------------------------------------ spin
PLAYER = "player/accuracy"


CLAIMS += [
    Claim(
        "spin-vs-sft",
        "spin",
        "what more training adds to the accuracy of a fully fine-tuned model: SFT against SPIN",
        "nothing against a rise",
        gain(PLAYER),
        ("continued SFT", "SPIN"),
    ),
    Claim(
        "spin-opponent",
        "spin",
        "the same, the opponent fixed at the first model against the previous iterate",
        "-",
        gain(PLAYER),
        ("opponent fixed at the first", "SPIN"),
    ),
]
PAGES["spin"] = Page(
    "spin",
    """The paper: a fully fine-tuned model gets better with every iteration, where one more epoch of
    SFT on the same answers lowers it. The first model here has been fine-tuned on these very
    answers for many passes.""",
    {"accuracy": (last(PLAYER), True), "greedy": (last("player/greedy"), True)},
    {"accuracy": first(PLAYER), "greedy": first("player/greedy")},
    [
        ("held-out accuracy", "step", "eval/player/accuracy", ALL),
        ("log-likelihood of held-out human answers", "step", "eval/player/logp_human", ALL),
    ],
)

# ------------------------------------------------------------------ mae
SOLVER, TRAINED = "solver/accuracy", "all parts trained"
CLAIMS += [
    Claim(
        f"mae-{name}",
        "mae",
        f"accuracy, {variant} against all parts trained",
        paper,
        last(SOLVER),
        (variant, TRAINED),
    )
    for name, variant, paper in (
        ("proposer", "no proposer training", "57.9 against 59.9"),
        ("solver", "no solver training", "57.8 against 59.9"),
        ("gate", "no quality gate", "56.2 against 59.9"),
        ("judge-untrained", "no judge training", "57.2 against 59.9"),
        ("judge-agreement", "judge paid for agreement with gold", "-"),
        ("judge-shuffled", "shuffled scores", "-"),
        ("judge-format", "format only", "-"),
        ("judge-gold", "gold scores", "-"),
    )
]
CLAIMS.append(
    Claim(
        "mae-loop",
        "mae",
        "accuracy after all parts were trained minus before",
        "55.3 to 59.9",
        gain(SOLVER),
        (TRAINED,),
        "gain",
    )
)
MAE = {
    "accuracy": SOLVER,
    "greedy": "solver/greedy",
    "judged minus true accuracy": "co/flattery",
    "judge, balanced": "judge/balanced_accuracy",
    "judge, AUC": "judge/rank_agreement",
    "proposals with an answer": "proposer/answerable",
}
PAGES["mae"] = Page(
    "mae",
    """The paper: each part is needed (55.3 before, 59.9 with all parts; without the proposer's
    training 57.9, the solver's 57.8, the judge's 57.2, the quality gate 56.2). Accuracy is against
    gold answers, which training never sees but where a variant's name says so. The last three take
    the judge's scores away, or put the truth in their place.""",
    {title: (last(key), True) for title, key in MAE.items()},
    {title: first(key) for title, key in MAE.items()},
    [("mean score of the solver's answers", "step", "solver/judged", ALL)],
)

# ------------------------------------------------------------------ azr
SOLVED = "solver/accuracy"
CLAIMS += [
    Claim(
        f"azr-{name}",
        "azr",
        f"held-out accuracy, {variant} against execution as gate and pay",
        paper,
        last(SOLVED),
        (variant, "execution"),
    )
    for name, variant, paper in (
        ("gate", "no gate", "collapses without"),
        ("gate-leak", "leak of .2", "metrics part first"),
        ("pay", "voting solver", "collapses fastest"),
        ("pay-all", "voting solver and proposer", "collapses"),
        ("gate-and-pay", "no gate, all voting", "collapses"),
    )
]
CLAIMS += [
    Claim(
        "azr-pay-and-truth",
        "azr",
        "what the solver is paid for minus what is true, in the last 5 steps",
        "metrics part first",
        at_the_end("co/paid_minus_true"),
        ("execution", "voting solver"),
    )
]
AZR = {"accuracy": SOLVED, "greedy": "solver/accuracy_greedy"}
AZR |= {kind: f"solver/{kind}" for kind in ("deduction", "abduction", "induction")}
AZR |= {"proposals that run": "proposer/valid", "new programs": "proposer/new"}
PAGES["azr"] = Page(
    "azr",
    """The paper: a model that learns from its own tasks alone, 7.0 points better over code and
    mathematics. The study: what keeps it from collapse is a gate that lets in only what Python has
    run; a solver paid by votes collapses fastest beside a proposer paid by the truth. Here every
    variant has the same proposals to start from; what no program says, the model itself does.""",
    {
        **{title: (last(key), True) for title, key in AZR.items()},
        "paid minus true, last 5 steps": (at_the_end("co/paid_minus_true"), True),
        "tasks that run": (at_the_end("co/tasks_that_run", 1), True),
    },
    {title: first(key) for title, key in AZR.items()},
    [
        ("held-out accuracy", "step", "eval/solver/accuracy", ALL),
        ("paid minus true", "step", "co/paid_minus_true", ALL),
        ("proposals that run", "step", "proposer/valid", ALL),
    ],
)

# ------------------------------------------------------------------ deepseekmath
REAL, CLAIMED = "verifier/claims_real", "co/over_claim"


def voted(key: str) -> Callable[[dict], float]:
    """The mean over the rounds whose labels are voted: all but the first, which are the truth."""

    def measure(run: dict) -> float:
        values = [step[key] for step in run["steps"] if key in step][-2:]
        return statistics.mean(values) if values else math.nan

    return measure


CLAIMS += [
    Claim(
        "dsm-meta",
        "deepseekmath",
        "share of claimed defects that are real, without the meta-reward against with it",
        "-",
        last(REAL),
        ("no meta-reward", "all"),
    ),
    Claim(
        "dsm-quality",
        "deepseekmath",
        "mean R_meta that an analysis deserves, without the meta-reward against with it",
        ".85 to .96",
        last("verifier/analysis_quality"),
        ("no meta-reward", "all"),
    ),
    Claim(
        "dsm-defects",
        "deepseekmath",
        "share of faulty steps that it finds, without the meta-reward against with it",
        "-",
        last("verifier/defects_found"),
        ("no meta-reward", "all"),
    ),
    Claim(
        "dsm-meta-score",
        "deepseekmath",
        "accuracy of the verifier's scores, without the meta-reward against with it",
        "equal",
        last("verifier/balanced_accuracy"),
        ("no meta-reward", "all"),
    ),
    Claim(
        "dsm-self",
        "deepseekmath",
        "own score minus true score, without R_Z against with it",
        "falls",
        last(CLAIMED),
        ("no self-reward", "all"),
    ),
    Claim(
        "dsm-self-right",
        "deepseekmath",
        "share of own scores that are right, without R_Z against with it",
        "-",
        last("generator/own_score_right"),
        ("no self-reward", "all"),
    ),
    Claim(
        "dsm-labels",
        "deepseekmath",
        "share of labels by votes that agree with the truth",
        "replace experts",
        voted("labels/agreement"),
        ("all",),
    ),
    Claim(
        "dsm-labels-accuracy",
        "deepseekmath",
        "accuracy of the generator, labels by the truth against labels by votes",
        "-",
        last("generator/accuracy"),
        ("labels by the truth", "all"),
    ),
]
DSM = {
    "accuracy": "generator/accuracy",
    "greedy": "generator/greedy",
    "after a second look": "generator/refined",
    "own score right": "generator/own_score_right",
    "verifier's scores, balanced": "verifier/balanced_accuracy",
    "claimed defects that are real": REAL,
    "faulty steps found": "verifier/defects_found",
    "meta-verifier": "meta/accuracy",
}
PAGES["deepseekmath"] = Page(
    "deepseekmath",
    """The paper: a meta-verifier's scores in the verifier's reward raise the quality of its
    analyses from .85 to .96 while its scores stay as accurate; a generator that is paid for an
    honest self-evaluation learns to find its own faults; labels by votes replace experts. Here all
    of it is held against the truth, which only the first round's labels are told.""",
    {
        **{title: (last(key), True) for title, key in DSM.items()},
        "own score minus true score": (last(CLAIMED), True),
        "labels by votes that are true": (voted("labels/agreement"), True),
        "of one analysis alone": (voted("labels/single"), True),
    },
    {title: first(key) for title, key in DSM.items()},
    [
        ("accuracy in training", "step", "generator/accuracy", ALL),
        ("own minus true score", "step", "co/over_claim", ALL),
        ("claimed defects that are real", "step", "verifier/claims_real", ALL),
    ],
)

# ------------------------------------------------------------------ vstar
BEST = "co/best_of_16"
CLAIMS += [
    Claim(
        f"vstar-verifiers-{name}",
        "vstar",
        f"best of 16 on the same solutions, {variant} against dpo",
        paper,
        last(BEST),
        (variant, "dpo"),
    )
    for name, variant, paper in (
        ("orm", "orm", "dpo is better"),
        ("prm", "prm", "-"),
        ("genrm", "genrm", "GenRM is better"),
        ("genrm-cot", "genrm-cot", "GenRM is better"),
    )
]
RANK = "verifier/rank_agreement"
CLAIMS += [
    Claim(
        f"vstar-{kind}-training{name}",
        "vstar",
        what.format(kind),
        "-",
        last(key),
        (f"{kind}, not trained", kind),
    )
    for kind in ("dpo", "genrm-cot")
    for name, what, key in (
        ("", "best of 16 on the same solutions, {} not trained against trained", BEST),
        ("-rank", "the same: right above wrong", RANK),
    )
]
CLAIMS += [
    Claim(
        "vstar-dpo-rate",
        "vstar",
        "the same at three times dpo's rate: best of 16, not trained against trained",
        "-",
        last(BEST),
        ("dpo, not trained", "dpo, at 1e-3"),
    ),
    Claim(
        "vstar-vote",
        "vstar",
        "best of 16 by dpo minus the majority's answer",
        "better",
        lambda run: last(BEST)(run) - last("co/majority")(run),
        ("dpo",),
        "gain",
    ),
    Claim(
        "vstar-restart",
        "vstar",
        "the generator's accuracy, going on against starting from the first model each time",
        "restart",
        last("generator/accuracy"),
        ("dpo, generator goes on", "dpo"),
    ),
    Claim(
        "vstar-restart-greedy",
        "vstar",
        "the same, decoded greedily",
        "-",
        last("generator/greedy"),
        ("dpo, generator goes on", "dpo"),
    ),
    Claim(
        "vstar-loop",
        "vstar",
        "the generator's accuracy, without and with the verifier in the loop",
        "no gain",
        last("generator/accuracy"),
        ("dpo", "dpo, in the loop"),
    ),
]
VSTAR = {
    "majority": "co/majority",
    "mean": "generator/accuracy",
    "greedy": "generator/greedy",
    "oracle": "co/oracle",
}
PAGES["vstar"] = Page(
    "vstar",
    """The papers: a verifier trained by DPO ranks better than an outcome head under LoRA, and one
    that writes better than both; to start from the first model in every iteration is part of the
    method, and a verifier in the loop brings nothing. All verifiers here rank the very same
    solutions of a seed, but in the last two rows; those that were *not trained*, too, which says
    what is the kind of verifier and what its training.""",
    {
        "best of 16": (last(BEST), True),
        "best of 4": (last("co/best_of_4"), True),
        "right above wrong": (last(RANK), True),
        **{title: (last(key), True) for title, key in VSTAR.items()},
    },
    {title: first(key) for title, key in VSTAR.items()},
    [
        (
            "accuracy of the generator's samples",
            "step",
            "generator/accuracy",
            ["dpo", "dpo, generator goes on", "dpo, in the loop"],
        )
    ],
)

# ------------------------------------------------------------------ self_rewarding
FIRST_PAIRS, OWN, TAUGHT = "judge/first_pairs", "own scores", "own scores, self-taught judge"


def last_round(key: str) -> Callable[[dict], float]:
    """A metric that only steps that begin a round have, in the last round."""
    return lambda run: [step[key] for step in run["steps"] if key in step][-1]


CLAIMS += [
    Claim(
        "selfreward-judge",
        "self_rewarding",
        "right above wrong answers of the first model: after the last round minus before",
        "78.7 -> 81.7",
        gain(FIRST_PAIRS),
        (OWN,),
        "gain",
    ),
    Claim(
        "selfreward-judge-taught",
        "self_rewarding",
        "the same after the last round, judge not trained against self-taught",
        "RewardBench 75.4 -> 88.3",
        last(FIRST_PAIRS),
        (OWN, TAUGHT),
    ),
    Claim(
        "selfreward-compared",
        "self_rewarding",
        "the right one of two chosen, judge not trained against self-taught",
        "-",
        last("judge/first_compared"),
        (OWN, TAUGHT),
    ),
    Claim(
        "selfreward-accuracy",
        "self_rewarding",
        "accuracy after the last round minus before, by a model's own scores alone",
        "AlpacaEval 9.9 -> 20.4",
        gain("solver/accuracy"),
        (OWN,),
        "gain",
    ),
    Claim(
        "selfreward-chance",
        "self_rewarding",
        "accuracy, scores at random against own ones",
        "-",
        last("solver/accuracy"),
        ("scores at random", OWN),
    ),
    Claim(
        "selfreward-truth",
        "self_rewarding",
        "accuracy, own scores against the truth in their place",
        "-",
        last("solver/accuracy"),
        (OWN, "scores by the truth"),
    ),
]
SELF = {
    "accuracy": "solver/accuracy",
    "greedy": "solver/greedy",
    "best of 4": "co/best_of_4",
    "right above wrong, first model's": FIRST_PAIRS,
    "right above wrong, its own": "judge/own_pairs",
    "one reading right": "judge/readings_right",
    "right one chosen": "judge/first_compared",
    "in both orders": "judge/both_orders",
}
PAGES["self_rewarding"] = Page(
    "self_rewarding",
    """The paper: a model that prefers what it scores highest itself gets better at answering and,
    as a side effect, at judging. Here every score can be held against the truth, two further runs
    choose their pairs by the truth and by chance, and one trains its judge, too.""",
    {
        **{title: (last(key), True) for title, key in SELF.items()},
        "pairs the right way round, last round": (last_round("co/pairs_right_way"), True),
        "tokens of an answer": (last("solver/length"), False),
    },
    {
        **{title: first(key) for title, key in SELF.items()},
        "tokens of an answer": first("solver/length"),
    },
    [
        ("accuracy of a round's answers", "step", "solver/accuracy", ALL),
        ("pairs the right way round", "step", "co/pairs_right_way", ALL),
    ],
)
