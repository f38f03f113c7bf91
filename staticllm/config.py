"""The frozen config of how a model is laid out on a device and served; ``properties.py`` reads its property names."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, TypeVar, cast, get_args

from staticllm.core import CrossWindows, KVType, ProgramLayout, ProgramMode
from staticllm.devices import type_name
from staticllm.errors import MAX_LEN, ConfigError, shown
from staticllm.model_paths.path_kind import MODEL_XML

if TYPE_CHECKING:
    from staticllm.adapters.adapter_set import AdapterSet

_ON, _OFF = ("YES", "TRUE", "1"), ("NO", "FALSE", "0")
MAX_SEQS = 64
MIN_KEY_BYTES = 16
Scheduler: TypeAlias = str
"""The name of a shipped policy. ``pipelines/scheduling/policies`` knows which there are."""
CacheMode = Literal["OPTIMIZE_SIZE", "OPTIMIZE_SPEED"]
Programs = Literal["auto", ProgramLayout]
PROGRAMS: tuple[Programs, ...] = ("auto", *get_args(ProgramLayout))
Crypt = Callable[[bytes], bytes]


T = TypeVar("T")
Parser = Callable[[str, Any], Any]
"""Returns the value of a field as the config keeps it, from the name of its property, for messages, and the value given.

Raises ``ConfigError`` if the value is impossible; the message has the name, the value, and what is allowed.
"""


def as_whole(value: Any) -> Any:
    """Return a float that is a whole number, and an integer of numpy, as an int; other values unchanged."""
    return int(value) if is_whole(value) or (isinstance(value, float) and value.is_integer()) else value


def is_whole(value: object, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """Return whether a value is a whole number from ``least`` to ``most``; ``True`` is none, numpy's integers are."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= cast(int, value) <= most


def whole(name: str, value: object, least: int, most: int = MAX_LEN) -> int:
    """Return ``value`` as an int from ``least`` to ``most``. A float may be given if it is whole, as 128.0 is.

    Raises:
        ConfigError: the value is not a whole number, or is outside the limits; the message names both limits.
    """
    try:
        number = as_whole(value).__index__()
    except Exception:  # the value is no number, or of a caller's class
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= most:
        limits = f"from {least} to {most}" if most <= MAX_LEN else f"of {least} or more"
        raise ConfigError(f"{name}={shown(value)}: must be a whole number {limits}")
    return int(number)


def as_float(value: object) -> float | None:
    """Return a number as a float; None if it is no number, or is one that no float holds. ``True`` is none."""
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def _path(name: str, value: Any) -> str:
    try:
        path = os.fsdecode(value)
    except Exception:  # it is no path, or of a caller's class
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


