"""Runs staticllm on Windows' own Python, under Wine, and clients of this machine against it; skipped where Wine cannot be had.

python scripts/windows_check.py           # all steps, in about eight minutes with the set-up
python scripts/windows_check.py serve     # some of them

What the tests leave out, and why, is printed after them. Wine is no Windows: what it lacks is named where it is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.response import addinfourl
from xml.etree import ElementTree

from _setup import ROOT, ensure_environment
from windows_python import NO_LINKS, NoWindowsError, WindowsPython, windows_path

ZOO = Path(os.environ.get("STATICLLM_ZOO", ROOT.parent / "shared" / "zoo"))
GGUF = Path.home() / ".cache" / "staticllm" / "real_models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
COMPARED = ("llama", "qwen2", "gemma2", "lfm2", "phi3", "gpt2")
"""Models whose tokens are compared with those of this machine's Python."""
VERIFIED = ("llama", "lfm2")
TEST_SECONDS = 900
LEAST_TESTS = 6000
STEP_SECONDS = 180
QUESTION = "Tell me a story about a fox."
TOKENS = """
import json, sys
import numpy as np
from staticllm import StaticLLMPipeline
exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "MAX_PROMPT_LEN": 128}
for path in sys.argv[1:]:
    with StaticLLMPipeline(path, "CPU", **exact) as pipe:
        prompt = np.random.default_rng(4).integers(8, 200, 60)
        print("TOKENS", json.dumps(list(pipe.generate(prompt, max_new_tokens=24, ignore_eos=True).tokens[0])))
"""
CHATS = """
import sys, time
from staticllm import StaticLLMPipeline, demo_model_path
with StaticLLMPipeline(demo_model_path(), "CPU", daemon=True) as pipe:
    text = str(pipe.generate("Once upon a time", max_new_tokens=8))
    print("ANSWER", repr(text), flush=True)
    if "--stay" in sys.argv:
        pipe.generate("Once upon a time", max_new_tokens=100000)
"""
GENAI = """
import sys
import openvino_genai
pipe = openvino_genai.LLMPipeline(sys.argv[1], "CPU")
print("ANSWER", repr(str(pipe.generate("Once upon a time", max_new_tokens=8))), flush=True)
"""
ENCODER = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from support.encoders.encoder_directories import a_directory
folder = pathlib.Path(sys.argv[2])
folder.mkdir()
a_directory(folder)
"""
CLOSES = """
import ctypes, sys
kernel = ctypes.WinDLL("kernel32", use_last_error=True)
base = ctypes.WinDLL("kernelbase")
kernel.OpenProcess.restype = kernel.CreateRemoteThread.restype = ctypes.c_void_p
pointer = ctypes.c_void_p
kernel.CreateRemoteThread.argtypes = (pointer, pointer, ctypes.c_size_t, pointer, pointer, ctypes.c_uint32, pointer)
process = kernel.OpenProcess(0x1F0FFF, 0, int(sys.argv[1]))
routine = ctypes.cast(base.CtrlRoutine, ctypes.c_void_p)
event = ctypes.c_void_p(2)  # CTRL_CLOSE_EVENT
assert kernel.CreateRemoteThread(process, None, 0, routine, event, 0, None), ctypes.get_last_error()
"""
"""Closes the console window of a process as Windows does: by a thread of the process. Windows of Wine's consoles say nothing."""
PLACES = """
import os, pathlib, shutil, sys
from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.errors import StaticLLMError
home = pathlib.Path(sys.argv[1])
exact = {"MAX_PROMPT_LEN": 64}
def answers(path, **more):
    with StaticLLMPipeline(path, "CPU", **exact, **more) as pipe:
        return str(pipe.generate("Once upon a time", max_new_tokens=8))
wanted = answers(demo_model_path())
longer = home / ("x" * 120) / ("y" * 120) / "model"
places = {
    "letters and blanks": home / "J\\u00f6rg M\\u00fcller \\u03b1" / "model",
    "long path": pathlib.Path("\\\\\\\\?\\\\" + str(longer)),
}
for name, place in places.items():
    place.parent.mkdir(parents=True)
    shutil.copytree(demo_model_path(), place)
    assert answers(str(place)) == wanted, name
    for _ in range(2):
        assert answers(str(place), CACHE_DIR=str(place.parent / "cache")) == wanted, name
    print("PLACE", name)
place = places["letters and blanks"]
unc = sys.argv[2] + str(place)[len(str(home)):]
for name, text in {"slashes": place.as_posix(), "UNC": unc, "other case": str(place).upper()}.items():
    assert answers(text) == wanted, name
    print("PLACE", name)
for text in (str(home / "no" / "model"), "owner/name", "C:\\\\no\\\\model.gguf"):
    try:
        answers(text)
    except StaticLLMError as error:
        assert text in str(error), (text, str(error))
        print("PLACE refused", ascii(str(error)[:90]))
"""


