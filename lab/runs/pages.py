"""Tables and figures of docs/, made of lab/evidence/ alone: python -m lab.runs.pages

docs/pictures/NAME.png        an experiment's curves, for the experiments that are named
docs/*.md, lab/notes/*.md,    every block between <!-- MARK --> and <!-- end -->
README.md
"""

import json
import math
import posixpath
import re
import statistics
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache

from lab import EVIDENCE, PICTURES, ROOT
from lab.runs import evidence
from lab.runs.evidence import EXPERIMENTS, read, runs_of
from lab.runs.measures import having, interval, measure
from lab.speed import gpu, gpu_tables

from scipy import stats

XLABELS = {
    "step": "updates",
    "gen_step": "the generator's updates",
    "co/samples": "samples drawn, filtered ones included",
}
OF_ANOTHER_KIND = 20
"""Points from the median: a mean of such a run and of others is that of no run."""
END = "generator/accuracy"
SHOWN = tomllib.loads((ROOT / "lab/runs/shown.toml").read_text())
TRAINED = [name for name, experiment in EXPERIMENTS.items() if not experiment.timed]


def markdown(header: list, rows: list) -> str:
    first, *others = (f"| {' | '.join(map(str, cells))} |\n" for cells in [header, *rows])
    return "".join([first, "|---" * len(header) + "|\n", *others])


