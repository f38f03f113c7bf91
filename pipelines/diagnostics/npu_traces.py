"""Writes the schedules of compiled parts as Chrome traces, one file per part, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from staticllm.errors import ConfigError, quoted
from staticllm.system.files import private_folder_in

from ..loading.npu_target import CompiledForNPU

_OTHER = re.compile(r"[^A-Za-z0-9]+")
_REMEDY = "give another folder with --trace"


def check_new_folder(folder: Path) -> Path:
    """Return a folder that does not exist and can be made, before minutes of compiling.

    Raises:
        ConfigError: it exists, or cannot be made.
    """
    try:
        if os.path.lexists(folder):
            raise ConfigError(f"{quoted(folder)} exists already: {_REMEDY}, or remove it")
        folder.mkdir()
        folder.rmdir()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _not_written(folder, error) from None
    return folder


def write_traces(parts: Iterable[CompiledForNPU], folder: Path) -> tuple[Path, ...]:
    """Write the traces of parts to a new folder, all or none, and return the files, in the order of the parts.

    Raises:
        ConfigError: the folder exists, or cannot be written.
    """
    names = list[str]()
    try:
        scratch = private_folder_in(folder.parent, f".{folder.name}.")
        try:
            for number, part in enumerate(parts):
                assert part.program.trace is not None, "the target asks for schedules"
                names.append(f"{number:02}-{_OTHER.sub('-', part.what).strip('-')}.json")
                (scratch / names[-1]).write_bytes(part.program.trace)
            scratch.chmod(0o755)
            scratch.rename(folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    except OSError as error:
        raise _not_written(folder, error) from None
    return tuple(folder / name for name in names)


def _not_written(folder: Path, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else None
    return ConfigError(f"{quoted(str(folder)[:200])} cannot be written ({reason or error}): {_REMEDY}")