SIDECAR = """
import multiprocessing
from staticllm.cli import main
if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()
"""
SPEC = """
programs = []
parts = []
for name, has_console in (("server", True), ("chat", False)):
    analysis = Analysis([f"{name}.py"], hiddenimports=["staticllm.cli.serve", "staticllm.cli.daemon"])
    program = EXE(PYZ(analysis.pure), analysis.scripts, exclude_binaries=True, name=name, console=has_console)
    parts += [program, analysis.binaries, analysis.datas]
COLLECT(*parts, name="apps")
"""


class CheckError(Exception):
    """A step has not shown what it must."""


@dataclass(frozen=True)
class Context:
    """What the steps share. ``home``: a new folder that both systems see."""

    windows: WindowsPython
    home: Path

    def ask(self, *arguments: str, seconds: float = STEP_SECONDS, more: Mapping[str, str] | None = None) -> str:
        """Return what ``python.exe`` prints; a ``CheckError`` if it fails."""
        done = self.windows.run(*arguments, seconds=seconds, cwd=self.home, more=more)
        if done.returncode:
            raise CheckError(f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-1500:]}")
        return done.stdout


def tests(context: Context) -> str:
    report = context.home / "tests.xml"
    workers = str(min((os.cpu_count() or 1) + 1, 4))
    done = context.windows.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, "--dist", "loadfile", "--timeout", "120",
        "--max-worker-restart", "0", "--reruns", "2", "--junitxml", windows_path(report), "tests/null", "tests/cpu",
        seconds=TEST_SECONDS, shows=True,
    )  # fmt: skip
    reasons, count = Counter[str](), 0
    for case in ElementTree.parse(report).getroot().iter("testcase") if report.is_file() else ():
        count += 1
        if (skipped := case.find("skipped")) is not None:
            reasons[skipped.attrib.get("message", "").strip()] += 1
    print("\nleft out:", *(f"  {number:4} {reason}" for reason, number in reasons.most_common()), sep="\n", flush=True)
    if done.returncode or count < LEAST_TESTS:
        raise CheckError(f"pytest ended with {done.returncode} after {count} tests")
    return f"{count} tests, {sum(reasons.values())} of them left out"


def answer(context: Context) -> str:
    text = context.ask("-m", "staticllm", "run", QUESTION, "--max-new-tokens", "32")
    here = _here("-m", "staticllm", "run", QUESTION, "--max-new-tokens", "32")
    if not text.strip() or text.split() != here.split():
        raise CheckError(f"{text!r}, and here {here!r}")
    return f"{text.strip()[:60]!r}, as here"


def verify(context: Context) -> str:
    for name in VERIFIED:
        context.ask("-m", "staticllm", "verify", windows_path(ZOO / name))
    context.ask("-m", "staticllm", "doctor")
    encoder = context.home / "encoder"
    _here("-c", ENCODER, str(ROOT / "tests"), str(encoder))
    context.ask("-m", "staticllm", "verify", windows_path(encoder))
    return ", ".join((*VERIFIED, "an encoder"))