def _positive(name: str, value: Any, unit: str, most: float = math.inf) -> float:
    """Return a number above 0 and up to ``most``. ``unit`` says of what, for the message."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise ConfigError(f"{name}={shown(value)}: must be {unit}, more than 0")
    return value


def _milliseconds(name: str, value: Any) -> float | None:
    return None if value is None else float(_positive(name, value, "milliseconds", MAX_LEN * 1e3))


def one_of(name: str, value: T, allowed: tuple[object, ...]) -> T:
    """Return ``value``, which must be one of ``allowed``, of the same type.

    Raises:
        ConfigError: the value is not; the message lists ``allowed``.
    """
    if not any(value is item or (type(value) is type(item) and value == item) for item in allowed):
        raise ConfigError(f"{name}={shown(value)}: must be one of {', '.join(map(repr, allowed))}")
    return value


def _num_seqs(name: str, value: Any) -> int:
    found = whole(name, value, 1, 1 << 24)
    if found > MAX_SEQS:
        raise ConfigError(f"{name}={found}: a step holds at most {MAX_SEQS} sequences; lower it")
    return found


def _kv_type(name: str, value: Any) -> str:
    found = type_name(value).lower()
    if found not in get_args(KVType):
        raise ConfigError(f"{name}={shown(found)}: must be one of {', '.join(get_args(KVType))}")
    return found


def _cache_mode(name: str, value: Any) -> Any:
    return one_of(name, getattr(value, "name", value), get_args(CacheMode))  # OpenVINO has an enum for it


def _crypts(name: str, value: Any) -> tuple[Crypt, Crypt]:
    if not (isinstance(value, (tuple, list)) and len(value) == 2 and all(map(callable, value))):
        raise ConfigError(f"{name}: must be two functions (encrypt, decrypt) from bytes to bytes")
    return value[0], value[1]


def _crypt(name: str, value: Any) -> Any:
    if not callable(value):
        raise ConfigError(f"{name}={shown(value)}: must be a function from bytes to bytes")
    return value


def _key(name: str, value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{name}: must be at least {MIN_KEY_BYTES} bytes (for example os.urandom(32)), or be left out"
        )
    return value


def _properties(name: str, value: Any) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={shown(value)}: must be a dict of device properties")
    return value


def _adapters(name: str, value: Any) -> Any:
    from staticllm.adapters.adapter_set import AdapterSet  # reads with numpy, which `staticllm --help` does not need

    if not isinstance(value, AdapterSet):
        raise ConfigError(f"{name.lower()} is a {type(value).__name__}: must be an openvino_genai.AdapterConfig")
    return value


def _cross_windows(name: str, value: Any) -> CrossWindows:
    if not isinstance(value, CrossWindows):
        raise ConfigError(f"{name.lower()} is a {type(value).__name__}: only StaticWhisperPipeline sets it")
    return value


def _sizes(name: str, value: Any, least: int) -> tuple[int, ...]:
    """Return one size, or several, from ``least``: sorted, each once."""
    try:
        sizes = [value] if isinstance(value, int) else list(value)
    except Exception:  # it has no items, or is of a caller's class
        sizes = None
    if sizes is None or isinstance(value, str):
        raise ConfigError(f"{name}={shown(value)}: must be a list of whole numbers")
    found = tuple(sorted({whole(name, item, least) for item in sizes}))
    if not found:
        raise ConfigError(f"{name} is empty: give at least one size, or leave it out for the default")
    return found


def _scheduler(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name}={shown(value)}: must be the name of a shipped policy")
    return str.__str__(value)


def _row(default: T, parser: Parser, **options: bool) -> T:
    """Return the field of one property. If its default is None, None is not parsed."""
    return field(default=default, metadata={"parser": parser}, **options)  # type: ignore[call-overload,no-any-return]


def _properties_row() -> Mapping[str, object]:
    return field(default_factory=dict, hash=False, metadata={"parser": _properties})


def _default(item: Field[Any]) -> Any:
    return {} if item.default is MISSING else item.default


@dataclass(frozen=True, kw_only=True)
class StaticLLMConfig:
    """How a model is laid out on a device and served. Lengths are in tokens.

    Raises:
        ConfigError: a value is impossible.
    """

    max_prompt_len: int = _row(1024, partial(whole, least=1))
    """The longest prompt (``MAX_PROMPT_LEN``). On a CPU, if no length is given, the model's positions and the memory decide."""
    min_response_len: int = _row(128, partial(whole, least=1))
    """Tokens for which there is room after the longest prompt (``MIN_RESPONSE_LEN``). On a CPU, if no length is given, one."""
    programs: Programs = _row("auto", partial(one_of, allowed=PROGRAMS))
    """``separate`` compiles one static program per variant, ``blocks`` the same as chains of blocks that share the weights,
    ``shared`` one program for all, ``phases`` one for decoding and one for the rest, ``few_rows`` one for calls of few rows and
    one for the rest, ``paged`` one whose attention works on pages of slots. ``auto`` depends on the device: blocks on an NPU;
    paged on a CPU; phases on a GPU if the weights are under 256 MiB, else shared. What cannot be in pages has phases on a CPU,
    too, or few_rows, if the weights are under 1 GiB and a probe finds that the second copy of them pays (``PROGRAMS``)."""
    prefill_rows: tuple[int, ...] | None = _row(None, partial(_sizes, least=1))
    """Sizes of the prefill programs, None for the default buckets (``PREFILL_ROWS``)."""
    prefill_kv_lens: tuple[int, ...] | None = _row(None, partial(_sizes, least=0))
    """KV slots that a prefill program can see; 0 is a program without past (``PREFILL_KV_LENS``)."""
    generate_kv_lens: tuple[int, ...] | None = _row(None, partial(_sizes, least=1))
    """KV slots that a generate program can see (``GENERATE_KV_LENS``)."""
    kv_cache_precision: KVType | None = _row(None, _kv_type)
    """Element type of the KV slots, None for the device's default (``KV_CACHE_PRECISION``)."""
    prefix_caching: bool = _row(True, switch)
    """Keep the KV slots of conversations and reuse the longest common prefix (``PREFIX_CACHING``)."""
    measure_costs: bool = _row(True, switch)
    """Measure the costs of calls while the pipeline is idle, after the first request. A request that arrives meanwhile waits
    for one call, which takes up to about 0.15 s. While others use the processors, a tenth of the time is used
    (``MEASURE_COSTS``)."""
    max_num_seqs: int | None = _row(None, _num_seqs)
    """Requests that decode together, None for 16, or for 4 with ``PROGRAMS=separate`` (``MAX_NUM_SEQS``)."""
    kv_slots: int | None = _row(None, partial(whole, least=1, most=1 << 24))
    """KV slots that all requests share, None for those of 4 longest sequences, or of 2 if each variant has a program of its own
    (``KV_SLOTS``)."""
    kv_cache_gb: float | None = _row(None, partial(_positive, unit="a number of GB", most=MAX_LEN))
    """Memory of the KV slots in GB, instead of their number; at least one longest sequence (``KV_CACHE_GB``)."""
    host_kv_slots: int | None = _row(None, partial(whole, least=0, most=1 << 24))
    """KV slots in host memory, for swapped requests and for conversations kept for their prefix; None for 16 longest sequences
    (``HOST_KV_SLOTS``)."""
    prompt_lookup: bool = _row(False, switch)
    """Draft the tokens of every request by prompt lookup, also of those whose options do not ask for it (``PROMPT_LOOKUP``,
    docs/generation.md)."""
    memory_limit_mb: int | None = _row(None, partial(whole, least=1, most=1 << 24))
    """The most private memory in MB (10^6 bytes) that the process should have on a CPU, by estimate. If two programs would
    exceed it, there is one; if one would, loading fails. The host pool gets what is left. None for no limit
    (``MEMORY_LIMIT_MB``)."""
    max_waiting: int = _row(128, partial(whole, least=1, most=1 << 24))
    """Requests whose prompts may wait to begin, however many answers or beams each has; further requests are refused with
    ``BusyError`` (``MAX_WAITING``)."""
    scheduler: Scheduler = _row("dynamic", _scheduler)
    """The scheduling policy: ``dynamic``, ``fcfs``, ``prefill_first``, ``decode_first``, ``chunked`` or ``ratio``
    (``SCHEDULER``, docs/scheduling.md)."""
    ttft_ms: float | None = _row(None, _milliseconds)
    """Target for the time to first token, ms; None for as soon as possible (``TTFT_MS``)."""
    tpot_ms: float | None = _row(None, _milliseconds)
    """Target for the time between two tokens, ms; None for a bound relative to a decode step (``TPOT_MS``)."""
    gap_ms: float | None = _row(500.0, _milliseconds)
    """The longest time that a request which has begun should wait for a place among the running ones, ms; None for until one
    ends (``GAP_MS``, docs/scheduling.md)."""
    cache_dir: str | None = _row(None, _path)
    """Folder of blob sets, from which programs that were compiled before are loaded; None for no cache (``CACHE_DIR``)."""
    cache_mode: CacheMode = _row("OPTIMIZE_SIZE", _cache_mode)
    """``OPTIMIZE_SIZE`` writes blobs without weights, if the device can, and reads the weights beside the IR;
    ``OPTIMIZE_SPEED`` writes whole blobs (``CACHE_MODE``)."""
    cache_limit_gb: float = _row(20.0, partial(_positive, unit="a number of GB"))
    """Size of the cache, GB; the least recently used sets are removed (``CACHE_LIMIT_GB``)."""
    cache_encryption_callbacks: tuple[Crypt, Crypt] | None = _row(None, _crypts, repr=False)
    """``(encrypt, decrypt)``, from bytes to bytes, for blobs on disk (``CACHE_ENCRYPTION_CALLBACKS``)."""
    weights_decryption_callback: Crypt | None = _row(None, _crypt, repr=False)
    """Decrypts the bytes of an encrypted weights file; blobs then contain the weights (``WEIGHTS_DECRYPTION_CALLBACK``)."""
    blob_path: str | None = _row(None, _path)
    """A blob set that is loaded instead of compiling, or written with ``export_blob`` (``BLOB_PATH``)."""
    export_blob: bool = _row(False, switch)
    """Compile and write the set to ``blob_path``, or ``openvino_model.blob`` beside the IR (``EXPORT_BLOB``)."""
    integrity_key: bytes | None = _row(None, _key, repr=False)
    """Secret bytes of the application: blob sets and snapshots are signed with them (keyed BLAKE2b), and those with another
    signature or none are refused (``INTEGRITY_KEY``, docs/security.md)."""
    weights_path: str | None = _row(None, _path)
    """The weights file, if it is not beside the IR (``WEIGHTS_PATH``)."""
    background_compile: bool | None = _row(None, switch)
    """Serve as soon as the fewest programs are compiled, and compile the others meanwhile. None for yes, but on a CPU only for
    the program for few rows, and only if no blobs are written; and of a blob set a program that only calls of several requests
    need (``BACKGROUND_COMPILE``)."""
    serve_from_cpu: bool = _row(False, switch)
    """Serve from the CPU until the device's programs are compiled (``SERVE_FROM_CPU``)."""
    device_properties: Mapping[str, object] = _properties_row()
    """OpenVINO properties for every program."""
    prefill_config: Mapping[str, object] = _properties_row()
    """More properties for prefill programs (``PREFILL_CONFIG``)."""
    generate_config: Mapping[str, object] = _properties_row()
    """More properties for generate programs (``GENERATE_CONFIG``)."""
    adapters: AdapterSet | None = _row(None, _adapters, repr=False)
    """LoRA adapters, None for none. Pipelines make it of ``adapters=AdapterConfig(...)``."""
    cross_windows: CrossWindows | None = _row(None, _cross_windows, repr=False)
    """The windows that the model's cross-attention sees, None for a model without it. Pipelines make it."""

    def __post_init__(self) -> None:
        """Parse each value, then check values against each other.

        Raises:
            ConfigError: a value is impossible, or two contradict each other.
        """
        for row in fields(self):
            value = getattr(self, row.name)
            if value is not None or row.default is not None:
                object.__setattr__(self, row.name, row.metadata["parser"](row.name.upper(), value))
        longest = self.max_seq_len
        if self.kv_slots is not None and self.kv_slots < longest:
            raise ConfigError(
                f"KV_SLOTS={self.kv_slots}: one sequence can have MAX_PROMPT_LEN + MIN_RESPONSE_LEN = {longest} slots; raise "
                "KV_SLOTS or lower a length"
            )
        if self.kv_cache_gb is not None and self.kv_slots is not None:
            raise ConfigError(
                f"KV_CACHE_GB={self.kv_cache_gb} and KV_SLOTS={self.kv_slots}: both set the same memory, give only one"
            )
        for rows in self.prefill_rows or ():
            if rows > self.max_prompt_len:
                raise ConfigError(
                    f"PREFILL_ROWS has {rows}, more than MAX_PROMPT_LEN={self.max_prompt_len}: leave it out"
                )
        for name in ("prefill_kv_lens", "generate_kv_lens"):
            for kv_len in getattr(self, name) or ():
                if kv_len > longest:
                    raise ConfigError(
                        f"{name.upper()} has {kv_len}, more than MAX_PROMPT_LEN + MIN_RESPONSE_LEN = {longest}: leave it out or "
                        "raise a length"
                    )

    @property
    def model_file(self) -> str:
        """The name of the model's IR in its directory."""
        return MODEL_XML if self.cross_windows is None else self.cross_windows.model_file

    @property
    def max_seq_len(self) -> int:
        """The KV slots that one sequence can have, of prompt and response together."""
        return self.max_prompt_len + self.min_response_len

    def num_seqs(self, mode: ProgramMode) -> int:
        """Return the number of sequences that decode together."""
        is_whole = mode == "separate" and self.programs == "separate"  # such programs hold the weights once more each
        return self.max_num_seqs or (4 if is_whole else 16)

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
        return frozenset(item.name for item in fields(self) if getattr(self, item.name) != _default(item))
