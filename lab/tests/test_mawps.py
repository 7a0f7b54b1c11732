"""mawps.py: which word problems of the CSV file become rows."""

from lab.runs import mawps


def test_mawps_is_made_of_its_csv_file():
    """Problems stay whose equation ends in the answer, a whole number."""
    names = ("Question", "Numbers", "Equation", "Answer")
    lines = [
        ("number0 kids and number1 .", "12 7", "+ number0 number1", "19.0"),
        ("number1 times number0 ?", "0.5 4", "* number0 number1", "2.0"),
        ("a half", "1 2", "/ number0 number1", "0.5"),
        ("wrong", "1 2", "+ number0 number1", "4.0"),
    ]
    found = [mawps.read(dict(zip(names, line))) for line in lines]
    sums = {"answer": "19", "equation": "+ number0 number1", "numbers": [12, 7]}
    times = {"answer": "2", "equation": "* number0 number1", "numbers": [0.5, 4]}
    kids = {"question": "12 kids and 7 .", **sums}
    assert found == [kids, {"question": "4 times 0.5 ?", **times}, None, None]