def tokens(context: Context) -> str:
    """The tokens are those of this machine; the user's cache, in which GGUF files are converted, has blanks and other letters."""
    cache = context.home / "J\u00f6rg M\u00fcller \u03b1"
    models = [ZOO / name for name in COMPARED] + [path for path in (GGUF,) if path.is_file()]
    more = {"XDG_CACHE_HOME": windows_path(cache)}
    there = context.ask("-c", TOKENS, *map(windows_path, models), seconds=400, more=more)
    here = _here("-c", TOKENS, *map(str, models))
    found = [[line for line in text.splitlines() if line.startswith("TOKENS")] for text in (there, here)]
    if len(found[0]) != len(models) or found[0] != found[1]:
        raise CheckError(f"other tokens: {there[-800:]}\nthan here: {here[-800:]}")
    if GGUF in models and not any(cache.glob("staticllm/converted/*")):
        raise CheckError(f"the GGUF file was not converted in {cache}")
    return f"equal in f32 for {len(models)} models, with a user's cache in {cache.name!r}"


def blobs(context: Context) -> str:
    """A set that was made on one system is loaded on the other."""
    model = ZOO / "llama"
    for name, make, load, make_path, load_path in (
        ("here to Windows", _here, context.ask, str, windows_path),
        ("Windows to here", context.ask, _here, windows_path, str),
    ):
        place = context.home / name.replace(" ", "-")
        make(
            "-m", "staticllm", "compile", make_path(model), "--export-blob", make_path(place), "--max-prompt-len", "64"
        )
        load("-m", "staticllm", "run", "-m", load_path(model), "hi", "-p", f"BLOB_PATH={load_path(place)}")
    return "loaded both ways"


def npu(context: Context) -> str:
    """A set for an NPU elsewhere has the same bytes from both systems; Windows opens it up to the question of its device."""
    asked = ("--device", "NPU", "--platform", "4000", "--max-prompt-len", "64")
    here, there = (context.home / name for name in ("npu-here", "npu-there"))
    try:
        _here("-m", "staticllm", "compile", str(ZOO / "llama"), *asked, "--export-blob", str(here))
    except CheckError as error:
        if "npu_compiler.py setup" not in str(error):
            raise
        return f"left out: {str(error).strip().splitlines()[-1][:150]}"
    model = windows_path(ZOO / "llama")
    context.ask("-m", "staticllm", "compile", model, *asked, "--export-blob", windows_path(there))
    files, others = ({_part_of(path): _content(path) for path in place.glob("*.blob")} for place in (here, there))
    if not files or files != others:
        names = sorted(name for name in files | others if files.get(name) != others.get(name))
        raise CheckError(f"other bytes in {len(names)} of {len(files)} files: {', '.join(names[:4])}")
    num_host = sum("-host" in name for name in files)
    run = ("-m", "staticllm", "run", "-m", model, "hi", "--device", "NPU", "-p", f"BLOB_PATH={windows_path(here)}")
    done = context.windows.run(*run, seconds=STEP_SECONDS, cwd=context.home)
    lines = done.stderr.strip().splitlines()
    if done.returncode != 1 or not lines[-1].startswith("Error: ") or "Traceback" in done.stderr:
        raise CheckError(f"exit code {done.returncode}: {done.stderr[-800:]}")
    return (
        f"{len(files) - num_host} files of the same bytes, {num_host} graphs of the host with the same nodes and constants; "
        f"opened there: {lines[-1][:120]}"
    )


def _part_of(path: Path) -> str:
    """Return the name of a file of a set; that of a graph of the host without its digest."""
    return path.stem.rpartition("-")[0] if "-host-" in path.name else path.name


def _content(path: Path) -> object:
    """Return what must be the same in a file of a set.

    OpenVINO numbers the nodes of a graph of the host in each process anew, and writes its edges in the order of addresses.
    """
    data = path.read_bytes()
    return sorted(re.sub(rb"_\d+", b"", data).splitlines()) if "-host-" in path.name else data


