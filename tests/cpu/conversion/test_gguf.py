"""Tests GGUF files: what they compute is what the original model computes with the numbers of the file, in f32."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from openvino import opset13 as ops
from openvino.frontend import FrontEndManager
from support.models import gguf_files

from staticllm import StaticEmbeddingPipeline, StaticLLMPipeline, StaticRerankPipeline
from staticllm.compiler_passes.gguf import make_stateful
from staticllm.compiler_passes.graph.step_graph import redirect, upstream
from staticllm.compiler_passes.rewrites.rotate_halves import rotate_halves
from staticllm.errors import ModelError, UnsupportedModelError
from staticllm.model_files import converted as converted_module
from staticllm.model_files.converted import converted
from staticllm.model_files.gguf_header import read_gguf_header

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
QUICK = {("llama", "Q4_1"), ("qwen3", "Q8_0"), ("gemma2", "Q4_0"), ("demo", "Q4_K")}
CASES = [  # each kind in one model, and some in the others: how a kind is read does not depend on the architecture
    *(("llama", kind) for kind in KINDS),
    *(("qwen2", kind) for kind in ("F16", "Q4_0", "Q8_0")),
    *(("qwen3", kind) for kind in ("F32", "Q4_1", "Q8_0")),
    *(("gemma2", kind) for kind in ("BF16", "Q4_0", "Q5_1")),
    *(("demo", kind) for kind in gguf_files.RANDOM),
]
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
LENGTH = 70
"""Tokens of a test, more than the sliding window of the model that has one."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits_of(model, tokens, steps):
    """Return the logits of a stateful model for tokens that come in several calls."""
    request = ov.Core().compile_model(model, "CPU", EXACT).create_infer_request()
    names = {name for port in model.inputs for name in port.get_names()}
    found = []
    for begin, end in zip((0, *steps), (*steps, len(tokens)), strict=True):
        feeds = {
            "input_ids": np.array([tokens[begin:end]]), "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(begin, end)[None], "beam_idx": np.zeros(1, np.int32),
        }  # fmt: skip
        request.infer({name: value for name, value in feeds.items() if name in names})
        found.append(request.get_tensor("logits").data.copy())
    return np.concatenate(found, 1)


@pytest.mark.parametrize(
    "name,kind", [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_file_computes_what_its_numbers_compute(name, kind, model_path, tmp_path):
    written = gguf_files.write(model_path(name), tmp_path / "model.gguf", name, kind)
    folder = converted(written.path)
    tokens = np.random.default_rng(5).integers(0, 500, LENGTH).tolist()
    expected = logits_of(written.reference, tokens, ())
    found = logits_of(ov.Core().read_model(folder / "openvino_model.xml"), tokens, (20, 21, 50))
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    assert converted(written.path) == folder


def test_a_pipeline_takes_a_file(model_path, tmp_path):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "Q4_1")
    pipeline = StaticLLMPipeline(written.path, "CPU", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=32, **EXACT)
    prompt = "abcdefgh"
    tokens = pipeline.get_tokenizer().encode(prompt).input_ids.data[0].tolist()
    found = pipeline.generate(pipeline.get_tokenizer().encode(prompt), max_new_tokens=12, ignore_eos=True).tokens[0]
    for token in found:
        best = logits_of(written.reference, tokens, ())[0, -1]
        assert best[token] >= best.max() - 1e-4 * np.abs(best).max()
        tokens.append(token)


def test_a_file_that_is_no_embedder_is_named(model_path, tmp_path):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "Q8_0")
    with pytest.raises(
        ModelError, match=f"^'{re.escape(str(written.path))}' is not an encoder but a causal language model"
    ):
        StaticEmbeddingPipeline(written.path, "CPU")
    for name in ("model.gguf", "."):  # the folder with one such file as well
        path = written.path.parent / name
        for pipeline, options in (
            (StaticRerankPipeline, {}),
            (StaticEmbeddingPipeline, {"pooling_type": StaticEmbeddingPipeline.PoolingType.LAST_TOKEN}),
        ):
            with pytest.raises(
                ModelError, match=r"model\.gguf' is a GGUF file, and .* for generation only: for vectors"
            ):
                pipeline(path, "CPU", **options)


def test_damaged_contents_get_one_line_or_a_model(model_path, tmp_path, in_full):
    """The header holds, so the readers see the file: a crash of theirs is a line, and nothing is left."""
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "Q4_1")
    good = written.path.read_bytes()
    random = np.random.default_rng(11)
    cache = tmp_path / "cache" / "staticllm" / "converted"
    cases = 0
    while cases < (60 if in_full else 6):
        data = bytearray(good)
        for place in random.integers(0, 1200, 3):
            data[place] = random.integers(0, 256)
        written.path.write_bytes(data)
        try:
            read_gguf_header(written.path)
        except ModelError:
            continue
        cases += 1
        try:
            folder = converted(written.path)
        except ModelError as error:
            assert "\n" not in str(error)
        else:
            ov.Core().read_model(folder / "openvino_model.xml")
        assert not list(cache.glob(".unfinished-*"))