# ------------------------------------------------------------------ figures
def draw(name: str, panels: list[list], path):
    """A panel [title, x, metric, variants] each: every seed a thin line, their mean a thick one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ran = evidence.with_runs(name)
    panels = [(*panel[:3], [v for v in (panel[3:] or [ran])[0] if v in ran]) for panel in panels]
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
                mean = mean_curve(curves, enough)
                axis.plot(*zip(*mean), color=color, linewidth=1.8)
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


def draw_tones(path):
    """Of results.md: a row per verifier and a dot per seed, right above wrong where the
    wrong solutions sound sure, and where the right ones do.
    """
    from matplotlib import pyplot

    names = evidence.with_runs("verifiers")[::-1]
    figure, axis = pyplot.subplots(figsize=(7.0, 0.3 * len(names) + 1.2))
    for i, (tone, whose) in enumerate((("sure", "wrong solutions"), ("meek", "right solutions"))):
        key, middles = f"last:asked/agreement_{tone}", []
        for y, name in enumerate(names):
            found = [100 * measure(key, run) for run in runs_of("verifiers", name).values()]
            axis.plot(found, [y + 0.12 - 0.24 * i] * len(found), "o", color=f"C{i}", alpha=0.5)
            middles.append(statistics.mean(found))
        axis.plot(middles, range(len(names)), "|", color=f"C{i}", ms=16, mew=3, label=whose)
    axis.axvline(50, color="gray", linewidth=0.8)  # chance
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("right above wrong, %: dots are seeds, | is their mean")
    figure.legend(title="all steps end in ! of", loc="upper right", ncols=2, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def points(run: dict, x: str, key: str) -> list[tuple[float, float]]:
    """(x, metric) of every row of a run that has the metric."""
    rows = run["evaluations"] if key.startswith("eval/") else run["steps"]
    if x == "gen_step":  # how many of the generator's steps are done, which alone have an alpha
        own = [s for s in run["steps"] if "co/alpha" in s] or having(run, "generator/accuracy")
        rows = rows if key.startswith("eval/") else own
        rows = [{**row, x: sum(one["step"] <= row["step"] for one in own)} for row in rows]
    return [(row[x], row[key]) for row in rows if key in row]


def mean_curve(curves: list[list[tuple]], enough: int) -> list[tuple[float, float]]:
    """The mean at every x at which at least `enough` curves have a point."""
    values = defaultdict(list)
    for x, y in (point for curve in curves for point in curve):
        values[x].append(y)
    return sorted((x, statistics.mean(ys)) for x, ys in values.items() if len(ys) >= enough)


# ------------------------------------------------------------------ which code, which versions
def libraries(run: dict) -> str:
    return f"Python {run['versions']['python']}, torch {run['versions']['torch']}"


@cache
def usual_libraries(folder) -> str:
    """Those of most runs of lab/evidence/, the folder."""
    runs = [run for name in EXPERIMENTS for run in read(name)["runs"]]
    return Counter(map(libraries, runs)).most_common(1)[0][0]


def provenance(name: str) -> str:
    """Which commits a table's runs are of, and whether the code has changed since; versions of
    Python and torch if they are not everywhere's.
    """
    of = {evidence.recorded(name, variant): variant for variant in EXPERIMENTS[name].variants}
    runs = [run for run in read(name)["runs"] if run["variant"] in of]
    commits = list(dict.fromkeys((run["versions"]["commit"] or "none")[:7] for run in runs))
    named = {1: f"commit {commits[0]}", 2: f"commits {' and '.join(commits[:2])}"}
    several = f"{len(commits)} commits, {commits[0]} to {commits[-1]}"
    older = sum(run.get("code") != evidence.code_of(name, of[run["variant"]]) for run in runs)
    since = "the code has changed since" + f" {older} of them" * (older < len(runs))
    these = "This run is" if len(runs) == 1 else f"These {len(runs)} runs are"
    text = f"{these} of {named.get(len(commits), several)}"
    text += f"; {since}." if older else ", with today's code."
    found = Counter(map(libraries, runs))
    usual = usual_libraries(evidence.EVIDENCE)
    if list(found) != [usual]:
        text += f" They ran on {', '.join(f'{what} ({n})' for what, n in found.items())}; "
        text += f"most others on {usual}."
    return text


def all_runs() -> str:
    """Of lab/README.md: where each experiment's table stands, its runs and of which code they are,
    and the command that runs a row again.
    """
    rows = []
    for name in TRAINED:
        if ran := evidence.with_runs(name):
            variant = ran[0] if re.fullmatch(r"[\w-]+", ran[0]) else json.dumps(ran[0])
            seed = min(runs_of(name, ran[0]))
            page = posixpath.relpath(page_of(name), "lab")
            command = f"`python -m lab.runs.evidence {name} {variant} --seed {seed}`"
            runs = f"[{name}](evidence/{name}.json)"
            rows.append([runs, f"[table]({page})", provenance(name), command])
    return markdown(["runs", "shown in", "of which code", "a row again"], rows)


# ------------------------------------------------------------------ an experiment's block
def cell(values: list[float], percent: bool) -> str:
    """Mean ± half of the 95 % interval over the runs that get there, and how many never do. Of two
    runs, or where one of several shares is OF_ANOTHER_KIND or the interval leaves 0 to 100, each.
    """
    there = [value * (100 if percent else 1) for value in values if math.isfinite(value)]
    never = sum(map(math.isinf, values))
    if not there:
        return "never" if never else "-"
    middle, low, high = interval(there)
    far = max(abs(x - statistics.median(there)) for x in there) > OF_ANOTHER_KIND
    beyond = all(0 <= x <= 100 for x in there) and (low < 0 or high > 100)
    if len(there) == 2 or (len(there) > 1 and percent and (far or beyond)):
        return ", ".join(f"{x:.1f}" for x in there)
    digits = 2 if not percent and 0 < middle < 1 else 1 if percent or middle < 100 else 0
    text = f"{middle:,.{digits}f}"
    text += f"±{high - middle:,.{digits}f}" if len(there) > 1 else ""
    return text + (f", {never} never" if never else "")


def table(name: str, only: str = "") -> str:
    """only: what the names of the variants end with."""
    columns = EXPERIMENTS[name].columns
    variants = [v for v in evidence.with_runs(name) if v.endswith(only)]

    def line(variant: str, of: Callable) -> list[str]:
        runs = runs_of(name, variant).values()
        return [
            cell([measure(of(text), run) for run in runs], not count) if of(text) else ""
            for _, text, *count in columns
        ]

    before = lambda text: f"first:{text[5:]}" if text.startswith("last:") else ""  # noqa: E731
    # all start from the same model, and patched judges are not it: the first variant's that has it
    of = EXPERIMENTS[name].variants
    own = [v for v in variants if of[v].own_start]
    usual = [v for v in variants if v not in own and not of[v].controls and not of[v].judge]
    cells = zip(*[line(v, before) for v in usual])
    found = [next((c for c in its if c != "-"), "-") for its in cells]
    rows = [["before training", *found]] if found else []
    rows += [[f"before training, {variant}", *line(variant, before)] for variant in own]
    seeds = {variant: len(runs_of(name, variant)) for variant in variants}
    rows += [[f"{v}, {seeds[v]}", *line(v, str)] for v in variants]
    return markdown(["variant, seeds", *[title for title, *_ in columns]], rows)


def page_of(name: str) -> str:
    """The file in which an experiment's block stands, from the project's root."""
    page, _, _ = EXPERIMENTS[name].page.partition("#")
    return posixpath.normpath(f"docs/{page}")


def block(name: str) -> str:
    """What is known of an experiment: how it was run, the figure and the tables."""
    experiment, ran = EXPERIMENTS[name], evidence.with_runs(name)
    if not ran:
        return f"Not measured yet: `python -m lab.runs.evidence {name}`.\n"
    lab = posixpath.relpath("lab/README.md", posixpath.dirname(page_of(name)))
    text = f"[The runs of this table]({lab}#the-runs) are those of `{name}`."
    missing = [v for v in experiment.variants if v not in ran and experiment.variants[v].seeds]
    text += f" Not run yet: {'; '.join(f'*{v}*' for v in missing)}." * bool(missing) + "\n\n"
    if experiment.panels:
        folder = posixpath.dirname(page_of(name))
        text += f"![{name}: curves]({posixpath.relpath(f'docs/pictures/{name}.png', folder)})\n\n"
    return text + (bases_table() if name == "bases" else table(name))


def bases_runs() -> dict[str, dict[str, dict]]:
    """Of every small model that has runs: column of its table -> {seed: run}."""
    found = {}
    for model, base in SHOWN["bases"]["rows"]:
        found[model] = {}
        for title, shipped, others in SHOWN["bases"]["columns"]:
            of = ("bases", f"{base}: {others}") if base else ("few_labels", shipped)
            found[model][title] = runs_of(*of)
    return {model: runs for model, runs in found.items() if any(runs.values())}


def bases_table() -> str:
    """A row per small model, a column per reward, and of runs with the same seed the difference
    between a verifier that is trained along and one that is trained beforehand.
    """
    titles, rows = [title for title, *_ in SHOWN["bases"]["columns"]], []
    for model, found in bases_runs().items():
        starts = [measure(f"first:{END}", run) for runs in found.values() for run in runs.values()]
        ends = {t: {s: measure(f"last:{END}", r) for s, r in found[t].items()} for t in titles}
        cells = [f"{cell([*some.values()], True)} ({len(some)})" for some in ends.values()]
        along, beforehand = ends["trained along"], ends["trained beforehand"]
        both = [100 * (along[seed] - beforehand[seed]) for seed in along if seed in beforehand]
        gap = "{:+.1f} [{:.1f}, {:.1f}]".format(*interval(both)) if len(both) > 1 else "-"
        rows.append([model, f"{100 * statistics.mean(starts):.1f}", *cells, gap])
    text = "![accuracy on each small model, by reward](../../docs/pictures/bases.png)\n\n"
    text += markdown(["small model", "before", *titles, "along - beforehand"], rows)
    longer = any(v.endswith(", 110 steps") for v in evidence.with_runs("bases"))
    return text + (f"\n{table('bases', ', 110 steps')}" if longer else "")


def draw_bases(path):
    """A column of dots per reward and small model: a dot is a seed, and a dash is their median."""
    from matplotlib import pyplot

    models = bases_runs()
    figure, axis = pyplot.subplots(figsize=(8.8, 4.4))
    titles = [title for title, *_ in SHOWN["bases"]["columns"]]
    for i, (model, found) in enumerate(models.items()):
        name = model.split(":")[0].strip("*")
        for x, title in enumerate(titles):
            ends = [100 * measure(f"last:{END}", run) for run in found[title].values()]
            if not ends:
                continue
            at = x + 0.15 * (i - (len(models) - 1) / 2)
            axis.plot([at] * len(ends), ends, "o", color=f"C{i}", alpha=0.5, ms=5)
            axis.plot(at, statistics.median(ends), "_", color=f"C{i}", ms=14, mew=2.5)
        axis.plot([], [], "o", color=f"C{i}", label=name)
    axis.set_xticks(range(len(titles)), titles)
    axis.set_ylabel("accuracy after 40 updates of the generator, %", fontsize=9)
    axis.grid(axis="y", alpha=0.25)
    figure.legend(loc="upper center", ncols=len(models), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def minutes() -> str:
    """Of the scripts without arguments."""
    measured = read("defaults")
    runs = sorted(measured["runs"], key=lambda run: run["wall_seconds"])
    least, most = (
        f"{r['wall_seconds'] / 60:.1f} (`{r['variant']}.py`)" for r in runs[:: len(runs) - 1]
    )
    takes = f"Without arguments the script of a paper takes {least} to {most} minutes"
    return f"{takes}, evaluations included ({measured['machine']}). {provenance('defaults')}\n"


def speed() -> str:
    """Our time over theirs, see side_by_side.py."""
    rows = []
    for r in json.loads((EVIDENCE / "speed_cpu.json").read_text())["rows"]:
        times = "{:.2f}x [{:.2f}, {:.2f}]".format(r["ratio"], *r["range"])
        extra = "{:.0f} / {:.0f} MiB".format(*r["extra_mib"])
        what = "" if r["what"] in [row[0] for row in rows] else r["what"]  # named once
        rows.append([what, r["against"], times, extra])
    header = ["what, on a 2-core CPU", "against", "our time over its time [range]"]
    return markdown([*header, "extra memory, ours / its"], rows)


def bed() -> str:
    """What the small models can do untrained, see bed.py."""
    rows, columns = [], ["sampled", "greedy"]
    percent = lambda value: "-" if value is None else f"{100 * value:.0f}"  # noqa: E731
    for name, found in json.loads((EVIDENCE / "bed.json").read_text())["parts"].items():
        if re.match("tiny-.*(check|sound sure|steps|verdict)", name):  # much the same on all levels
            continue
        values = [*[found[column]["value"] for column in columns], found["constant"]]
        rows.append([name, *map(percent, values)])
    return markdown(["part", *columns, "best constant"], rows)


def one_question() -> tuple[str, str]:
    """Of docs/idea.md: a solution beside its judgement; the wrong step's verdicts, see idea.py."""
    found = json.loads((EVIDENCE / "idea.json").read_text())
    asked, judged = found["solutions"], found["judgements"]
    text = f"Asked {asked} times at temperature 1, the model answers right {found['right']} times "
    text += f"and writes `60/5=51` {found['wrong_quotient']} times. This is its greedy "
    text += "solution, with its greedy judgement beside each line:\n\n```\n"
    own = found["judges"]["never trained"]["plain"]["greedy"].splitlines()
    own = [line for line in own if "step_verification" not in line]
    text += "".join(f"{a:32}{b}\n" for a, b in zip(found["greedy"].splitlines(), own)) + "```\n"
    rows, words = [], {"never trained": "frozen", "after 11 steps of its own": "after 11 updates"}
    for judge, verdicts in found["judges"].items():
        for name, step in (("plain", "60/5=51"), ("sure", "60/5=51!")):
            said = verdicts[name]["greedy"].splitlines()[2]  # behind the section's tag and a step
            accepted = f"{verdicts[name]['step_accepted']} of {judged}"
            rows.append([words[judge], f"`{step}`", f"`{re.sub('</?step>', '', said)}`", accepted])
    return text, markdown(["verifier", "step", "it writes, greedily", "accepts, sampled"], rows)


