"""Tests that damaged model directories are refused before OpenVINO reads them, which could kill the process."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from staticllm import ModelError, StaticLLMPipeline, demo_model_path
from staticllm.model_dir import max_positions
from staticllm.model_files.model_at import check_model_dir
from staticllm.system.ir_file import IrError, read_ir

SMALL = {"MAX_PROMPT_LEN": 32, "MIN_RESPONSE_LEN": 16, "INFERENCE_PRECISION_HINT": "f32"}


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(demo_model_path(), tmp_path / "model")


def ir(constant):
    return f'<net><layers><layer id="0" type="Const"><data {constant}/></layer></layers></net>'.encode()


@pytest.mark.parametrize(
    ("xml", "words"),
    [
        (b"", "damaged or truncated"),
        (b"<net><layers>", "damaged or truncated"),
        (b"<html></html>", "root is not <net>"),
        (b'<!DOCTYPE x [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><net>&b;</net>', "document type"),
        (b"<net>" * 300 + b"</net>" * 300, "is nested more than"),
        (ir('element_type="u8" shape="4" offset="-1" size="4"'), "'-1' where a number"),
        (ir('element_type="u8" shape="4" offset="0x10" size="4"'), "'0x10' where a number"),
        (ir(f'element_type="u8" shape="4" offset="{"9" * 5000}" size="4"'), "where a number"),
        (ir('element_type="u8" shape="4" offset="\u0663" size="4"'), "where a number"),
        (ir('element_type="i32" shape="4" offset="0" size="4"'), "constant i32[4] of 4 bytes"),
        (ir('element_type="i32" shape="4" offset="0"'), "where a number"),
        (
            b'<net><layers><layer id="0" type="ReadValue"><dada variable_id="x"/></layer></layers></net>',
            "a state without",
        ),
        (b'<net><layers><layer id="0" type="Assign"/></layers></net>', "a state without 'variable_id'"),
    ],
)
def test_an_impossible_ir_is_refused(xml, words):
    with pytest.raises(IrError) as error:
        read_ir(xml)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_parsing_time_grows_only_with_the_size():
    """A regular expression once took 40 s for this text."""
    text = b'<net><layers><layer id="0"><data offset="1" ' + b'x="offset=1" ' * 0 + b"/></layer></layers>"
    text += b'<a offset="1" b="' + b"offset=&quot;1&quot; " * 100_000 + b'"/></net>'
    start = time.perf_counter()
    with pytest.raises(IrError):
        read_ir(text)
    assert time.perf_counter() - start < 5


def test_layers_of_bodies_are_counted_separately():
    text = b"""<net><layers><layer id="0"><data offset="0" size="4" element_type="i32" shape=""/></layer><layer id="1"><body>
    <layers><layer id="0"><data offset="8" size="8" element_type="i64" shape=""/></layer></layers></body></layer>
    </layers></net>"""
    found = read_ir(text)
    assert found.num_weight_bytes == 16
    assert len(found.constants) == 2


def test_a_tokenizer_whose_texts_lie_outside_is_refused(model):
    path = model / "openvino_tokenizer.bin"
    data = bytearray(path.read_bytes())
    data[168:172] = (2**30).to_bytes(4, "little")  # the offset of the first text of the vocabulary
    path.write_bytes(data)
    with pytest.raises(ModelError, match="its vocabulary offsets point outside the file"):
        check_model_dir(model)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in the file system here")
def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(model):
    (model / "openvino_model.xml").unlink()
    os.mkfifo(model / "openvino_model.xml")
    with pytest.raises(ModelError):
        check_model_dir(model)


def test_overwriting_weights_in_place_is_detected(model):
    with StaticLLMPipeline(model, **SMALL) as pipe:
        assert pipe.wait_until_complete(60)
        weights = model / "openvino_model.bin"
        os.utime(weights)
        assert pipe.generate("hello", max_new_tokens=2), "only its time has changed"
        data = weights.read_bytes()
        stat = weights.stat()
        with weights.open("r+b") as file:
            file.write(bytes(len(data)))
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as programs do that copy with times
        for call in (pipe.generate, pipe.submit):
            with pytest.raises(ModelError, match="was overwritten while it is in use"):
                call("hello", max_new_tokens=2)
        with weights.open("r+b") as file:
            file.write(data)
        assert pipe.generate("hello", max_new_tokens=2)
        copy = model / "copy"
        copy.write_bytes(bytes(len(data)))
        if os.name != "nt":  # Windows cannot replace a mapped file
            copy.replace(weights)
            assert pipe.generate("hello", max_new_tokens=2), "another file under the name is no danger"


def test_a_graph_that_is_overwritten_with_its_time_set_back_is_read_again(model):
    xml = model / "openvino_model.xml"
    stat = xml.stat()
    check_model_dir(model)
    xml.write_bytes(b" " * stat.st_size)
    os.utime(xml, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ModelError, match="is damaged or truncated"):
        check_model_dir(model)


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions", "n_ctx"])
def test_lengths_beyond_the_limit_of_the_model_cause_a_warning(name, model):
    """GPT-2 and CodeGen have names of their own; beyond their tables, OpenVINO reads zeros."""
    (model / "config.json").write_text(json.dumps({name: 40}))
    with pytest.warns(RuntimeWarning, match="= 48, but the model was made for 40 positions"):
        StaticLLMPipeline(model, **SMALL).close()


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ('{"max_position_embeddings": 512}', 512),
        ('{"text_config": {"max_position_embeddings": 64}}', 64),
        ('{"max_position_embeddings": "many"}', None),
        ("[1, 2]", None),
        ("{", None),
        ("[" * 100_000, None),
        ("", None),
    ],
)
def test_the_limit_is_read_from_any_config(text, limit, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert max_positions(tmp_path) == limit
    assert max_positions(tmp_path / "no") is None


LITTLE_MEMORY = """
import resource, sys
import openvino_genai
from staticllm import StaticLLMPipeline, StaticLLMError, demo_model_path
StaticLLMPipeline(demo_model_path(), MAX_PROMPT_LEN=32).close()  # takes the memory that only the first load needs
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for spare in (400, 200, 120, 80, 40, 20, 10, 5):
    resource.setrlimit(resource.RLIMIT_AS, (used + (spare << 20), resource.RLIM_INFINITY))
    try:
        StaticLLMPipeline(demo_model_path(), MAX_PROMPT_LEN=1024, KV_SLOTS=40000).close()
        print("loaded")
    except StaticLLMError as error:
        assert len(str(error).splitlines()) == 1, error
        print("refused", error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as Linux has them")
def test_lack_of_memory_is_a_one_line_error():
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY], capture_output=True, text=True, check=False, timeout=120
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr[-1500:]
    assert len(lines) == 8
    assert "refused" in lines[-1]
