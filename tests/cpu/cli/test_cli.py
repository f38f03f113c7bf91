"""Tests the command line as a user runs it, with child processes, pipes and a terminal."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
from support.command_line import ENVIRONMENT, IN_BOTH, STATICLLM, in_child, in_here

from staticllm.cli.run import DEMO_ANSWERS

pytestmark = pytest.mark.usefixtures("shared_programs")

PROMPT, TAKEN = "\x1b[?2004h", "\x1b[?2004l"
"""The codes that prompt_toolkit sends before and after it reads a line; they enable and disable marked pasting."""


@pytest.fixture(scope="module")
def llama(zoo):
    return zoo / "llama"


def test_run_prints_the_answer_and_stats(llama):
    done = in_child("run", "hello", "-m", llama, "-n", 12, "--stats")
    assert done.returncode == 0
    assert done.stdout.strip()
    assert "12 generated (length)" in done.stderr
    assert "TTFT" in done.stderr
    assert "TPOT" in done.stderr


@IN_BOTH
def test_run_reads_stdin_with_the_same_answer(llama, staticllm):
    from_stdin, from_argument = (
        staticllm("run", "-m", llama, "-n", 12, stdin="hello"),
        staticllm("run", "hello", "-m", llama, "-n", 12),
    )
    assert from_stdin.returncode == 0
    assert from_stdin.stdout == from_argument.stdout


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"abc\xff", b"byte 0xff at 3"),
        pytest.param(b"\x7fELF\x02\x00", b"a zero byte at 5", marks=pytest.mark.slow),
        pytest.param(b"", b"empty", marks=pytest.mark.slow),
    ],
)
def test_binary_input_is_a_one_line_error(data, word):
    command = [*STATICLLM, "run", "-n", "4"]
    done = subprocess.run(command, input=data, capture_output=True, timeout=60, env=ENVIRONMENT, check=False)
    assert done.returncode == 1
    assert not done.stdout
    assert word in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


ASCII_ONLY = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
FOX = "What is a 🦊?"


@pytest.mark.skipif(os.name == "nt", reason="arguments are Unicode there")
@pytest.mark.parametrize(
    ("extra", "stdin", "environment"),
    [
        pytest.param((FOX,), None, ENVIRONMENT, id="as usual", marks=pytest.mark.slow),
        pytest.param((FOX,), None, ASCII_ONLY, id="argument"),
        pytest.param((), FOX.encode(), ASCII_ONLY, id="pipe", marks=pytest.mark.slow),
    ],
)
def test_utf8_is_read_under_every_locale(extra, stdin, environment):
    """With ``LC_ALL=C`` and without Python's UTF-8 mode, arguments arrive as escaped bytes and pipes are ASCII."""
    options = ["run", "-n", "4", "--json"]
    command = [*STATICLLM, *options, *extra]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=60, env=environment, check=False)
    expected = json.loads(in_here(*options, FOX).stdout)["prompt_tokens"]
    assert json.loads(done.stdout)["prompt_tokens"] == expected, done.stderr


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes it")
def test_a_closed_standard_output_is_a_one_line_error(llama):
    command = f'"{sys.executable}" -m staticllm run hello -n 2 >&-'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: standard output is closed")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_full_disk_is_reported_without_a_traceback(llama):
    command = [*STATICLLM, "run", "-m", str(llama), "-n", "4"]
    if os.path.exists("/dev/full"):  # noqa: PTH110 - a device, not a path of ours
        with open("/dev/full", "w") as full:  # noqa: PTH123
            done = subprocess.run(
                [*command, "x"], stdout=full, stderr=subprocess.PIPE, timeout=60, env=ENVIRONMENT, check=False
            )
        assert done.returncode == 1
        assert b"No space left" in done.stderr
        assert b"Traceback" not in done.stderr


def test_temperature_zero_is_greedy(llama, staticllm):
    runs = [staticllm("run", "hello", "-m", llama, "-n", 8, *extra).stdout for extra in ((), ("--temperature", 0))]
    assert runs[0] == runs[1]


