"""Tests texts that are very long, cancelled or late, ids that a model does not have, and weights that are not finite."""

import threading
import time
import zipfile
from concurrent.futures import CancelledError

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from support.encoders.encoder_models import ARCHIVES, Alone, encoder_directory, unpack
from support.helpers import one_line

from staticllm.devices import get_core
from staticllm.errors import ModelError, NumericalError, StaticLLMError
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline
from tests.support.inside import driver_of

pytestmark = pytest.mark.usefixtures("shared_lowering")

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
SECONDS = 30
TEXTS = ["a", "What is an NPU?", "the fox runs"]
KINDS = {"one device": {}, "pool": {"LATENCY_MS": 60_000}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return encoder_directory(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(params=list(KINDS))
def pipe(request, directory):
    with StaticEmbeddingPipeline(directory, "CPU", **KINDS[request.param], **F32) as found:
        yield found


class Gate:
    """Holds the calls of a pipeline's device back, and counts the texts that it runs."""

    def __init__(self, pipe, monkeypatch):
        self.open, self.began, self.num_texts = threading.Event(), threading.Event(), 0
        is_pool = pipe.shared_engine is None
        place, name = (
            (driver_of(pipe).pool.devices[0].instance, "embed") if is_pool else (driver_of(pipe).runner, "run")
        )
        inner = getattr(place, name)

        def held(*arguments, **options):
            self.num_texts += len(arguments[0]) if is_pool else sum(map(len, arguments[1]))
            self.began.set()
            assert self.open.wait(SECONDS)
            return inner(*arguments, **options)

        monkeypatch.setattr(place, name, held)


def test_a_text_of_100_000_characters_is_cut_to_the_programs(tmp_path):
    unpack("bert", tmp_path)
    with zipfile.ZipFile(ARCHIVES / "bert_tokenizer.zip") as archive:
        archive.extractall(tmp_path)
    long = ("the fox asks " * 8000)[:100_000]
    assert len(long) == 100_000
    with StaticEmbeddingPipeline(tmp_path, "CPU", **F32) as pipe:
        (count,) = pipe.count_tokens([long])
        assert count > 10 * pipe.max_length
        found = pipe.encode(["a", long, "the"])
        ids = genai.Tokenizer(tmp_path).encode(long).input_ids.data[0]
        alone = Alone(get_core().read_model(tmp_path / "openvino_model.xml"))
        cut = np.concatenate((ids[: pipe.max_length - 1], ids[-1:]))
        np.testing.assert_allclose(found[1], alone(cut, "first"), atol=1e-5)
        np.testing.assert_allclose(found[[0, 2]], pipe.encode(["a", "the"]), atol=1e-5)


def test_a_cancelled_text_does_not_run_and_a_late_one_ends_with_an_error(pipe, monkeypatch):
    expected, gate = pipe.encode(TEXTS), Gate(pipe, monkeypatch)
    running = pipe.submit(TEXTS[0])
    assert gate.began.wait(SECONDS)
    cancelled, late = pipe.submit_texts(TEXTS), pipe.submit_texts(TEXTS[:2], deadline_ms=1000)
    waiting = pipe.submit(TEXTS[2])
    assert cancelled.cancel()
    time.sleep(1.1)
    gate.open.set()
    np.testing.assert_allclose([running.result(SECONDS), waiting.result(SECONDS)], expected[[0, 2]], atol=1e-6)
    with pytest.raises(CancelledError):
        cancelled.result(SECONDS)
    with pytest.raises(StaticLLMError, match="the deadline passed before all texts were embedded") as error:
        late.result(SECONDS)
    one_line(error)
    assert gate.num_texts == 2
    np.testing.assert_allclose(pipe.encode(TEXTS, deadline_ms=60_000), expected, atol=1e-6)


def test_ctrl_c_between_adding_texts_and_waiting_for_them_gives_them_up(pipe, monkeypatch):
    gate, submit = Gate(pipe, monkeypatch), driver_of(pipe).submit
    running = pipe.submit(TEXTS[0])
    assert gate.began.wait(SECONDS)

    def interrupted(request):
        submit(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(driver_of(pipe), "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipe.encode(TEXTS)
    monkeypatch.setattr(driver_of(pipe), "submit", submit)
    after = pipe.submit(TEXTS[2])
    gate.open.set()
    running.result(SECONDS)
    after.result(SECONDS)
    assert gate.num_texts == 2


def test_ids_that_the_model_does_not_have_are_refused_in_one_line(directory, tmp_path):
    for path in directory.glob("openvino_*tokenizer.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    unpack("bert", tmp_path)
    with StaticEmbeddingPipeline(tmp_path, "CPU", **F32) as pipe:
        with pytest.raises(
            ModelError, match=r"^text 1: the tokenizer gives the id \d+, the model has \d+ tokens$"
        ) as error:
            pipe.encode(["", "What is an NPU?"])
        one_line(error)


@pytest.mark.parametrize("options", KINDS.values(), ids=list(KINDS))
def test_weights_that_are_not_finite_fail_only_the_texts_that_need_them(directory, tmp_path, options, monkeypatch):
    tokenizer = genai.Tokenizer(directory)
    ids = {text: set(tokenizer.encode(text).input_ids.data[0].tolist()) for text in (*TEXTS, "Zebra")}
    poison = min(ids["Zebra"] - set().union(*(ids[text] for text in TEXTS)))
    for path in directory.glob("openvino_*tokenizer.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    model = get_core().read_model(directory / "openvino_model.xml")
    (table,) = [
        node for node in model.get_ops() if node.get_type_name() == "Gather" and len(node.input_value(0).shape) == 2
    ]
    data = np.array(table.input_value(0).get_node().data)
    data[poison] = np.nan
    table.input(0).replace_source_output(ov.opset13.constant(data).output(0))
    ov.save_model(model, tmp_path / "openvino_model.xml", compress_to_fp16=False)
    with StaticEmbeddingPipeline(directory, "CPU", **F32) as pipe:
        expected = pipe.encode(TEXTS)
    with StaticEmbeddingPipeline(
        tmp_path, "CPU", pooling_type=StaticEmbeddingPipeline.PoolingType.MEAN, **options, **F32
    ) as pipe:
        gate = Gate(pipe, monkeypatch)
        first = pipe.submit(TEXTS[0])
        assert gate.began.wait(SECONDS)
        handles = [pipe.submit(text) for text in ("Zebra", *TEXTS, "Zebra")]
        gate.open.set()  # these share a call
        np.testing.assert_allclose(first.result(SECONDS), expected[0], atol=1e-6)
        np.testing.assert_allclose([handle.result(SECONDS) for handle in handles[1:4]], expected, atol=1e-6)
        for handle in (handles[0], handles[4]):
            with pytest.raises(NumericalError, match="text 0: its embedding is not finite") as error:
                handle.result(SECONDS)
            one_line(error)
