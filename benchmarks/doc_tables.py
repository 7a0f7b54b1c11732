"""Tables in the pages of docs/, each made anew between the marks that stand around it."""


def markdown(header, rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def with_tables(text: str, tables: dict[str, str]) -> str:
    """The page with these tables between <!-- table: KEY --> and <!-- end: KEY -->."""
    for key, table in tables.items():
        start, end = f"<!-- table: {key} -->\n", f"<!-- end: {key} -->"
        before, rest = text.split(start)
        text = before + start + table + rest[rest.index(end) :]
    return text