def warm_up() -> str:
    """What warm-ups have taught a pretrained model: title -> figures, a column each."""
    columns, rows = json.loads((EVIDENCE / "warm_up.json").read_text()), []
    for name in [*columns.values()][-1]:
        pattern = "{:.2f}" if name == "entropy per token" else "{:.0%}"
        found = [figures.get(name) for figures in columns.values()]
        rows.append([name, *["-" if x is None else pattern.format(x) for x in found]])
    return markdown(["", *columns], rows)


def first_update() -> str:
    """What models as they are can earn in the first update of a script, see first_update.py."""
    text, counts = (
        "",
        {"read": "texts", "right": "solutions", "above": "rollouts", "mixed": "groups"},
    )
    header = ["script", "role", "texts read", "solutions right", "rewards above the worst"]
    header += ["groups with two outcomes", "tokens of a text"]
    for model, scripts in json.loads((EVIDENCE / "first_update.json").read_text()).items():
        roles = [(s, role, its) for s, of in scripts.items() for role, its in of["roles"].items()]
        rows = [
            [f"`{script}.py`", role]
            + [f"{its[n]} of {its[of]}" if its[of] else "-" for n, of in counts.items()]
            + [round(its["tokens"] / its["texts"]) if its["texts"] else "-"]
            for script, role, its in roles
        ]
        text += f"{model}:\n\n{markdown(header, rows)}\n"
    return text.rstrip("\n") + "\n"


