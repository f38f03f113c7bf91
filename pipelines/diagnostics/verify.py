"""Compares a lowered model with the original: teacher-forced logits and greedy tokens, in f32."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress, ProgramMode, Variant
from staticllm.devices import check_device, get_core
from staticllm.kvcache.step import Segment
from staticllm.model_dir import check_model_dir
from staticllm.pipelines.artifacts.blob_set import read_manifest, rewrite_manifest
from staticllm.pipelines.artifacts.manifest import Manifest
from staticllm.pipelines.diagnostics.reference import EXACT, StatefulReference
from staticllm.pipelines.diagnostics.reports import Agreement, Verdict
from staticllm.pipelines.loading.load import load
from staticllm.pipelines.programs.compile import compile_all
from staticllm.pipelines.programs.compile_plan import prepare
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.programs.warm_up import make_runner

STEPS, NUM_NEW, GREEDY_PROMPTS = 96, 48, (5, 40, 300)
KV_LENS = (48, 64)
"""KV lengths; a generation after a prompt of 40 tokens exceeds the smaller ones."""
CHUNKS = (16, 64)
TOLERANCE = 1e-3
"""Largest difference of logits, as a share of the range of the reference's logits."""
INTERLEAVED_STEPS = 16
NUM_DRAFTED = 4
LEAD = 32  # random tokens at the beginning of a text
LEAST_AGREEMENT, MOST_DISTANCE = 0.9, 0.1
"""Limits beyond which a set fails verification. In bf16 with 8-bit activations the embedded model agrees in 95 of 97 places."""
ORDINARY = (8, 1000)  # token ids of every vocabulary that is not a toy


def verify_model(
    models_path: str | os.PathLike[str],
    device: str = "CPU",
    modes: Sequence[ProgramMode] = ("separate", "shared"),
    chunks: Sequence[int] = CHUNKS,
    on_progress: OnProgress = lambda event: None,
) -> Iterator[Verdict]:
    """Run every check for every mode and chunk size, and yield each verdict. ``on_progress`` receives the events of loading.

    On devices other than the CPU tokens may differ in near-ties; the checks show how often.

    Raises:
        ModelError: a file of the model is missing or damaged.
        DeviceError: the device is missing, or refused a program.
        ConfigError: there is not enough memory for KV slots or masks.
        UnsupportedModelError: a pass cannot lower the model.
    """
    path = check_model_dir(models_path, needs_tokenizer=False)
    check_device(get_core(), device)
    prepare(
        path, device, _config(device, modes[0], chunks[0])
    )  # a model that cannot be lowered is refused before it is run
    reference = StatefulReference(path)
    prompts = {length: _tokens(length) for length in GREEDY_PROMPTS}
    text = _tokens(STEPS)
    expected = reference.logits(text)
    answers = {length: reference.greedy(prompt, NUM_NEW) for length, prompt in prompts.items()}
    for mode in modes:
        for chunk in chunks:
            name = f"{mode}, chunks of {chunk}"
            runner = _runner(path, device, _config(device, mode, chunk), on_progress)
            yield _logits(f"{name}: logits", runner, text, expected)
            if len(runner.index.widest) and runner.index.max_decoding(0) > 1:
                yield _interleaved(f"{name}: interleaved", runner, text, expected)
            if not runner.cache.states:
                yield _drafted(f"{name}: draft", runner, text, expected)
            for length, prompt in prompts.items():
                yield _greedy(f"{name}: {length} tokens", runner, prompt, answers[length])


def agreement(runner: ModelRunner, models_path: str | os.PathLike[str]) -> Agreement:
    """Compare a runner, in any precision, with the original in f32. ``compile --verify`` writes the result into a manifest.

    Both run the same text token by token: random tokens, and the original's continuation. After a near-tie both continue with
    the same token, so that it counts as one place.
    """
    reference = StatefulReference(models_path)
    prompt = _tokens(LEAD)
    text = prompt + reference.greedy(prompt, STEPS)
    reference.reset()
    expected = reference.logits(text)[LEAD - 1 :]
    sequence = runner.reset()
    found = [runner.prefill(sequence, prompt).copy()]
    found += [runner.decode(sequence, token).copy() for token in text[LEAD:]]
    same = float(
        np.mean([int(mine.argmax()) == int(other.argmax()) for mine, other in zip(found, expected, strict=True)])
    )
    distance = float(np.abs(np.stack(found) - expected).max() / np.ptp(expected))
    is_ok = same >= LEAST_AGREEMENT and distance <= MOST_DISTANCE
    return Agreement(is_ok, same, distance, places=len(found), against="CPU, f32")


def verify_set(models_path: str | os.PathLike[str], device: str, folder: Path) -> Manifest:
    """Compare the tokens of a set with the CPU in f32, and write the result into its manifest.

    Raises:
        BlobError: the set cannot be loaded.
    """
    loaded = load(models_path, device, StaticLLMConfig(blob_path=str(folder)))
    found = agreement(loaded.runner, models_path)
    manifest = replace(read_manifest(folder), verification=found.as_dict())
    rewrite_manifest(folder, manifest)
    return manifest


