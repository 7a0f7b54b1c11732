"""Pages and figures from docs/evidence/*.json alone; `python benchmarks/evidence.py` calls it.

docs/evidence/NAME.md and .png   an experiment's page
docs/NAME.md                     the same, between <!-- results --> and <!-- end -->
README.md                        claims, hardware and speed, between marks like these
"""

import json
import math
import re
import statistics
from collections import defaultdict
from pathlib import Path

from evidence import EXPERIMENTS, FOLDER, ROOT, finished, read
from evidence_tables import CLAIMS, TABLES, Results, markdown
from one_gpu_docs import CARDS, GIB, fitting
from one_gpu_docs import name as model_name

NOTES = {
    "cure": """
        The paper, on far harder tasks: the precision reward ends with tests that let fewer wrong
        programs pass than the simple one's, right tests (p01) and wrong ones (p00). The embedded
        tasks are of two kinds, and on each tests go wrong in another way: products, where some
        inputs tell little, and sums with a negative number, whose sign both parts drop at first. So
        at the start wrong tests let wrong programs pass more often than two wrong digits agree by
        chance, one case of nine. For the base's programs, which are the same all along, both rates
        fall in every seed: p00 to about chance, because what is wrong in a test is now its
        arithmetic, and p01 because there now are right tests for sums, which a dropped sign fails.
        On products p01 stays about where it was, though the testers choose weak inputs less often
        (docs/evidence/cure_inputs.md). Of the trained coder's programs hardly any is wrong in the
        end: the means of their rates fall, too, but single seeds end above the start. Between the
        rewards the difference has the paper's sign and is small: see the line below the table.
        Where only the tester is trained the coder, on the same adapter, gains some, and the program
        that the tests pick of four is right far more often.""",
    "mae": """
        The paper: each part is needed, and without the quality gate little is gained (56.2 against
        55.3). All numbers are against gold answers, which training never sees, except for the last
        row's judge. Here the
        solver's own training and the gate matter as in the paper; the judge's training does not
        help: it is paid for its format, which the embedded model has already, and moves the one
        adapter for nothing. Rows without a trained part can collapse, as a thin line does in the
        figure: the judge loses its judgement, its opinion rises above the truth, and accuracy falls
        below the start. Paying it for being right, which the paper does not, helps most, and no
        such run collapsed.""",
    "mae_collapse": """
        Four times the default learning rate: accuracy falls below the start, the model's opinion of
        itself rises far above the truth, and the judge knows no more than chance. At this rate
        neither leaving out the judge's training nor paying it for being right prevents it. When the
        judgements have had no scores for three steps, a run stops itself, at the step in the last
        column.""",
    "tango": """
        The paper: GRPO's final accuracy in 3.3x fewer steps of the generator, and a verifier that
        learns to judge steps without step labels; without class weights the verifier collapses.
        Here all generators are nearly perfect after 21 steps: held out, no variant that knows the
        answer ends clearly ahead, in most runs co-training does not reach GRPO's last training
        accuracy in as many generator steps, and it takes about four times GRPO's seconds. The
        verifier's figures, sampled at T = 1, rise without step labels in RL. But the embedded one
        has been taught to judge steps, and decoded greedily it finds nearly all wrong ones before
        RL (`eval/verifier/step_f1_greedy` at step 0 of any run; these runs did not log it yet).
        Without class weights it does not collapse: the embedded generator is right often enough
        from the start. The last two variants take the
        gold answer out of the generator's reward (alpha = 1). A frozen verifier is then a worse
        teacher than a co-trained one in each of the three seeds. Whether it is gamed these runs
        cannot tell: the generator is paid for verdicts on steps, and they logged final ones, whose
        accept rate stays below the truth.""",
    "prime": """
        The paper reports a ratio of 2.5.""",
    "gar": """
        The paper's table 4, on two sets of 30 problems and without a spread: of the rows shown,
        each is better than the one before. Row 3, a plain fixed critic (56.7 / 40.4), is left out:
        it needs one that was not taught to judge slices, and the embedded model was. Here plain
        GRPO is soon nearly perfect, and no row is better; row 4, the fixed discriminator, is worse
        in each of the five seeds. What the discriminator says at T = 1 does differ (decoded
        greedily, it tells sound from unsound slices before any RL): agreement alone drifts to YES
        for everything, in some runs for unsound slices, too; telling real from generated alone
        keeps them down, and sound ones as well; both together say YES to sound slices and seldom
        to unsound ones. The last column rests on the few wrong slices that a run's own reasoner
        still writes, some twenty a run.""",
    "spin": """
        The paper: the average of six benchmarks rises with every iteration, where one more epoch
        of SFT lowers it. There the first model had been trained on these very data before; the
        embedded one was last taught solutions with mistakes, so SFT on right ones still has
        something to give, and is ahead of SPIN here. With the opponent fixed at the SFT model the
        seeds differ more, and some fall back on the way: human answers become less likely again,
        which the loss allows as long as the opponent's become less likely still.""",
}


