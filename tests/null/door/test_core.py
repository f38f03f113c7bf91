import pickle
from dataclasses import replace

import pytest

import staticllm
from staticllm.core import FinishReason, MaskKind, RecurrentState, Variant
from staticllm.metrics import MeanStdPair, PerfMetrics, RawPerfMetrics
from staticllm.results import DecodedResults, GeneratedText


def test_only_the_listed_names_are_public():
    assert set(staticllm.__all__) == {
        "Adapter", "AdapterConfig", "AdapterError",
        "Calibration", "Choice", "Decision", "DecisionCancelledError", "DecisionHandle", "Level", "Option", "Predicate",
        "QuestionError", "Score",
        "BlobError", "BusyError", "ClosedError",
        "ConfigError", "DecodedResults", "DeviceError", "EncodedResults", "FinishReason", "GeneratedText",
        "GenerationConfigError", "GenerationHandle", "ModelError", "NumericalError", "PerfMetrics", "Plan", "Policy",
        "EmbeddingConfig", "EmbeddingHandle", "StaticEmbeddingPipeline", "RerankConfig", "RerankHandle",
        "StaticRerankPipeline", "StaticWhisperPipeline", "WhisperDecodedResultChunk", "WhisperDecodedResults",
        "WhisperGenerationConfig", "WhisperPerfMetrics", "WhisperWordTiming",
        "ProcessLostError", "ProgressEvent", "PromptError", "RequestStatus", "RequestView", "Stats", "Trace", "View",
        "Device", "VariantIndex",
        "PromptTooLongError", "SnapshotError",
        "StaticLLMConfig", "StaticLLMError", "StaticLLMPipeline", "UnsupportedModelError", "Variant",
        "AssistantMessage", "ToolCall", "LogitsProcessor",
        "ArgumentsDelta", "CallBegin", "CallBroken", "CallEnd", "ContentDelta", "ReasoningDelta",
        "demo_model_path", "draft_model",
    }  # fmt: skip
    with pytest.raises(AttributeError):
        staticllm.nothing_of_this_name  # noqa: B018


def test_finish_reasons_equal_their_names():
    class Genai:
        name = "LENGTH"

    assert FinishReason.STOP == "stop"
    assert FinishReason.STOP != "length"
    assert "stop" in [FinishReason.STOP]
    assert Genai() == FinishReason.LENGTH
    assert Genai() != FinishReason.STOP
    assert not Genai() != FinishReason.LENGTH  # noqa: SIM202 - tests __ne__
    assert not FinishReason.STOP != "stop"  # noqa: SIM202 - tests __ne__
    assert str(FinishReason.CANCELLED) == "cancelled"
    assert {FinishReason.STOP: 1}["stop"] == 1


def test_variants_print_their_phase_and_sizes():
    assert str(Variant(1, 256)) == "generate[1x256]"
    assert str(Variant(64, 0)) == "prefill[64x0]"
    assert MaskKind().port_name == "mask.causal"
    assert MaskKind(32).port_name == "mask.window:32"


def test_a_variant_may_have_more_logits_than_sequences():
    assert Variant(16, 64, 4).num_logits == 4
    assert str(Variant(16, 64, 4)) == "prefill[16x64x4]"
    assert str(Variant(4, 64, 1, 3)) == "prefill[4x64,logits=4]"
    assert Variant(4, 64, 4, 4).phase == "generate"
    assert Variant(4, 64) < Variant(4, 64, 1, 3)
    assert Variant(4, 64) != Variant(4, 64, 1, 3)
    assert replace(Variant(16, 64), sequences=4) == Variant(16, 64, 4)
    assert replace(Variant(4, 64), rows=8).num_logits == 1
    assert replace(Variant(16, 64, 1, 3), sequences=4).num_logits == 7, "drafts stay beside the rows of each sequence"


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bool", 1), ("int64", 8), ("float16", 2)])
def test_a_recurrent_state_has_the_bytes_of_its_type(dtype, size):
    assert RecurrentState(0, "s", (1, 2, 3), dtype).num_bytes == 6 * size


def test_a_generated_text_is_a_str_with_the_attributes_of_results():
    results = DecodedResults(["hello"], [[1]], [0.5], [FinishReason.STOP], PerfMetrics(3.0))
    text = GeneratedText.of(results)
    assert text == "hello"
    assert isinstance(text, str)
    assert text.tokens == [[1]]
    assert text.scores == [0.5]
    assert text.finish_reasons == ["stop"]
    assert text.perf_metrics.get_load_time() == 3.0


def test_errors_can_be_pickled():
    for error in (staticllm.PromptTooLongError(5, 3, True), staticllm.UnsupportedModelError("stage", "reason")):
        copied = pickle.loads(pickle.dumps(error))
        assert str(copied) == str(error)
        assert type(copied) is type(error)
    assert hash(staticllm.StaticLLMConfig()) == hash(staticllm.StaticLLMConfig())


def test_metrics_of_several_requests_are_pooled():
    first = PerfMetrics(5.0, RawPerfMetrics(m_times_to_first_token=[1000.0], m_durations=[2000.0, 4000.0]))
    first.count(10, 3, 4)
    second = PerfMetrics(5.0, RawPerfMetrics(m_times_to_first_token=[3000.0]))
    second.count(1, 1, 0)
    both = first + second
    assert both.get_ttft() == MeanStdPair(2.0, 1.0)
    assert both.get_tpot() == MeanStdPair(3.0, 1.0)
    assert both.get_throughput().mean == pytest.approx(1000 / 3)
    assert (both.get_num_input_tokens(), both.get_num_generated_tokens(), both.get_num_cached_tokens()) == (11, 4, 4)
    assert second.get_tpot() == second.get_throughput() == MeanStdPair(-1.0, -1.0)
