"""Tests that a GGUF file with a tensor or a fact that does not fit is refused by its header, or computes what it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import openvino as ov
import pytest
from support.models.gguf_numpy import Reference
from support.models.gguf_random import (
    CAPS,
    HEADS,
    MINICPM,
    PAIRS,
    SIZE,
    WIDTH,
    WINDOW,
    YARN,
    shapes_of,
    write_random,
)

from staticllm.compiler_passes.conversion.gguf_model import convert
from staticllm.errors import ModelError
from staticllm.model_files.converted import converted
from staticllm.model_files.gguf_architectures import ARCHITECTURES, check_architecture
from staticllm.model_files.gguf_header import read_gguf_header
from staticllm.model_files.gguf_tensors import TOKENS
from staticllm.pipelines.diagnostics.doctor import check_gguf
from tests.cpu.conversion.test_gguf import logits_of
from tests.cpu.conversion.test_gguf_architectures import CASES

FILES = {name: CASES[name] for name in CASES if CASES[name][1].get("quantised") is None}
VALUES = (
    None, 0, 1, -1, 2, 3, 7, 16, 33, 64, 512, 10**9, 2**31, 2**32 - 1, 2**63, 0.0, -1.0, 1e30, 3e38, 5e-324, float("nan"),
    float("inf"), "8", "", True, False, [8, 8, 8], [2, 2, 2], [256, 256], [256.0, 256.0, 256.0], [],
)  # fmt: skip
LINES = np.random.default_rng(5).integers(0, 500, 30).tolist()
RANDOM = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "staticllm" / "converted"


@pytest.fixture(scope="module")
def headers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return {
        name: read_gguf_header(write_random(folder / f"{name}.gguf", kind, **options))
        for name, (kind, options) in FILES.items()
    }


def refusal(header):
    """Return why a header is refused, which is one line; None if it is not."""
    try:
        check_architecture(header)
    except ModelError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


def with_tensors(header, change):
    """Return a header with changed tensors, by name; those that become None are left out."""
    changed = {tensor.name: tensor for tensor in header.tensors} | change
    return replace(header, tensors=tuple(tensor for tensor in changed.values() if tensor is not None))


def reshaped(tensor, axis, size):
    return replace(tensor, shape=(*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]))


def changes_of(tensor):
    """Yield the tensor with each dimension changed, turned round, and with one more or one less."""
    for axis, size in enumerate(tensor.shape):
        for other in (1, size // 2, size - 1, size + 1, size + 32, 2 * size):
            yield reshaped(tensor, axis, other)
    if tensor.shape[::-1] != tensor.shape:
        yield replace(tensor, shape=tensor.shape[::-1])
    yield replace(tensor, shape=(*tensor.shape, 2))
    yield replace(tensor, shape=(np.prod(tensor.shape).item(),) if len(tensor.shape) > 1 else (1, *tensor.shape))


@pytest.mark.parametrize("name", FILES)
def test_a_valid_file_is_taken(name, headers):
    assert refusal(headers[name]) is None


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_a_tensor_is_refused(name, headers):
    """Only a head may be missing: then the embeddings are the head. Factors of angles may be missing both."""
    for tensor in headers[name].tensors:
        found = refusal(with_tensors(headers[name], {tensor.name: None}))
        if tensor.name not in ("output.weight", "rope_freqs.weight"):
            assert tensor.name in found or ".bias" in tensor.name


@pytest.mark.parametrize("name", FILES)
def test_a_tensor_of_another_shape_is_named(name, headers):
    for tensor in headers[name].tensors:
        for other in changes_of(tensor):
            found = refusal(with_tensors(headers[name], {tensor.name: other}))
            assert tensor.name in found, other.shape
            assert str(list(other.shape)) in found


@pytest.mark.parametrize("name", FILES)
def test_tensors_with_each_others_shapes_are_refused(name, headers):
    """Each kind with each other kind; what is needed as well as what may be there."""
    tensors = {each.name: each for each in headers[name].tensors if not each.name.startswith(("blk.1.", "blk.2."))}
    for one in tensors.values():
        for other in tensors.values():
            if one.shape != other.shape:
                swapped = {one.name: replace(one, shape=other.shape), other.name: replace(other, shape=one.shape)}
                found = refusal(with_tensors(headers[name], swapped))
                assert one.name in found or other.name in found


@pytest.mark.parametrize("name", FILES)
def test_tensors_that_no_layer_has_are_refused(name, headers):
    """Those of other architectures, of a layer too many, and with names that look alike."""
    header = headers[name]
    known = {tensor.name for tensor in header.tensors}
    optional = {"output.weight", "rope_freqs.weight"}
    example = header.tensors[0]
    others = {each for kind in ARCHITECTURES for each in shapes_of(kind, 8, False)} - known - optional
    alike = {f"blk.00.{each.partition('.')[2].partition('.')[2]}" for each in known if each.startswith("blk.0.")}
    for extra in sorted(others | alike | {"blk.0.attn_q.weight2", "blk.-1.attn_q.weight", "output.bias", "cls.weight"}):
        found = refusal(with_tensors(header, {extra: replace(example, name=extra)}))
        assert found is not None, extra
        assert extra in found or "blk." in found


def with_fact(header, key, value):
    metadata = {name: each for name, each in header.metadata.items() if name != key}
    listed = isinstance(value, list)
    return replace(
        header, metadata=metadata if value is None else {**metadata, key: np.array(value) if listed else value}
    )


def changed_facts(name, header):
    """Yield the facts of a file with other values, and those that it could have."""
    own = header.architecture
    keys = {key for key in header.metadata if key.startswith(f"{own}.")}
    keys |= {
        f"{own}.{key}"
        for key in ("attention.causal", "attention.scale", "vocab_size", "expert_count", "rope.scale_linear")
    }
    keys |= {f"{own}.{key}" for other in CASES.values() for key in dict(other[1].get("keys", ()))}
    for key in sorted(keys):
        for value in VALUES:
            before = header.metadata.get(key)
            if type(value) is not type(before) or value != before:
                yield key, value, with_fact(header, key, value)


@pytest.mark.parametrize("name", FILES)
def test_a_fact_is_refused_or_taken_with_its_value(name, headers):
    """Whole numbers that shapes depend on are refused with any other value, and values of other types always."""
    header = headers[name]
    own = header.architecture
    shaping = {f"{own}.{key}" for key in ("embedding_length", "block_count", "feed_forward_length")}
    shaping |= {f"{own}.attention.{key}" for key in ("head_count", "head_count_kv", "value_length")}
    for key, value, changed in changed_facts(name, header):
        found = refusal(changed)
        is_same = isinstance(value, list) and len(value) == 3 and value[0] == header.metadata.get(key)
        if key in shaping and not is_same and (value is not None or not key.endswith(("_kv", "value_length"))):
            assert found is not None, (key, value)
        if value == "8":
            assert found is not None, (key, value)
        if isinstance(value, float) and not abs(value) < 1e13:
            assert found is not None, (key, value)


def taken_facts(headers):
    cases = []
    for name, header in headers.items():
        for key, value, changed in changed_facts(name, header):
            if refusal(changed) is None and not isinstance(value, list):
                cases.append((name, key, value))
    return cases


def test_facts_that_are_taken_are_computed(headers, tmp_path, in_full):
    """A sample of them, each converted and compared with NumPy; a late refusal names the fact as well."""
    cases = taken_facts(headers)
    count = 60 if in_full else 3
    for place in np.random.default_rng(13).choice(len(cases), count, replace=False):
        name, key, value = cases[place]
        kind, options = FILES[name]
        keys = {**dict(options.get("keys", ())), key.removeprefix(f"{kind}."): value}
        path = write_random(tmp_path / f"{place}.gguf", kind, **{**options, "keys": keys})
        folder = tmp_path / f"{place}"
        folder.mkdir()
        try:
            convert(path, folder)
        except ModelError as error:
            assert key in str(error) or "windows" in str(error)
            continue
        expected = Reference(path).logits(LINES)
        # the original keeps keys with the factors of the call that made them, so a text that crosses the limit is one call
        cuts = () if key.endswith("original_context_length") else (10,)
        found = logits_of(ov.Core().read_model(folder / "openvino_model.xml"), LINES, cuts)[0]
        assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max(), (name, key, value)


def random_values(shapes, scale):
    return {name: RANDOM.normal(0, scale, shape).astype(np.float32) for name, shape in shapes.items()}


def in_layers(shapes, scale=0.5, layers=3):
    return random_values(
        {f"blk.{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()}, scale
    )


BIASES = in_layers({"attn_q.bias": (HEADS * SIZE,), "attn_k.bias": (PAIRS * SIZE,), "attn_v.bias": (PAIRS * SIZE,)})
FEW_BIASES = in_layers({f"attn_{letter}.bias": (SIZE,) for letter in "qkv"}, layers=4)
OUTPUT = in_layers({"attn_output.bias": (WIDTH,)})
INNER = in_layers({"ffn_gate.bias": (WIDTH,), "ffn_up.bias": (WIDTH,), "ffn_down.bias": (WIDTH,)})
JOINED = in_layers({"attn_qkv.weight": ((HEADS + 2 * PAIRS) * SIZE, WIDTH)}, 1.2 / WIDTH**0.5) | in_layers(
    {"attn_qkv.bias": ((HEADS + 2 * PAIRS) * SIZE,)}
)


def without_queries(shapes):
    return {name: shape for name, shape in shapes.items() if not name.endswith(tuple("qkv")) and ".attn_q." not in name
            and ".attn_k." not in name and ".attn_v." not in name}  # fmt: skip


OPTIONAL = {
    "biases": ("llama", {"tensors": BIASES}),
    "output": ("llama", {"tensors": OUTPUT}),
    "inner": ("llama", {"tensors": INNER}),
    "all": ("hunyuan-dense", {"tensors": BIASES | OUTPUT | INNER}),
    "gemma": ("gemma", {"tensors": BIASES, "is_tied": True}),
    "joined llama": ("llama", {"tensors": JOINED, "change": without_queries}),
    "joined qwen2": ("qwen2", {"tensors": JOINED, "change": without_queries}),
    "no head": ("llama", {"is_tied": True}),
    "part": ("smollm3", {"keys": {"rope.dimension_count": 16}, "layers": 5}),
    "kv by layer": ("llama", {"keys": {"attention.head_count_kv": [PAIRS] * 3, "feed_forward_length": [WIDTH] * 3}}),
    "joined, by layer": (
        "phi3",
        {"keys": {"attention.head_count_kv": [PAIRS] * 3}, "quantised": "Q4_1"},
    ),
    "shorter": ("llama", {"keys": {"attention.key_length": None, "attention.value_length": None}}),
    "no base": ("qwen2", {"keys": {"rope.freq_base": None, "rope.dimension_count": None}}),
    "one layer": ("mistral3", {"keys": WINDOW, "layers": 1}),
    "one key head": ("llama", {"heads": (8, 1)}),
    "one key head, part": ("minicpm", {"heads": (8, 1), "keys": {**MINICPM, "rope.dimension_count": 16}}),
    "one key head, unrotated": ("smollm3", {"heads": (4, 1), "layers": 4, "quantised": "Q4_1"}),
    **{
        f"one head, {kind}": (kind, {"heads": (1, 1), "layers": 4})
        for kind in ("llama", "smollm3", "phi3", "hunyuan-dense")
    },
    "one head, biases": ("qwen2", {"heads": (1, 1), "tensors": OUTPUT}),
    "one head, capped": ("gemma2", {"heads": (1, 1), "keys": {**WINDOW, **CAPS}}),
    "one head, unrotated, biases": ("smollm3", {"heads": (1, 1), "layers": 4, "tensors": FEW_BIASES}),
    "norms after a rotation that scales": ("hunyuan-dense", {"keys": YARN}),
}
FEW = {"biases", "joined qwen2", "one key head", "one head, unrotated, biases", "norms after a rotation that scales"}


@pytest.mark.parametrize(
    "name", [each if each in FEW else pytest.param(each, marks=pytest.mark.slow) for each in OPTIONAL]
)
def test_what_a_file_may_have_is_computed(name, tmp_path):
    kind, options = OPTIONAL[name]
    path = write_random(tmp_path / "model.gguf", kind, **options)
    assert check_gguf(path).level == "ok"
    expected = Reference(path).logits(LINES)
    found = logits_of(ov.Core().read_model(converted(path) / "openvino_model.xml"), LINES, (10,))[0]
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["biases", "output", "inner", "joined qwen2"])
def test_what_a_file_may_have_is_there_in_all_layers(name, tmp_path):
    kind, options = OPTIONAL[name]
    header = read_gguf_header(write_random(tmp_path / "model.gguf", kind, **options))
    for tensor in options["tensors"]:
        found = refusal(with_tensors(header, {tensor: None}))
        assert f"has no {tensor}" in found or "leaves out" in found


def drop(*names):
    return lambda shapes: {name: shape for name, shape in shapes.items() if name not in names}


def shaped(**sizes):
    return lambda shapes: {name: sizes.get(name.replace(".", "_"), shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "kind,options,said",
    [
        ("llama", {"change": drop("blk.0.attn_v.weight")}, "has no blk.0.attn_v.weight, which must have the shape [256, 64]"),
        (
            "llama",
            {"change": shaped(token_embd_weight=(300, WIDTH))},
            "has token_embd.weight with the shape [256, 300], and its metadata say [256, 600] "
            "(embedding_length: 256, tokenizer.ggml.tokens: 600): download it again",
        ),
        ("llama", {"change": shaped(output_norm_weight=(1,))}, "has output_norm.weight with the shape [1]"),
        ("llama", {"change": shaped(blk_1_attn_output_weight=(1, 256))}, "blk.1.attn_output.weight with the shape [256, 1]"),
        ("llama", {"change": shaped(blk_2_ffn_up_weight=(1, 256))}, "blk.2.ffn_up.weight with the shape [256, 1]"),
        ("phi3", {"change": shaped(output_weight=(599, 256))}, "has output.weight with the shape [256, 599]"),
        ("llama", {"keys": {"rope.dimension_count": 10**9}}, "rope.dimension_count 1000000000, which must be even and at most"),
        ("llama", {"keys": {"attention.head_count_kv": 3}}, "head_count_kv 3, which does not divide head_count 8"),
        ("llama", {"keys": {"attention.layer_norm_rms_epsilon": None}}, "has no llama.attention.layer_norm_rms_epsilon"),
        ("minicpm", {"keys": {"embedding_scale": 12.0, "residual_scale": 0.2}}, "has no minicpm.logit_scale"),
        ("gemma2", {"keys": {"attention.sliding_window": 16}}, "logit_softcapping"),
        ("gemma3", {}, "has no gemma3.attention.sliding_window, which every file of this architecture must have"),
        ("gemma2", {"keys": {**CAPS, "attention.sliding_window": 0}}, "has gemma2.attention.sliding_window 0, which"),
    ],
)  # fmt: skip
def test_a_refused_file_is_named_and_nothing_is_kept(kind, options, said, tmp_path, cache):
    path = write_random(tmp_path / "model.gguf", kind, **options)
    for _ in range(2):
        with pytest.raises(ModelError) as error:
            converted(path)
        assert said in str(error.value)
        assert "\n" not in str(error.value)
    assert not [each for each in cache.glob("*") if each.is_dir()]
    assert check_gguf(path).level == "fail"


def test_the_vocabulary_is_compared_with_both_matrices(headers):
    for name, header in headers.items():
        for count in (1, 599, 601, 1200):
            tokens = [str(number) for number in range(count)]
            found = refusal(replace(header, metadata={**header.metadata, TOKENS: tokens}))
            assert f"tokenizer.ggml.tokens: {count}" in found, name
            assert "token_embd.weight" in found
