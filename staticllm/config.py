"""The frozen config of how a model is laid out on a device and served; ``properties.py`` reads its property names."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from staticllm.core import KVType, ProgramLayout, ProgramMode
from staticllm.devices import type_name
from staticllm.errors import MAX_LEN, ConfigError, shown

if TYPE_CHECKING:
    from staticllm.adapters.adapter_set import AdapterSet

_ON, _OFF = ("YES", "TRUE", "1"), ("NO", "FALSE", "0")
MAX_SEQS = 64
MIN_KEY_BYTES = 16
Scheduler: TypeAlias = str
"""The name of a shipped policy."""
CacheMode = Literal["OPTIMIZE_SIZE", "OPTIMIZE_SPEED"]
Programs = Literal["auto", ProgramLayout]
PROGRAMS: tuple[Programs, ...] = ("auto", *get_args(ProgramLayout))
Crypt = Callable[[bytes], bytes]


@dataclass(frozen=True, kw_only=True)
class StaticLLMConfig:
    """How a model is laid out on a device and served. Lengths are in tokens.

    Args:
        max_prompt_len: The longest prompt (``MAX_PROMPT_LEN``).
        min_response_len: Tokens for which there is room after the longest prompt (``MIN_RESPONSE_LEN``).
        programs: ``separate`` compiles one static program per variant, ``shared`` one program for all, ``phases`` one for
            decoding and one for the rest, ``few_rows`` one for calls of few rows and one for the rest. ``auto`` depends on
            the device: separate on an NPU; on CPU and GPU phases if the weights are under 256 MiB, on a CPU few_rows if
            they are under 1 GiB and a probe finds that the second copy of them pays, else shared (``PROGRAMS``).
        prefill_rows: Sizes of the prefill programs, None for the default buckets (``PREFILL_ROWS``).
        prefill_kv_lens: KV slots that a prefill program can see; 0 is a program without past (``PREFILL_KV_LENS``).
        generate_kv_lens: KV slots that a generate program can see (``GENERATE_KV_LENS``).
        kv_cache_precision: Element type of the KV slots, None for the device's default (``KV_CACHE_PRECISION``).
        prefix_caching: Keep the KV slots of conversations and reuse the longest common prefix (``PREFIX_CACHING``).
        measure_costs: Measure the costs of calls while the pipeline is idle, after the first request. A request that arrives
            meanwhile waits for one call, which takes up to about 0.15 s (``MEASURE_COSTS``).
        max_num_seqs: Requests that decode together, None for 16, or for 4 if each variant has a program of its own
            (``MAX_NUM_SEQS``).
        kv_slots: KV slots that all requests share, None for those of 4 longest sequences, or of 2 if each variant has a program
            of its own (``KV_SLOTS``).
        kv_cache_gb: Memory of the KV slots in GB, instead of their number; at least one longest sequence (``KV_CACHE_GB``).
        host_kv_slots: KV slots in host memory, for swapped requests and for conversations kept for their prefix;
            None for 16 longest sequences (``HOST_KV_SLOTS``).
        prompt_lookup: Draft the tokens of every request by prompt lookup, also of those whose options do not ask for it
            (``PROMPT_LOOKUP``, docs/generation.md).
        memory_limit_mb: The most private memory in MB (10^6 bytes) that the process should have on a CPU, by estimate. If two
            programs would exceed it, there is one; if one would, loading fails. The host pool gets what is left. None for no
            limit (``MEMORY_LIMIT_MB``).
        max_waiting: Requests that may wait, however many answers or beams each has; further requests are refused with
            ``BusyError`` (``MAX_WAITING``).
        scheduler: The scheduling policy: ``dynamic``, ``fcfs``, ``prefill_first``, ``decode_first`` or ``chunked``
            (``SCHEDULER``, docs/scheduling.md).
        ttft_ms: Target for the time to first token, ms; None for as soon as possible (``TTFT_MS``).
        tpot_ms: Target for the time between two tokens, ms; None for a bound relative to a decode step (``TPOT_MS``).
        gap_ms: The longest time that a request which has begun should wait for a place among the running ones, ms; None for
            until one ends (``GAP_MS``, docs/scheduling.md).
        cache_dir: Folder of blob sets, from which programs that were compiled before are loaded; None for no cache
            (``CACHE_DIR``).
        cache_mode: ``OPTIMIZE_SIZE`` writes blobs without weights, if the device can, and reads the weights beside the IR;
            ``OPTIMIZE_SPEED`` writes whole blobs (``CACHE_MODE``).
        cache_limit_gb: Size of the cache, GB; the least recently used sets are removed (``CACHE_LIMIT_GB``).
        cache_encryption_callbacks: ``(encrypt, decrypt)``, from bytes to bytes, for blobs on disk
            (``CACHE_ENCRYPTION_CALLBACKS``).
        weights_decryption_callback: Decrypts the bytes of an encrypted weights file; blobs then contain the weights
            (``WEIGHTS_DECRYPTION_CALLBACK``).
        blob_path: A blob set that is loaded instead of compiling, or written with ``export_blob`` (``BLOB_PATH``).
        export_blob: Compile and write the set to ``blob_path``, or ``openvino_model.blob`` beside the IR (``EXPORT_BLOB``).
        integrity_key: Secret bytes of the application: blob sets and snapshots are signed with them (keyed BLAKE2b), and those
            with another signature or none are refused (``INTEGRITY_KEY``, docs/security.md).
        weights_path: The weights file, if it is not beside the IR (``WEIGHTS_PATH``).
        background_compile: Serve as soon as the fewest programs are compiled, and compile the others meanwhile. None for yes, but
            on a CPU only for the program for few rows, and only if no blobs are written (``BACKGROUND_COMPILE``).
        serve_from_cpu: Serve from the CPU until the device's programs are compiled (``SERVE_FROM_CPU``).
        device_properties: OpenVINO properties for every program.
        prefill_config: More properties for prefill programs (``PREFILL_CONFIG``).
        generate_config: More properties for generate programs (``GENERATE_CONFIG``).
        adapters: LoRA adapters, None for none. Pipelines make it of ``adapters=AdapterConfig(...)``.

    Raises:
        ConfigError: a value is impossible.
    """

    max_prompt_len: int = 1024
    min_response_len: int = 128
    programs: Programs = "auto"
    prefill_rows: tuple[int, ...] | None = None
    prefill_kv_lens: tuple[int, ...] | None = None
    generate_kv_lens: tuple[int, ...] | None = None
    kv_cache_precision: KVType | None = None
    prefix_caching: bool = True
    measure_costs: bool = True
    max_num_seqs: int | None = None
    kv_slots: int | None = None
    kv_cache_gb: float | None = None
    host_kv_slots: int | None = None
    prompt_lookup: bool = False
    memory_limit_mb: int | None = None
    max_waiting: int = 128
    scheduler: Scheduler = "dynamic"
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    gap_ms: float | None = 500.0
    cache_dir: str | None = None
    cache_mode: CacheMode = "OPTIMIZE_SIZE"
    cache_limit_gb: float = 20.0
    cache_encryption_callbacks: tuple[Crypt, Crypt] | None = field(default=None, repr=False)
    weights_decryption_callback: Crypt | None = field(default=None, repr=False)
    blob_path: str | None = None
    export_blob: bool = False
    integrity_key: bytes | None = field(default=None, repr=False)
    weights_path: str | None = None
    background_compile: bool | None = None
    serve_from_cpu: bool = False
    device_properties: Mapping[str, object] = field(default_factory=dict, hash=False)
    prefill_config: Mapping[str, object] = field(default_factory=dict, hash=False)
    generate_config: Mapping[str, object] = field(default_factory=dict, hash=False)
    adapters: AdapterSet | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_blobs()
        for name in ("max_prompt_len", "min_response_len"):
            object.__setattr__(self, name, whole(name.upper(), getattr(self, name), 1))
        self._check_serving()
        one_of("PROGRAMS", self.programs, PROGRAMS)
        if self.kv_cache_precision is not None:
            object.__setattr__(self, "kv_cache_precision", _kv_type(self.kv_cache_precision))
        if self.adapters is not None:
            _check_adapters(self.adapters)
        for name in ("device_properties", "prefill_config", "generate_config"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{name.upper()}={shown(getattr(self, name))}: must be a dict of device properties")
        for name, least in (("prefill_rows", 1), ("prefill_kv_lens", 0), ("generate_kv_lens", 1)):
            object.__setattr__(self, name, _buckets(name.upper(), getattr(self, name), least))
        for rows in self.prefill_rows or ():
            if rows > self.max_prompt_len:
                raise ConfigError(
                    f"PREFILL_ROWS has {rows}, more than MAX_PROMPT_LEN={self.max_prompt_len}: leave it out"
                )
        for name in ("prefill_kv_lens", "generate_kv_lens"):
            for kv_len in getattr(self, name) or ():
                if kv_len > self.max_seq_len:
                    raise ConfigError(
                        f"{name.upper()} has {kv_len}, more than MAX_PROMPT_LEN + MIN_RESPONSE_LEN = {self.max_seq_len}: "
                        "leave it out or raise a length"
                    )

    def _check_blobs(self) -> None:
        for name in ("cache_dir", "blob_path", "weights_path"):
            object.__setattr__(self, name, _path(name.upper(), getattr(self, name)))
        for name in (item.name for item in fields(self) if str(item.type).startswith("bool")):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, switch(name.upper(), getattr(self, name)))
        mode = getattr(self.cache_mode, "name", self.cache_mode)  # OpenVINO has an enum for it
        one_of("CACHE_MODE", mode, get_args(CacheMode))
        object.__setattr__(self, "cache_mode", mode)
        limit = self.cache_limit_gb
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
            raise ConfigError(f"CACHE_LIMIT_GB={shown(limit)}: must be a number of GB, more than 0")
        decrypt = self.weights_decryption_callback
        if decrypt is not None and not callable(decrypt):
            raise ConfigError(f"WEIGHTS_DECRYPTION_CALLBACK={decrypt!r}: must be a function from bytes to bytes")
        key = self.integrity_key
        if key is not None and (not isinstance(key, bytes) or len(key) < MIN_KEY_BYTES):
            raise ConfigError(
                f"INTEGRITY_KEY: must be at least {MIN_KEY_BYTES} bytes (for example os.urandom(32)), or be left out"
            )
        callbacks = self.cache_encryption_callbacks
        if callbacks is not None:
            is_pair = isinstance(callbacks, (tuple, list)) and len(callbacks) == 2 and all(map(callable, callbacks))
            if not is_pair:
                raise ConfigError(
                    "CACHE_ENCRYPTION_CALLBACKS: must be two functions (encrypt, decrypt) from bytes to bytes"
                )
            object.__setattr__(self, "cache_encryption_callbacks", tuple(callbacks))

    def _check_serving(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("kv_slots", 1),
            ("host_kv_slots", 0),
            ("max_waiting", 1),
            ("memory_limit_mb", 1),
        ):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole(name.upper(), getattr(self, name), least, 1 << 24))
        if self.max_num_seqs is not None and self.max_num_seqs > MAX_SEQS:
            raise ConfigError(f"MAX_NUM_SEQS={self.max_num_seqs}: a step holds at most {MAX_SEQS} sequences; lower it")
        if self.kv_slots is not None and self.kv_slots < self.max_seq_len:
            raise ConfigError(
                f"KV_SLOTS={self.kv_slots}: one sequence can have MAX_PROMPT_LEN + MIN_RESPONSE_LEN = {self.max_seq_len} slots; "
                "raise KV_SLOTS or lower a length"
            )
        size = self.kv_cache_gb
        if size is not None and (
            isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 < size < MAX_LEN
        ):
            raise ConfigError(f"KV_CACHE_GB={shown(size)}: must be a number of GB, more than 0")
        if size is not None and self.kv_slots is not None:
            raise ConfigError(
                f"KV_CACHE_GB={size} and KV_SLOTS={self.kv_slots}: both set the same memory, give only one"
            )
        one_of("SCHEDULER", self.scheduler, schedulers())
        for name in ("ttft_ms", "tpot_ms", "gap_ms"):
            object.__setattr__(self, name, _milliseconds(name.upper(), getattr(self, name)))

    @property
    def max_seq_len(self) -> int:
        """The KV slots that one sequence can have, of prompt and response together."""
        return self.max_prompt_len + self.min_response_len

    def num_seqs(self, mode: ProgramMode) -> int:
        """Return the number of sequences that decode together."""
        return self.max_num_seqs or (16 if mode == "shared" else 4)

    def num_kv_slots(self, mode: ProgramMode) -> int:
        """Return the number of KV slots in the arena."""
        longest = min(self.num_seqs(mode), 4 if mode == "shared" else 2)
        return self.kv_slots or longest * self.max_seq_len

    @property
    def num_host_slots(self) -> int:
        """The number of KV slots in the host pool."""
        return 16 * self.max_seq_len if self.host_kv_slots is None else self.host_kv_slots

    @property
    def non_default(self) -> frozenset[str]:
        """The names of the fields whose values differ from their defaults."""
        return frozenset(item.name for item in fields(self) if getattr(self, item.name) != _default_of(item))


@cache
def schedulers() -> tuple[str, ...]:
    """Return the names of the shipped policies, the default first: the modules in ``pipelines/scheduling/policies``."""
    folder = import_module("staticllm.pipelines.scheduling.policies")
    found = sorted(each.name for each in pkgutil.iter_modules(folder.__path__))
    return tuple(sorted(found, key=lambda name: name != StaticLLMConfig.scheduler))


def as_whole(value: Any) -> Any:
    """Return a float that is a whole number as an int, and other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole(name: str, value: object, least: int, most: int = MAX_LEN) -> int:
    """Return ``value`` as an int from ``least`` to ``most``. A float may be given if it is whole, as 128.0 is.

    Raises:
        ConfigError: the value is not a whole number, or is outside the limits; the message names both limits.
    """
    try:
        number = as_whole(value).__index__()
    except (AttributeError, TypeError):
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= most:
        limits = f"from {least} to {most}" if most <= MAX_LEN else f"of {least} or more"
        raise ConfigError(f"{name}={shown(value)}: must be a whole number {limits}")
    return int(number)


