"""The picture with which the README opens, light and dark: python -m lab.runs.picture

It shows one question in the report of a kept run (docs/reports/runs.tar.gz): two solutions, of
which the verifier accepts every step of one, and rejects the wrong step of the other. Chromium and
chromedriver take it (apt-get install chromium chromium-driver).
"""

import json
import shutil
import tarfile
import tempfile
from collections import defaultdict
from pathlib import Path

from common.run.report.build import write_report
from lab import PICTURES, ROOT

from selenium import webdriver

RUN = "co-trained"
WIDTH, HEIGHT = 1000, 2000  # pixels of the window, of which two are a pixel of the picture each way


def one_question(rows: list[dict]) -> list[dict]:
    """Returns the two recorded solutions of a question: all steps of the first are true and
    accepted; in the second one step is wrong, and the verifier rejects just this step.
    """
    groups = defaultdict(list)
    for row in rows:
        if row["player"] == "generator":
            groups[row["step"], row["prompt"]].append(row)
    for group in groups.values():
        read = [row for row in group if row["gold"] and row["verdicts"] == row["gold"]]
        right = [row for row in read if all(row["gold"])]
        wrong = [row for row in read if row["gold"].count(False) == 1]
        if right and wrong:
            return [right[0], wrong[0]]
    raise LookupError("no question has two such solutions")


def main():
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(ROOT / "docs/reports/runs.tar.gz") as runs:
            runs.extractall(place, filter="data")
        folder = Path(place, RUN)
        recorded = folder / "rollouts.jsonl"
        rows = one_question([*map(json.loads, recorded.read_text().splitlines())])
        recorded.write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_report(folder)
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in ("headless", "no-sandbox", "disable-gpu", f"window-size={WIDTH},{HEIGHT}"):
            options.add_argument(f"--{flag}")
        options.add_argument("--force-device-scale-factor=2")
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        browser = webdriver.Chrome(options=options, service=service)
        try:
            browser.get((folder / "report.html").resolve().as_uri())
            for scheme in ("light", "dark"):
                media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
                browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
                question = browser.find_element("css selector", "article.question")
                question.screenshot(str(PICTURES / f"one-question-{scheme}.png"))
        finally:
            browser.quit()


if __name__ == "__main__":
    main()
