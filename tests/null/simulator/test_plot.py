"""Tests plots of simulated runs, which need matplotlib."""

import pytest
from click.testing import CliRunner

from staticllm.cli import cli

RUN = ["simulate", "-n", "8", "--prompt", "20-40", "--output", "1-9", "--max-num-seqs", "2"]


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    result = CliRunner().invoke(cli, [*RUN, "--plot", str(path)])
    assert result.exit_code == 0, result.output
    assert "<svg" in path.read_text(encoding="utf-8")


def test_an_unknown_picture_format_is_a_one_line_error(tmp_path):
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(cli, [*RUN, "--plot", str(tmp_path / "plot.docx")])
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith("Error: ")
    assert "docx" in result.output