def names(context: Context) -> str:
    """A model is brought by its name from a hub on loopback, and answers; ``owner\\name`` is no name."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.hub import Repository, serving

    model = Path(
        context.ask("-c", "import staticllm; print(staticllm.demo_model_path())").strip()[2:].replace("\\", "/")
    )
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.suffix in (".json", ".xml", ".bin")}
    with serving() as hub:
        hub.repositories["small/demo-ov"] = Repository(files, tuple(name for name in files if name.endswith(".bin")))
        more = {
            "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
            "HF_HOME": windows_path(context.home / "hf"), NO_LINKS: "1",
        }  # fmt: skip
        context.ask("-m", "staticllm", "pull", "small/demo-ov", more=more)
        text = context.ask(
            "-m", "staticllm", "run", "-m", "small/demo-ov", QUESTION, "--max-new-tokens", "8", more=more
        )
        listed = context.ask("-m", "staticllm", "list", more=more)
        wrong = ("-m", "staticllm", "pull", "small\\demo-ov")
        done = context.windows.run(*wrong, seconds=STEP_SECONDS, cwd=context.home, more=more)
    if "small/demo-ov" not in listed or not text.strip():
        raise CheckError(f"{text!r}, and the list has {listed!r}")
    return f"{text.strip()[:40]!r}; {_refusal(done)}"


def refusals(context: Context) -> str:
    """A folder that takes no files, and an export without its environment, get one line, soon."""
    said = []
    source = context.home / "source"
    source.mkdir()
    (source / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 9}')
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for arguments in (
        ("compile", windows_path(ZOO / "llama"), "--export-blob", windows_path("/sys/set"), "--max-prompt-len", "64"),
        ("run", QUESTION, "--profile", windows_path("/sys/profile.json")),
        ("export", windows_path(source), windows_path(context.home / "exported")),
    ):
        done = context.windows.run("-m", "staticllm", *arguments, seconds=STEP_SECONDS, cwd=context.home)
        said.append(_refusal(done))
    return "; ".join(said)


def _refusal(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if not done.returncode or "Traceback" in done.stderr or not lines or "Error: " not in lines[-1]:
        raise CheckError(f"exit code {done.returncode}: {done.stderr[-800:]}")
    return lines[-1].partition("Error: ")[2][:110]


@contextlib.contextmanager
def _serving(context: Context, ready: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Yield a server and its URL. A block ends it; its exit code and its ready file are looked at then."""
    arguments = ("-m", "staticllm", "serve", "--port", "0", "--ready-file", windows_path(ready))
    server = context.windows.start(*arguments, cwd=context.home)
    try:
        yield server, _url_of(ready, server.poll)
        code = server.wait(30)
        if code or ready.exists():
            raise CheckError(f"exit code {code}, its ready file {'is left' if ready.exists() else 'is gone'}")
    finally:
        server.kill()
        server.communicate()


def serve(context: Context) -> str:
    with _serving(context, context.home / "ready.json") as (server, url):
        name = _get(f"{url}/v1/models")["data"][0]["id"]
        body = {"model": name, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200, "stream": True}
        with _post(f"{url}/v1/chat/completions", body) as stream:
            lines = [line for line in stream if line.startswith(b"data: ")]
        if lines[-1].strip() != b"data: [DONE]":
            raise CheckError(f"a stream ended with {lines[-1]!r}")
        other = {"model": name, "messages": body["messages"], "options": {"num_predict": 500}}
        with _post(f"{url}/api/chat", other) as stream:
            stream.readline()  # the client leaves in the middle of an answer
        with contextlib.suppress(OSError):
            _post(f"{url}/v1/chat/completions", {**body, "messages": 5}).close()
        whole = {**body, "stream": False, "max_tokens": 8}
        with _post(f"{url}/v1/chat/completions", whole) as response:
            if not json.loads(response.read())["choices"][0]["message"]["content"]:
                raise CheckError("no answer after a client that left")
        server.send_signal(signal.SIGINT)  # Wine makes Ctrl-C of it
    return f"{len(lines)} events, a client that left, Ctrl-C: exit code 0"


def closing(context: Context) -> str:
    """A server whose console window is closed while it answers ends as by Ctrl-C, and removes its ready file."""
    ready = context.home / "closing.json"
    with _serving(context, ready) as (_, url):
        pid = json.loads(ready.read_text(encoding="utf-8"))["pid"]
        body = {"model": _get(f"{url}/v1/models")["data"][0]["id"], "messages": [{"role": "user", "content": QUESTION}]}
        with _post(f"{url}/v1/chat/completions", {**body, "max_tokens": 1500, "stream": True}) as stream:
            stream.readline()
            begin = time.monotonic()
            context.ask("-c", CLOSES, str(pid))
            lines = [line for line in stream if line.strip()]
    return f"its stream ended after {len(lines)} events, exit code 0, all in {time.monotonic() - begin:.1f} s"


