"""Follows the flags of all commands through the code: each is read by its command, or by a function that gets its options.

A flag that is only declared stands in ``--help`` and does nothing.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from contextlib import suppress
from importlib import import_module

import click
import pytest
from click.testing import CliRunner

from staticllm.cli import cli
from staticllm.cli.backends import SAMPLING, ServerBackend, generation_of
from staticllm.cli.options import _pairs

CONTEXT = click.Context(cli, info_name="staticllm")


def all_commands(group=cli, names=()):
    for name in group.list_commands(CONTEXT):
        command = group.get_command(CONTEXT, name)
        if isinstance(command, click.Group):
            yield from all_commands(command, (*names, name))
        else:
            yield " ".join((*names, name)), command


COMMANDS = dict(all_commands())


def layers_of(function):
    """Return a function and those that it wraps, as decorators of ``staticllm.cli.options`` do."""
    found = [function]
    while (function := getattr(function, "__wrapped__", None)) is not None:
        found.append(function)
    return found


def tree_of(function):
    """Return the tree of a function itself, not of what it wraps; None for one without source, as dataclasses make them."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body
    except (OSError, SyntaxError):
        return None
    return node if isinstance(node, ast.FunctionDef) else None


def imported_in(node):
    """Return what a function imports itself, by name."""
    found = {}
    for each in ast.walk(node):
        if isinstance(each, ast.ImportFrom) and each.module and each.module.startswith("staticllm."):
            with suppress(ModuleNotFoundError):  # of an extra that is not installed
                module = import_module(each.module)
                found |= {name.asname or name.name: getattr(module, name.name, None) for name in each.names}
    return found