def _config(device: str, mode: ProgramMode, chunk: int) -> StaticLLMConfig:
    longest = max(GREEDY_PROMPTS)
    kv_len = longest + 2 * NUM_NEW
    exact = EXACT if device == "CPU" else {}
    return StaticLLMConfig(
        programs=mode,
        max_prompt_len=longest,
        min_response_len=kv_len - longest,
        max_num_seqs=2,
        kv_slots=2 * kv_len,
        prefill_rows=(chunk,),
        generate_kv_lens=(*KV_LENS, kv_len),
        kv_cache_precision="f32" if device == "CPU" else None,
        device_properties={name: value for name, value in exact.items() if name != "KV_CACHE_PRECISION"},
    )


def _runner(path: Path, device: str, config: StaticLLMConfig, on_progress: OnProgress) -> ModelRunner:
    """Compile the programs of ``load``, and one more that computes logits after every token of a draft."""
    plan = prepare(path, device, config, on_progress)
    if not plan.lowered.shape.needs_real_rows:
        draft = Variant(2 * NUM_DRAFTED, plan.variants[-1].kv_len, extra_logits=NUM_DRAFTED - 1)
        plan = replace(plan, variants=(*plan.variants, draft))
    return make_runner(compile_all(plan, on_progress), on_progress)


def _tokens(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(count).integers(*ORDINARY, count).tolist()
    return tokens


def _logits(check: str, runner: ModelRunner, text: list[int], expected: NDArray[np.float32]) -> Verdict:
    """Compare logits: a third of the text runs as a prompt, then one token of the text per step."""
    sequence, start = runner.reset(), len(text) // 3
    found = [runner.prefill(sequence, text[:start]).copy()]
    found += [runner.decode(sequence, token).copy() for token in text[start:]]
    differences = np.abs(np.stack(found) - expected[start - 1 :])
    share = float(differences.max() / np.ptp(expected))
    return Verdict(check, share <= TOLERANCE, share)


def _interleaved(check: str, runner: ModelRunner, text: list[int], expected: NDArray[np.float32]) -> Verdict:
    """Interleave with a second sequence, in mixed prefill where a variant allows it and in decoding."""
    runner.reset()
    mine, other = runner.cache.open(), runner.cache.open()
    start, found = len(text) // 3, dict[int, NDArray[np.float32]]()
    runner.prefill(mine, text[:8])
    runner.prefill(other, text[::-1][:start])
    chunk = [Segment(mine, np.array(text[8:12])), Segment(other, np.array([text[0]]))]
    if runner.variant_for(chunk) is not None:
        found[11] = runner.step(chunk)[0].copy()
    found[start - 1] = runner.prefill(mine, text[len(mine) : start]).copy()
    for place in range(start, start + INTERLEAVED_STEPS):
        tokens = [Segment(mine, np.array([text[place]])), Segment(other, np.array([text[-place]]))]
        found[place] = runner.step(tokens)[0].copy()
    share = float(max(np.abs(logits - expected[place]).max() for place, logits in found.items()) / np.ptp(expected))
    return Verdict(check, share <= TOLERANCE, share)


def _drafted(check: str, runner: ModelRunner, text: list[int], expected: NDArray[np.float32]) -> Verdict:
    """Compare logits after each token of a draft whose first half is accepted, and after the rejected half is discarded."""
    sequence, start, half = runner.reset(), len(text) // 3, NUM_DRAFTED // 2
    runner.prefill(sequence, text[:start])
    draft = Segment(sequence, np.array(text[start : start + half] + text[:half]), num_logits=NUM_DRAFTED)
    variant = runner.variant_for([draft])
    assert variant is not None
    (result,) = runner.run(variant, [draft], accept=lambda segment, logits: half).segments
    found = [*result.logits[:half].copy()]
    found += [runner.decode(sequence, token).copy() for token in text[start + half : start + 2 * half]]
    share = float(np.abs(np.stack(found) - expected[start : start + 2 * half]).max() / np.ptp(expected))
    return Verdict(check, share <= TOLERANCE, share)


def _greedy(check: str, runner: ModelRunner, prompt: list[int], expected: list[int]) -> Verdict:
    sequence, found = runner.reset(), list[int]()
    logits = runner.prefill(sequence, prompt)
    while len(found) < len(expected):
        found.append(int(logits.argmax()))
        logits = runner.decode(sequence, found[-1])
    same = next(
        (i for i, (mine, other) in enumerate(zip(found, expected, strict=True)) if mine != other), len(expected)
    )
    detail = "" if same == len(expected) else f"token {same} is {found[same]}, in the original {expected[same]}"
    return Verdict(check, same == len(expected), same / len(expected), detail)
