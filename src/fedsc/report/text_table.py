"""A table of texts, and its forms: terminal, Markdown, LaTeX (booktabs)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

GAP = 2  # between the columns of a terminal table
TERMINAL_STYLE = {"best": "bold", "second": "underline"}
LATEX_SYMBOLS = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "τ": r"$\tau$",
    "ρ": r"$\rho$",
}


@dataclasses.dataclass(frozen=True)
class Block:
    """Columns that belong together, under one heading: ours, the paper's, the difference."""

    heading: str
    names: tuple[str, ...]  # one, empty: the heading says it all
    rows: Sequence[tuple[str, ...]]
    marks: list[str] = dataclasses.field(default_factory=list)  # "best", "second" or "" by row

    def mark(self, row: int) -> str:
        return self.marks[row] if self.marks else ""

    def width(self) -> int:
        columns = zip(*self.rows, strict=True)
        texts = [[*self.header(i).split("\n"), *c] for i, c in enumerate(columns)]
        return sum(max(map(len, column)) + GAP for column in texts)

    def header(self, index: int) -> str:
        """Of one of its columns on a terminal, where no heading spans several."""
        lines = self.heading.count("\n") + 1
        above = self.heading if index == 0 else "\n" * (lines - 1)
        return above + ("\n" + self.names[index] if any(self.names) else "")


@dataclasses.dataclass(frozen=True)
class TextTable:
    title: str
    row_heading: str
    row_names: list[str]
    blocks: list[Block]
    notes: tuple[str, ...] = ()


def for_terminal(table: TextTable, width: int) -> list[Table]:
    """As many tables, one below the other, as are needed to keep each within the width."""
    names = max(map(len, [table.row_heading, *table.row_names]))
    names = min(names, width // 2)  # longer ones are folded
    parts: list[list[Block]] = []
    room = 0
    for block in table.blocks:
        if not parts or block.width() > room:
            parts.append([])
            room = width - names
        parts[-1].append(block)
        room -= block.width()
    return [_terminal_part(table, part) for part in parts]


def _terminal_part(table: TextTable, blocks: list[Block]) -> Table:
    made = Table(
        header_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    made.add_column(Text(table.row_heading), vertical="bottom", overflow="fold")
    for block in blocks:
        for index in range(len(block.names)):
            # Text, not str: brackets in a label are no markup.
            header = Text(block.header(index))
            made.add_column(header, justify="right", vertical="bottom", no_wrap=True)
    for number, name in enumerate(table.row_names):
        cells = [Text(name)]
        for block in blocks:
            first_cell, *others = block.rows[number]
            cells.append(Text(first_cell, style=TERMINAL_STYLE.get(block.mark(number), "")))
            cells += [Text(other, style="dim") for other in others]
        made.add_row(*cells)
    return made


def as_markdown(table: TextTable) -> str:
    headings = [_markdown(table.row_heading)]
    for block in table.blocks:
        first, *others = block.names
        headings.append(_markdown(f"{block.heading} {first}".strip()))
        headings += map(_markdown, others)
    wrap = {"best": "**{}**", "second": "*{}*", "": "{}"}
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1)]
    for number, name in enumerate(table.row_names):
        cells = [_markdown(name)]
        for block in table.blocks:
            first, *others = map(_markdown, block.rows[number])
            cells += [wrap[block.mark(number)].format(first), *others]
        lines.append(cells)
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = "".join(f"\n{_markdown(note)}\n" for note in table.notes)
    title = f"### {_markdown(table.title)}\n\n" if table.title else ""
    return f"{title}{rows}\n{notes}"


def as_latex(table: TextTable) -> str:
    """A `tabular` for the package booktabs, inside a `table`."""
    columns = sum(len(block.names) for block in table.blocks)
    spanning, rules, names, position = [""], [], [latex_text(table.row_heading)], 2
    for block in table.blocks:
        width = len(block.names)
        heading = latex_text(block.heading)
        spanning.append(rf"\multicolumn{{{width}}}{{c}}{{{heading}}}" if width > 1 else heading)
        if any(block.names):
            rules.append(rf"\cmidrule(lr){{{position}-{position + width - 1}}}")
        names += map(latex_text, block.names)
        position += width
    if any(any(block.names) for block in table.blocks):
        header = [_latex_row(spanning), " ".join(rules), _latex_row(names)]
    else:
        header = [_latex_row([latex_text(table.row_heading), *spanning[1:]])]
    wrap = {"best": r"\textbf{%s}", "second": r"\underline{%s}", "": "%s"}
    body = []
    for number, name in enumerate(table.row_names):
        cells = [latex_text(name)]
        for block in table.blocks:
            first, *others = map(latex_text, block.rows[number])
            cells += [wrap[block.mark(number)] % first, *others]
        body.append(_latex_row(cells))
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{latex_text(table.title)}}}",
        rf"  \begin{{tabular}}{{l{'r' * columns}}}",
        r"    \toprule",
        *(f"    {line}" for line in header),
        r"    \midrule",
        *(f"    {line}" for line in body),
        r"    \bottomrule",
        r"  \end{tabular}",
        *(rf"  \par\smallskip\footnotesize {latex_text(note)}" for note in table.notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def latex_text(text: str) -> str:
    """Characters that LaTeX reads as commands, as themselves."""
    if re.fullmatch(r"[+-]\d+(\.\d+)?", text):
        return f"${text}$"  # a minus, not a hyphen
    return "".join(LATEX_SYMBOLS.get(character, character) for character in text.replace("\n", " "))


def _markdown(text: str) -> str:
    """On one line, without what Markdown would read as a new cell, emphasis or a tag."""
    for character in "\\|*_<":
        text = text.replace(character, "\\" + character)
    return text.replace("\n", " ")