def test_without_a_temperature_the_models_own_config_decides_and_zero_is_greedy_all_the_same(
    llama, tmp_path, staticllm
):
    for file in llama.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    own = {"eos_token_id": 1, "do_sample": True, "temperature": 3.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    greedy = staticllm("run", "hello", "-m", llama, "-n", 24).stdout
    command = ("run", "hello", "-m", tmp_path, "-n", 24)
    assert staticllm(*command, "--temperature", 0).stdout == greedy
    assert staticllm(*command, "--temperature", 0, "--top-k", 5, "--seed", 3).stdout == greedy
    assert staticllm(*command).stdout != greedy


def test_run_can_print_json(llama, staticllm):
    done = staticllm("run", "hello", "-m", llama, "-n", 5, "--json", "--stats")
    report = json.loads(done.stdout)
    assert report["generated_tokens"] == 5
    assert report["finish_reason"] == "length"
    assert report["text"]
    assert "5 generated (length)" in done.stderr


def test_the_embedded_model_is_the_default(staticllm):
    done = staticllm("run", "What is an NPU?", "-n", 24)
    assert done.returncode == 0
    assert len(done.stdout.split()) > 8


MISTAKES = [
    (["run", "hi", "-m", "/no/such/model"], 1, "no model directory"),
    (["run", "hi", "--device", "TOASTER"], 1, "there are: CPU"),
    (["run", "hi", "-p", "NONSENSE"], 2, "NAME=VALUE"),
    (["run", "hi", "-p", "NONSENSE=5"], 1, "unknown property 'NONSENSE'"),
    (["run", "hi", "-m", "/no/such/model", "--max-prompt-len", "0"], 2, "'--max-prompt-len': 0"),
    (["run", "hi", "-m", "/no/such/model", "-n", "0"], 2, "'--max-new-tokens': 0"),
    (["run", "hi", "-m", "/no/such/model", "-n", str(1 << 64)], 2, "is more than 9223372036854775807"),
    (["run", "hi", "-m", "/no/such/model", "--top-p", "2"], 2, "'--top-p': 2"),
    (["run", "hi", "-m", "/no/such/model", "--temperature", "nan"], 2, "'nan' is not a number"),
    (["run", "hi", "-m", "/no/such/model", "--seed", "-1"], 2, "'--seed': -1"),
    (["run", "hi", "-m", __file__], 1, "give the directory that holds openvino_model.xml"),
    (["inspect", "one", "-m", "other"], 2, "the model is given twice"),
    (["run", ""], 1, "empty"),
    (["run", "hi", "-p", "MAX_PROMPT_LEN=--5"], 1, "MAX_PROMPT_LEN='--5'"),
    (["run", "hi", "--raw", "--system", "x"], 2, "--raw goes with a prompt"),
    (["run", "hi", "-n", "2", "-p", "NPUW_DEVICES=CPU"], 0, "Warning: NPUW_DEVICES"),
    (["run", "hi", "--colour"], 2, "No such option"),
    (["ruin"], 2, "No such command"),
    (["compile", "/no/such/model", "--export-blob", "/no/such/folder/x"], 1, "no model directory"),
    (["inspect", "/no/such/model"], 1, "no model directory"),
]


def check_mistake(run, arguments, code, word):
    done = run(*arguments)
    assert done.returncode == code
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.strip().splitlines() if line != DEMO_ANSWERS]
    assert code == 2 or len(lines) == 1
    assert code == 0 or DEMO_ANSWERS not in done.stderr, "nothing answers"


@pytest.mark.parametrize(("arguments", "code", "word"), MISTAKES)
def test_mistakes_are_one_line_errors_with_an_exit_code(arguments, code, word, staticllm):
    check_mistake(staticllm, arguments, code, word)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "code", "word"), MISTAKES[::5])
def test_a_process_of_its_own_ends_with_the_exit_code(arguments, code, word):
    """One mistake of each code."""
    check_mistake(in_child, arguments, code, word)


