"""The kill matrix as a page: fault by family, with the gates that found it."""

from .kill_table import KillRow, KillTable


def kill_markdown(tables: list[KillTable], *, seed: int) -> str:
    """A Markdown page of the kill matrices, survivors first.

    Args:
        tables: One per operation.
        seed: Of the cases.
    """
    lines = [
        "# Kill matrix",
        "",
        f"Written by `assay mutate --seed {seed} --out DIR`. Rows are planted faults, columns families; a cell",
        "names the gates (or the verdict, where no gate took part) that found the fault there for an expected reason.",
        "",
    ]
    for table in tables:
        lines += _operation(table)
    return "\n".join(lines) + "\n"


def _operation(table: KillTable) -> list[str]:
    killed = sum(row.right_reason for row in table.rows)
    accepted = sum(variant.accepted for variant in table.variants)
    lines = [
        f"## {table.op}",
        "",
        f"{killed} of {len(table.rows)} faults killed for their reason, {accepted} of {len(table.variants)} correct "
        f"variants accepted, {table.cases} cases.",
        "",
        _line(["fault", "rows", "expects", *table.families]),
        _line(["---"] * (3 + len(table.families))),
    ]
    for row in sorted(table.rows, key=lambda row: (row.right_reason, row.fault)):
        lines.append(_line(_cells(row, table.families)))
    lines += ["", "Correct variants: " + ", ".join(f"`{variant.name}`" for variant in table.variants) + ".", ""]
    if table.left_out:
        lines += ["Rows of the catalogue that are not planted:", ""]
        lines += [f"- {row}: {reason}" for row, reason in table.left_out]
        lines.append("")
    return lines


def _cells(row: KillRow, families: list[str]) -> list[str]:
    found = [" ".join(row.gates.get(family, [])) for family in families]
    name = f"`{row.fault}`" if row.right_reason else f"**`{row.fault}` {row.status}**"
    return [name, " ".join(row.rows), " ".join(row.expects), *found]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
