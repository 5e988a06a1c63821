"""The forms of a table, against texts written by hand."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from fedsc.report.text_table import Block, TextTable, as_latex, as_markdown, for_terminal

TABLE = TextTable(
    title="CIFAR-10 & more_or_less, 100%",
    row_heading="method",
    row_names=["FedAvg", "fedsc,u_mode=round"],
    blocks=[
        Block(
            "NID1\n0.05",
            ("ours", "paper", "diff."),
            [("78.00 ± 1.00", "78.27", "-0.27"), ("missing", "82.41", "-")],
            ["best", ""],
        ),
        Block("ρ = 10", ("ours", "paper", "diff."), [("1.00", "2.00", "-1.00")] * 2),
    ],
    notes=("One | two",),
)


def test_markdown() -> None:
    assert as_markdown(TABLE) == (
        "### CIFAR-10 & more\\_or\\_less, 100%\n"
        "\n"
        "| method | NID1 0.05 ours | paper | diff. | ρ = 10 ours | paper | diff. |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| FedAvg | **78.00 ± 1.00** | 78.27 | -0.27 | 1.00 | 2.00 | -1.00 |\n"
        "| fedsc,u\\_mode=round | missing | 82.41 | - | 1.00 | 2.00 | -1.00 |\n"
        "\n"
        "One \\| two\n"
    )


def test_latex() -> None:
    assert as_latex(TABLE) == (
        r"""\begin{table}
  \centering
  \caption{CIFAR-10 \& more\_or\_less, 100\%}
  \begin{tabular}{lrrrrrr}
    \toprule
     & \multicolumn{3}{c}{NID1 0.05} & \multicolumn{3}{c}{$\rho$ = 10} \\
    \cmidrule(lr){2-4} \cmidrule(lr){5-7}
    method & ours & paper & diff. & ours & paper & diff. \\
    \midrule
    FedAvg & \textbf{78.00 $\pm$ 1.00} & 78.27 & $-0.27$ & 1.00 & 2.00 & $-1.00$ \\
    fedsc,u\_mode=round & missing & 82.41 & - & 1.00 & 2.00 & $-1.00$ \\
    \bottomrule
  \end{tabular}
  \par\smallskip\footnotesize One $|$ two
\end{table}
"""
    )


def test_latex_without_sub_columns_has_one_line_of_headings() -> None:
    lines = as_latex(TextTable("", "a_b", ["x"], [Block("p\nq", ("",), [("1",)])])).splitlines()
    assert lines[3:8] == [
        r"  \begin{tabular}{lr}",
        r"    \toprule",
        r"    a\_b & p q \\",
        r"    \midrule",
        r"    x & 1 \\",
    ]


NASTY = "a\\b{c}d_e^f~g#h$i%j&k<l>m|n±o×pτqρ"


def test_latex_of_any_label_is_balanced_and_has_as_many_cells_as_columns() -> None:
    table = TextTable(NASTY, NASTY, [NASTY], [Block(NASTY, ("",), [(NASTY,)], ["best"])])
    text = as_latex(table)
    bare = re.sub(r"\\[\\{}&%$#_]", "", text)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    assert text.count(r"\begin{") == text.count(r"\end{") == 2
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert [len(re.findall(r"(?<!\\)&", row)) for row in rows] == [1, 1]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex here")
def test_latex_compiles(tmp_path: Path) -> None:
    nasty = TextTable(NASTY, NASTY, [NASTY], [Block(NASTY, ("",), [(NASTY,)], ["second"])])
    page = (
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n"
        f"{as_latex(TABLE)}\n{as_latex(nasty)}\\end{{document}}\n"
    )
    (tmp_path / "page.tex").write_text(page)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def lines_at(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    for part in for_terminal(TABLE, width):
        console.print(part)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def test_a_wide_terminal_shows_all_columns_side_by_side() -> None:
    (row,) = [line for line in lines_at(80) if "FedAvg" in line]
    assert row.split() == [
        "FedAvg",
        "78.00",
        "±",
        "1.00",
        "78.27",
        "-0.27",
        "1.00",
        "2.00",
        "-1.00",
    ]


def test_a_narrow_terminal_shows_them_one_below_the_other() -> None:
    lines = lines_at(56)
    assert max(map(len, lines)) <= 56
    assert [line.split() for line in lines if "FedAvg" in line] == [
        ["FedAvg", "78.00", "±", "1.00", "78.27", "-0.27"],
        ["FedAvg", "1.00", "2.00", "-1.00"],
    ]
    assert not any("…" in line for line in lines)
