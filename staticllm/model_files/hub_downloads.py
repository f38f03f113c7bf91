"""Brings models from Hugging Face into the cache that ``huggingface_hub`` keeps, through a process that can be ended.

Only commands in which a person writes the name of a model call this. Whatever the hub sends, or does not send, a download ends:
that process is ended when nothing arrives, or when it takes too much memory.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from staticllm.children.answers import check
from staticllm.children.child import Child, ChildLostError, python_command
from staticllm.core import OnProgress, ProgressEvent, Stage
from staticllm.errors import ConfigError, ModelError, quoted
from staticllm.model_files.hub import cache_folder, repository_folder
from staticllm.model_files.hub_errors import endpoint, offline
from staticllm.model_files.hub_files import HubFile, Repository, files_of_model
from staticllm.model_paths.hub_names import HubName
from staticllm.wire.messages import Kind, Message

CHILD = "staticllm.model_files.hub_child"
STAGE: Stage = "download"
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_SYMLINKS_WARNING": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_VERBOSITY": "critical", "HF_DEBUG": "0",
}  # fmt: skip
"""Variables of the process that downloads: it writes nothing itself."""
LOOK_SECONDS, MAX_SECONDS = 180.0, 7 * 86400.0
STALL_SECONDS = 120.0
"""Seconds without a new byte after which a download is given up."""
MAX_MEMORY = 4 << 30
"""Bytes of memory that a hub's answers may take."""
WATCH_SECONDS = 0.25
WORK_SECONDS = 0.5
"""Seconds of the processor within a stall that show that a digest is computed."""
SPARE_BYTES = 64 << 20
_MB = 1e6


def pull(name: HubName, say: Callable[[str], object], on_progress: OnProgress = lambda event: None) -> Path:
    """Return the local place of a model, which is downloaded as far as it is not in the cache: a folder, or a GGUF file.

    ``say`` gets a line with what is downloaded and how much, before anything is. A download that was interrupted is continued.

    Raises:
        ModelError: the hub has no such model, refuses it, cannot be reached, or sends something else; or the disk is too
            small.
        ConfigError: the package is missing.
    """
    import_hub()
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ModelError(offline(str(name)))
    if getattr(sys, "frozen", False):
        raise ModelError(f"{str(name)!r} cannot be downloaded by a frozen application: bring it with staticllm pull")
    with _hub_child() as child:
        repository = _look(child, name)
        files = files_of_model(repository)
        blobs = repository_folder(name.repo) / "blobs"
        missing = [file for file in files if not (blobs / file.digest).is_file()]
        _announce(repository, files, missing, blobs, say)
        begin = time.monotonic()
        with _Watch(child, blobs, missing, on_progress) as watch:
            body = {
                "action": "fetch", "repo": name.repo, "revision": name.revision, "commit": repository.commit,
                "files": [[file.name, file.size, file.digest, file.is_large] for file in files],
            }  # fmt: skip
            _ask(child, body, MAX_SECONDS, watch)
        on_progress(ProgressEvent(STAGE, 1, 1, time.monotonic() - begin))
    snapshot = repository_folder(name.repo) / "snapshots" / repository.commit
    return snapshot / files[0].name if files[0].name.endswith(".gguf") else snapshot


def import_hub() -> None:
    """Import the package that knows the hub and its cache.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import huggingface_hub  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is not installed: pip install "staticllm[hub]"') from None


def _look(child: Child, name: HubName) -> Repository:
    """Return what the repository of a name holds.

    Raises:
        ModelError: it cannot be had.
    """
    with _Watch(child, None, ()) as watch:
        body = {"action": "look", "repo": name.repo, "revision": name.revision}
        found = _ask(child, body, LOOK_SECONDS, watch)
    files = tuple(HubFile(*each) for each in found["files"])
    return Repository(name, found["commit"], files, found["config"].encode())


def _announce(
    repository: Repository, files: Sequence[HubFile], missing: Sequence[HubFile], blobs: Path, say: Callable[[str], object]
) -> None:  # fmt: skip
    """Say what will be downloaded.

    Raises:
        ModelError: the disk has too little space.
    """
    name = repository.name
    if not missing:
        say(f"{name} (commit {repository.commit[:7]}) is complete, {_gigabytes(sum(file.size for file in files))}")
        return
    there = sum(_size_of(blobs / f"{file.digest}.incomplete") for file in missing)
    needed = sum(file.size for file in missing) - there
    place = next(each for each in (blobs, *blobs.parents) if each.is_dir())
    free = shutil.disk_usage(place).free
    if needed + SPARE_BYTES > free:
        raise ModelError(
            f"{name} needs {_gigabytes(needed)} in {quoted(cache_folder())}, which has {_gigabytes(free)}: free space there, "
            "or set HF_HOME to a folder of a larger disk"
        )
    what = files[0].name if len(files) == 1 else f"{len(missing)} files"
    rest = f", {_gigabytes(there)} are here already" if there else ""
    say(f"downloading {name} (commit {repository.commit[:7]}): {what}, {_gigabytes(needed)}{rest}, from {endpoint()}")


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@contextmanager
def _hub_child() -> Iterator[Child]:
    """Start the process, and end it; what it has written is kept."""
    with tempfile.TemporaryDirectory(prefix="staticllm-hub-") as scratch:
        errors = Path(scratch) / "errors.txt"  # not quoted: it may hold what a hub sends
        with Child(python_command(CHILD), environment=QUIET, has_pipes=True, errors=errors) as child:
            yield child


def _ask(child: Child, body: dict[str, Any], seconds: float, watch: _Watch) -> Any:
    try:
        answer = child.ask(Message(Kind.MODEL, body=body), seconds)
    except TimeoutError:
        raise ModelError(_silent()) from None
    except ChildLostError as error:
        raise ModelError(watch.problem or f"the download ended (exit code {error.code}): pull it again") from None
    check(answer)
    return answer.body


def _silent() -> str:
    return f"{endpoint()} sends nothing more: check the network, and pull again, which goes on from there"


class _Watch:
    """Reports how much of some files has arrived, and ends a process for which nothing arrives or that takes too much memory.

    ``problem`` says why it was ended.
    """

    def __init__(
        self, child: Child, blobs: Path | None, files: Sequence[HubFile], on_progress: OnProgress = lambda event: None
    ) -> None:
        self.problem = ""
        self._child = child
        self._blobs = blobs
        self._files = files
        self._on_progress = on_progress
        self._total = max(1, round(sum(file.size for file in files) / _MB))
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="staticllm-download", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _run(self) -> None:
        last = (-1, 0.0)
        since = time.monotonic()
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(self._child.pid)
            while not self._is_done.wait(WATCH_SECONDS):
                here = (self._arrived(), process.cpu_times().user)
                if here[0] != last[0] or here[1] - last[1] > WORK_SECONDS:
                    last = here
                    since = time.monotonic()
                if process.memory_info().rss > MAX_MEMORY:
                    self._give_up(f"the answers of {endpoint()} have no end: check HF_ENDPOINT")
                elif time.monotonic() - since > STALL_SECONDS:
                    self._give_up(_silent())

    def _arrived(self) -> int:
        """Return the bytes that have arrived, and report them in megabytes."""
        if self._blobs is None:
            return 0
        found = sum(
            _size_of(self._blobs / file.digest) or _size_of(self._blobs / f"{file.digest}.incomplete")
            for file in self._files
        )
        part = min(round(found / _MB), self._total)
        self._on_progress(ProgressEvent(STAGE, part, self._total, 0.0))
        return found

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self._child.kill()
        self._is_done.set()