# ------------------------------------------------------------------ figures
def panels(name: str) -> list[tuple]:
    """(title, x, metric, variants) of each panel; a metric that begins with eval/ is held out."""
    variants = list(EXPERIMENTS[name].variants)
    if name == "tango":
        trained, gap = "co-trained", "co/verdict_minus_gold"
        alone = [variant for variant in variants if variant.startswith("reward from")]
        return [
            ("generator, training accuracy", "gen_step", "generator/accuracy", variants[:3]),
            ("accept rate minus true accuracy", "gen_step", gap, [trained, *alone]),
            (
                "verifier, balanced accuracy",
                "step",
                "verifier/balanced_accuracy",
                [trained, f"{trained}, no class weights"],
            ),
        ]
    if name == "prime":
        title = "training accuracy before the filter"
        return [(title, x, "policy/accuracy", variants) for x in ("step", "co/samples")]
    if name == "gar":
        kinds = ("reference", "generated_right", "generated_wrong")
        titles = {f"discriminator/yes_{k}": f"P({k.replace('_', ' ')} → YES)" for k in kinds}
        variants = variants[2:]
    else:
        titles = {
            "cure": {
                "tester/accuracy": "tester: right tests",
                "eval/tester/p01_base": "held out: p01, base's programs",
                "eval/tester/p00_base": "held out: p00, base's programs",
            },
            "mae": {
                "eval/solver/accuracy": "held-out accuracy",
                "eval/co/flattery": "judged minus true accuracy",
                "eval/judge/rank_agreement": "judge against gold, AUC",
            },
            "mae_collapse": {
                "eval/solver/accuracy": "held-out accuracy",
                "eval/co/flattery": "judged minus true accuracy",
                "eval/judge/unparsable": "judgements without a score",
            },
            "spin": {
                "eval/player/accuracy": "held-out accuracy",
                "eval/player/logp_human": "log-likelihood of held-out human answers",
            },
        }[name]
    return [(title, "step", key, variants) for key, title in titles.items()]


XLABELS = {
    "step": "optimiser step",
    "gen_step": "the generator's steps",
    "co/samples": "samples drawn, filtered ones included",
}


