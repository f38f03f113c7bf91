"""Keeps what was measured on this machine in small files: costs of calls beside a blob set, and probes beside a cache.

They are only estimates, and another user may have written them. A file that is missing, damaged, too large, or made by another
machine, version or model counts as empty; a file that cannot be written is left out.
"""

from __future__ import annotations

import hmac
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import openvino as ov
from filelock import Timeout

from staticllm.system.file_lock import acquire
from staticllm.system.files import read_regular, whole_file
from staticllm.system.posix import affinity
from staticllm.wire.file_stamp import stamp_of

from ..compiling.compile import CompileOptions, V
from .blob_set import COSTS, LOCK, SCRATCH, json_properties
from .fingerprint import Fingerprint, bytes_digest, file_digest, machine_values
from .manifest import MAX_ENTRIES, cost_from_json, cost_to_json

PROBES = "staticllm-probes-"
"""Prefix of the probe files in a cache folder."""
DIGESTS = "staticllm-digests.json"
"""The file of ``digests_in``."""
STEP_NS = 2 * 10**9
"""The longest step in which file systems count times: a younger file may change without another stamp."""
PROOFS = "proofs.json"
"""The file of ``CostsPlace.proofs``."""
SCHEMA = 1
MAX_BYTES = 4 << 20
MAX_PROBES = 256
MAX_AGE_SECONDS = 30 * 24 * 3600.0
"""After this time probes run again: the machine may have been busy, or have changed."""
SECONDS = (1e-6, 600.0)
"""Plausible range of a call's duration, in seconds."""
CHANGE = 0.1
"""Relative change of a cost above which the file is rewritten."""