def daemon(context: Context) -> str:
    """Two programs share a daemon; one is killed while it generates, the other goes on."""
    folder = {"STATICLLM_RUNTIME_DIR": windows_path(context.home / "run-daemon")}
    first = context.ask("-c", CHATS, more=folder)
    killed = context.windows.start("-c", CHATS, "--stay", cwd=context.home, more=folder)
    limit = threading.Timer(STEP_SECONDS, killed.kill)
    limit.start()
    try:
        assert killed.stdout is not None
        line = killed.stdout.readline()
        killed.kill()
        killed.communicate()
        second = context.ask("-c", CHATS, more=folder)
        status = context.ask("-m", "staticllm", "daemon", "status", more=folder)
    finally:
        limit.cancel()
        killed.kill()
        context.windows.run("-m", "staticllm", "daemon", "stop", seconds=STEP_SECONDS, cwd=context.home, more=folder)
    if not first.startswith("ANSWER") or second != first or line.decode().strip() != first.strip():
        raise CheckError(f"{first!r}, {line!r} and {second!r}: the same was asked")
    return f"{first.strip()[:50]}; {status.strip().splitlines()[0][:60]}"


def attach(context: Context) -> str:
    """A program that uses GenAI runs through the daemon, untouched."""
    folder = {"STATICLLM_RUNTIME_DIR": windows_path(context.home / "run-attach")}
    program = context.home / "program.py"
    program.write_text(GENAI)
    model = context.ask("-c", "import staticllm; print(staticllm.demo_model_path())").strip()
    alone = context.ask(windows_path(program), model)
    try:
        command = ("-m", "staticllm", "attach", "--require", "--", "python.exe", windows_path(program), model)
        python = windows_path(context.windows.folder / "python" / "python.exe")
        attached = context.ask(*(python if each == "python.exe" else each for each in command), more=folder)
    finally:
        context.windows.run("-m", "staticllm", "daemon", "stop", seconds=STEP_SECONDS, cwd=context.home, more=folder)
    if "ANSWER" not in alone or attached.splitlines()[-1:] != alone.splitlines()[-1:]:
        raise CheckError(f"{attached!r} attached, {alone!r} alone")
    return attached.strip()[:60]


def places(context: Context) -> str:
    home = context.home / "places"
    with context.windows.shared("staticllm-check", home) as share:
        said = context.ask("-c", PLACES, windows_path(home), share)
    return "; ".join(line.partition(" ")[2] for line in said.splitlines() if line.startswith("PLACE"))


def app(_: Context) -> str:
    """PyInstaller makes a program of the server and one of the window example; the server answers and leaves no process."""
    more = ("pyinstaller>=6.16,<7", "setuptools>=80,<90")
    windows = WindowsPython("3.11", "server", more, is_editable=False)
    place = Path(tempfile.mkdtemp(prefix="staticllm-app-"))
    try:
        (place / "server.py").write_text(SIDECAR)
        (place / "chat.py").write_text((ROOT / "examples" / "chat_window.py").read_text(encoding="utf-8"))
        (place / "apps.spec").write_text(SPEC)
        done = windows.run("-m", "PyInstaller", "--noconfirm", "apps.spec", seconds=1200, cwd=place)
        if done.returncode:
            raise CheckError(f"PyInstaller: {done.stderr[-1500:]}")
        folder = place / "dist" / "apps"
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        said = _served_by(windows, folder / "server.exe", place)
        print(f"the window: {shlex.join(windows.wine(folder / 'chat.exe'))}", flush=True)
        return f"{num_bytes / 1e6:.0f} MB; {said}; {place}"
    finally:
        windows.close()