def test_a_reader_that_dies_is_a_line(model_path, tmp_path, monkeypatch):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "Q8_0")
    (tmp_path / "dies.py").write_text("import os\nos.abort()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("staticllm.model_files.converted.CHILD", "dies")
    with pytest.raises(ModelError, match=r"the reader crashed on .*exit code"):
        converted(written.path)


def test_a_disk_without_room_is_a_line(model_path, tmp_path, monkeypatch):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "Q8_0")
    monkeypatch.setattr("staticllm.model_files.converted.SPARE_BYTES", 1 << 60)
    with pytest.raises(ModelError, match=r"needs .* GB in .*: free space there, or set XDG_CACHE_HOME"):
        converted(written.path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(written.path))
    with pytest.raises(ModelError, match="no model can be kept in"):
        converted(written.path)


def test_several_threads_convert_a_file_once(model_path, tmp_path, monkeypatch):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "Q8_0")
    runs = []
    run = converted_module.run_child
    monkeypatch.setattr(converted_module, "run_child", lambda *given: (runs.append(given), run(*given)))
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(converted, [written.path] * 4))
    assert len(folders) == len(runs) == 1


def test_windows_of_an_unknown_length_are_refused(model_path, tmp_path):
    written = gguf_files.write(model_path("gemma2"), tmp_path / "model.gguf", "gemma2", "Q8_0")
    frontend = FrontEndManager().load_by_framework("gguf")
    model = frontend.convert(frontend.load(str(written.path)))
    with pytest.raises(UnsupportedModelError, match="sliding windows, and the file does not say how long"):
        make_stateful(model)


def stateful(path):
    frontend = FrontEndManager().load_by_framework("gguf")
    model = frontend.convert(frontend.load(str(path)))
    make_stateful(model)
    return model


def kinds_of(model):
    compiled = ov.Core().compile_model(model, "CPU", EXACT)
    return Counter(node.get_rt_info()["layerType"].value for node in compiled.get_runtime_model().get_ordered_ops())


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_halves_rotate_instead_of_pairs_with_the_same_logits(kind, model_path, tmp_path):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", kind)
    tokens = np.random.default_rng(5).integers(0, 500, 20).tolist()
    model = stateful(written.path)
    expected = logits_of(model, tokens, ())
    num_layers = kinds_of(model)["ScaledDotProductAttention"]
    assert kinds_of(model)["RoPE"] == 0
    assert rotate_halves(model) == 2 * num_layers
    assert kinds_of(model)["RoPE"] == 2 * num_layers
    found = logits_of(model, tokens, (7,))
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2"])
def test_rotations_are_fused_and_survive_in_a_blob(name, model_path, tmp_path):
    written = gguf_files.write(model_path(name), tmp_path / "model.gguf", name, "F32")
    model = ov.Core().read_model(converted(written.path) / "openvino_model.xml")
    kinds = kinds_of(model)
    assert kinds["RoPE"] == kinds["MemoryInput"] > 0  # queries and keys; keys and values are held
    core = ov.Core()
    compiled = core.compile_model(model, "CPU", EXACT)
    imported = core.import_model(compiled.export_model().getvalue(), "CPU", EXACT)
    tokens = np.random.default_rng(5).integers(0, 500, (1, 20))
    feeds = {
        "input_ids": tokens, "attention_mask": np.ones((1, 20), np.int64), "position_ids": np.arange(20)[None],
        "beam_idx": np.zeros(1, np.int32),
    }  # fmt: skip
    expected, found = (each.create_infer_request().infer(feeds)["logits"] for each in (compiled, imported))
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def also_read_keys(model, rotations):
    """Let something else than attention read the rotated keys of one layer."""
    model.add_results([ops.result(rotations[1].output(0))])


def share_weights(model, rotations):
    """Let something else read the numbers of a matrix before a rotation."""
    product = next(each for each in upstream([rotations[0]]) if each.get_type_name() == "MatMul")
    model.add_results([ops.result(product.input_value(1))])


def rotate_queries_only(model, rotations):
    """Replace the rotation of one layer's keys by what it rotates."""
    redirect(rotations[1].output(0), rotations[1].input_value(0).get_node().input_value(0))


@pytest.mark.parametrize("change", [also_read_keys, share_weights, rotate_queries_only])
def test_rotations_that_are_not_understood_stay(change, model_path, tmp_path):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "F32")
    model = stateful(written.path)
    change(model, [node for node in model.get_ordered_ops() if node.get_friendly_name().endswith("_rope")])
    tokens = np.random.default_rng(5).integers(0, 500, 20).tolist()
    expected = logits_of(model, tokens, ())
    assert rotate_halves(model) == 0
    assert np.array_equal(logits_of(model, tokens, ()), expected)