@IN_BOTH
def test_inspect_prints_a_table_and_json(zoo, staticllm):
    report = json.loads(staticllm("inspect", zoo / "gemma2", "--json").stdout)
    assert report["num_states"] == 8
    assert report["masks"] == ["causal", "window:32"]
    assert report["layers"][0] == {"layer": 0, "query_heads": 4, "kv_heads": 2, "head_dim": 16, "mask": "window:32"}
    assert report["kv"]["bytes"] == 8 * 2 * 16 * {"f32": 4, "bf16": 2}[report["kv"]["type"]] * report["kv"]["num_slots"]
    assert report["weights_bytes"] == (zoo / "gemma2" / "openvino_model.bin").stat().st_size
    assert any((each["phase"], each["rows"], each["sequences"]) == ("generate", 4, 4) for each in report["variants"])
    text = staticllm("inspect", zoo / "gemma2")
    assert text.returncode == 0
    for word in ("window:32", "page_attention", "4 attentions in pages of 32", "rows 1, 2x2, 4x4", "MiB"):
        assert word in text.stdout


@pytest.mark.parametrize("mode", [pytest.param("separate", marks=pytest.mark.slow), "shared"])
def test_compile_exports_blobs_that_the_device_imports(llama, tmp_path, mode, staticllm):
    import openvino as ov

    target = tmp_path / "blobs"
    done = staticllm("compile", llama, "--export-blob", target, "--programs", mode, "--max-prompt-len", 64)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((target / "manifest.json").read_text())["content"]
    num_variants = len(manifest["variants"])
    assert len(manifest["blobs"]) == (1 if mode == "shared" else num_variants)
    lines = done.stderr.splitlines()
    assert sum(line.startswith("blob written") for line in lines) == len(manifest["blobs"])
    assert sum(line.startswith("program compiled") for line in lines) == len(manifest["blobs"]), "a line per program"
    for name in manifest["blobs"]:
        weights = {"WEIGHTS_PATH": str(llama / "openvino_model.bin"), "CACHE_MODE": "OPTIMIZE_SIZE"}
        imported = ov.Core().import_model((target / name).read_bytes(), "CPU", weights)
        assert "logits" in {name for port in imported.outputs for name in port.get_names()}
    assert {"IR digest", "weights digest", "OpenVINO", "device name"} <= set(manifest["fingerprint"])
    again = staticllm("compile", llama, "--export-blob", target)
    assert again.returncode == 1
    assert "exists already" in again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blobs"], "nothing half-written is left"


