"""What a page shows without its script: the sentences, the last held-out figures, the curves.

Model output stays text: whatever comes from a run goes through `text`.
"""

import html
import re
from statistics import mean

from common.core.errors import visible
from common.run.report.health import is_number

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 320, 130, 44, 8, 110  # of a drawing, and of the curves in it
POINTS = 120  # of a curve, at most


def text(value) -> str:
    return html.escape(visible(str(value))).encode("ascii", "xmlcharrefreplace").decode()


def tag(name: str, *inside: str) -> str:
    """An element around HTML, with its classes as in the script: tag("p.soft", text(x))."""
    kind, *classes = name.split(".")
    marked = f' class="{" ".join(classes)}"' if classes else ""
    return f"<{kind}{marked}>{''.join(inside)}</{kind}>"


def section(name: str, title: str, hint: str, *inside: str) -> str:
    start = tag("h2", title) + tag("p.hint", hint)
    return f'<section id="{name}">{start}{"".join(inside)}</section>'


def swatch(color: int) -> str:
    return f'<i class="swatch c{color % 8}"></i>'


def brief(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.4g}"


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


# ------------------------------------------------------------------ parts of the page
def header(data: dict) -> str:
    lead = lead_of_a_run(data) if data["kind"] == "run" else []
    if lead and not data["health"]:
        lead.append(tag("p.soft", "No health metric stands out."))
    lead = lead or [tag("p.soft", plural(len(data["variants"]), "variant"))]
    remarks = [tag("p.remark", text(said)) for said in [*data.get("health", []), *data["remarks"]]]
    return tag("header", tag("div.wide", tag("h1", text(data["title"])), *lead, *remarks))


def lead_of_a_run(data: dict) -> list[str]:
    done, wanted = data["axes"]["step"][-1], data["args"].get("steps")
    running = is_number(wanted) and done < wanted
    steps = f"still at step {done} of {wanted}" if running else plural(done, "step")
    minutes = f"{data['axes']['minutes'][-1]:.1f} minutes"
    facts = [data["folder"], steps, minutes, data["versions"].get("device")]
    about = " ".join(re.split(r"\n\s*\n", data["about"])[0].split())
    facts = " \u00b7 ".join(str(fact) for fact in facts if fact)
    said = {"p": about, "p.result": data["result"], "p.soft": facts}
    return [tag(kind, text(line)) for kind, line in said.items() if line]


def main(data: dict) -> str:
    """The held-out figures, and the curves for who runs no script."""
    of_run = data["kind"] == "run"
    steps = data["axes"]["step"] if of_run else None
    drawn = [drawing(panel, steps) for panel in data["panels"] if panel["section"] != "all"]
    hint = "By step; held-out values are dashed." if of_run else "By step, the mean of the seeds."
    hint += " The rollouts need the page's script."
    curves = section("drawn", "Curves", hint, tag("div.charts", *drawn))
    return (tiles if of_run else variants)(data) + tag("noscript", curves)


def tiles(data: dict) -> str:
    (first, now), rows = data["held_out"]["steps"], data["held_out"]["rows"]
    shown = []
    for name, before, value, highest, step, meaning in rows:
        lines = [("name", name), ("now", brief(value))]
        if first != now and is_number(before):
            sign = "+" * (value > before)
            lines.append(("was", f"{brief(before)}\u2002{sign}{brief(value - before)}"))
        if highest > value and step != first:
            lines.append(("was", f"highest {brief(highest)} at step {step}"))
        lines += [("meaning", meaning)] if meaning else []
        shown.append(tag("div.tile", *(tag(f"div.{kind}", text(line)) for kind, line in lines)))
    hint = f"Step {now}, the change since step {first}, and the highest evaluation between them if "
    hint = f"Step {now}." if first == now else f"{hint}it was higher."
    return section("held-out", "Held-out questions", hint, tag("div.tiles", *shown)) if rows else ""


def variants(data: dict) -> str:
    def spread(values: list[float]) -> str:
        if len({*values}) < 2:
            return f"{values[0]:.4g}" if values else ""
        return f"{brief(mean(values))} [{brief(min(values))}, {brief(max(values))}]"

    keys = dict.fromkeys(key for variant in data["variants"] for key in variant["final"])
    titles = ["variant", "seeds", "steps", "minutes", *(key[5:] for key in keys)]
    rows = tag("tr", *(tag("th", text(title)) for title in titles))
    for i, one in enumerate(data["variants"]):
        cells = [", ".join(map(str, v)) for v in (one["seeds"], dict.fromkeys(one["steps"]))]
        cells += map(spread, [one["minutes"], *(one["final"].get(key, []) for key in keys)])
        label = tag("td.variant", swatch(i), text(one["label"]))
        rows += tag("tr", label, *(tag("td", text(cell)) for cell in cells))
    hint = "The last held-out values: mean over seeds [lowest, highest]. In the curves a line is "
    hint += "the mean, and the band goes from the lowest to the highest."
    return section("held-out", "Variants", hint, tag("div.scroll", tag("table", rows)))


def drawing(panel: dict, steps: list[int] | None) -> str:
    """The curves of a panel by step, with their first and last values. steps: of a run's rows."""
    curves = []
    for one in panel["series"]:
        xy = ([steps[i] for i in one["at"]], one["y"]) if steps else map(one["step"].get, "xy")
        curves.append([*zip(*xy)])
    (x0, *_, x1), (y0, *_, y1) = (sorted(v * 2) for v in zip(*sum(curves, [])))  # of one point too
    lines, legend = "", ""
    for y, place in ((y1, TOP), (y0, BOTTOM)):
        lines += f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{place}" y2="{place}"/>'
        lines += f'<text x="{LEFT - 6}" y="{place + 4}" text-anchor="end">{brief(y)}</text>'
    for x, place, anchor in ((x0, LEFT, "start"), (x1, WIDTH, "end")):
        lines += f'<text x="{place}" y="{HEIGHT - 4}" text-anchor="{anchor}">{x:.0f}</text>'
    for series, curve in zip(panel["series"], curves):
        kept = curve[:: -(len(curve) // POINTS + 1)][::-1]
        across = [LEFT + (x - x0) / (x1 - x0 or 1) * (WIDTH - LEFT) for x, _ in kept]
        down = [BOTTOM - (y - y0) / (y1 - y0 or 1) * (BOTTOM - TOP) for _, y in kept]
        across, down = (v * (1 + (len(v) == 1)) for v in (across, down))  # a dot is a line of two
        places = " ".join(f"{x:.0f},{y:.0f}" for x, y in zip(across, down))
        held_out = bool(steps) and series["held_out"]
        look = f"curve c{series['color'] % 8}{' dashed' * held_out}"
        lines += f'<polyline class="{look}" points="{places}"/>'
        values = f"{', held out' * held_out} {brief(curve[0][1])} to {brief(curve[-1][1])}"
        legend += tag("span", swatch(series["color"]), text(series["label"] + values))
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{lines}</svg>'
    return tag("figure", tag("h3", text(panel["title"])), svg, tag("div.legend", legend))