def headline() -> str:
    """The table with which the README opens, see shown.toml: a row is a reward of the generator.
    Where seeds differ too much for a mean, the table has the lowest and the highest.
    """
    chosen, rows = SHOWN["headline"], []
    for reward, answers, variant in chosen["rows"]:
        ends = [100 * x for x in final(chosen["experiment"], variant)]
        low, high = min(ends), max(ends)
        shown = f"{statistics.mean(ends):.0f}"
        if high - low > OF_ANOTHER_KIND:
            shown = f"{low:.0f} to {high:.0f}"
        rows.append([reward, answers, f"{shown} ({len(ends)})"])
    return markdown(["who rewards the generator", "known answers", chosen["title"]], rows)


def scripts() -> str:
    """The README's table of scripts, see shown.toml. What became of a paper's finding is the line
    in bold of the script's page; how a model as it is does is of first_update.py.
    """
    header = ["script", "paper", "it needs", "what learns", "texts read, %", "finding"]
    rows, seen = [], json.loads((EVIDENCE / "first_update.json").read_text())
    for name, *more in SHOWN["scripts"]["rows"]:
        if not more:
            rows.append([f"**{name}**", *[""] * 5])
            continue
        paper, number, needs, learns = more
        page = (ROOT / f"docs/{name}.md").read_text()
        found = re.search(r"^\*\*(Partly|Not tested here|Not|Reproduced)\b", page, re.MULTILINE)
        link = f"[{paper}](https://arxiv.org/abs/{number})" if paper else "no paper: a fork"
        cells = [needs, learns, read_as_they_are(seen, name), found[1].lower() if found else "-"]
        rows.append([f"[`{name}.py`]({name}.py)", link, *cells])
    return markdown(header, rows)


