"""Makes a site of the docs: README.md, CONTRIBUTING.md, lab/README.md and the laboratory's notes
become pages, and files that the pages link to outside of docs/ become files of the site, under
source/, so that no link leaves it. On a script's page stand the script's docstring, which tells its
loop, and the edits that it applies. The reports that docs/running.md links to are made of their
runs' folders, slides.html of docs/idea.md.
"""

import ast
import posixpath
import re
import shutil
import sys
import tempfile
from pathlib import Path

from markdown import markdown as to_html
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "lab.md": "lab/README.md"}
NOTES = sorted(path.name for path in (ROOT / "lab" / "notes").glob("*.md"))
PAGES |= {f"notes/{name}": f"lab/notes/{name}" for name in NOTES}
EDIT = re.compile(r"```\ngit apply (docs/edits/\S+)\n```\n")
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


def moved(match: re.Match, folder: str, own: str) -> str:
    """A link of the page `own`, written in `folder` of the project, as it has to be on the site."""
    text, target = match.groups()
    if re.match(r"[a-z]+:|#", target):
        return match[0]
    path, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(folder, path))  # in the project
    if (ROOT / path).is_dir():
        return text[1:-1] if not text.startswith("!") else match[0]  # a site has no folders
    names = {source: page for page, source in PAGES.items()}
    page = names.get(path) or (
        path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"
    )
    page = posixpath.relpath(page, posixpath.dirname(own) or ".")
    return f"{text}({page}{'#' + anchor if anchor else ''})"


def on_config(config):
    """The scripts' pages stand in the order of README.md's table, before the own script."""
    scripts = re.findall(r"\[`(\w+)\.py`\]\(\1\.py\)", (ROOT / "README.md").read_text())
    place = next(i for i, entry in enumerate(config.nav) if "your-own-script.md" in entry.values())
    config.nav.insert(place, {"The scripts": [{name: f"{name}.md"} for name in scripts]})


def on_files(files, config):
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    sources = [
        *ROOT.glob("*.py"),
        ROOT / "LICENSE",
        ROOT / "CITATION.cff",
        *ROOT.glob("requirements.txt"),
    ]
    sources += ROOT.glob("notebooks/*.ipynb")
    for folder in ("common", "lab", "tests"):
        shown = (".py", ".txt", ".toml", ".json", ".jsonl")
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in shown]
    for path in sources:
        name = f"source/{path.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for name, html in reports().items():
        files.append(File.generated(config, f"reports/{name}.html", content=html))
    page = (ROOT / "docs" / "idea.md").read_text()
    files.append(File.generated(config, "slides.html", content=slides(page)))
    return files


def reports() -> dict[str, str]:
    sys.path.insert(0, str(ROOT))
    from common.run.report.build import page, read_run, run_data
    from common.run.report.compare import comparison_data

    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(ROOT / "docs" / "reports" / "runs.tar.gz", folder, filter="data")
        runs = {name: read_run(f"{folder}/{name}") for name in ("frozen", "co-trained")}
    data = {name: run_data(run) for name, run in runs.items()}
    data["frozen-or-co-trained"] = comparison_data([*runs.values()])
    return {name: page(its) for name, its in data.items()}


def slides(page: str) -> str:
    """A lesson in a browser: of each section its heading, code and tables, and the first
    sentences of each paragraph and item; a figure is a slide. A long table keeps seven rows.
    """
    page = re.sub(r"<!--.*?-->\n|(?<!!)\[([^\]]*)\]\([^)]*\)", r"\1", page)  # no links
    shown = []
    for section in re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]:
        kept = []
        for part in re.split(r"(^```.*?^```)", f"## {section}", flags=re.DOTALL | re.MULTILINE):
            for block in [part] if part.startswith("```") else part.split("\n\n"):
                if block.startswith("|"):
                    block = "\n".join(block.splitlines()[:9])
                elif not block.startswith(("```", "![", "#")):
                    items = re.split(r"\n(?=- |\d\. )", block)
                    sentences = [re.split(r"(?<=\D[.?]) |(?<=\D[.?]\*\*) ", item) for item in items]
                    most = 2 if len(items) > 1 else 3
                    block = "\n".join(" ".join(some[:most]) for some in sentences)
                kept.append(block)
        for slide in re.split(r"^(?=!\[)", "\n\n".join(kept), flags=re.MULTILINE):
            shown.append(to_html(slide, extensions=["tables", "fenced_code"]))
    style = (ROOT / "docs" / "slides.css").read_text()
    sections = "".join(f"<section>{html}</section>" for html in shown)
    return f"<!doctype html><meta charset=utf-8><title>Duet</title><style>{style}</style>{sections}"


def told(markdown: str, script: Path) -> str:
    """A script's page with its docstring above the equations, and with its edits."""
    loop = f"## The loop\n\n```\n{ast.get_docstring(ast.parse(script.read_text()))}\n```\n\n"
    markdown = markdown.replace("## Equations", f"{loop}## Equations", 1)
    return EDIT.sub(lambda m: f"{m[0]}\n```diff\n{(ROOT / m[1]).read_text()}```\n", markdown)


def on_page_markdown(markdown, page, config, files):
    own = page.file.src_uri
    script = ROOT / own.replace(".md", ".py")
    markdown = told(markdown, script) if script.exists() else markdown
    folder = posixpath.dirname(PAGES.get(own, f"docs/{own}"))
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    for i in range(0, len(parts), 2):  # not inside of code
        parts[i] = LINK.sub(lambda match: moved(match, folder, own), parts[i])
        if not folder:  # README's picture, light and dark, is HTML
            parts[i] = re.sub(r'(src|srcset)="docs/', r'\1="', parts[i])
    return "".join(parts)
