"""Programs that do not know of the daemon, run natively and attached: the same values, types and exceptions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from lora_files import Lora

from staticllm import demo_model_path
from staticllm.cli.attach.launcher import attached_environment

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
    folder = Path(tempfile.mkdtemp(prefix="attach"))  # pytest's folders are too long for a socket
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STATICLLM_")}
    yield attached_environment({**clean, "STATICLLM_RUNTIME_DIR": str(folder), "STATICLLM_ATTACH_WAIT": "60"})
    stop = [sys.executable, "-m", "staticllm", "daemon", "stop"]
    subprocess.run(stop, env={**clean, "STATICLLM_RUNTIME_DIR": str(folder)}, check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def run(environment, *command, mode="auto", **more):
    return subprocess.run(
        [sys.executable, *map(str, command)], env={**environment, "STATICLLM_ATTACH": mode, **more}, text=True,
        capture_output=True, timeout=240, check=False,
    )  # fmt: skip


def last_json(done):
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_call_of_the_api_sees_the_same(environment, root, tmp_path):
    found = []
    for mode in ("off", "auto"):
        folder = tmp_path / mode
        folder.mkdir()
        found.append(last_json(run(environment, root / "tests" / "attach_calls.py", folder, mode=mode)))
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
        "    far, finish = request._far, type(request._far._place).finish\n"
        "    def once(self):\n"
        "        type(self).finish = finish\n"
        "        self._exchange(lambda: signal.raise_signal(signal.SIGINT))\n"
        "    type(far._place).finish = once\n"
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
        "place = request._far._place\n"  # both would read the answers to both on this one
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if answer(4) == before and request._far._place is not place else 3)\n"
        "after = answer(4)\n"
        "is_kept = request._far._place is place\n"
        "print([before == after, is_kept, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])])\n"
    )
    done = run(environment, "-c", code, model)
    assert done.stdout.strip() == "[True, True, 0]", done.stderr


def test_what_is_not_taken_runs_natively_or_fails_as_asked(environment, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import attach_calls as calls, openvino as ov\n"
        "print(type(ov.Core().compile_model(calls.half_model(), 'CPU')).__name__)"
    )
    tests = Path(__file__).parents[2]
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
    done = run(environment, "-c", code, Path(__file__).parents[2])
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
    assert not run(environment, "-c", code, Path(__file__).parents[2], path, mode="off").returncode
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
    assert run(own, "-c", code, Path(__file__).parents[2]).stdout.strip().startswith("staticllm.attach.")


GENAI = """
import json, sys
import openvino_genai
from openvino_genai import LLMPipeline
pipe = openvino_genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32")
config = pipe.get_generation_config()
config.max_new_tokens = 16
pieces = []
pipe.generate("What is an NPU?", config, lambda text: pieces.append(text) and None)
pipe.start_chat()
chat = [str(pipe.generate(text, max_new_tokens=12)) for text in ("Hello!", "Who are you?")]
pipe.finish_chat()
print(json.dumps({
    "class": type(pipe).__name__, "is": isinstance(pipe, LLMPipeline), "text": "".join(pieces),
    "again": str(pipe.generate("What is an NPU?", config)), "chat": chat,
}))
"""


def test_a_genai_program_has_its_engine_in_the_daemon(environment):
    found = [last_json(run(environment, "-c", GENAI, demo_model_path(), mode=mode)) for mode in ("off", "require")]
    native, attached = found
    assert (native.pop("class"), attached.pop("class")) == ("LLMPipeline", "StaticLLMPipeline")
    assert attached == native
    assert native["is"]


MORE_GENAI = """
import json, sys
from openvino_genai import Adapter, AdapterConfig, LLMPipeline, draft_model
import openvino_genai as genai
assert "staticllm.pipelines" not in sys.modules
path, order, loras = sys.argv[1], sys.argv[2], sys.argv[3:]
exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
if order == "pipeline":
    LLMPipeline(path, "CPU", **exact)
options = {"max_new_tokens": 12, "ignore_eos": True, "apply_chat_template": False}
adapters = [Adapter(lora) for lora in loras]
pipe = LLMPipeline(path, "CPU", adapters=AdapterConfig(adapters), **exact)
found = [pipe.generate("What is an NPU?", adapters=AdapterConfig(adapters[0], alpha), **options) for alpha in (1.0, 0.25)]
drafted = LLMPipeline(path, "CPU", draft_model=draft_model(path, "CPU", **exact), ATTENTION_BACKEND="PA", **exact)
found.append(drafted.generate("What is an NPU?", num_assistant_tokens=3, **options))
print(json.dumps([type(pipe).__name__, type(drafted).__name__, *map(str, found)]))
"""


@pytest.mark.parametrize("order", ["adapters", "pipeline"])
def test_a_genai_program_has_its_adapters_and_its_draft_model_in_the_daemon(environment, order, tmp_path):
    loras = [Lora(demo_model_path(), ("q_proj", "down_proj"), seed=seed).save(tmp_path / str(seed)) for seed in (1, 2)]
    files = [folder / "adapter_model.safetensors" for folder in loras]
    native, attached = (
        last_json(run(environment, "-c", MORE_GENAI, demo_model_path(), order, *files, mode=mode))
        for mode in ("off", "require")
    )
    assert native[:2] == ["LLMPipeline"] * 2
    assert attached == ["StaticLLMPipeline"] * 2 + native[2:]
    assert native[2] != native[3]


def test_a_genai_model_that_the_daemon_does_not_take_runs_natively(environment, tmp_path):
    done = run(environment, "-c", GENAI, demo_model_path(), STATICLLM_RUNTIME_DIR=str(tmp_path / ("x" * 120)))
    assert last_json(done)["class"] == "LLMPipeline"
    assert "LLMPipeline runs natively" in done.stderr
    refused = run(environment, "-c", GENAI, demo_model_path(), mode="require", STATICLLM_RUNTIME_DIR="/dev/null/x")
    assert refused.returncode == 1
    assert "set STATICLLM_RUNTIME_DIR" in refused.stderr


HINTS = """
import sys, types
utils = types.ModuleType("transformers.generation.utils")
class GenerationMixin:
    def _sample(self):
        return hints.wants_last(), self._other()
    def _beam_search(self):
        raise KeyError
    def _other(self):
        return hints.wants_last()
utils.GenerationMixin = GenerationMixin
from staticllm.attach import hints
hints.attach(utils)
hints.attach(utils)
mixin = GenerationMixin()
assert not hints.wants_last()
expected = sys.argv[1] == "1"
assert mixin._sample() == (expected, expected), mixin._sample()
try:
    mixin._beam_search()
except KeyError:
    pass
assert not hints.wants_last() and not mixin._other()
print("[]")
"""


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_hint_holds_inside_the_loops_of_transformers_only(environment, value):
    assert last_json(run(environment, "-c", HINTS, value, STATICLLM_HINTS=value)) == []


def test_nothing_is_imported_for_transformers_without_openvino(environment, tmp_path):
    package = tmp_path / "transformers" / "generation"
    package.mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "utils.py").write_text("class GenerationMixin:\n    def _sample(self): pass\n")
    program = (
        "import sys, transformers.generation.utils as u; assert hasattr(u.GenerationMixin._sample, '__wrapped__');"
        "assert not any(name.startswith('openvino') or name == 'staticllm' for name in sys.modules); print('[]')"
    )
    path = os.pathsep.join((environment["PYTHONPATH"], str(tmp_path)))
    assert last_json(run(environment, "-c", program, PYTHONPATH=path)) == []
