"""What messages say on Windows: paths as they are typed, and the runtime that a new computer lacks."""

from __future__ import annotations

import re

import pytest

import staticllm
from staticllm.errors import missing_runtime, quoted

LOAD_FAILED = "DLL load failed while importing py_openvino_genai: The specified module could not be found."
CODE = ("staticllm", "pipelines", "compiler_passes", "kvcache")


@pytest.mark.parametrize(
    "path", [r"C:\models\chat", r"\\server\share\chat", "owner/name", "/models/chat", "model with blanks", "α/ü"]
)
def test_a_path_is_shown_as_it_was_typed(path):
    assert quoted(path) == f"'{path}'"


@pytest.mark.parametrize("name", ["a\nError: b", "a\x1b[2J", "a\rb", "a\x00b", "a\ud800b", "it's"])
def test_a_hostile_name_stays_on_its_line(name):
    shown = quoted(name)
    assert shown.isprintable()
    assert len(shown.splitlines()) == 1


def test_no_message_shows_a_path_by_repr(root):
    """``repr`` doubles the backslashes of Windows: ``quoted`` does not."""
    by_repr = re.compile(r"\{(str\([^{}]*\)(\[:\d+\])?|os\.fspath\([^{}]*\)|\w*(path|folder|directory|file))!r\}")
    values = ("str(value)", "str(name)", "str(start)")  # that are no paths, and the places in a model's graph
    found = [
        f"{path.relative_to(root)}: {match[0]}"
        for room in CODE
        for path in (root / room).rglob("*.py")
        for match in by_repr.finditer(path.read_text(encoding="utf-8"))
        if not match[0].startswith(tuple(f"{{{value}" for value in values))
    ]
    assert found == []


def test_an_import_that_lacks_microsofts_runtime_says_what_to_install(monkeypatch):
    def fails(name):
        raise ImportError(LOAD_FAILED, name="py_openvino_genai")

    monkeypatch.setattr(staticllm, "import_module", fails)
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(ImportError, match=r"specified module could not be found\.$"):
        _ = staticllm.StaticLLMPipeline
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(ImportError, match="python -m pip install msvc-runtime`, or install Microsoft's") as error:
        _ = staticllm.StaticLLMPipeline
    assert "\n" not in str(error.value)
    assert missing_runtime(ImportError("No module named 'numpy'")) is None


ONE_SYSTEM = re.compile(
    r"os\.(fork|forkpty|get\w*[ug]id|set\w*[ug]id|setsid|killpg|[gs]etpgid|register_at_fork|sched_\w+|mkfifo|f?chown|fchmod|statvfs"
    r"|memfd_create|waitpid|posix_\w+|startfile|getloadavg|sysconf)\b"
    r"|import (fcntl|resource|pwd|grp|termios|tty|msvcrt|winreg|_winapi)\b|signal\.SIG(KILL|HUP|USR[12]|CONT|STOP|CHLD|BREAK)"
)
STANDALONE = ("staticllm/system/", "staticllm/wire/", "staticllm/attach/", "staticllm/export/tool.py")
"""Where they may be: one room for the library, and what programs without staticllm load."""


def test_functions_that_one_system_lacks_are_in_one_room(root):
    found = [
        f"{name}: {match[0]}"
        for room in CODE
        for path in (root / room).rglob("*.py")
        if not (name := path.relative_to(root).as_posix()).startswith(STANDALONE)
        for match in ONE_SYSTEM.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
