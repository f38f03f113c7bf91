"""Compares published models with transformers' reading of the same files in f32, and prints the rows of a table.

    python scripts/verified_models.py --python export/bin/python              # the table of docs/models.md
    python scripts/verified_models.py --python export/bin/python --readers    # also what other readers of GGUF make of them

The files come from scripts/real_models.py, as do the texts; the interpreter is one of an environment for exports. The logits of
the beginning of a text are compared, and greedy tokens after 10 parts of it. ``--readers`` compares the logits of OpenVINO's
reader of GGUF files, without what our conversion adds, and of openvino_genai's, and says what that does to the perplexity.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import openvino_genai as genai
from numpy.typing import NDArray
from real_models import fetch

from staticllm import StaticEmbeddingPipeline, StaticLLMPipeline
from staticllm.compiler_passes.conversion import gguf_model
from staticllm.export.exporter import ExportRequest, export
from staticllm.model_files.converted import converted
from staticllm.pipelines.diagnostics.divergence import TextDivergence, summary
from staticllm.pipelines.diagnostics.reference import StatefulReference

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support" / "export"
F32: dict[str, Any] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}
DECODERS, ENCODERS = ("smollm2", "gemma3"), ("minilm",)
LOGITS_LEN, PROMPT_LEN, NUM_PROMPTS, NUM_NEW = 256, 48, 10, 24
TOLERANCES = {"decoder": 1e-4, "encoder": 1e-4}
"""The largest difference of logits, as a share of their range, and of vectors, as a share of their length."""
SENTENCES = 20
HEAD = "| file | SHA-256 | reference | tolerance | found | matching | date |\n|---|---|---|---|---|---|---|"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *DECODERS, *ENCODERS], metavar="NAME")
    parser.add_argument("--python", type=Path, required=True, help="of an environment for exports")
    parser.add_argument("--readers", action="store_true", help="also compare other readers of GGUF files")
    options = parser.parse_args()
    names = options.names or [*DECODERS, *ENCODERS]
    print(HEAD, flush=True)
    for name in names:
        print((decoder_row if name in DECODERS else encoder_row)(name, options.python), flush=True)
    for name in names if options.readers else ():
        if name in DECODERS:
            print("\n".join(readers(name, options.python)), flush=True)


def decoder_row(name: str, python: Path) -> str:
    path = fetch(name)
    ids, prompts = texts_of(converted(path))
    reference = run_reference(python, "gguf_reference.py", path, {"ids": ids, "prompts": prompts, "new": NUM_NEW})
    off = share_of_range(StatefulReference(converted(path)).logits(ids), reference["logits"])
    with StaticLLMPipeline(path, "CPU", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=64, **F32) as pipe:
        asked: dict[str, Any] = {"max_new_tokens": NUM_NEW, "ignore_eos": True, "do_sample": False}
        found = [list(pipe.generate(np.array(prompt), **asked).tokens[0]) for prompt in prompts]
    same = int((np.array(found) == reference["tokens"]).sum())
    return row(
        path, digest_of(path), "transformers, f32", TOLERANCES["decoder"], off, f"{same} of {np.size(found)} tokens"
    )


def encoder_row(name: str, python: Path) -> str:
    path = fetch(name)
    lines = fetch("news").read_text("utf-8").splitlines()[:SENTENCES]
    texts = [line.split(". ")[0] for line in lines]
    expected = run_reference(python, "mean_vectors.py", path, texts)
    with tempfile.TemporaryDirectory() as scratch:
        export(ExportRequest(str(path), Path(scratch) / "model", weights="f32"), python)
        with StaticEmbeddingPipeline(Path(scratch) / "model", "CPU", INFERENCE_PRECISION_HINT="f32") as pipe:
            found = pipe.encode(texts)
    off = float((np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())
    same = int((nearest(found) == nearest(expected)).sum())
    digest = digest_of(path / "model.safetensors")
    return row(path, digest, "transformers, f32", TOLERANCES["encoder"], off, f"{same} of {len(texts)} neighbours")


def readers(name: str, python: Path) -> Iterator[str]:
    """Yield a line per reader of a GGUF file: how far its logits are from those that transformers computes."""
    path = fetch(name)
    ids, _ = texts_of(converted(path))
    expected = run_reference(python, "gguf_reference.py", path, {"ids": ids, "prompts": [], "new": 0})["logits"]
    with tempfile.TemporaryDirectory() as scratch:
        ways: dict[str, Callable[..., Path]] = {
            "ours": converted,
            "OpenVINO's": read_by_openvino,
            "GenAI's": read_by_genai,
        }
        for reader, read in ways.items():
            try:
                folder = read(path) if reader == "ours" else read(path, Path(scratch) / reader)
                found = compared(StatefulReference(folder).logits(ids), expected, ids)
            except Exception as error:
                found = f"not read: {str(error).splitlines()[-1]}"
            yield f"{path.name}, {reader} reader, {len(ids)} tokens: {found}"


def compared(found: NDArray[np.float32], expected: NDArray[np.float32], ids: list[int]) -> str:
    """Compare logits ``[tokens, vocab]`` after each token of a text with those of transformers, in words."""
    text = summary("", [TextDivergence.of(expected, found, ids[1:])])
    off = (
        f"logits off by {share_of_range(found, expected):.2g} of their range, divergence {text.mean:.2g} nats per token"
    )
    return f"{off}, perplexity {text.perplexity:.2f} instead of {text.exact_perplexity:.2f}"


def read_by_openvino(path: Path, target: Path) -> Path:
    """Convert with the numbers that OpenVINO's reader gives."""
    target.mkdir()
    with contextlib.ExitStack() as patches:
        for name in ("restore_scales", "restore_angles", "mend_layers"):
            patches.enter_context(mock.patch.object(gguf_model, name, lambda model, header: None))
        gguf_model.convert(path, target)
    return target


