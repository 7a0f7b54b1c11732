"""Pages and figures from docs/evidence/*.json alone; `python benchmarks/evidence.py` calls it.

docs/evidence/NAME.md and .png   an experiment's page
docs/evidence/summary.json       a row per claim
docs/NAME.md                     both, between <!-- results --> and <!-- end -->
docs/measured.md, README.md      all claims, hardware and speed; three claims, between marks
"""

import json
import math
import re
import statistics
from collections import defaultdict
from pathlib import Path

from doc_tables import markdown
from evidence import EXPERIMENTS, FOLDER, ROOT, SWEEP_SEEDS, having, rate_of, read, score, with_runs
from evidence_claims import ACCURACY, CLAIMS, PAGES, interval, result, runs_of
from fits import CARDS, GIB, fitting
from fits import name as model_name

# ------------------------------------------------------------------ figures
HEADLINES = """lucky-co-trained dsm-quality dsm-defects tango-speed tango-tokens
tango-paper-alpha-rate tango-paper-alpha-frozen""".split()
"""Claims that the README shows: what was asked, and beside it what it cost."""
NOT_YET = "Not measured yet on these embedded models: `python benchmarks/evidence.py {name}`.\n"
XLABELS = {
    "step": "optimiser step",
    "gen_step": "the generator's steps",
    "co/samples": "samples drawn, filtered ones included",
}


def draw(name: str, panels: list[tuple], path: Path):
    """A panel (title, x, metric, variants) each: every seed a thin line, their mean a thick one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ran = with_runs(name)
    panels = [(*rest, [v for v in some or ran if v in ran]) for *rest, some in panels]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.4 * len(panels), 4.0), squeeze=False)
    names = list(dict.fromkeys(variant for *_, variants in panels for variant in variants))
    for axis, (title, x, key, variants) in zip(axes[0], panels):
        for variant in variants:
            color = f"C{names.index(variant)}"
            curves = [points(run, x, key) for run in runs_of(name, variant).values()]
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
    # below the panels: on them it would hide curves; three columns are wider than one panel
    columns = 3 if len(panels) > 1 else 2
    figure.legend(lines, names, loc="lower center", ncols=columns, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.05 * math.ceil(len(names) / columns) + 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def points(run: dict, x: str, key: str) -> list[tuple[float, float]]:
    """(x, metric) of every row of a run that has the metric."""
    rows = run["evaluations"] if key.startswith("eval/") else run["steps"]
    if x == "gen_step":
        rows = [{**row, x: i} for i, row in enumerate(having(run, ACCURACY), start=1)]
    return [(row[x], row[key]) for row in rows if key in row]


def mean_curve(curves: list[list[tuple]], enough: int) -> list[tuple[float, float]]:
    """The mean at every x at which at least `enough` curves have a point."""
    values = defaultdict(list)
    for x, y in (point for curve in curves for point in curve):
        values[x].append(y)
    return sorted((x, statistics.mean(ys)) for x, ys in values.items() if len(ys) >= enough)


# ------------------------------------------------------------------ claims
def results(experiments=EXPERIMENTS) -> list[dict]:
    """The rows of summary.json: every claim of these experiments whose variants have runs."""
    some = [claim for claim in CLAIMS if claim.experiment in experiments]
    return [row for row in map(result, some) if row]


def in_words(row: dict) -> str:
    """`+5.1 [1.2, 9.0] points: a 55.0, b 60.1`; what is not separated says so."""
    scale, unit = (100, " points") if row["kind"] != "ratio" else (1, "")
    ours, low, high = (None if row[k] is None else scale * row[k] for k in ("ours", "low", "high"))
    if row["kind"] == "ratio":
        late = [bool(n) for n in row["never"]]  # who never got there has taken at least so much
        bound = {(True, False): "at least ", (False, True): "at most ", (True, True): "about "}
        text = f"{bound.get(tuple(late), '')}{ours:.2f}x"
        text += f" [{low:.2f}, {high:.2f}]" if low is not None and not any(late) else ""
        sizes = [f"{mean:,.0f}" for mean in row["means"]]
    else:
        text = f"{ours:.1f}" if row["kind"] == "mean" else f"{ours:+.1f}"
        text += f" [{low:.1f}, {high:.1f}]" if low is not None else ""
        text += unit if row["kind"] != "mean" else ""
        sizes = [f"{100 * mean:.1f}" for mean in row["means"]]
    if len(row["variants"]) == 2:
        text += f": {', '.join(f'{v} {size}' for v, size in zip(row['variants'], sizes))}"
        never = [f"{v} {n}" for v, n in zip(row["variants"], row["never"]) if n]
        if never:
            text += f" (never there: {', '.join(never)} of {row['seeds']}, counted as a whole run)"
    if row["verdict"] == "not separated":
        text += "; **not separated**"
    return text


def claims_table(rows: list[dict], folder: str = "") -> str:
    """folder: of the experiments' pages, for links; without it there are none."""
    header = ["claim", "what", "paper", "here: mean [95 % interval]", "seeds"]
    lines = []
    for row in rows:
        experiment = row["command"].split()[-1]
        name = f"[{row['claim']}]({folder}{experiment}.md)" if folder else row["claim"]
        lines.append([name, row["says"], row["paper"], in_words(row), str(row["seeds"])])
    return markdown(header, lines)


