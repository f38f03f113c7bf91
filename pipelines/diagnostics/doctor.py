"""Checks that everything that staticllm needs is present and works, with a remedy for each problem (``staticllm doctor``)."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version, release, system

import openvino as ov
import psutil

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress
from staticllm.devices import get_core, kind
from staticllm.errors import (
    GenerationConfigError,
    ModelError,
    PromptError,
    StaticLLMError,
    UnsupportedModelError,
    last_line,
    quoted,
    shown,
)
from staticllm.model_dir import demo_model_path, read_model
from staticllm.model_files.gguf_architectures import check_architecture, context_length
from staticllm.model_files.gguf_header import GGUFHeader, read_gguf_header
from staticllm.model_files.hub import located
from staticllm.model_files.model_at import check_model_dir

from ...compiler_passes.artifacts.cache import BlobCache
from ...compiler_passes.artifacts.fingerprint import fingerprint_model
from ...compiler_passes.conversion.gguf_tokenizer import KIND, PRE, TOKENS, check_vocabulary
from ...compiler_passes.graph.compressed_matrix import find_compressed_matrices, is_symmetric
from ...compiler_passes.npu_compiler.find import compiler_statuses
from ...compiler_passes.npu_compiler.wine import COMMAND, WHERE, default_folder
from ..loading.load import load
from .kinds import diagnosis_of, known_kind
from .reference import StatefulReference, exact_for
from .reports import Finding

PACKAGES = (
    "openvino",
    "openvino-genai",
    "openvino-tokenizers",
    "numpy",
    "click",
    "filelock",
    "psutil",
    "jinja2",
    "msgspec",
    "safetensors",
    "tqdm",
    "prompt_toolkit",
    "llguidance",
)
LITTLE_MEMORY, LITTLE_DISK = 2 << 30, 5 << 30
SELF_TEST = tuple(range(20, 36))
NUM_NEW = 16
SYMMETRIC_8_BIT = "--weights int8 --symmetric"
SYMMETRIC_4_BIT = "--weights int4 --symmetric"
"""Options of `staticllm export` for weights without zero points."""
NOT_TEXT = "its graph is neither a decoder's nor an encoder's"


def examine(
    devices: tuple[str, ...] = (),
    cache_dir: str | None = None,
    model: str | None = None,
    on_progress: OnProgress = lambda event: None,
    platform: str | None = None,
) -> Iterator[Finding]:
    """Check packages, machine, devices, memory, a model, the cache, and the embedded model on each device; yield each finding.

    A model is loaded and run on the first of ``devices`` that is there, else on the CPU. ``on_progress`` gets the parts of that.
    If there is an NPU, if it is one of ``devices``, or for a ``platform`` of NPUs elsewhere, its weights are examined as well.
    """
    yield Finding("ok", "system", f"{system()} {release()}, Python {python_version()}")
    yield from _packages()
    yield _memory()
    available = get_core().available_devices
    for device in available:
        yield _device(device)
    if "NPU" not in available:
        yield Finding("warn", "NPU", "not found", "to use one, install its driver (docs.openvino.ai, NPU device)")
        yield _npu_compiler()
    if model is not None:
        there = [name for name in devices if any(name.split(".")[0] == kind(other) for other in available)]
        findings = list(_files_given(model))
        yield from findings
        if not any(finding.level == "fail" for finding in findings):
            yield check_model(model, there[0] if there else "CPU", cache_dir, on_progress)
        if platform is not None or any(kind(name) == "NPU" for name in (*devices, *available)):
            yield from check_weights(model)
    if cache_dir is not None:
        yield from _cache(Path(cache_dir))
    for device in devices or tuple(available):
        yield _self_test(device)


def _files_given(model: str) -> Iterator[Finding]:
    """Say what a file is of which a model is made."""
    found = located(model)
    if found.is_converted:
        yield check_gguf(found.directory)


def _npu_compiler() -> Finding:
    """Check whether programs can be compiled for an NPU that is not on this machine."""
    local, wine = compiler_statuses()
    if local.version:
        return Finding("ok", "NPU compiler", "found beside OpenVINO's plugins")
    if wine.version:
        return Finding("ok", "NPU compiler", f"{wine.version}, under Wine")
    remedy = f"compile for an NPU on the machine that has one, or on Linux set the compiler up with `{COMMAND}` {WHERE}"
    return Finding("warn", "NPU compiler", local.problem if not default_folder().is_dir() else wine.problem, remedy)


def _packages() -> Iterator[Finding]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            yield Finding("fail", name, "not installed", f"{Path(sys.executable).name} -m pip install {name}")
    yield Finding("ok", "packages", ", ".join(f"{name} {number}" for name, number in found.items()))
    releases = {".".join(number.split(".")[:3]) for name, number in found.items() if name.startswith("openvino")}
    if len(releases) > 1:
        remedy = "install openvino, -genai and -tokenizers of one release"
        yield Finding("fail", "OpenVINO", f"packages of {len(releases)} releases", remedy)
    if found.get("openvino") and not ov.get_version().startswith(found["openvino"]):
        difference = f"runs {ov.get_version()}, installed {found['openvino']}"
        yield Finding("warn", "OpenVINO", difference, "check sys.path for a second installation")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    value = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free, {os.cpu_count()} processors"
    is_little = memory.available < LITTLE_MEMORY
    return Finding("warn" if is_little else "ok", "memory", value, "free memory before loading" if is_little else "")


def _device(device: str) -> Finding:
    core = get_core()
    try:
        name = str(core.get_property(device, "FULL_DEVICE_NAME")).strip()
        supported = core.get_property(device, "SUPPORTED_PROPERTIES")
        has_driver = "NPU_DRIVER_VERSION" in supported
        driver = f", driver {core.get_property(device, 'NPU_DRIVER_VERSION')}" if has_driver else ""
        precisions = ", ".join(core.get_property(device, "OPTIMIZATION_CAPABILITIES"))
    except RuntimeError as error:
        return Finding("fail", device, last_line(error), "install or repair its driver")
    return Finding("ok", device, f"{name}{driver} ({precisions})")


def _cache(folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield Finding("warn", "cache", f"{quoted(folder)} does not exist", "the first start with CACHE_DIR creates it")
        return
    free = shutil.disk_usage(folder).free
    if free < LITTLE_DISK:
        yield Finding("warn", "disk", f"{free / 1e9:.1f} GB free", f"staticllm cache prune {folder} --limit-gb 5")
    total = 0
    remedy = "the set is compiled again when it is needed; staticllm cache prune --all removes it"
    for entry, problem in BlobCache(folder).verify():
        total += entry.num_bytes
        if problem:
            yield Finding("fail", "cache", problem, remedy)
    yield Finding("ok", "cache", f"{total / 1e6:.1f} MB in {quoted(folder)}, {free / 1e9:.1f} GB free")


def _self_test(device: str) -> Finding:
    """Compare the embedded model on one device with the stateful original on the CPU."""
    name = f"self-test {device}"
    path = demo_model_path()
    try:
        short = StaticLLMConfig(max_prompt_len=64, min_response_len=64, max_num_seqs=1, kv_cache_precision="f32")
        config = replace(short, device_properties=exact_for(device))
        runner = load(path, device, config).runner
        sequence = runner.reset()
        tokens = list[int]()
        logits = runner.prefill(sequence, SELF_TEST)
        while len(tokens) < NUM_NEW:
            tokens.append(int(logits.argmax()))
            logits = runner.decode(sequence, tokens[-1])
    except StaticLLMError as error:
        return Finding("fail", name, str(error), "update the driver, or use another device")
    expected = StatefulReference(path).greedy(list(SELF_TEST), NUM_NEW)
    same = sum(mine == other for mine, other in zip(tokens, expected, strict=True))
    if same == NUM_NEW:
        return Finding("ok", name, f"{NUM_NEW} of {NUM_NEW} tokens equal the original's")
    remedy = "do not trust this device: update its driver, or set INFERENCE_PRECISION_HINT=f32"
    return Finding("fail", name, f"{same} of {NUM_NEW} tokens equal the original's", remedy)


def check_model(path: str, device: str, cache_dir: str | None, on_progress: OnProgress) -> Finding:
    """Load the model at ``path`` on ``device`` and run it once; compare its weights with those of the sets in a cache."""
    start = time.perf_counter()
    try:
        found = located(path)
        directory = found.directory if found.kind.has_parts else check_model_dir(path, False)
        name = found.kind.name if found.kind.has_parts else known_kind(directory)
        if name is None:
            raise ModelError(NOT_TEXT)
        diagnosis = diagnosis_of(name)
        if diagnosis.needs_tokenizer and not found.kind.has_parts:
            check_model_dir(path)
        what = diagnosis.what(directory)
        trial = diagnosis.try_model(directory, device, on_progress)
        ran = f"loaded and run on {device} in {time.perf_counter() - start:.1f} s{trial.how}"
        if found.kind.has_parts:  # caches and their fingerprints are of its parts
            return Finding("ok", "model", f"complete, {what}, {ran}")
        here = fingerprint_model(directory)
    except StaticLLMError as error:
        found = located(path, needs_tokenizer=True)
        if not found.is_loadable:
            return Finding("fail", "model", found.what, found.remedy)
        return Finding("fail", "model", str(error), _remedy(error))
    for entry in BlobCache(cache_dir).entries() if cache_dir is not None else ():
        there = entry.manifest.fingerprint if entry.manifest is not None else None
        if there is not None and there.ir_digest == here.ir_digest and there.weights_digest != here.weights_digest:
            mismatch = f"its weights ({here.weights_digest[:12]}) are not those of set {entry.key} ({there.weights_digest[:12]})"
            remedy = (
                "if this is not intended, copy the model again; a pipeline that runs with the model refuses requests"
            )
            return Finding("warn", "model", mismatch, remedy)
    place = "in the cache of Hugging Face, " if located(path).title else ""
    complete = f"complete, {place}weights {here.weights_digest[:12]}, {what}, {ran}"
    return Finding("warn" if trial.remedy else "ok", "model", complete, trial.remedy)


def check_weights(path: str) -> Iterator[Finding]:
    """Say what to export instead if the model at ``path`` has weights with zero points, which cost time on an NPU.

    Nothing is said of a model that cannot be read: ``check_model`` does that.
    """
    try:
        model = read_model(get_core(), check_model_dir(path, False))
    except StaticLLMError:
        return
    matrices = find_compressed_matrices(model)
    asymmetric = [matrix for matrix in matrices if not is_symmetric(matrix)]
    if not asymmetric:
        return
    bits = " and ".join(f"{size}-bit" for size in sorted({matrix.bits for matrix in asymmetric}))
    value = f"{len(asymmetric)} of {len(matrices)} matrices have {bits} weights with zero points, which an NPU has to correct"
    options = SYMMETRIC_4_BIT if any(matrix.bits == 4 for matrix in matrices) else SYMMETRIC_8_BIT
    yield Finding(
        "warn",
        "weights on NPU",
        value,
        f"export the original with `staticllm export ORIGINAL DIR {options}` (docs/npu.md)",
    )


def _remedy(error: StaticLLMError) -> str:
    """Return what helps a model that cannot be loaded or run."""
    again = "export the original with `staticllm export` (docs/models.md)"
    if isinstance(error, UnsupportedModelError):
        return again
    if isinstance(error, GenerationConfigError):
        return "correct the field in generation_config.json, or remove it there"
    if isinstance(error, PromptError):
        return "correct the chat template in openvino_tokenizer.xml or chat_template.jinja, or set another on the tokenizer"
    return f"copy the model again, or {again}"


def check_gguf(path: Path) -> Finding:
    """Return what a file is, and if it cannot be converted, why and what helps."""
    try:
        header = read_gguf_header(path)
    except ModelError as error:
        return _gguf_failure(error, "")
    try:
        check_architecture(header)
        check_vocabulary(header)
    except ModelError as error:
        return _gguf_failure(error, f"{_describe_gguf(header)}; ")
    return Finding("ok", "GGUF", f"{_describe_gguf(header)}; it can be converted")


def _gguf_failure(error: ModelError, what: str) -> Finding:
    problem, _, remedy = str(error).rpartition(": ")
    return Finding("fail", "GGUF", what + problem, remedy)


def _describe_gguf(header: GGUFHeader) -> str:
    """Return architecture, numbers, types of weights, context and vocabulary of a file in one line."""
    numbers = Counter[str]()
    for tensor in header.tensors:
        numbers[tensor.kind] += math.prod(tensor.shape)
    kinds = ", ".join(kind for kind, _ in numbers.most_common())
    tokens = header.metadata.get(TOKENS)
    size = f"{len(tokens)} tokens" if isinstance(tokens, list) else "none"
    how = ", ".join(shown(header.text(key)) for key in (KIND, PRE) if header.text(key))
    parts = [
        f"architecture {shown(header.architecture)}",
        f"{sum(numbers.values()) / 1e6:.0f} million numbers ({kinds or 'no weights'})",
        f"{header.num_bytes / 1e9:.2f} GB",
        f"context of {context_length(header) or 'unknown'} tokens",
        f"vocabulary: {size}" + (f" ({how})" if how else ""),
    ]
    return "; ".join(parts)
