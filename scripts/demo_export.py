"""Export of the demo model: OpenVINO IR with 8-bit weights, OpenVINO tokenizer and model card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CARD = """---
license: apache-2.0
language: en
library_name: openvino
tags: [openvino, text-generation]
---

# The demo model of staticllm

A very small language model ({parameters:.1f} million parameters) that comes with `staticllm`, so that the library can
be tried and tested at once, without a download. It is exported to OpenVINO with 8-bit weights ({megabytes:.1f} MB).

## What it is

- A Llama-style model: 6 layers, width 256, 4 heads with 2 key-value heads of size 64, 2,048 byte-level BPE tokens,
  tied embeddings, at most 2,048 positions.
- It tells short stories about a subject you name, answers some two hundred simple questions about nature, everyday
  things and language models, counts, does small sums, and keeps up a little conversation. Try `Tell me a story about a
  fox`, `What is an NPU?` or `Count from 3 to 8`.
- English only. Roles: system, user, assistant. Best with greedy decoding.
- It has seen texts of at most 1,024 tokens; in longer conversations its answers fall apart.

## What it is not

It is not a useful assistant: it knows nothing outside its training text and often makes mistakes, even in sums.
Use it to see that everything works, to write tests and to compare backends. Do not use it for advice or facts, nor for
measuring how fast a real model would be.

## Training

- Text: only text that `scripts/demo_corpus.py` generates from grammars written for this project. No downloaded or
  third-party text, no personal data.
- From scratch with `python scripts/train_demo.py` (seed {seed}): {steps} steps, {tokens:.1f} million tokens,
  {minutes:.0f} minutes on two CPU cores.
- Loss on held-out text of the same grammars: {loss:.3f} (nats per token of answers and plain text).

## Licence

Apache-2.0, like staticllm.
"""


@dataclass(frozen=True)
class TrainingReport:
    """What the model card says about the training."""

    seed: int
    steps: int
    tokens: int
    parameters: int
    minutes: float
    held_out_loss: float


def _save_float_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the uncompressed model, from which the export starts."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _export_network(folder: Path, out: Path) -> None:
    """Convert the network to a stateful IR with symmetric 8-bit weights, which NPUs handle best."""
    compression = OVWeightQuantizationConfig(bits=8, sym=True)
    network = OVModelForCausalLM.from_pretrained(
        folder, export=True, compile=False, stateful=True, quantization_config=compression
    )
    network.save_pretrained(out)
    (out / "openvino_config.json").unlink(missing_ok=True)  # describes this export only; nothing reads it


def _export_tokenizer(tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the tokenizer for transformers and for OpenVINO."""
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the names that every version of transformers knows
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    settings.pop("backend")
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8", newline="\n")
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    openvino.save_model(encoder, out / "openvino_tokenizer.xml", compress_to_fp16=False)
    openvino.save_model(decoder, out / "openvino_detokenizer.xml", compress_to_fp16=False)


def _check_no_local_paths(out: Path, folders: tuple[Path, ...]) -> None:
    """Fail if a file names a folder of the machine on which the model was exported."""
    names = {str(folder.resolve()).encode() for folder in folders}
    for file in sorted(out.iterdir()):
        content = file.read_bytes()
        for name in names:
            if name in content:
                raise RuntimeError(f"{file.name} contains the local path {name.decode()}")


def export_model(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, work: Path, out: Path, report: TrainingReport
) -> None:
    """Write everything that the demo model's folder contains."""
    _save_float_model(model, tokenizer, work)
    out.mkdir(parents=True, exist_ok=True)
    _export_network(work, out)
    _export_tokenizer(tokenizer, out)
    size = sum(file.stat().st_size for file in out.iterdir() if file.name != "README.md")
    card = CARD.format(
        parameters=report.parameters / 1e6,
        megabytes=size / 1e6,
        seed=report.seed,
        steps=report.steps,
        tokens=report.tokens / 1e6,
        minutes=report.minutes,
        loss=report.held_out_loss,
    )
    (out / "README.md").write_text(card, encoding="utf-8", newline="\n")
    _check_no_local_paths(out, (work, out.parent, Path.home()))
