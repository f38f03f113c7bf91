"""Compiled programs on disk: a folder with one blob a program and a manifest that says what they are."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openvino as ov

from staticllm.config import StaticLLMConfig
from staticllm.core import ProgressEvent, Variant
from staticllm.errors import ConfigError
from staticllm.model_dir import MODEL_XML
from staticllm.pipelines.loader import Layout, compile_layout, prepare

MANIFEST = "manifest.json"
SCHEMA = 1
CHUNK = 1 << 20


def export_blobs(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    target: str | os.PathLike[str],
    on_progress: Callable[[ProgressEvent], None] = lambda event: None,
) -> dict[str, Any]:
    """Compile every variant and write the set to the folder ``target``, all of it or nothing. Returns the manifest.

    Raises:
        ConfigError: ``target`` exists already, or its parent does not.
        ModelError, UnsupportedModelError, DeviceError
    """
    folder = Path(target)
    if folder.exists():
        raise ConfigError(f"{str(folder)!r} exists already: choose another path or remove it")
    if not folder.resolve().parent.is_dir():
        raise ConfigError(f"the folder {str(folder.resolve().parent)!r} does not exist: make it first")
    core, layout = prepare(models_path, device, config, on_progress)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.resolve().parent))
    except OSError as error:
        raise ConfigError(f"cannot write beside {str(folder)!r} ({error.strerror}): choose another path") from error
    try:
        files = _write_blobs(core, layout, scratch, on_progress)
        manifest = _manifest(Path(models_path), layout, files, scratch)
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        scratch.chmod(0o755)  # mkdtemp makes it private; a blob set is an ordinary folder
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return manifest


def _write_blobs(
    core: ov.Core, layout: Layout, scratch: Path, on_progress: Callable[[ProgressEvent], None]
) -> dict[Variant, str]:
    is_shared, total = layout.options.mode == "shared", len(layout.variants)
    blobs: list[tuple[ov.CompiledModel, str]] = []
    files: dict[Variant, str] = {}
    for variant, compiled in compile_layout(core, layout, on_progress):
        start = time.perf_counter()
        known = [name for other, name in blobs if other is compiled]
        name = f"shared-{len(blobs)}" if is_shared else f"{variant.phase}-{variant.rows}x{variant.capacity}"
        files[variant] = known[0] if known else f"{name}.blob"
        if not known:
            blobs.append((compiled, files[variant]))
            (scratch / files[variant]).write_bytes(compiled.export_model().getbuffer())
        on_progress(ProgressEvent("export", len(files), total, time.perf_counter() - start, variant))
    return files


def _manifest(models_path: Path, layout: Layout, files: dict[Variant, str], scratch: Path) -> dict[str, Any]:
    model = models_path / MODEL_XML
    return {
        "schema": SCHEMA,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "openvino": ov.get_version(),
        "device": layout.options.device,
        "programs": layout.options.mode,
        "row_type": layout.options.row_type,
        "properties": {phase: {k: str(v) for k, v in p.items()} for phase, p in layout.options.properties.items()},
        "model": {path.name: sha256(path) for path in (model, model.with_suffix(".bin"))},
        "variants": [{"rows": v.rows, "capacity": v.capacity, "file": files[v]} for v in layout.variants],
        "blobs": {name: sha256(scratch / name) for name in sorted(set(files.values()))},
    }


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()