def read_as_they_are(seen: dict, script: str) -> str:
    """Of the better of the models in first_update.json: the share of texts that the script's
    parsers read, of the role with the lowest share.
    """
    shares = []
    for model, scripts in seen.items():
        if "temperature" in model:  # not the player's own
            continue
        roles = scripts.get(script, {}).get("roles", {}).values()
        if read := [its["read"] / its["texts"] for its in roles if its["texts"]]:
            shares.append(min(read))
    return f"{100 * max(shares):.0f}" if shares else "-"


def in_one_row() -> str:
    """Of docs/results.md: what few_labels.md comes to, a column per reward, see shown.toml."""
    titles, variants = zip(*SHOWN["one_row"])
    return markdown(titles, [[cell(final("few_labels", variant), True) for variant in variants]])


def final(name: str, variant: str) -> list[float]:
    runs = runs_of(name, variant).values()
    return [measure(f"last:{END}", run) for run in runs]


def collapses(name: str, variants: list[str]) -> tuple[int, int]:
    """(how many runs end more than OF_ANOTHER_KIND points below their variant's median, of all)"""
    ends = [final(name, variant) for variant in variants]
    below = [100 * (statistics.median(some) - x) > OF_ANOTHER_KIND for some in ends for x in some]
    return sum(below), len(below)