def draw(results: Results, panels: list[tuple], path: Path):
    """A panel per metric: every seed a thin line, their mean a thick one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.4 * len(panels), 4.0), squeeze=False)
    names = list(dict.fromkeys(variant for *_, variants in panels for variant in variants))
    for axis, (title, x, key, variants) in zip(axes[0], panels):
        for variant in variants:
            color = f"C{names.index(variant)}"
            curves = [points(run, x, key) for run in results.of(variant)]
            for curve in curves:
                axis.plot(*zip(*curve), color=color, alpha=0.3, linewidth=0.8)
            if x != "co/samples":  # of which every run draws as many as it needs
                # evaluations: once a run has stopped itself, a mean would be the survivors'
                enough = len(curves) if key.startswith("eval/") else len(curves) // 2 + 1
                axis.plot(*zip(*mean_curve(curves, enough)), color=color, linewidth=1.8)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(XLABELS[x])
        axis.grid(alpha=0.25)
    lines = [pyplot.Line2D([], [], color=f"C{i}", linewidth=1.8) for i in range(len(names))]
    # below the panels: on them it would hide curves
    figure.legend(lines, names, loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.05 * math.ceil(len(names) / 3) + 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def points(run: dict, x: str, key: str) -> list[tuple[float, float]]:
    """(x, metric) of every row of a run that has the metric."""
    rows = run["evaluations"] if key.startswith("eval/") else run["steps"]
    if x == "gen_step":  # not those in which the generator only writes for the verifier
        own = [row for row in rows if "co/alpha" in row] or rows
        rows = [{**row, x: i} for i, row in enumerate(own, start=1)]
    return [(row[x], row[key]) for row in rows if key in row]


def mean_curve(curves: list[list[tuple]], enough: int) -> list[tuple[float, float]]:
    """The mean at every x at which at least `enough` curves have a point."""
    values = defaultdict(list)
    for x, y in (point for curve in curves for point in curve):
        values[x].append(y)
    return sorted((x, statistics.mean(ys)) for x, ys in values.items() if len(ys) >= enough)


# ------------------------------------------------------------------ the README's tables
def summary() -> str:
    """One line per claim, for every experiment that is complete."""
    rows = []
    for name, claims in CLAIMS.items():
        if finished(name):
            link = f"[`{EXPERIMENTS[name].script}`](docs/evidence/{name}.md)"
            for i, claim in enumerate(claims(Results(name))):
                rows.append(["" if i else link, *claim])
    ours = "here, in %: mean ± 95 % interval [range over seeds]"
    return markdown(["script", "claim", "paper", ours], rows)


def hardware() -> str:
    """Minutes of the embedded defaults; and the largest Qwen2.5 for each card, by estimate."""
    measured = load("defaults")
    minutes = [f"`{name}.py` {r['wall_seconds'] / 60:.1f}" for name, r in measured.items()]
    takes = f"minutes, evaluations included: {', '.join(minutes)}"
    machine = next(iter(measured.values()))["machine"]
    rows = [[machine, "the embedded default", "", takes]]
    for card, gib in CARDS.items():
        size = [size for size in ("0.5b", "1.5b", "7b", "14b", "32b") if fitting(size, gib)][-1]
        at_once, micro_batch, need = fitting(size, gib)
        model = f"two players of {model_name(size)}, 4-bit"
        options = f"`--rows-at-once {at_once} --micro-batch {micro_batch}`"
        takes = f"{need['peak'] / GIB:.1f} GiB, estimated; not measured yet"
        rows.append([f"one GPU of {card}", model, options, takes])
    return markdown(["hardware", "the largest that fits", "with", "takes"], rows)


def speed() -> str:
    """Our time over theirs: the median of the ratios within a repetition, and their range."""
    rows = [*logprob_rows(), *train_phase_rows()]
    for r in load("sampling_cpu")["rows"]:
        rows.append([f"sampling, embedded, {r['part']}", "`generate`", ratio(r), ""])
    measured = load("sandbox")["speed"]
    peers = {
        "plain interpreter": "plain interpreter",
        "released design": "bare forks, CURE's released design",
    }
    for key, peer in peers.items():
        faster, (low, high) = measured[key]["sandbox_is_faster_by"], measured[key]["range_of_that"]
        times = ratio({"ratio": 1 / faster, "range": (1 / high, 1 / low)})
        rows.append(["running programs", peer, times, ""])
    header = ["what, on a 2-core CPU", "against", "our time over its time [range]"]
    return markdown([*header, "extra memory, ours / its"], rows)


def logprob_rows() -> list[list[str]]:
    peers = {"trl": "TRL's fused head", "liger": "Liger", "naive": "plain autograd"}
    measured = load("logprob_cpu")["rows"]
    by_key = {(r["N"], r["H"], r["V"], r["pass"], r["method"]): r for r in measured}
    rows = []
    for N, H, V in sorted({key[:3] for key in by_key}, reverse=True):
        for kind in ("forward+backward", "forward"):
            ours = by_key[N, H, V, kind, "ours"]
            for method, peer in peers.items():
                r, extra = by_key[N, H, V, kind, method], ""
                if r["extra_mib"]:
                    extra = f"{ours['extra_mib']:.0f} / {r['extra_mib']:.0f} MiB"
                what = f"log-probs, {kind}, {N} tokens, hidden {H}, vocabulary {V:,}"
                times = ratio({"ratio": r["ours_over_it"], "range": r["range"]})
                rows.append([what, peer, times, extra])
    return rows


def train_phase_rows() -> list[list[str]]:
    rows = []
    by = lambda r: (r["shape"], r["threads"], r.get("kl", 0.0))  # noqa: E731
    for r in sorted(load("train_phase_cpu")["rows"], key=by):
        threads = f"{r['threads']} thread{'s' * (r['threads'] > 1)}"
        kl = ", with a KL term" if r.get("kl") else ""
        what = f"loss and backward of a batch, {r['shape']}, {threads}{kl}"
        rows.append([what, "TRL's", ratio(r), ""])
    return rows


def load(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def ratio(row: dict) -> str:
    low, high = row["range"]
    return f"{row['ratio']:.2f}x [{low:.2f}, {high:.2f}]"


# ------------------------------------------------------------------ writing
def page(name: str, picture: str) -> str:
    """What is known of an experiment: the note, how it was run, the figure and the table."""
    runs, experiment = read(name), EXPERIMENTS[name]
    seeds = sorted({r["seed"] for r in runs["runs"]})
    text = f"{' '.join(NOTES[name].split())}\n\n"
    text += f"Mean ± 95 % interval [range] over seeds {', '.join(map(str, seeds))}; "
    text += f"{runs['machine']}; `python benchmarks/evidence.py {name}` runs "
    text += f"`{experiment.script} {experiment.arguments}` with"
    for variant, arguments in experiment.variants.items():
        changes = [arguments, experiment.patches.get(variant)]
        words = " and ".join(f"`{change}`" for change in changes if change)
        own = sorted(r["seed"] for r in runs["runs"] if r["variant"] == variant)
        fewer = f" (seeds {', '.join(map(str, own))})" if own != seeds else ""
        text += f"\n- {variant}{fewer}: {words or 'nothing else'}"
    figure = f"![every seed thin, their mean thick]({picture})"
    return f"{text}\n\n{figure}\n\n{TABLES[name](Results(name))}"


def blocks() -> dict[tuple[str, str], str]:
    """(page, mark) -> what stands between the mark and <!-- end -->."""
    found = {}
    for name in filter(finished, EXPERIMENTS):
        path, mark = ("mae", "collapse") if name == "mae_collapse" else (name, "results")
        found[f"docs/{path}.md", mark] = page(name, f"evidence/{name}.png")
    readme = {"evidence": summary(), "hardware": hardware(), "speed": speed()}
    return found | {("README.md", mark): text for mark, text in readme.items()}


def fill(path: Path, mark: str, text: str):
    """Put text between <!-- mark --> and <!-- end -->, if the page is there."""
    if path.exists():
        block = f"<!-- {mark} -->\n{text}<!-- end -->"
        marks = re.compile(f"<!-- {mark} -->.*?<!-- end -->", re.DOTALL)
        path.write_text(marks.sub(lambda _: block, path.read_text()))


def write_up(name: str):
    """An experiment's page and figure, and every block that is made of results."""
    draw(Results(name), panels(name), FOLDER / f"{name}.png")
    (FOLDER / f"{name}.md").write_text(f"# {name}\n\n{page(name, f'{name}.png')}")
    for (path, mark), text in blocks().items():
        fill(ROOT / path, mark, text)
    print(TABLES[name](Results(name)))
