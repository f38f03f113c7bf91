"""Tests the reader of LoRA files: it reads what PEFT writes, and every other file gets one line."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.lora_files import PREFIX, safetensors_bytes

from staticllm.adapters.adapter_set import AdapterSet
from staticllm.adapters.lora import CONFIG, FILE, MAX_VALUE, adapter_in_memory, read_adapter
from staticllm.adapters.safetensors_file import parse_safetensors
from staticllm.core import AdaptedGroup, AdaptedPart
from staticllm.errors import AdapterError
from staticllm.system.bf16 import from_bf16, to_bf16

A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(8, dtype=np.float32).reshape(4, 2) / 4
NAME = PREFIX + "model.layers.0.self_attn.q_proj"
PLAIN = {f"{NAME}.lora_A.weight": A, f"{NAME}.lora_B.weight": B}


def header_of(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(change, data=None):
    """Return a file whose header was changed."""
    header, rest = header_of(data or safetensors_bytes(PLAIN))
    header = change(header) or header
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_tensors_are_read_as_f32(kind):
    tensors = parse_safetensors(safetensors_bytes(PLAIN, dict.fromkeys(PLAIN, kind)))
    for name, expected in PLAIN.items():
        assert np.array_equal(tensors[name].to_f32(), expected)
        assert tensors[name].to_f32().dtype == np.float32


def test_the_paths_of_modules_have_no_prefix_of_peft():
    adapter = adapter_in_memory(safetensors_bytes(PLAIN))
    assert list(adapter.layers) == ["model.layers.0.self_attn.q_proj"]
    layer = adapter.layers["model.layers.0.self_attn.q_proj"]
    assert (layer.rank, layer.sizes, layer.scale) == (2, (3, 4), 1.0)
    assert np.array_equal(layer.a, A)
    assert np.array_equal(layer.b, B)


@pytest.mark.parametrize(
    "names", [("lora_A.default", "lora_B.default"), ("lora.down", "lora.up"), ("lora_down", "lora_up")]
)
def test_other_names_of_the_matrices_are_known(names):
    tensors = {f"x.y.{name}.weight": value for name, value in zip(names, (A, B), strict=True)}
    assert list(adapter_in_memory(safetensors_bytes({**tensors, "x.y.alpha": np.ones(1, np.float32)})).layers) == [
        "x.y"
    ]


def test_the_models_own_weights_and_alphas_are_left_out():
    own = {f"{NAME}.base_layer.weight": np.ones((4, 3), np.float32), "x.alpha": np.ones(1, np.float32)}
    whole, plain = (adapter_in_memory(safetensors_bytes(tensors)) for tensors in ({**PLAIN, **own}, PLAIN))
    assert whole.name == plain.name


def test_the_name_of_an_adapter_is_that_of_its_numbers(tmp_path):
    first, second = (adapter_in_memory(safetensors_bytes(PLAIN)) for _ in range(2))
    other = adapter_in_memory(safetensors_bytes({**PLAIN, f"{NAME}.lora_B.weight": B + 1}))
    assert first.name == second.name != other.name


def directory(folder, config, tensors=None):
    folder.mkdir()
    (folder / FILE).write_bytes(safetensors_bytes(tensors or PLAIN))
    (folder / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"r": 2, "lora_alpha": 8}, 4.0),
        ({"r": 2, "lora_alpha": 8, "use_rslora": True}, 8 / np.sqrt(2)),
        ({"r": 2, "lora_alpha": 8, "alpha_pattern": {"q_proj": 1}}, 0.5),
        ({"r": 2, "lora_alpha": 8, "alpha_pattern": {"proj": 1}}, 4.0),
        (
            {"r": 2, "lora_alpha": 8, "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 1}},
            0.5,
        ),  # as PEFT documents it
        (
            {"r": 2, "lora_alpha": 8, "alpha_pattern": {"^layers.0.self_attn.q_proj": 1}},
            4.0,
        ),  # ^ is the whole path's beginning
        ({"r": 2, "lora_alpha": 8, "alpha_pattern": {r"layers\.[0-3]\..*proj": 1}}, 0.5),
        ({"r": 2, "lora_alpha": 8, "alpha_pattern": {r"layers\.[1-3]\..*proj": 1}}, 4.0),
        ({"r": 2, "lora_alpha": 8, "alpha_pattern": {"k_proj|q_proj": 1, "q_proj": 2}}, 0.5),  # the first that matches
        ({"r": 2, "lora_alpha": 8, "init_lora_weights": "gaussian"}, 4.0),
        ({"r": 2, "lora_alpha": 8, "init_lora_weights": True, "modules_to_save": None}, 4.0),
        ({"r": 16, "lora_alpha": 8, "rank_pattern": {"q_proj": 2}}, 4.0),  # the rank is that of the matrices
        ({"peft_type": "LORA", "lora_alpha": 2}, 1.0),
    ],
)
def test_a_directory_has_the_scale_of_peft(config, scale, tmp_path):
    (layer,) = read_adapter(directory(tmp_path / "lora", config)).layers.values()
    assert layer.scale == pytest.approx(scale)


@pytest.mark.parametrize(
    "config",
    [
        "", "[]", "{", "[" * 100_000, '{"lora_alpha": "x"}', '{"lora_alpha": null}', '{"lora_alpha": 1e400}',
        '{"use_dora": true}', '{"peft_type": "IA3"}', '{"bias": "all"}', '{"alpha_pattern": {"x": "y"}}', '{"alpha_pattern": 3}',
        '{"alpha_pattern": {"(": 1}}', '{"alpha_pattern": {"(a+)+b": 1}}', '{"alpha_pattern": {".*.*.*.*.*": 1}}',
        '{"init_lora_weights": "pissa"}', '{"init_lora_weights": "olora"}', '{"init_lora_weights": 1}',
        '{"modules_to_save": ["lm_head"]}', '{"layer_replication": [[0, 2]]}', '{"target_parameters": ["mlp.experts"]}',
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_used_gets_one_line(config, tmp_path):
    with pytest.raises(AdapterError) as caught:
        read_adapter(directory(tmp_path / "lora", config))
    assert CONFIG in one_line(caught)


@pytest.mark.parametrize(
    "name", ["adapter_model.bin", "adapter_model.pt", "lora.gguf", "pytorch_lora_weights.safetensors"]
)
def test_a_directory_with_another_format_says_what_to_do(name, tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    (tmp_path / name).write_bytes(b"PK\x03\x04")
    with pytest.raises(AdapterError, match=r"save it as safetensors|give a folder with") as error:
        read_adapter(tmp_path)
    one_line(error)


@pytest.mark.parametrize("data", [b"PK\x03\x04" + bytes(60), b"\x80\x02}q\x00.", b"", b"GGUF" + bytes(60)])
def test_a_file_in_another_format_says_what_to_do(data, tmp_path):
    path = tmp_path / "adapter_model.bin"
    path.write_bytes(data)
    with pytest.raises(AdapterError, match=r"save it as safetensors|no safetensors file|adapter_model\.safetensors"):
        read_adapter(path)
    path.write_bytes(safetensors_bytes(PLAIN))
    assert read_adapter(path).layers


def test_files_that_are_not_there_get_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    pipes = [tmp_path / "fifo"] if hasattr(os, "mkfifo") else []
    for pipe in pipes:
        os.mkfifo(pipe)
    for path in (tmp_path / "nothing.safetensors", tmp_path / "empty", *pipes, "a\0b", 5, None, "x" * 5000):
        with pytest.raises(AdapterError) as caught:
            read_adapter(path)
        one_line(caught)


NAMED = f"{NAME}.lora_A.weight"
DAMAGED = "is damaged, or no safetensors file"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", DAMAGED),
        (b"\xff" * 8, DAMAGED),
        ((5).to_bytes(8, "little") + b"{}", DAMAGED),
        ((2).to_bytes(8, "little") + b"[]", DAMAGED),
        ((2).to_bytes(8, "little") + b"\xff\xff", DAMAGED),
        (safetensors_bytes(PLAIN)[:-1], DAMAGED),
        (safetensors_bytes(PLAIN) + b"\0", DAMAGED),
        (with_header(lambda header: header[NAMED].update(dtype="I64")), DAMAGED),
        (with_header(lambda header: header[NAMED].update(dtype="I64", shape=[3, 1])), "I64: only F32, F16, BF16"),
        (with_header(lambda header: header[NAMED].update(dtype=["F32"])), DAMAGED),
        (with_header(lambda header: header[NAMED].update(shape=[2, -3])), DAMAGED),
        (with_header(lambda header: header[NAMED].update(shape=[1 << 31, 1 << 31])), DAMAGED),
        (with_header(lambda header: header[NAMED].update(shape=[True, 6])), DAMAGED),
        (with_header(lambda header: header[NAMED].update(data_offsets=[0, 1 << 40])), DAMAGED),
        (with_header(lambda header: header[NAMED].update(data_offsets=[24, 0])), DAMAGED),
        (with_header(lambda header: header[NAMED].update(data_offsets=[-24, 0])), DAMAGED),
        (with_header(lambda header: header.update({NAMED: 5})), DAMAGED),
        (
            with_header(lambda header: header.update({"x": header[NAMED]})),
            DAMAGED,
        ),  # overlapping tensors need any memory
        (safetensors_bytes({}), "no low-rank matrices"),
        (safetensors_bytes({NAMED: A}), "one of two"),
        (safetensors_bytes({**PLAIN, f"{NAME}.lora_A.second.weight": A}), "two tensors"),
        (safetensors_bytes({**PLAIN, PREFIX + "lm_head.weight": A}), "lm_head"),
        (safetensors_bytes({**PLAIN, f"{NAME}.lora_magnitude_vector": A}), "magnitude"),
        (safetensors_bytes({**PLAIN, f"{PREFIX}model.embed_tokens.lora_embedding_A": A}), "embedding"),
        (safetensors_bytes({**PLAIN, NAMED: A[:1]}), "must be"),
        (safetensors_bytes({**PLAIN, NAMED: A[:0]}), "must be"),
        (safetensors_bytes({**PLAIN, NAMED: A[0]}), "must be a matrix"),
        (safetensors_bytes({**PLAIN, NAMED: np.zeros((2000, 2000), np.float32)}), "must be a matrix"),
        (safetensors_bytes({**PLAIN, NAMED: A * np.nan}), "not finite"),
        (safetensors_bytes({**PLAIN, NAMED: np.full_like(A, np.inf)}), "not finite"),
        (safetensors_bytes({**PLAIN, NAMED: A * np.float32(MAX_VALUE)}), "larger"),
    ],
)
def test_damaged_and_foreign_files_get_one_line(data, message, tmp_path):
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(data)
    for read in (lambda: adapter_in_memory(data), lambda: read_adapter(file)):
        with pytest.raises(AdapterError) as caught:
            read()
        assert message in one_line(caught)
    assert str(file) in str(caught.value)


@given(st.data())
def test_no_change_of_a_file_raises_another_error(data):
    whole = bytearray(safetensors_bytes(PLAIN))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(whole)))
    try:
        adapter = adapter_in_memory(bytes(whole[:end] if data.draw(st.booleans()) else whole))
    except AdapterError as error:
        assert "\n" not in str(error)
    else:
        assert all(np.isfinite(layer.a).all() and np.isfinite(layer.b).all() for layer in adapter.layers.values())


def a_set():
    second = {f"{NAME}.lora_A.weight": A[:1] + 1, f"{NAME}.lora_B.weight": B[:, :1] + 1}
    adapters = tuple(adapter_in_memory(safetensors_bytes(tensors)) for tensors in (PLAIN, second))
    return AdapterSet(adapters, (1.0, 0.5))


def test_a_request_has_one_factor_per_adapter():
    found = a_set()
    first, second = (adapter.name for adapter in found.adapters)
    assert found.scales(None) == (1.0, 0.5)
    assert found.scales([(second, 0.25)]) == (0.0, 0.25)
    assert found.scales([(first, 0.25), (first, 0.5)]) == (0.75, 0.0)
    assert found.scales([]) == found.scales([(first, 0.0)]) == ()
    with pytest.raises(KeyError):
        found.scales([("stranger", 1.0)])


def test_the_matrices_of_a_group_have_their_own_rows_and_columns():
    """Two layers of one group, changed by two adapters: what the inputs compute is the sum of all changes."""
    found, path = a_set(), NAME.removeprefix(PREFIX)
    parts = (AdaptedPart(0, path, 2, 0, 0), AdaptedPart(1, path, 1, 0, 2), AdaptedPart(0, path, 2, 4, 3))
    group = AdaptedGroup(7, 3, 8, parts)
    matrices = found.matrices((group,))
    a, b = matrices["adapter.7.a"], matrices["adapter.7.b"]
    x, alphas = np.array([1.0, -2.0, 3.0], np.float32), np.array([0.5, 2.0], np.float32)
    scales = alphas[list(group.columns)]
    first, second = (adapter.layers[path] for adapter in found.adapters)
    one = 0.5 * (x @ first.a.T) @ first.b.T
    assert np.allclose((x @ a.T * scales) @ b.T, [*(one + 2.0 * (x @ second.a.T) @ second.b.T), *one])


def test_layouts_tell_shapes_and_fused_sets_tell_numbers():
    first = a_set()
    changed = AdapterSet(first.adapters[::-1], (1.0, 0.5))
    assert first.description == AdapterSet(first.adapters, (0.25, 0.0)).description != changed.description
    fused = [AdapterSet(first.adapters, alphas, is_fused=True).description for alphas in ((1.0, 0.5), (1.0, 0.25))]
    assert len({*fused, first.description}) == 3


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20))
def test_numbers_are_rounded_to_the_nearest_of_bf16(values):
    exact = np.array(values, np.float32)
    found = from_bf16(to_bf16(exact))
    down = (exact.view(np.uint32) & 0xFFFF0000).view(np.float32)
    up = ((exact.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    assert np.array_equal(np.abs(found - exact), np.minimum(np.abs(exact - down), np.abs(up - exact)))


def test_headers_names_and_axes_are_bounded():
    """An error repeats names and shapes, and the package allows headers of 100 MB."""
    for bad, said in (
        ((17 << 20).to_bytes(8, "little") + b"{}", "header has more than"),
        (safetensors_bytes({"x" * 2000: A}), "a name of 2000 characters"),
        (safetensors_bytes({"y": A.reshape(2, 3, *[1] * 10)}), "12 axes"),
    ):
        with pytest.raises(AdapterError, match=said) as caught:
            adapter_in_memory(bad)
        assert len(one_line(caught)) < 300
