"""Tests the help of the command line: sections, groups, what it imports, and files of options."""

import json
import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from staticllm.cli import _COMMANDS, _OF_OTHERS, cli
from staticllm.cli.grouped_command import GroupedCommand
from staticllm.errors import quoted

HEAVY = (
    "numpy",
    "openvino",
    "openvino_genai",
    "openvino_tokenizers",
    "jinja2",
    "tqdm",
    "prompt_toolkit",
    "psutil",
    "fastapi",
    "httpx",
)
CONTEXT = click.Context(cli, info_name="staticllm")
MOST_USUAL, MOST_SHOWN = 12, 26


def all_commands(group=cli, names=()):
    for name in group.list_commands(CONTEXT):
        command = group.get_command(CONTEXT, name)
        yield (*names, name), command
        if isinstance(command, click.Group):
            yield from all_commands(command, (*names, name))


COMMANDS = dict(all_commands())
GROUPED = {" ".join(names): command for names, command in COMMANDS.items() if isinstance(command, GroupedCommand)}


def help_of(*arguments):
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli, arguments)


def options_of(command):
    return [each for each in command.params if isinstance(each, click.Option) and not each.hidden]


@pytest.mark.parametrize("names", [(), *COMMANDS], ids=lambda names: " ".join(names) or "staticllm")
def test_no_help_imports_a_heavy_module(names):
    """Importing them takes seconds; a help is answered in less than half of one."""
    code = f"import sys; from staticllm.cli import main; sys.argv[1:] = {[*names, '--help']!r}\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += f"sys.exit(', '.join(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.stderr.strip(), f"it imports {done.stderr}"
    assert "Usage: staticllm" in done.stdout or "Usage: -c" in done.stdout


def test_the_commands_stand_in_sections_with_what_they_do():
    printed = help_of("--help").stdout
    for section in ("Use a model:", "Try a model:", "Keep compiled programs:", "Look at a server:", "Share a device:"):
        assert f"\n{section}\n" in printed
    assert printed.index("\n  run ") < printed.index("\n  simulate ")
    for name, (_, text) in _COMMANDS.items():
        assert f"  {name} " in printed
        assert text in " ".join(printed.split())
        assert len(text) < 80 - 14, "one line on a narrow terminal"


@pytest.mark.parametrize(
    "name", [" ".join(names) for names, command in COMMANDS.items() if len(options_of(command)) > 14]
)
def test_a_command_with_many_options_has_groups(name):
    assert name in GROUPED


@pytest.mark.parametrize("name", GROUPED)
def test_each_option_is_in_one_group_and_the_usual_ones_are_few(name):
    command = GROUPED[name]
    named = [each for groups in (command.groups, command.rare) for group in groups.values() for each in group]
    assert len(named) == len(set(named))
    assert set(named) <= {each.name for each in command.params}, "a group names a parameter that is not there"
    shown = help_of(*name.split(), "--help").stdout
    usual = shown[shown.index("\nOptions:\n") :].partition("\n\n")[0]
    assert sum(line.startswith("  -") for line in usual.splitlines()) <= MOST_USUAL
    assert sum(line.startswith("  -") for line in shown.splitlines()) <= MOST_SHOWN
    assert all(f"\n{title}:\n" in shown for title in command.groups)
    every = help_of(*name.split(), "--help-all" if command.rare else "--help").stdout
    for option in options_of(command):
        assert option.opts[-1] in every
    for title in command.rare:
        assert f"\n{title}:\n" not in shown
        assert f"\n{title}:\n" in every
        assert title.lower() in " ".join(shown.splitlines()[-3:])


@pytest.fixture
def given(monkeypatch, tmp_path):
    """Return a function that runs ``simulate`` with a file of options, and returns what the command got."""
    found = {}
    monkeypatch.setattr("staticllm.cli.simulate._simulate", found.update)

    def run(content, *more):
        path = tmp_path / "options.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        result = CliRunner().invoke(cli, ["simulate", "--options", str(path), *more])
        return result, found

    return run


def test_options_come_from_a_file_and_the_command_line_counts(given):
    content = {"seed": 7, "gap-ms": 20.5, "kv_slots": 99, "policy": ["fcfs", "chunked"], "json": True, "requests": 3}
    result, found = given(content, "--requests", "5")
    assert result.exit_code == 0, result.output
    values = {name: found[name] for name in ("seed", "gap_ms", "kv_slots", "policies", "as_json", "requests")}
    assert values == {
        "seed": 7, "gap_ms": 20.5, "kv_slots": 99, "policies": ["fcfs", "chunked"], "as_json": True, "requests": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"sede": 7}, "names 'sede': this command has no such option; --help-all lists them"),
        ({"options": "x"}, "no such option"),
        ({"seed": -1}, "seed: -1 is not in the range"),
        ({"seed": "x"}, "seed: 'x' is not a valid integer"),
        ({"gap-ms": "nan"}, "gap-ms: 'nan' is not a number"),
        ({"seed": [1, 2]}, "seed is [1, 2], must be a text or a number"),
        ({"seed": None}, "seed is null, must be a text or a number"),
        ({"seed": True}, "seed is true, must be a value"),
        ({"json": "yes"}, 'json is "yes", must be true or false'),
        ({"policy": ["best"]}, "'best' is not one of"),
        ([1], "holds a list: must be an object"),
        ("{", "is no JSON"),
    ],
)
def test_a_mistake_in_a_file_of_options_is_one_line_with_the_file(given, tmp_path, content, words):
    result, _ = given(content)
    assert result.exit_code == 2
    last = result.output.splitlines()[-1]
    assert words in last
    assert last.startswith(f"Error: Invalid value for '--options': {quoted(tmp_path / 'options.json')}")


def test_a_file_that_is_missing_is_one_line():
    result = CliRunner().invoke(cli, ["simulate", "--options", "none.json"])
    assert "'none.json' cannot be read: No such file or directory" in result.output
    assert result.exit_code == 2


@pytest.mark.parametrize("name", ["show", "cp", "create", "models", "chat", "alias", "download", "convert"])
def test_a_command_of_another_program_names_ours(name):
    said = help_of(name, "x")
    assert said.exit_code == 2
    line = said.output.splitlines()[-1]
    assert line.startswith(f"Error: No such command '{name}': ")
    assert any(f"staticllm {ours}" in line for ours in _COMMANDS)


def test_hints_name_commands_that_exist():
    for name, hint in _OF_OTHERS.items():
        assert name not in _COMMANDS
        assert set(re.findall(r"staticllm ([\w-]+)", hint)) <= set(_COMMANDS), name


def test_a_mistyped_command_names_the_nearest():
    assert help_of("srve").output.splitlines()[-1] == "Error: No such command 'srve': did you mean 'serve'?"
    assert help_of("zzz").output.splitlines()[-1] == "Error: No such command 'zzz'."