def texts_in(value):
    """Return the texts of a table that a function names: of its keys, or of fields of its rows."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, (tuple, list, set, frozenset)):
        return {text for each in value for text in texts_in(each)}
    if isinstance(value, dict):
        return texts_in(tuple(value))
    return texts_in(tuple(vars(value).values())) if hasattr(value, "__dataclass_fields__") else set()


def read_by(function, seen):
    """Return the names that a function, and the functions that it gives its options to, read."""
    found = set()
    for layer in layers_of(function):
        node = None if layer in seen else tree_of(layer)
        seen.add(layer)
        if node is None:
            continue
        known = {**layer.__globals__, **imported_in(node), **nonlocals(layer)}
        for each in (part for statement in node.body for part in ast.walk(statement)):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
                found |= {each.id} | texts_in(known.get(each.id))
            elif isinstance(each, ast.Attribute):
                found.add(each.attr)
            elif isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.isidentifier():
                found.add(each.value)
            elif isinstance(each, ast.Call) and takes_options(each):
                for callee in callees(each.func, known):
                    found |= read_by(callee, seen)
    return found


def nonlocals(function):
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def takes_options(call):
    """Return whether a call gets a whole dict of options, whatever its name is."""
    given = [*call.args, *(each.value for each in call.keywords)]
    return any(isinstance(each, ast.Name) for each in given)


def callees(node, known):
    """Return the functions of ours behind the name of a call: for a class its methods."""
    value = known.get(node.id) if isinstance(node, ast.Name) else None
    if inspect.isclass(value) and value.__module__.startswith("staticllm.cli"):
        return [each for each in vars(value).values() if inspect.isfunction(each)]
    is_ours = inspect.isfunction(value) and value.__module__.startswith("staticllm.")
    return [value] if is_ours else []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_flag_is_read_by_its_command(name):
    command = COMMANDS[name]
    read = read_by(command.callback, set())
    given = {each.name for each in command.params if each.expose_value}
    assert not given - read, f"these are declared and nothing reads them: {sorted(given - read)}"


def test_a_flag_that_is_only_declared_is_found():
    command = COMMANDS["run"]
    flag = click.Option(["--no-such-flag"])
    assert flag.name not in read_by(command.callback, set())


def test_each_sampling_flag_changes_what_is_asked():
    plain = dict.fromkeys([row.name for row in SAMPLING]) | {"raw": False, "max_new_tokens": 5}
    for row in SAMPLING:
        options = {**plain, row.name: 1}
        assert generation_of(options)[row.option] == 1
        assert ServerBackend(None, None, options)._body[row.field] == 1
        assert generation_of(options) != generation_of(plain)


def test_a_seed_of_0_is_a_seed_like_others_here_and_at_a_server():
    asks = pytest.importorskip("staticllm.server.answers.asks", exc_type=ImportError)
    plain = dict.fromkeys([row.name for row in SAMPLING]) | {"raw": False, "max_new_tokens": 5}
    given = generation_of({**plain, "seed": 0, "temperature": 1.0})["rng_seed"]
    assert given == asks.options_of(asks.AnswerFields(numbers={"rng_seed": 0}))["rng_seed"] != 0


IGNORED = [
    *(["simulate", "--trace", "trace.csv", name, value] for name, value in (
        ("-n", "3"), ("--arrivals", "uniform"), ("--rate", "1"), ("--prompt", "9"), ("--output", "9"), ("--answers", "2"),
        ("--beams", "2"), ("--seed", "1"),
    )),
    *(["simulate", "--validate", name, value] for name, value in (
        ("--arrivals", "burst"), ("--prompt", "9"), ("--output", "9"), ("--answers", "2"), ("--beams", "2"),
        ("--draft-tokens", "2"), ("--trace", "trace.csv"), ("--devices", "2"), ("--disaggregate", "1x1"), ("--max-num-seqs", "2"),
        ("--concurrency", "2"), ("--kv-slots", "99"), ("--host-kv-slots", "9"), ("--ttft-ms", "9"), ("--tpot-ms", "9"),
        ("--gap-ms", "9"), ("--programs", "separate"), ("--costs", "costs.json"), ("--blocks", "2"), ("--weights-ms", "2"),
        ("--row-ms", "2"), ("--attention-us", "2"), ("--host-ms", "2"), ("--swap-us", "2"), ("--job-ms", "2"),
        ("--call-us", "2"), ("--dispatch", "two_choices"),
    )),
    *(["simulate", "--costs", "npu-4000", name, value] for name, value in (
        ("--weights-ms", "2"), ("--row-ms", "2"), ("--attention-us", "2"), ("--programs", "separate"),
    )),
    ["simulate", "--call-us", "2"], ["simulate", "--costs", "costs.json", "--call-us", "2"], ["simulate", "-m", "folder"],
    ["simulate", "--device", "CPU"], ["simulate", "--accept", "0.5"], ["simulate", "--draft-ms", "2"],
    ["simulate", "--transfer-ms", "2"], ["simulate", "--slot-bytes", "2"], ["simulate", "--bandwidth", "2"],
    ["simulate", "--arrivals", "burst", "--rate", "2"],
    *(["bench", f"--{report}", name, value] for report in ("costs", "calibration", "divergence") for name, value in (
        ("--n-prompt", "9"), ("-n", "9"), ("-d", "9"), ("-c", "2"), ("-r", "2"), ("--profile", "trace.json"),
    )),
    *([name, "--compiler", "local"] for name in ("compile", "inspect", "plan")),
    ["verify", "--precision", "f16", "--programs", "shared"],
]  # fmt: skip
"""The last flag of each has no effect beside the others, or without another one."""


def refusal(arguments):
    found = CliRunner().invoke(cli, arguments)
    assert (found.exit_code, found.stdout) == (2, ""), found.output
    return found.output.splitlines()[-1]


@pytest.mark.parametrize("arguments", IGNORED, ids=" ".join)
def test_a_flag_that_another_one_leaves_without_effect_is_refused(arguments):
    place = max(index for index, each in enumerate(arguments) if each.startswith("-"))
    command = COMMANDS[arguments[0]]
    names = next(each.opts for each in command.params if arguments[place] in each.opts)
    assert refusal(arguments).startswith(f"Error: {max(names, key=len)} is for "), arguments


def test_options_of_a_file_are_refused_like_those_of_the_command_line(tmp_path):
    file = tmp_path / "options.json"
    file.write_text('{"rate": 2}')
    assert "--rate is for arrivals" in refusal(["simulate", "--arrivals", "burst", "--options", str(file)])


SAME = [
    ["bench", "--max-prompt-len", "64", "-p", "max_prompt_len=32"],
    ["inspect", "--min-response-len", "64", "-p", "MIN_RESPONSE_LEN=32"],
    ["inspect", "--programs", "shared", "-p", "PROGRAMS=separate"],
    ["inspect", "--precision", "f32", "-p", "INFERENCE_PRECISION_HINT=f16"],
    ["inspect", "--kv-precision", "u8", "-p", "KV_CACHE_PRECISION=f16"],
    ["trace", "record", "-o", "trace.json", "--scheduler", "fcfs", "-p", "SCHEDULER=dynamic"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", SAME, ids=" ".join)
def test_a_property_that_is_given_by_its_flag_as_well_is_refused(arguments):
    flags = [each for each in arguments if each.startswith("--")]
    name = arguments[-1].partition("=")[0]
    assert refusal(arguments) == f"Error: {flags[-1]} and -p {name} are the same: leave one of them out"


TWICE = [
    ["inspect", "-p", "PROGRAMS=shared", "-p", "PROGRAMS=separate"],
    ["bench", "-p", "MAX_NUM_SEQS=2", "-p", "MAX_NUM_SEQS=2"],
    ["transcribe", "a.wav", "-m", "folder", "-p", "MAX_WINDOWS=1", "-p", "max_windows=2"],
    ["embed", "folder", "a", "-p", "NUM_STREAMS=1", "-p", "PROGRAMS=shared", "-p", "NUM_STREAMS=2"],
    ["rerank", "folder", "a", "b", "-p", "top_n=1", "-p", "top_n=2"],
    ["serve", "-p", "demo:MAX_NUM_SEQS=1", "-p", "MAX_NUM_SEQS=2", "-p", "demo:MAX_NUM_SEQS=3"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", TWICE, ids=" ".join)
def test_a_property_that_is_given_twice_is_refused_by_its_name(arguments):
    name = arguments[-1].partition("=")[0]
    assert refusal(arguments) == f"Error: -p {name} is given twice, and only one would count: leave one of them out"


def test_properties_of_several_models_may_have_one_name():
    found = _pairs(None, None, ("a:TOP=1", "b:TOP=2", "TOP=3", "A:TOP=4"))
    assert found == [("a:TOP", "1"), ("b:TOP", "2"), ("TOP", "3"), ("A:TOP", "4")]
