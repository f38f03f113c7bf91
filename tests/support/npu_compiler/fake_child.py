"""A child that compiles nothing: ``python fake_child.py WAYS`` behaves in one way per request, in order, and then as ``ok``.

A blob of ``ok`` is the request itself, so that a test sees what was asked for.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

TRACE = {
    "traceEvents": [
        {"name": "fetch", "cat": "DMA", "ph": "X", "ts": 0, "dur": 3.0, "pid": 0, "tid": 0, "args": {}},
        {"name": "a_node", "cat": "Layer", "ph": "X", "ts": 0, "dur": 9.5, "pid": 2, "tid": 1,
         "args": {"Layer type": "MatMul", "DMA time": "3us 0ns", "DPU time": "1ms 2us 500ns"}},
    ],
    "taskStatistics": {"total duration": 9.5, "DMA duration": 3.0, "DPU duration": 6.0, "SW duration": 0.5,
                       **{f"Sum of {name} task durations": 3.0 for name in ("DMA", "DPU", "SW")}},
}  # fmt: skip
LOG = """\
[INFO] 10:00:00.000 [vpux-compiler] hello
[ERROR] 10:00:00.001 [vpux-compiler] Got Diagnostic at loc(fused<{name = "a_node", type = "MatMul"}>["a_node"]) : no
[ERROR] 10:00:00.002 [vpux-compiler] UnrollDMA Pass failed : The size of [64, 16] is not equal to 3
[ERROR] 10:00:00.003 [vpux-compiler] Failed Pass UnrollDMA on Operation loc(fused<{name = "main", type = "Func"}>["main"])
"""
BLOB, TRACE_FILE = Path("program.blob"), Path("compileTimeScheduleTrace.json")


def answer(text):
    print(f"staticllm-npu {text}", flush=True)


def ok(request):
    BLOB.write_text(request)
    TRACE_FILE.write_text(json.dumps(TRACE))
    answer('{"ok": true, "seconds": 0.25, "requirements": "npu=4000;t=4"}')


def refuse(request):
    print(LOG, flush=True)
    answer(json.dumps({"ok": False, "stage": "compile", "error": "Exception from a.cpp:1:\nCompilation failed\n\n"}))


def unknown_option(request):
    answer(json.dumps({"ok": False, "stage": "compile", "error": "from b.cpp:2:\nOption 'X' is not supported\n"}))


def no_library(request):
    answer(json.dumps({"ok": False, "stage": "compile", "error": 'Cannot load library "C:\\npu\\a.dll": 193\n'}))


def dies(request):
    print('loc(fused<{name = "b_node", type = "Add"}>["b_node"])', file=sys.stderr)
    print("LLVM ERROR: out of registers", file=sys.stderr, flush=True)
    os._exit(134)


def dies_in_its_answer(request):
    sys.stdout.write('staticllm-npu {"ok": tr')
    sys.stdout.flush()
    os._exit(3)


def hangs(request):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])  # holds the pipe as well
    time.sleep(300)


def endless_noise(request):
    while True:
        sys.stdout.write("noise " * 10_000 + "\n")


def endless_line(request):
    while True:
        sys.stdout.write("noise " * 10_000)


def bytes_of_anything(request):
    sys.stdout.buffer.write(b"\xff\xfe\x00 noise\n")
    sys.stdout.flush()
    ok(request)


def no_json(request):
    answer('{"ok": true')


def no_object(request):
    answer('["ok"]')


def no_verdict(request):
    answer('{"ok": 1}')


def deep(request):
    answer("[" * 100_000)


def no_blob(request):
    answer('{"ok": true}')


def empty_blob(request):
    BLOB.touch()
    TRACE_FILE.write_text(json.dumps(TRACE))
    answer('{"ok": true}')


def no_trace(request):
    BLOB.write_text(request)
    answer('{"ok": true}')


def link_as_blob(request):
    BLOB.symlink_to(__file__)
    TRACE_FILE.write_text(json.dumps(TRACE))
    answer('{"ok": true}')


def huge_trace(request):
    BLOB.write_text(request)
    with TRACE_FILE.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    answer('{"ok": true}')


def damaged_trace(request):
    BLOB.write_text(request)
    TRACE_FILE.write_text('{"traceEvents": [')
    answer('{"ok": true}')


def main():
    ways = sys.argv[1].split(",") if sys.argv[1] else []
    start = ways.pop(0) if ways and ways[0].startswith("start") else ""
    if start == "start-hangs":
        time.sleep(300)
    if start == "start-dies":
        print('wine: cannot find L"C:\\\\npu"', file=sys.stderr, flush=True)
        sys.exit(5)
    if start == "start-refuses":
        answer(json.dumps({"ok": False, "stage": "start", "error": "x.cpp:1\nCannot load library"}))
        sys.exit(1)
    answer(json.dumps({"ok": True, "openvino": "2026.4.1-fake", "compiler": "524292"}))
    for line in sys.stdin:
        globals()[ways.pop(0) if ways else "ok"](line.rstrip("\n"))


if __name__ == "__main__":
    main()