def _path(name: str, value: object) -> str | None:
    if value is None:
        return None
    try:
        path = os.fsdecode(cast(Any, value))
    except TypeError:
        path = ""
    if not path or "\0" in path:
        raise ConfigError(f"{name}={shown(value)}: must be the path of a file or folder")
    return path


def switch(name: str, value: object) -> bool:
    """Return a boolean value, in any form that OpenVINO reads: ``True``, ``"YES"``, ``"true"``, ``"1"``.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, str) and value.upper() in (*_ON, *_OFF):
        return value.upper() in _ON
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)}: must be YES or NO")
    return value


def _default_of(item: Field[Any]) -> Any:
    return item.default if item.default is not MISSING else {}


def _milliseconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MAX_LEN * 1e3:
        raise ConfigError(f"{name}={shown(value)}: must be milliseconds, more than 0")
    return float(value)


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Check that ``value`` is one of ``allowed``, of the same type.

    Raises:
        ConfigError: the value is not; the message lists ``allowed``.
    """
    if not any(value is item or (type(value) is type(item) and value == item) for item in allowed):
        raise ConfigError(f"{name}={shown(value)}: must be one of {', '.join(map(repr, allowed))}")


def _kv_type(value: object) -> KVType:
    name = type_name(value).lower()
    if name not in get_args(KVType):
        raise ConfigError(f"KV_CACHE_PRECISION={name!r}: must be one of {', '.join(get_args(KVType))}")
    return cast(KVType, name)


def _check_adapters(value: object) -> None:
    from staticllm.adapters.adapter_set import (
        AdapterSet,  # it reads matrices with numpy, which `staticllm --help` does not need
    )

    if not isinstance(value, AdapterSet):
        raise ConfigError(f"adapters is a {type(value).__name__}: must be an openvino_genai.AdapterConfig")


def _buckets(name: str, value: object, least: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    value = [value] if isinstance(value, int) else value
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{name}={shown(value)}: must be a list of whole numbers")
    buckets = tuple(sorted({whole(name, item, least) for item in cast(Any, value)}))
    if not buckets:
        raise ConfigError(f"{name} is empty: give at least one size, or leave it out for the default")
    return buckets