# ------------------------------------------------------------------ the README's tables
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
def cell(values: list[float], percent: bool) -> str:
    """Mean ± half of the 95 % interval over the runs that get there, and how many never do."""
    there = [value * (100 if percent else 1) for value in values if math.isfinite(value)]
    never = sum(map(math.isinf, values))
    if not there:
        return "never" if never else "-"
    middle, _, high = interval(there)
    digits = 1 if percent or middle < 100 else 0
    text = f"{middle:,.{digits}f}"
    text += f" ± {high - middle:,.{digits}f}" if len(there) > 1 else ""
    return text + (f", {never} never" if never else "")


def table(name: str) -> str:
    columns, rows = PAGES[name].columns, []
    for variant in with_runs(name):
        runs = runs_of(name, variant).values()
        if not rows:  # of the first variant's seeds: all of them start from the same model
            start = PAGES[name].start
            known = {title: [measure(run) for run in runs] for title, measure in start.items()}
            cells = [cell(known[t], columns[t][1]) if t in known else "" for t in columns]
            rows.append(["before training", *cells])
        rows.append(
            [variant, *[cell([f(r) for r in runs], percent) for f, percent in columns.values()]]
        )
    return markdown(["variant", *columns], rows)


def rates_table(name: str) -> str:
    """What the sweep found: the yardstick at every rate, and the rate that was taken."""
    variants = EXPERIMENTS[name].variants
    swept = {v: variants[v].rates for v in with_runs(name) if len(variants[v].rates) > 1}
    rates = sorted({rate for some in swept.values() for rate in some})
    runs, rows = read(f"{name}_rates")["runs"], []
    for variant in swept:
        cells = []
        for rate in rates:
            own = [r for r in runs if (r["variant"], r["rate"]) == (variant, rate)]
            mean = statistics.mean(score(EXPERIMENTS[name], r) for r in own) if own else math.nan
            text = f"{100 * mean:.1f}" if own else "-"
            cells.append(f"**{text}**" if own and rate == rate_of(name, variant) else text)
        rows.append([variant, *cells])
    seeds = ", ".join(map(str, SWEEP_SEEDS))
    key = EXPERIMENTS[name].yardstick
    what = f"the last `{key}`" if key.startswith("eval/") else f"mean `{key}` of a run"
    title = f"Learning rates, on seeds {seeds}: {what}, in %"
    return f"{title}\n\n{markdown(['variant', *[f'{rate:g}' for rate in rates]], rows)}"


def page(name: str, picture: str) -> str:
    """What is known of an experiment: how it was run, the claims, the figure and the tables."""
    runs, experiment = read(name), EXPERIMENTS[name]
    text = f"{' '.join(PAGES[name].note.split())}\n\n"
    text += f"{runs['machine']}; `python benchmarks/evidence.py {name}` runs "
    text += f"`{experiment.script} {experiment.arguments}` with"
    for variant, chosen in experiment.variants.items():
        if variant not in with_runs(name):
            text += f"\n- {variant}: not run yet"
            continue
        changes = [
            f"{chosen.arguments} {EXPERIMENTS[name].rate} {rate_of(name, variant):g}"
            if chosen.rates
            else chosen.arguments
        ]
        words = " and ".join(
            f"`{change.strip()}`" for change in [*changes, chosen.patch] if change.strip()
        )
        text += f"\n- {variant}, {len(runs_of(name, variant))} seeds: {words or 'nothing else'}"
    figure = f"![every seed thin, their mean thick]({picture})"
    text += f"\n\n{claims_table(results([name]))}\n{figure}\n\n{table(name)}"
    swept = any(len(experiment.variants[v].rates) > 1 for v in with_runs(name))
    return f"{text}\n{rates_table(name)}" if swept else text


def blocks() -> dict[tuple[str, str], str]:
    """(page, mark) -> what stands between the mark and <!-- end -->."""
    found = {}
    for name in EXPERIMENTS:
        if not with_runs(name):
            found[f"docs/{PAGES[name].page}.md", f"results: {name}"] = NOT_YET.format(name=name)
            continue
        found[f"docs/{PAGES[name].page}.md", f"results: {name}"] = page(
            name, f"evidence/{name}.png"
        )
    rows = results()
    known = {row["claim"]: row for row in rows}
    some = [known[name] for name in HEADLINES if name in known]
    nothing = NOT_YET.format(name="all")
    return found | {
        ("README.md", "evidence"): claims_table(some, "docs/evidence/") if some else nothing,
        ("docs/measured.md", "claims"): claims_table(rows, "evidence/") if rows else nothing,
        ("docs/measured.md", "hardware"): hardware(),
        ("docs/measured.md", "speed"): speed(),
    }


def fill(path: Path, mark: str, text: str):
    """Put text between <!-- mark --> and <!-- end -->, if the page is there."""
    if path.exists():
        block = f"<!-- {mark} -->\n{text}<!-- end -->"
        marks = re.compile(f"<!-- {mark} -->.*?<!-- end -->", re.DOTALL)
        path.write_text(marks.sub(lambda _: block, path.read_text()))


def write_up(name: str):
    """An experiment's page and figure."""
    draw(name, PAGES[name].panels, FOLDER / f"{name}.png")
    (FOLDER / f"{name}.md").write_text(f"# {name}\n\n{page(name, f'{name}.png')}")
    print(table(name))


def fill_all():
    """summary.json, and every block that is made of results."""
    (FOLDER / "summary.json").write_text(json.dumps(results(), indent=1) + "\n")
    for (path, mark), text in blocks().items():
        fill(ROOT / path, mark, text)
