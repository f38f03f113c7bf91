"""Programs of an environment into which the hook was installed attach themselves, without a launcher, if they are asked to."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner

from staticllm import ConfigError
from staticllm.cli import attach as installed_hook
from staticllm.cli.attach import HOOK, command
from tests.support.attach.attached_programs import daemon_environment

SHOW = "import sys; print([type(finder).__name__ for finder in sys.meta_path if type(finder).__name__ == 'Finder'])"
NUMBERS = """
import json, sys, numpy as np, openvino as ov
from openvino import opset13 as ops
x = ops.parameter([1, 3], np.float32, name="x")
model = ov.Core().compile_model(ov.Model([ops.multiply(x, np.float32(2))], [x], "m"), "CPU")
print(json.dumps([type(model).__name__, model(np.array([[1, 2, 3]], np.float32))[0].tolist()]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An environment of its own, which finds the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=sys.platform != "win32")
    found = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if sys.platform == "win32" and not found.is_file():
        pytest.skip("the embeddable Python of Windows makes no environments")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(subprocess.run([found, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(found)


@pytest.fixture(scope="module")
def installed(python):
    done = CliRunner().invoke(command, ["--install", python])
    assert done.exit_code == 0, done.output
    assert "staticllm-attach.pth" in done.output
    return python


def run(python, code, environment, *options, **more):
    own = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "STATICLLM_DAEMON_COMMAND")}
    done = subprocess.run(
        [python, *options, "-c", code], env={**own, **more}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_programs_attach_themselves_only_where_the_variable_says_so(installed):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STATICLLM_")}
    assert run(installed, SHOW, clean, STATICLLM_ATTACH="auto") == "['Finder']"
    assert run(installed, SHOW, clean, STATICLLM_ATTACH="require") == "['Finder']"
    for value in ("off", ""):
        assert run(installed, SHOW, clean, STATICLLM_ATTACH=value) == "[]"
    assert run(installed, SHOW, clean) == "[]"
    assert run(installed, SHOW, clean, "-I", STATICLLM_ATTACH="auto") == "[]"
    twice = run(installed, SHOW, {**clean, "PYTHONPATH": ""}, STATICLLM_ATTACH="auto", PYTHONPATH=str(HOOK))
    assert twice == "['Finder']"


def test_a_wrong_value_of_the_variable_is_told(installed):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STATICLLM_")}
    done = subprocess.run(
        [installed, "-c", NUMBERS],
        env={**clean, "STATICLLM_ATTACH": "AUTO"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == ["CompiledModel", [[2.0, 4.0, 6.0]]]
    assert "STATICLLM_ATTACH='AUTO': must be one of" in done.stderr
    assert "natively" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="makes a link")
def test_two_copies_of_the_hook_do_not_call_each_other(installed, tmp_path):
    copy = tmp_path / "staticllm"
    copy.symlink_to(Path(HOOK).parents[1])
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STATICLLM_")}
    done = subprocess.run(
        [installed, "-c", SHOW],
        env={**clean, "STATICLLM_ATTACH": "auto", "PYTHONPATH": str(copy / "attach" / "startup")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    assert done.stdout.strip() == "['Finder']"


def test_an_unchanged_program_runs_in_the_daemon_without_a_launcher(installed):
    with daemon_environment() as environment:
        native = json.loads(run(installed, NUMBERS, environment, STATICLLM_ATTACH="off"))
        attached = json.loads(run(installed, NUMBERS, environment, STATICLLM_ATTACH="require"))
    assert (native[0], attached[0]) == ("CompiledModel", "AttachedCompiledModel")
    assert attached[1] == native[1] == [[2.0, 4.0, 6.0]]


def test_the_hook_is_removed_again(python):
    invoke = CliRunner().invoke
    assert invoke(command, ["--install", python]).exit_code == 0
    assert "removed" in invoke(command, ["--uninstall", python]).output
    assert "not installed" in invoke(command, ["--uninstall", python]).output
    assert run(python, SHOW, dict(os.environ), STATICLLM_ATTACH="auto") == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--install", "no-such-python"], "no Python interpreter"),
        (["--install", "a", "b"], "one Python interpreter"),
        (["--install", "--uninstall"], "give one of them"),
        ([], "Missing argument 'COMMAND...'"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments, said):
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code != 0
    assert said in done.output + str(done.exception)


def test_the_line_is_ascii_whatever_the_paths_are(tmp_path, monkeypatch):
    """Python reads it in the encoding of the locale, and does not start if it cannot."""
    monkeypatch.setattr(installed_hook, "_folder_of", lambda python: tmp_path)
    hook = tmp_path / "cüd"
    hook.mkdir()
    (hook / "sitecustomize.py").touch()
    line = installed_hook.install("python", hook, ["/tmp/ä ö/python"]).read_bytes()
    assert line.isascii()
    before = list(sys.path)
    monkeypatch.setattr(os, "environ", {"STATICLLM_ATTACH": "auto"})
    try:
        exec(line.decode())
        assert sys.path[0] == str(hook)
        assert json.loads(os.environ["STATICLLM_DAEMON_COMMAND"]) == ["/tmp/ä ö/python"]
    finally:
        sys.path[:] = before


def test_a_program_says_that_the_hook_is_gone_and_runs_natively_only_without_require(python, tmp_path):
    gone = tmp_path / "removed" / "cüd"
    path = installed_hook.install(python, gone, ["none"])
    try:
        for value, code, out in (("auto", 0, "1\n"), ("require", 1, ""), ("off", 0, "1\n")):
            environment = {**os.environ, "STATICLLM_ATTACH": value}
            done = subprocess.run(
                [python, "-c", "print(1)"], env=environment, capture_output=True, text=True, check=False
            )
            assert (done.returncode, done.stdout) == (code, out), value
            assert len(done.stderr.splitlines()) == (value != "off"), done.stderr
            assert ("install staticllm again" in done.stderr) == (value != "off")
    finally:
        path.unlink()


@pytest.mark.skipif(os.name == "nt", reason="makes a link")
def test_a_link_in_place_of_the_file_is_replaced_and_its_target_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(installed_hook, "_folder_of", lambda python: tmp_path)
    target, path = tmp_path / "others", tmp_path / installed_hook.FILE
    target.write_text("mine")
    path.symlink_to(target)
    assert installed_hook.install("python", HOOK, ["none"]) == path
    assert target.read_text() == "mine"
    assert path.read_text().startswith("import os")
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o444 == 0o444, "every user of the environment reads it"
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        installed_hook.install("python", HOOK, ["none"])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["others", installed_hook.FILE]


@pytest.mark.parametrize("option", [["--require"], ["--exact"], ["--priority", "5"], ["--devices", "NPU"]])
def test_options_of_a_command_are_not_dropped(option):
    done = CliRunner().invoke(command, [*option, "--install", "none"])
    assert done.exit_code == 2
    assert "for a COMMAND" in done.output
