"""MAWPS and ASDiv-A, word problems, as rows: python -m lab.runs.mawps train.csv > mawps.jsonl

train.csv is data/mawps-asdiv-a_svamp/train.csv of github.com/arkilpatel/SVAMP (MIT licence), with
the columns Question, Numbers, Equation and Answer.
"""

import csv
import json
import re
import sys

from common.tasks.references import as_number, solve_equation


def read(row: dict) -> dict | None:
    """{question, answer, equation, numbers} of a line of the CSV file; None unless the equation has
    one to three steps and ends in the answer, a whole number.
    """
    numbers, answer = [float(number) for number in row["Numbers"].split()], float(row["Answer"])
    steps = solve_equation(row["Equation"], numbers)
    if not 1 <= len(steps) <= 3 or steps[-1].rpartition(" = ")[2] != f"{answer:.0f}":
        return None
    number = lambda found: as_number(numbers[int(found[1])])  # noqa: E731
    question = re.sub(r"\bnumber(\d+)\b", number, row["Question"])
    more = {"equation": row["Equation"], "numbers": numbers}
    return {"question": question, "answer": f"{answer:.0f}", **more}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        for row in filter(None, map(read, csv.DictReader(file))):
            print(json.dumps(row))
