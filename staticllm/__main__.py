"""The ``staticllm`` command, and ``python -m staticllm``."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line; the entry point of the console script. Ctrl-C while it is imported ends it quietly."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, and stays so
        signal.signal(signal.SIGINT, _leave)
    from staticllm.cli import main as run

    signal.signal(signal.SIGINT, before)
    try:
        run()
    except SystemExit as end:
        if "openvino" not in sys.modules:
            raise
        from staticllm.system.long_calls import exit_process

        exit_process(end.code)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
