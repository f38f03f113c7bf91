"""Turns what the NPU compiler wrote into one line: what was compiled, the pass that failed, its reason, and the node."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from pathlib import Path

from staticllm.children.child import LAST_BYTES, ChildLostError

MAX_LOG = 256 << 10
"""The most bytes of a log that are looked at, its last."""
MAX_LINES = 500
MAX_LINE = 2000
MAX_REASON = 240
_ERROR = re.compile(r"^\[ERROR\] [0-9:.]+ (?:\[[\w-]+\] )?(.*)$", re.MULTILINE)
_PASS_FAILED = re.compile(r"^(\w+) Pass failed : (.*)$")
_FAILED_PASS = re.compile(r"^Failed Pass (\w+) on Operation")
_NODE = re.compile(r'loc\(fused<\{name = "([^"]{1,200})"')
_WHOLE = "main"
"""The name of the compiler's function around all nodes."""


class Log:
    """What a child wrote for the current program beside its answers: lines of stdout, and the file that takes its stderr."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin = 0
        self._lines: deque[str] = deque(maxlen=MAX_LINES)

    def begin(self) -> None:
        self._begin = self.path.stat().st_size if self.path.is_file() else 0
        self._lines.clear()

    def add(self, line: str) -> None:
        """Note a line of stdout."""
        self._lines.append(line[:MAX_LINE])

    def text(self) -> str:
        """Return the lines of stdout, the last ``MAX_LINES``, and those of stderr, at most the last ``MAX_LOG`` bytes."""
        said = ""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(self._begin, size - MAX_LOG))
            said = file.read(MAX_LOG).decode("utf-8", "replace")
        return "\n".join([*self._lines, said])


def refused_text(job: str, said: str, log: Log) -> str:
    """Return the message about a model that the compiler refused.

    Args:
        said: The reason of its answer, if its log has none.
    """
    text = log.text()
    errors = [found.strip() for found in _ERROR.findall(text)]
    failed = next((found[1] for found in map(_FAILED_PASS.match, errors) if found), "")
    reason = next((line for line in errors if not _FAILED_PASS.match(line)), said)
    found = _PASS_FAILED.match(reason)
    if found is not None:
        failed = found[1]
        reason = found[2]
    node = next((name for name in _NODE.findall(text) if name != _WHOLE), "")
    where = (f", in its pass {failed}" if failed else "") + (f", at the node {_shown(node)}" if node else "")
    return (
        f"the NPU compiler refused {job}{where}: {_shown(reason)}; another form or platform may compile (docs/npu.md)"
    )


def lost_text(what: str, error: ChildLostError, log: Log, remedy: str) -> str:
    """Return the message about a compiler's process that has ended."""
    text = log.text()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    node = next((name for name in reversed(_NODE.findall(text)) if name != _WHOLE), "")
    said = f": {_shown(lines[-1][:LAST_BYTES])}" if lines else ""
    return f"{what}, {error}{f', at the node {_shown(node)}' if node else ''}{said}; {remedy}"


def _shown(text: str) -> str:
    """Return a text of the compiler as a part of one line."""
    return "".join(each if each.isprintable() else "?" for each in text[:MAX_REASON])
