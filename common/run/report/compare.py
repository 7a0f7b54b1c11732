"""Makes comparison.html: every run is a thin line, and its colour says its variant."""

from collections import defaultdict

from common.run.report.build import command, curve, metrics_of, minutes_of, panels


def variants(runs: list[dict]) -> dict[str, list[dict]]:
    """Returns name -> runs of a variant. Runs are the same variant if their scripts are equal byte
    by byte and their arguments differ only in the seed. Its name says how it differs from the
    others.
    """
    identities = [
        {f"{run['script']}.py": run["code"], **run["args"], "seed": None, "out": None}
        for run in runs
    ]
    keys = dict.fromkeys(key for identity in identities for key in identity)
    differing = [key for key in keys if len({repr(i.get(key)) for i in identities}) > 1]
    found = defaultdict(list)
    for run, identity in zip(runs, identities):
        label = ", ".join(f"{key} {identity[key]}" for key in differing if key in identity)
        found[label or f"{run['script']}.py"].append(run)
    return found


def comparison_data(runs: list[dict]) -> dict:
    """Returns what the page of several runs shows: a panel per metric, a series per run."""
    by_label, metrics = variants(runs), metrics_of(runs)
    curves = {title: names for run in runs for title, names in run["curves"].items()}
    drawn, final = [], {label: {} for label in by_label}
    section_of = {f"eval/{metric}": "held out" for metric in metrics}
    for panel in panels(metrics, curves):
        section_of |= dict.fromkeys(panel["keys"], panel["section"])
    for key, section in section_of.items():
        series = []
        for color, (label, seeds) in enumerate(by_label.items()):
            lines = [line for run in seeds for line in curve(run, key, label, color)]
            series += lines
            if lines and section == "held out":
                final[label][key] = [line["y"][-1] for line in lines]
        if series:
            drawn.append({"section": section, "title": key, "hint": "", "series": series})
    scripts = " and ".join(sorted({f"{run['script']}.py" for run in runs}))
    return {
        "kind": "comparison",
        "title": f"{len(runs)} runs of {scripts}",
        "remarks": [f"{run['folder']}: {remark}" for run in runs for remark in run["remarks"]],
        "panels": drawn,
        "variants": [
            {
                "label": label,
                "seeds": [run["args"].get("seed") for run in seeds],
                "steps": [run["metrics"][-1]["step"] for run in seeds],
                "minutes": [minutes_of(run) for run in seeds],
                "final": final[label],
            }
            for label, seeds in by_label.items()
        ],
        "runs": [{"folder": run["folder"], "command": command(run)} for run in runs],
    }
