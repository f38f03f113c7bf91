"""Tests the tables that commands print."""

from __future__ import annotations

from staticllm.system.table import markdown, table

HEAD = ["name", "ms", "share", ""]
ROWS = [["short", "1.5", "+3%", ""], ["a longer name", "120.0", "-12%", "late"], ["", "-", "", ""]]


def test_columns_are_as_wide_as_their_widest_cell_and_numbers_end_together():
    assert table(HEAD, ROWS).splitlines() == [
        "name              ms  share",
        "short            1.5    +3%",
        "a longer name  120.0   -12%  late",
        "                   -",
    ]


def test_markdown_says_which_columns_are_numbers():
    head, rule, *rows = markdown(HEAD, ROWS[:2])
    assert head == "| name          |    ms | share |      |"
    assert rule == "| ------------- | ----: | ----: | ---- |"
    assert rows == ["| short         |   1.5 |   +3% |      |", "| a longer name | 120.0 |  -12% | late |"]


def test_a_table_may_have_no_rows():
    assert table(["pid", "program"], []) == "pid  program"
    assert len(markdown(["pid", "program"], [])) == 2