def _served_by(windows: WindowsPython, program: Path, place: Path) -> str:
    ready = place / "ready.json"
    pipe = subprocess.PIPE
    arguments = ("serve", "--port", "0", "--ready-file", windows_path(ready), "--supervise")
    server = subprocess.Popen(
        windows.wine(program, *arguments), cwd=place, env=windows.environment(), stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        begin = time.monotonic()
        url = _url_of(ready, server.poll)
        seconds = time.monotonic() - begin
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
        with _post(f"{url}/v1/chat/completions", {**body, "model": _get(f"{url}/v1/models")["data"][0]["id"]}) as found:
            text = json.loads(found.read())["choices"][0]["message"]["content"]
        server.send_signal(signal.SIGINT)
        code = server.wait(60)
        end = time.monotonic() + 20
        while (left := _processes_of(program.name)) and time.monotonic() < end:
            time.sleep(0.5)
        if code or left or not text:
            raise CheckError(f"exit code {code}, {len(left)} processes left, {text!r}")
        return f"ready after {seconds:.0f} s, {text!r}, exit code 0, no process left"
    finally:
        server.kill()
        server.communicate()


def _processes_of(name: str) -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
    return [line for line in lines if name in line and "wine" not in line.split(" ")[0]]


STEPS: tuple[Callable[[Context], str], ...] = (
    *(answer, verify, tokens, blobs, npu, names, refusals, serve, closing, daemon, attach, places),
    tests,
)
ALONE = (tests,)
"""Run after the others, which run two at a time."""
EXTRA: tuple[Callable[[Context], str], ...] = (app,)
"""Run if they are named only."""


def _here(*arguments: str) -> str:
    """Return what this machine's own Python prints; a ``CheckError`` if it fails."""
    done = subprocess.run(
        [str(ensure_environment("test")), *arguments], capture_output=True, text=True, timeout=STEP_SECONDS, check=False
    )
    if done.returncode:
        raise CheckError(f"here: exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-1500:]}")
    return done.stdout


def _url_of(ready: Path, ended: Callable[[], int | None]) -> str:
    end = time.monotonic() + STEP_SECONDS
    while time.monotonic() < end and ended() is None:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(ready.read_text(encoding="utf-8"))
            return str(found["url"]).removesuffix("/v1")
        time.sleep(0.2)
    raise CheckError(f"no server listens: exit code {ended()}")


def _get(url: str) -> dict[str, list[dict[str, str]]]:
    with urllib.request.urlopen(url, timeout=60) as response:
        found: dict[str, list[dict[str, str]]] = json.loads(response.read())
        return found


def _post(url: str, body: Mapping[str, object]) -> addinfourl:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    opened: addinfourl = urllib.request.urlopen(request, timeout=120)
    return opened


@contextlib.contextmanager
def _context() -> Iterator[Context]:
    windows = WindowsPython()
    with tempfile.TemporaryDirectory(prefix="staticllm-windows-", ignore_cleanup_errors=True) as home:
        try:
            yield Context(windows, Path(home))
        finally:
            windows.close()


def main() -> None:
    names = [step.__name__ for step in STEPS]
    others = [step.__name__ for step in EXTRA]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "steps",
        nargs="*",
        choices=[*names, *others, []],
        help=f"of {', '.join(names)} [all of these], {', '.join(others)}",
    )
    wanted = parser.parse_args().steps or names
    # a lane that is late is terminated: its programs are ended, and its folders removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed: list[str] = []
    begin = time.monotonic()
    try:
        with _context() as context:
            print(f"{time.monotonic() - begin:5.0f} s  set up", flush=True)

            def run(step: Callable[[Context], str]) -> None:
                start = time.monotonic()
                try:
                    said = step(context)
                except Exception as error:  # the others are tried too
                    failed.append(step.__name__)
                    said = f"FAILED: {type(error).__name__}: {error}"
                print(f"{time.monotonic() - start:5.0f} s  {step.__name__}: {said}", flush=True)

            with ThreadPoolExecutor(2) as pool:  # most of a step is one process that computes little
                list(pool.map(run, [step for step in STEPS if step.__name__ in wanted and step not in ALONE]))
            for step in (*ALONE, *EXTRA):
                if step.__name__ in wanted:
                    run(step)
    except NoWindowsError as error:
        print(f"skipped: {error}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