def test_a_model_that_others_have_damaged_is_converted_again(model_path, tmp_path):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "Q8_0")
    folder = converted(written.path)
    weights = (folder / "openvino_model.bin").read_bytes()
    (folder / "openvino_model.bin").write_bytes(weights[:1000])
    (folder / "openvino_tokenizer.xml").unlink()
    assert converted(written.path) == folder
    assert (folder / "openvino_model.bin").read_bytes() == weights
    assert (folder / "openvino_tokenizer.xml").is_file()


def test_a_file_that_changes_while_it_is_converted_is_not_kept(model_path, tmp_path, monkeypatch):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "Q8_0")
    run = converted_module.run_child

    def run_and_replace(path, *others):
        run(path, *others)
        path.write_bytes(path.read_bytes() + bytes(32))

    monkeypatch.setattr(converted_module, "run_child", run_and_replace)
    with pytest.raises(ModelError, match="was changed while it was converted"):
        converted(written.path)
    assert not [each for each in (tmp_path / "cache" / "staticllm" / "converted").iterdir() if each.is_dir()]


def test_only_what_the_header_names_is_read(model_path, tmp_path):
    """A file that goes on after its tensors, here with a hole of a terabyte, is read up to their end."""
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "Q8_0")
    folder = converted(written.path)
    os.truncate(written.path, 1 << 40)
    assert converted(written.path) == folder


def test_what_a_killed_conversion_left_is_removed_by_the_next(model_path, tmp_path):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "Q8_0")
    folder = converted(written.path)
    left = folder.with_name(f".unfinished-{folder.name}.1234")
    other = folder.with_name(".unfinished-other.1234")
    folder.rename(left)
    other.mkdir()
    assert converted(written.path) == folder
    assert (left.exists(), other.exists()) == (False, True)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of files")
def test_a_full_disk_is_a_line(model_path, tmp_path):
    written = gguf_files.write(model_path("llama"), tmp_path / "model.gguf", "llama", "Q8_0")
    code = (
        "import resource, sys; from pathlib import Path; from staticllm.model_files.converted import converted\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000)); converted(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(written.path)]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert re.search(r"ModelError: the model cannot be written to .*: free space there", found.stderr.splitlines()[-1])
    assert not [each for each in (tmp_path / "cache" / "staticllm" / "converted").iterdir() if each.is_dir()]


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
WITH_TOOLS = "{% for t in tools %}{{ t.function.name }}!{% endfor %}" + PLAIN
TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}]


def write_with(monkeypatch, path, model, *, templates=(), pre="smollm", architecture="llama"):
    """Write a file with chat templates by their names, and how it says that texts are split."""
    add = gguf_files.add_vocabulary

    def adding(writer, size):
        add(writer, size)
        if not pre:
            del writer.kv_data[0]["tokenizer.ggml.pre"]
        for name, text in dict(templates).items():
            writer.add_string("tokenizer.chat_template" + name, text)

    with monkeypatch.context() as patch:
        patch.setattr(gguf_files, "add_vocabulary", adding)
        return gguf_files.write(model, path, architecture, "Q8_0").path


@pytest.mark.parametrize(
    "templates",
    [
        {"": PLAIN, ".tool_use": WITH_TOOLS},
        {".default": PLAIN, ".tool_use": WITH_TOOLS},
        {"": PLAIN, ".rag": "r", ".tool_use": WITH_TOOLS},
    ],
)
def test_the_chat_template_for_tools_is_taken_if_there_are_tools(templates, model_path, tmp_path, monkeypatch):
    path = write_with(monkeypatch, tmp_path / "model.gguf", model_path("llama"), templates=templates)
    pipeline = StaticLLMPipeline(path, "CPU", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=32)
    messages = [{"role": "user", "content": "abc"}]
    for tools, text in (([], "abc"), (TOOLS, "rain!abc")):
        history = genai.ChatHistory(messages)
        history.set_tools(tools)
        found = pipeline.generate(history, max_new_tokens=1)
        wanted = pipeline.get_tokenizer().encode(text, add_special_tokens=False).input_ids.data[0]
        assert found.perf_metrics.get_num_input_tokens() == len(wanted)


def test_a_template_with_a_name_is_taken_if_there_is_no_other(model_path, tmp_path, monkeypatch):
    path = write_with(monkeypatch, tmp_path / "model.gguf", model_path("llama"), templates={".tool_use": WITH_TOOLS})
    folder = converted(path)
    assert genai.Tokenizer(folder).chat_template == WITH_TOOLS
    assert not (folder / "tokenizer_config.json").exists()


def test_what_a_conversion_has_assumed_is_a_warning(model_path, tmp_path, monkeypatch):
    path = write_with(monkeypatch, tmp_path / "model.gguf", model_path("qwen2"), pre=None, architecture="qwen2")
    with pytest.warns(
        RuntimeWarning, match=r"model.gguf' does not say how texts are split \(tokenizer.ggml.pre is missing"
    ):
        converted(path)