@dataclass(frozen=True)
class MeasurementFile:
    """A file of measurements. ``subject``: a digest of what was measured, and on which machine. ``key``: signs the file."""

    path: Path
    subject: str
    key: bytes = b""

    def read(self) -> dict[str, Any]:
        """Return the measurements; none if the file is not there, is damaged, has another subject or another signature."""
        try:
            data = json.loads(read_regular(self.path, MAX_BYTES, follow=False))
            content = data["content"]
            digest = data["digest"]
            is_ours = content["schema"] == SCHEMA and content["subject"] == self.subject
            if is_ours and hmac.compare_digest(str(digest).encode(), self._digest(content).encode()):
                return dict(content["measured"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError):
            return {}
        return {}

    def write(self, measured: Mapping[str, Any]) -> bool:
        """Replace the file as a whole, and return whether that was possible. No folder is created."""
        content = {"schema": SCHEMA, "subject": self.subject, "measured": measured}
        stored = json.dumps({"digest": self._digest(content), "content": content}, separators=(",", ":")).encode()
        try:
            with whole_file(self.path, prefix=SCRATCH) as file:
                file.write(stored)
        except OSError:
            return False
        return True

    def _digest(self, content: Mapping[str, Any]) -> str:
        return bytes_digest(json.dumps(content, sort_keys=True).encode(), self.key)


@dataclass(frozen=True)
class CostsPlace:
    """The folder of a blob set, which may not exist yet, and what its programs are made for. ``key`` signs the set."""

    folder: Path
    fingerprint: Fingerprint
    key: bytes = b""

    @property
    def proofs(self) -> MeasurementFile:
        """What an earlier load has proved of the lowered model."""
        subject = _digest_of({"fingerprint": self.fingerprint.to_json(), "proofs": True})
        return MeasurementFile(self.folder / PROOFS, subject, self.key)

    def costs_of(self, kind: type[V], options: CompileOptions) -> KeptCosts[V]:
        """Return the costs of programs that were compiled with ``options``, whose variants are of type ``kind``."""
        made = {
            "layout": options.layout,
            "few_rows": options.few_rows,
            "properties": {part: _without_cache_mode(values) for part, values in options.properties.items()},
        }
        subject = _digest_of({"fingerprint": self.fingerprint.to_json(), "cores": usable_cores(), **made})
        return KeptCosts(kind, MeasurementFile(self.folder / COSTS, subject, self.key), self.folder / LOCK)


def _without_cache_mode(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return properties but for where weights are stored: that changes no cost."""
    return {name: value for name, value in json_properties(properties).items() if name != "CACHE_MODE"}


class KeptCosts(Generic[V]):
    """The seconds per call of each variant, as measured by this process or an earlier one while its engine rested."""

    def __init__(self, kind: type[V], file: MeasurementFile, lock: Path) -> None:
        self._kind: type[V] = kind
        self._file = file
        self._lock = lock
        self._stored: dict[V, float] = {}

    def read(self) -> dict[V, float]:
        """Return the stored seconds per call, also of variants that this pipeline does not have."""
        self._stored = _costs(self._file.read().get("costs"), self._kind)
        return dict(self._stored)

    def write(self, costs: Mapping[V, float]) -> None:
        """Store seconds per call if some are new or have changed; not while another process writes the set."""
        if not any(_has_changed(self._stored.get(variant), seconds) for variant, seconds in costs.items()):
            return
        if not self._file.path.parent.is_dir():
            return
        try:
            with acquire(self._lock, 0):
                if self._file.write({"costs": [cost_to_json(variant, seconds) for variant, seconds in costs.items()]}):
                    self._stored = dict(costs)
        except (OSError, RuntimeError, Timeout):  # RuntimeError: the lock is a link to itself, or the disk has no locks
            return


class KeptProbes:
    """The times of probes, by question: a text that names everything that was timed, except the machine."""

    def __init__(self, file: MeasurementFile) -> None:
        self._file = file
        self._times = {name: seconds for name, seconds in file.read().items() if _are_times(seconds)}

    def times(self, question: str, count: int) -> list[float] | None:
        """Return the stored seconds of the ``count`` candidates of a question; None if there are none."""
        found = self._times.get(_digest_of(question))
        return list(found) if found is not None and len(found) == count else None

    def add(self, question: str, seconds: Sequence[float]) -> None:
        """Add the seconds of a question's candidates, and write the file. Beyond ``MAX_PROBES``, the oldest are dropped."""
        self._times[_digest_of(question)] = list(seconds)
        with suppress(OSError):  # a folder that cannot be made keeps nothing
            self._file.path.parent.mkdir(parents=True, exist_ok=True)
        self._file.write(dict(list(self._times.items())[-MAX_PROBES:]))


def probes_in(folder: Path, core: ov.Core, device: str, key: bytes = b"") -> KeptProbes:
    """Return the probes that a cache folder keeps for this machine, until they are old. ``key`` signs them."""
    subject = _digest_of({**machine_values(core, device), "cores": usable_cores()})
    signed = f"-{bytes_digest(b'', key)[:8]}" if key else ""
    path = folder / f"{PROBES}{subject[:12]}{signed}.json"
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > MAX_AGE_SECONDS:
            path.unlink()
    return KeptProbes(MeasurementFile(path, subject, key))


class KeptDigests:
    """The digests of files, by path and stamp: a file with the stamp that it had when it was read is not read again."""

    def __init__(self, file: MeasurementFile) -> None:
        self._file = file
        self._known = file.read()

    def of(self, path: Path) -> str:
        """Return what ``file_digest`` does.

        Raises:
            ModelError: the file cannot be read.
        """
        name = str(path.absolute())
        before = _stamp(path)  # size, time of the content and of the change, number
        known = self._known.get(name)
        if before and isinstance(known, list) and known[1:] == before and isinstance(known[0], str):
            return known[0]
        digest = file_digest(path)
        if before and before == _stamp(path) and before[2] and max(before[1:3]) < time.time_ns() - STEP_NS:
            self._known = {**dict(list(self._known.items())[-MAX_PROBES:]), name: [digest, *before]}
            self._file.write(self._known)
        return digest


def _stamp(path: Path) -> list[int]:
    """Return the stamp of a file; an empty one if there is no file."""
    try:
        return list(stamp_of(path))
    except OSError:
        return []


def digests_in(folder: Path, key: bytes = b"") -> KeptDigests:
    """Return the digests of files that a cache folder keeps. ``key`` signs them."""
    return KeptDigests(MeasurementFile(folder / DIGESTS, "digests of files", key))


def usable_cores() -> int:
    """Return the number of processors that this process may use."""
    return len(affinity() or ()) or os.cpu_count() or 1


def _digest_of(value: object) -> str:
    return bytes_digest(json.dumps(value, sort_keys=True).encode())


def _has_changed(before: float | None, now: float) -> bool:
    return before is None or abs(now - before) > CHANGE * before


def _costs(stored: object, kind: type[V]) -> dict[V, float]:
    if not isinstance(stored, list) or len(stored) > MAX_ENTRIES:
        return {}
    try:
        costs = dict(cost_from_json(cost, kind) for cost in stored)
    except (ValueError, TypeError, KeyError, OverflowError):
        return {}
    return costs if all(map(_is_possible, costs.values())) else {}


def _are_times(seconds: object) -> bool:
    return isinstance(seconds, list) and len(seconds) <= MAX_PROBES and all(map(_is_possible, seconds))


def _is_possible(seconds: object) -> bool:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    return is_number and SECONDS[0] <= seconds <= SECONDS[1]  # type: ignore[operator]
