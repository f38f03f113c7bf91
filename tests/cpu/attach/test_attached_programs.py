"""Programs that do not know of the daemon, run natively and attached: the same values, types and exceptions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from staticllm import demo_model_path
from staticllm.cli.attach import attached_environment
from tests.support.attach.attached_programs import daemon_environment, last_json, run

STEPS = """
import os, signal, sys
import numpy as np, openvino as ov
model = ov.Core().compile_model(sys.argv[1], "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
request = model.create_infer_request()

def ask(ids, past, request=request):
    mask = np.ones((1, past + len(ids)), np.int64)
    feed = {"input_ids": [ids], "attention_mask": mask, "position_ids": [list(range(past, past + len(ids)))], "beam_idx": [0]}
    feed = {name: np.array(value) for name, value in feed.items()}
    request.start_async(feed, share_inputs=True)
    between()
    request.wait()
    return int(request.get_tensor("logits").data[0, -1].argmax())

def between():
    pass

def answer(count, hook=None):
    global between
    request.reset_state()
    ids, tokens = list(range(5, 45)), []
    for number in range(count):
        if number == 3 and hook:
            between = hook
        tokens.append(ask(ids, (40 + number - 1) if number else 0))
        ids, between = tokens[-1:], lambda: None
    return tokens
"""


@pytest.fixture(scope="module")
def environment():
    """An environment whose attached programs have a daemon of their own."""
    with daemon_environment() as environment:
        yield environment


def test_every_call_of_the_api_sees_the_same(environment, root, tmp_path):
    found = []
    for mode in ("off", "auto"):
        folder = tmp_path / mode
        folder.mkdir()
        found.append(
            last_json(run(environment, root / "tests" / "support" / "attach" / "attach_calls.py", folder, mode=mode))
        )
    native, attached = found
    assert native["class"] == "CompiledModel"
    assert attached["class"] == "AttachedCompiledModel"
    assert len(native["seen"]) > 150
    assert attached["seen"] == native["seen"]


def test_a_stateful_model_continues_in_a_new_daemon_and_natively(environment):
    model = demo_model_path() / "openvino_model.xml"
    code = (
        STEPS + "import json, subprocess\n"
        "def pid():\n"
        "    command = [sys.executable, '-m', 'staticllm', 'daemon', 'status', '--json']\n"
        "    return json.loads(subprocess.run(command, capture_output=True).stdout)['pid']\n"
        "kill = lambda: os.kill(pid(), signal.SIGKILL)\n"
        "tokens = [answer(8), answer(8, kill)]\n"
        "first = pid()\n"
        "tokens.append(answer(8, kill))\n"
        "print(json.dumps([tokens, type(model).__name__, first]))\n"
    )
    if os.name != "posix":
        pytest.skip("it kills the daemon with a signal")
    native = last_json(run(environment, "-c", STEPS + "print(answer(8))", model, mode="off"))
    done = run(environment, "-c", code, model)
    tokens, kind, first = last_json(done)
    assert tokens == [native] * 3
    assert kind == "AttachedCompiledModel"
    assert first, "the first death starts another daemon"
    assert "twice within a minute" in done.stderr
    assert "goes on natively" in done.stderr


def test_ctrl_c_in_wait_loses_nothing(environment):
    if os.name != "posix":
        pytest.skip("it sends a signal to itself")
    model = demo_model_path() / "openvino_model.xml"
    code = STEPS + (
        "def interrupt():\n"
        "    remote, finish = request._remote, type(request._remote._place).finish\n"
        "    def once(self):\n"
        "        type(self).finish = finish\n"
        "        self._exchange(lambda: signal.raise_signal(signal.SIGINT))\n"
        "    type(remote._place).finish = once\n"
        "    try:\n"
        "        request.wait()\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', file=sys.stderr)\n"
        "print(answer(8, interrupt))\n"
    )
    native = last_json(run(environment, "-c", STEPS + "print(answer(8))", model, mode="off"))
    done = run(environment, "-c", code, model)
    assert last_json(done) == native
    assert "interrupted" in done.stderr


def test_a_forked_child_has_a_connection_of_its_own(environment):
    if not hasattr(os, "fork"):
        pytest.skip("no fork")
    model = demo_model_path() / "openvino_model.xml"
    code = STEPS + (
        "before = answer(4)\n"
        "place = request._remote._place\n"  # both would read the answers to both on this one
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if answer(4) == before and request._remote._place is not place else 3)\n"
        "after = answer(4)\n"
        "is_kept = request._remote._place is place\n"
        "print([before == after, is_kept, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])])\n"
    )
    done = run(environment, "-c", code, model)
    assert done.stdout.strip() == "[True, True, 0]", done.stderr


def test_what_is_not_taken_runs_natively_or_fails_as_asked(environment, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import attach_calls as calls, openvino as ov\n"
        "print(type(ov.Core().compile_model(calls.half_model(), 'CPU')).__name__)"
    )
    tests = Path(__file__).parents[2] / "support" / "attach"
    done = run(environment, "-c", code, tests)
    assert done.stdout.strip() == "CompiledModel"
    assert done.stderr.count("element type bf16: the model runs natively") == 1
    done = run(environment, "-c", code, tests, mode="require")
    assert done.returncode == 1
    assert "STATICLLM_ATTACH=require" in done.stderr
    other = code.replace("half_model", "static_model")
    done = run(environment, "-c", other, tests, STATICLLM_ATTACH_DEVICES="NPU")
    assert (done.stdout.strip(), done.stderr) == ("CompiledModel", "")
    (tmp_path / "file").touch()
    done = run(environment, "-c", other, tests, STATICLLM_RUNTIME_DIR=str(tmp_path / "file"))
    assert done.stdout.strip() == "CompiledModel"
    assert done.stderr.count("file cannot be used") == 1


def test_copies_of_models_in_memory_are_deleted(environment):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import attach_calls as calls, openvino as ov\n"
        "model = ov.Core().compile_model(calls.static_model(), 'CPU')\n"
        "print(type(model).__name__)\n"
    )
    done = run(environment, "-c", code, Path(__file__).parents[2] / "support" / "attach")
    assert done.stdout.strip() == "AttachedCompiledModel", done.stderr
    assert not list(Path(environment["STATICLLM_RUNTIME_DIR"]).glob("model-*"))


@pytest.mark.skipif(sys.platform == "win32", reason="a limit for files stands for the full disk")
def test_a_disk_without_room_for_a_copy_is_named(environment):
    code = (
        "import numpy as np, openvino as ov, resource, sys\n"
        "from openvino import opset13 as ops\n"
        "value = np.random.default_rng(0).random((512, 512), np.float32)\n"
        "inputs = ops.parameter([1, 512], np.float32)\n"
        "model = ov.Model(ops.matmul(inputs, ops.constant(value), False, False), [inputs])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "compiled = ov.Core().compile_model(model, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})\n"
        "given = np.ones((1, 512), np.float32)\n"
        "print(type(compiled).__name__, np.abs(compiled(given)[0] - given @ value).max() < 1e-3)\n"
    )
    folder = Path(environment["STATICLLM_RUNTIME_DIR"])
    done = run(environment, "-c", code)
    assert done.stdout.split() == ["CompiledModel", "True"], done.stderr
    assert f"cannot be written to {folder} (" in done.stderr
    assert "STATICLLM_RUNTIME_DIR" in done.stderr
    refused = run(environment, "-c", code, mode="require")
    assert refused.returncode == 1
    assert "cannot be written to" in refused.stderr.splitlines()[-1]
    assert not list(folder.glob("model-*"))


def test_the_benchmark_tool_runs_attached(environment, tmp_path):
    pytest.importorskip("openvino.tools.benchmark")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import attach_calls as calls, openvino as ov\n"
    code += "ov.save_model(calls.static_model(), sys.argv[2])"
    path = tmp_path / "model.xml"
    assert not run(
        environment, "-c", code, Path(__file__).parents[2] / "support" / "attach", path, mode="off"
    ).returncode
    for api in ("sync", "async"):
        options = ("-m", path, "-d", "CPU", "-niter", 20, "-api", api)
        done = run(environment, "-c", "from openvino.tools.benchmark.main import main; main()", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Throughput" in done.stdout
        assert "natively" not in done.stderr


def test_the_launcher_passes_arguments_and_the_exit_code(environment):
    command = [
        "-m",
        "staticllm",
        "attach",
        "--devices",
        "CPU",
        "--priority",
        "5",
        "--exact",
        "--",
        sys.executable,
        "-c",
    ]
    code = (
        "import os, sys; print(sorted(k for k in os.environ if k.startswith('STATICLLM_A')), sys.argv[1:]); sys.exit(7)"
    )
    done = run(environment, *command, code, "--devices", "x")
    assert done.returncode == 7, done.stderr
    assert "STATICLLM_ATTACH_DEVICES" in done.stdout
    assert "['--devices', 'x']" in done.stdout
    done = run(environment, "-m", "staticllm", "attach", "--", "no-such-program")
    assert done.returncode == 1
    assert "'no-such-program' cannot be run" in done.stderr


def test_a_program_without_openvino_starts_without_other_modules(environment, tmp_path):
    code = "import sys; print(sorted(sys.modules))"
    plain = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "STATICLLM_ATTACH")}
    lists = []
    for given in (plain, {**environment, "STATICLLM_ATTACH": "auto"}):
        done = subprocess.run(
            [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True, cwd=tmp_path
        )
        lists.append(set(json.loads(done.stdout.replace("'", '"'))))
    assert lists[1] - lists[0] <= {"sitecustomize"}


def test_a_hidden_sitecustomize_runs_and_attach_is_applied_once(environment, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine', __name__)\nvalue = 3\n")
    hook = environment["PYTHONPATH"].split(os.pathsep)[0]
    twice = attached_environment({**environment, "PYTHONPATH": os.pathsep.join([hook, str(tmp_path)])})
    assert twice["PYTHONPATH"].split(os.pathsep) == [hook, str(tmp_path)]
    code = (
        "import sitecustomize, sys; print(sitecustomize.value, sum('Finder' in repr(each) for each in sys.meta_path))"
    )
    done = run(twice, "-c", code)
    assert done.stdout.splitlines()[0] == "mine sitecustomize"
    assert done.stdout.splitlines()[-1].startswith("3 ")


def test_a_program_attaches_itself_by_an_import(environment):
    code = (
        "import sys, openvino as ov; sys.path.insert(0, sys.argv[1]); import attach_calls as calls, staticllm.attach\n"
        "staticllm.attach.set_priority(-7)\n"
        "print(type(ov.Core().compile_model(calls.static_model(), 'CPU')).__module__)"
    )
    own = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    assert (
        run(own, "-c", code, Path(__file__).parents[2] / "support" / "attach")
        .stdout.strip()
        .startswith("staticllm.attach.")
    )