@pytest.mark.slow
def test_a_closed_pipe_ends_the_command_quietly(llama):
    child = subprocess.Popen(
        [*STATICLLM, "run", "hello", "-m", str(llama), "-n", "1000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=ENVIRONMENT,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stderr is not None
    assert len(child.stdout.read(20)) == 20
    child.stdout.close()
    child.wait(30)
    assert child.stderr.read() == b""
    child.stderr.close()


@pytest.mark.slow
def test_tokens_appear_as_they_are_generated(llama):
    child = subprocess.Popen(
        [*STATICLLM, "run", "hello", "-m", str(llama), "-n", "900", "--raw"],
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=ENVIRONMENT,
    )  # fmt: skip
    assert child.stdout is not None
    moments = []
    while os.read(child.stdout.fileno(), 65536):
        moments.append(time.monotonic())
    child.wait(30)
    child.stdout.close()
    assert child.returncode == 0
    assert len(moments) > 20


@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals are POSIX")
class TestChat:
    @pytest.fixture
    def terminal(self, llama):
        import pty

        class Terminal:
            def __init__(self):
                self.unread = ""
                self.end, child_end = pty.openpty()
                self.child = subprocess.Popen(
                    [*STATICLLM, "run", "-m", str(llama), "-n", "1000", "-p", "MAX_PROMPT_LEN=900"],
                    stdin=child_end, stdout=child_end, stderr=child_end, start_new_session=True,
                    env={**ENVIRONMENT, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
                )  # fmt: skip
                os.close(child_end)

            def type(self, text):
                os.write(self.end, text.encode())

            def interrupt(self):
                self.child.send_signal(signal.SIGINT)

            def read_until(self, word, seconds=30):
                """Return all output up to and including ``word``, and keep the rest for the next call."""
                deadline = time.monotonic() + seconds
                while word not in self.unread and time.monotonic() < deadline:
                    if select.select([self.end], [], [], 0.2)[0]:
                        try:
                            self.unread += os.read(self.end, 65536).decode(errors="replace")
                        except OSError:
                            break
                assert word in self.unread, self.unread
                text, _, self.unread = self.unread.partition(word)
                return text + word

            def read_some(self, count):
                deadline = time.monotonic() + 30
                while len(self.unread) < count and time.monotonic() < deadline:
                    self.unread += os.read(self.end, 65536).decode(errors="replace")
                self.unread = ""

            def leaves(self):
                try:
                    return self.child.wait(20)
                finally:
                    os.close(self.end)

        terminal = Terminal()
        terminal.read_until(PROMPT)
        yield terminal
        terminal.child.kill()
        terminal.child.wait()

    def test_slash_commands(self, terminal, tmp_path):
        for text, answer in (
            ("/regenerate", "there is no answer yet"),
            ("/nonsense", "no command '/nonsense'"),
            ("/system Be brief.", "A new conversation begins."),
            ("/help", "/save FILE"),
            (f"/load {tmp_path / 'none.json'}", "No such file"),
        ):
            terminal.type(f"{text}\r")
            terminal.read_until(answer)
            terminal.read_until(PROMPT)
        terminal.type("hello\r")
        terminal.read_until(TAKEN)
        terminal.read_some(30)
        terminal.interrupt()
        terminal.read_until("[stopped]")
        for text, answer in (("/stats", "prompt tokens"), (f"/save {tmp_path / 'chat.json'}", "2 messages in")):
            terminal.type(f"{text}\r")
            terminal.read_until(answer)
        saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
        assert saved["system"] == "Be brief."
        assert [m["role"] for m in saved["messages"]] == ["user", "assistant"]
        assert saved["messages"][0]["content"] == "hello"
        assert len(saved["messages"][1]["content"]) > 20
        terminal.type("/clear\r")
        terminal.read_until("A new conversation")
        terminal.type(f"/load {tmp_path / 'chat.json'}\r")
        terminal.read_until("2 messages of")
        terminal.type("/exit\r")
        assert terminal.leaves() == 0

    @pytest.mark.slow
    def test_ctrl_d_ends_a_chat_of_several_turns(self, terminal):
        terminal.type("hello\r")
        terminal.read_until(PROMPT)
        terminal.type("\x04")
        assert terminal.leaves() == 0

    @pytest.mark.slow
    def test_a_full_conversation_starts_over(self, terminal):
        terminal.type("hello\r")
        terminal.read_until(PROMPT, 60)
        terminal.type("hello again\r")
        terminal.read_until("a new one begins")
        terminal.read_until(PROMPT)
        terminal.type("\x04")
        assert terminal.leaves() == 0

    def test_ctrl_c_stops_the_answer_but_not_the_chat(self, terminal):
        terminal.type("hello\r")
        terminal.read_until(TAKEN)
        terminal.read_some(30)
        terminal.interrupt()
        terminal.read_until(PROMPT)
        terminal.type("again\r")
        terminal.read_until(TAKEN)
        terminal.read_some(30)
        terminal.interrupt()
        terminal.read_until(PROMPT)
        terminal.type("\x04")
        assert terminal.leaves() == 0

    @pytest.mark.slow
    def test_ctrl_c_twice_ends_the_chat(self, terminal):
        time.sleep(1)  # Python handles a signal between writing the prompt and waiting for keys only at the next key
        terminal.interrupt()
        terminal.read_until("again to leave")
        time.sleep(1)
        terminal.interrupt()
        assert terminal.leaves() == 0
