"""A decoder as an embedder: its stateful original, its programs, and the directory of the embedded model as one."""

import json
import shutil

import numpy as np
import openvino_genai as genai
from support.encoders.encoder_directories import add_tokenizer
from support.encoders.encoder_models import unit, unpack

from staticllm import demo_model_path
from staticllm.compiler_passes.graph.step_graph import named_result
from staticllm.compiler_passes.lower_encoder import lower_encoder
from staticllm.compiler_passes.pass_pipeline import EncoderOptions
from staticllm.compiler_passes.shapes.select_logits import find_head
from staticllm.core import EncoderVariant
from staticllm.devices import get_core
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner

VOCABULARY = 99
SMALL = EncoderVariant(1, 8, 2), EncoderVariant(2, 16, 4)
CHUNKS = tuple(EncoderVariant(1, rows, 1, past) for rows in (4, 16) for past in (16, 32, 48))


def embedder(folder):
    """Make the directory of a tiny decoder that was exported with past, and says nothing of the length of texts."""
    unpack("qwen3_with_past", folder)
    add_tokenizer(folder)
    return with_pooling(folder)


def demo_embedder(folder):
    """Make a directory of the embedded language model as an embedder, for texts of up to 2000 tokens."""
    shutil.copytree(demo_model_path(), folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 2000}))
    return with_pooling(folder)


def with_pooling(folder):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


class Original:
    """The stateful original, whose hidden states are an output."""

    def __init__(self, path):
        model = get_core().read_model(path)
        (result,) = model.get_results()
        model.add_results([named_result("states", find_head(result).input_value(0))])
        self.program = get_core().compile_model(model, "CPU", EXACT)

    def __call__(self, ids):
        request, count = self.program.create_infer_request(), len(ids)
        feeds = {
            "input_ids": np.asarray(ids)[None],
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        request.infer({name: feeds[name] for port in self.program.inputs for name in port.get_names()})
        return unit(np.array(request.get_tensor("states").data[0, -1]))


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(5, VOCABULARY, count)


def runner_of(path, variants, is_shared, max_rows=64):
    lowered = lower_encoder(get_core().read_model(path), EncoderOptions(max_rows))
    assert lowered.shape.past, [report.notes for report in lowered.reports]
    compile_model = get_core().compile_model
    if is_shared:
        program = compile_model(lowered.share(variants), "CPU", EXACT)
        compiled = dict.fromkeys(variants, program)
    else:
        compiled = {variant: compile_model(lowered.specialise(variant), "CPU", EXACT) for variant in variants}
    return EncoderRunner(lowered.shape, compiled, "last")


def words(count, seed=1):
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(["the", "fox", "asks", "a", "device", "why", "it", "runs", "graphs"], count))


def hidden_states(folder, most, text):
    model = get_core().read_model(folder / "openvino_model.xml")
    (result,) = model.get_results()
    model.add_results([named_result("states", find_head(result).input_value(0))])
    request = get_core().compile_model(model, "CPU", EXACT).create_infer_request()
    ids = genai.Tokenizer(folder).encode(text).input_ids.data[:, :most]
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(ids.shape[1])[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    request.infer(feeds)
    return np.array(request.get_tensor("states").data[0])