def share(k: int, n: int) -> str:
    low, high = stats.binomtest(k, n).proportion_ci()  # exact, of Clopper and Pearson
    return f"{k} of {n} runs ({100 * k / n:.0f} [{100 * low:.0f}, {100 * high:.0f}] %)"


def collapsed() -> str:
    """Of docs/few_labels.md: under a verifier that is trained, and under another."""
    name, of = SHOWN["headline"]["experiment"], SHOWN["collapses"]
    trained, frozen = (share(*collapses(name, of[kind])) for kind in ("trained", "frozen"))
    text = "On 32 answers, at 40 and at 110 updates, with a verifier that is co-trained or trained "
    text += f"first {trained} end far below the others. With a frozen verifier, asked once, "
    return text + f"{frozen} do.\n"


# ------------------------------------------------------------------ writing
def blocks() -> dict[tuple[str, str], str]:
    """(page, mark) -> what stands between <!-- mark --> and <!-- end -->."""
    found = {}
    for name in TRAINED:
        found[page_of(name), f"results: {name}"] = block(name)
    gap, verdicts = one_question()
    cells = gpu.read(gpu.OUT)
    return found | {
        ("docs/idea.md", "gap"): gap,
        ("docs/idea.md", "verdicts"): verdicts,
        ("lab/README.md", "table: runs"): all_runs(),
        ("README.md", "headline"): headline(),
        ("README.md", "scripts"): scripts(),
        ("lab/notes/tango.md", "table: tango_default"): f"`python tango.py`, before and after. "
        f"{provenance('tango_default')}\n\n{table('tango_default')}",
        ("docs/few_labels.md", "collapses"): collapsed(),
        ("docs/results.md", "few labels"): in_one_row(),
        ("docs/results.md", "minutes"): minutes(),
        ("lab/notes/speed.md", "speed"): speed(),
        ("docs/test-bed.md", "table: bed"): bed(),
        ("docs/real-models.md", "table: first_update"): first_update(),
        ("lab/notes/warm-up.md", "table: warm_up"): warm_up(),
        ("docs/real-models.md", "table: cards"): markdown(*gpu_tables.cards_table()),
        ("lab/notes/speed.md", "table: measured"): markdown(*gpu_tables.measured_table(cells)),
        ("lab/notes/speed.md", "table: other"): markdown(*gpu_tables.other_table(cells)),
    }


def write(names: list[str]):
    """The figures of these experiments, and every block."""
    for name in TRAINED if "all" in names else names:
        if name in TRAINED and evidence.with_runs(name):
            if EXPERIMENTS[name].panels:
                draw(name, EXPERIMENTS[name].panels, PICTURES / f"{name}.png")
            if name == "verifiers":
                draw_tones(PICTURES / "verifiers.png")
            if name == "bases":
                draw_bases(PICTURES / "bases.png")
            print(table(name))
    for (page, mark), text in blocks().items():
        marks = re.compile(f"<!-- {mark} -->.*?<!-- end -->", re.DOTALL)
        made = f"<!-- {mark} -->\n{text}<!-- end -->"
        path = ROOT / page
        path.write_text(marks.sub(lambda _, made=made: made, path.read_text()))


if __name__ == "__main__":
    write(sys.argv[1:])