def read_by_genai(path: Path, target: Path) -> Path:
    """Let openvino_genai read a link to the file, and save its model beside it."""
    target.mkdir()
    (target / path.name).symlink_to(path)
    genai.LLMPipeline(str(target / path.name), "CPU", enable_save_ov_model=True)
    return target


def texts_of(folder: Path) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of the beginning of the text, and of prompts from the rest of it."""
    text = fetch("news").read_text("utf-8")[:20_000]
    ids = genai.Tokenizer(str(folder)).encode(text).input_ids.data[0].tolist()
    starts = range(LOGITS_LEN, LOGITS_LEN + NUM_PROMPTS * PROMPT_LEN, PROMPT_LEN)
    return ids[:LOGITS_LEN], [ids[start : start + PROMPT_LEN] for start in starts]


def run_reference(python: Path, script: str, path: Path, asked: object) -> Any:
    """Return an array, or those of an archive by their names."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / ("found.npz" if script.startswith("gguf") else "found.npy")
        subprocess.run(
            [str(python), str(SUPPORT / script), str(path), str(target)], input=json.dumps(asked), text=True, check=True,
            env={**environment, "HF_HUB_OFFLINE": "1"}, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        found = np.load(target)
        return found if isinstance(found, np.ndarray) else dict(found)


def share_of_range(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(found - expected).max() / np.ptp(expected))


def nearest(vectors: NDArray[np.float32]) -> NDArray[np.int64]:
    similarities = vectors @ vectors.T
    np.fill_diagonal(similarities, -1)
    return similarities.argmax(1)


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        digest = sha256()
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()[:12]


def row(path: Path, digest: str, reference: str, tolerance: float, off: float, matching: str) -> str:
    mark = "" if off <= tolerance else " FAIL"
    date = time.strftime("%Y-%m-%d")
    return f"| {path.name} | `{digest}` | {reference} | {tolerance:.0e} | {off:.1e}{mark} | {matching} | {date} |"


if __name__ == "__main__":
    main()
