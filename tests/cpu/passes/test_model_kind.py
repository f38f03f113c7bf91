"""Tests the table of model kinds: the graph decides, and a model of another kind is refused with a remedy."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from support.encoders.encoder_models import ARCHIVES, TinyEncoder, unpack

from staticllm.compiler_passes.model_kind import check_kind, kind_in, kind_of
from staticllm.devices import get_core
from staticllm.errors import ModelError

ENCODERS = [path.stem for path in ARCHIVES.glob("*.zip") if path.stem not in ("qwen3_with_past", "bert_tokenizer")]


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_stateless_models_are_encoders(name, tmp_path):
    unpack(name, tmp_path)
    kind = kind_in(tmp_path)
    assert kind.name == "encoder"
    assert ("cross-encoder" in kind.what) == name.endswith("_scores")


def test_a_decoder_is_no_encoder(tmp_path):
    unpack("qwen3_with_past", tmp_path)
    assert kind_in(tmp_path).name == "decoder"
    with pytest.raises(
        ModelError, match=r"is not an encoder but a causal language model .* use StaticLLMPipeline"
    ) as error:
        check_kind(get_core().read_model(tmp_path / "openvino_model.xml"), tmp_path, "encoder")
    assert "\n" not in str(error.value)
    assert check_kind(get_core().read_model(tmp_path / "openvino_model.xml"), tmp_path, "encoder", can_embed=True)


def test_hidden_states_beside_states_are_a_decoder_that_embeds(tmp_path):
    unpack("qwen3_with_past", tmp_path)
    model = get_core().read_model(tmp_path / "openvino_model.xml")
    model.output("logits").set_names({"last_hidden_state"})
    assert kind_of(model).name == "decoder embedder"
    assert check_kind(model, tmp_path, "encoder").name == "decoder embedder"
    with pytest.raises(ModelError, match="is not a causal language model but a text embedding model"):
        check_kind(model, tmp_path, "decoder")


def test_logits_of_every_token_without_states_are_not_scores():
    model = TinyEncoder().model()
    model.output(0).set_names({"logits"})
    assert kind_of(model).name == "decoder"


def test_a_model_without_text_has_no_kind(tmp_path):
    value = ops.parameter([1, 4], np.float32)
    model = ov.Model([ops.relu(value)], [value])
    assert kind_of(model) is None
    with pytest.raises(ModelError, match="is not an encoder: it needs an input 'input_ids'"):
        check_kind(model, tmp_path, "encoder")
