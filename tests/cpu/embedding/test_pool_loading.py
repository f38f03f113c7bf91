"""Tests what a pool is made of: its properties, its devices, and the messages between it and its worker processes."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest

from staticllm.core import EncoderVariant
from staticllm.errors import ConfigError, DeviceError, StaticLLMError, UnsupportedModelError
from staticllm.pipelines.embedding.encoder_kind import EncoderChoices
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.embedding.pool import pool_loader
from staticllm.pipelines.embedding.pool.instances import EncoderInfo, WorkerLostError, decode_texts, encode_texts
from staticllm.pipelines.embedding.pool.pool_loader import depths_key, make_pool
from staticllm.pipelines.embedding.pool.pool_plan import devices_of, needs_pool, take_options
from staticllm.pipelines.embedding.pool.worker_instance import WorkerInstance, WorkerSpec
from staticllm.pipelines.embedding.queue.loads import Line
from staticllm.pipelines.embedding.windve.queue_depth import Estimate, fine_tune, write_estimates
from staticllm.wire.messages import Kind, Message, read_message, write_message


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        ({"HETEROGENEOUS": "maybe"}, "HETEROGENEOUS='maybe': must be YES or NO"),
        ({"HETEROGENEOUS": None}, "HETEROGENEOUS=None: must be YES or NO"),
        ({"SEPARATE_PROCESS": None}, "SEPARATE_PROCESS=None: must be YES or NO"),
        ({"SEPARATE_PROCESS": 1}, "SEPARATE_PROCESS=1: must be YES or NO"),
        ({"LATENCY_MS": 0}, "LATENCY_MS=0"),
        ({"LATENCY_MS": True}, "LATENCY_MS=True"),
        ({"LATENCY_MS": 10**5000}, "LATENCY_MS=a whole number of 16610 bits: must be a number of ms"),
        ({"QUEUE_POLICY": "windve"}, "needs a latency limit"),
        ({"QUEUE_POLICY": "fifo", "LATENCY_MS": 5}, "'plain', 'predicted'"),
        ({"QUEUE_DEPTHS": 3}, "path of a file"),
        ({"DEVICE_PROPERTIES": {"CPU": 3}}, "one dict of properties per device"),
    ],
)
def test_impossible_properties_get_one_line(properties, text):
    with pytest.raises(ConfigError, match=text):
        take_options(properties)


def test_properties_are_read_and_taken():
    properties = {"HETEROGENEOUS": True, "LATENCY_MS": 250, "CACHE_DIR": "cache", "NUM_STREAMS": 1}
    options = take_options(properties)
    assert properties == {"CACHE_DIR": "cache", "NUM_STREAMS": 1}
    assert (options.limit_s, options.policy_name, options.depths.as_posix()) == (
        0.25,
        "predicted",
        "cache/queue_depths.json",
    )
    assert needs_pool("NPU", options)
    assert take_options({"HETEROGENEOUS": "YES", "LATENCY_MS": "250"}).is_heterogeneous
    assert not needs_pool("NPU", take_options({}))
    assert needs_pool("CPU#0,CPU#1", take_options({}))
    assert needs_pool("CPU", take_options({"SEPARATE_PROCESS": True}))


@pytest.mark.parametrize(
    ("device", "available", "order"),
    [
        ("CPU", ["CPU", "NPU"], "NPU CPU"),
        ("CPU", ["CPU", "GPU", "NPU"], "NPU GPU CPU"),
        ("CPU", ["CPU", "GPU.0", "GPU.1"], "GPU.0 GPU.1 CPU"),
        ("CPU#0,CPU#1", ["CPU", "NPU"], "NPU CPU#0 CPU#1"),
        ("NPU", ["CPU", "GPU", "NPU"], "NPU GPU CPU"),
        ("GPU", ["CPU", "GPU", "NPU"], "GPU NPU CPU"),
        ("NPU,CPU", ["CPU", "GPU", "NPU"], "NPU GPU CPU"),
        ("CPU,NPU", ["CPU", "NPU"], "CPU NPU"),
        ("CPU,GPU", ["CPU", "GPU", "NPU"], "CPU GPU NPU"),
        ("CPU", ["CPU"], "CPU"),
    ],
)
def test_the_cpu_helps_the_others_unless_the_list_prefers_it(device, available, order):
    assert " ".join(used.name for used in devices_of(device, True, available).devices) == order


def test_a_cpu_beside_other_devices_keeps_cores_for_the_service():
    found = devices_of("NPU", True, ["CPU", "NPU"])
    assert [used.device for used in found.devices] == ["NPU", "CPU"]
    assert [used.name for used in devices_of("CPU", True, ["CPU"]).devices] == ["CPU"]
    assert not devices_of("CPU", True, ["CPU"]).devices[0].cores, "one device keeps all of its cores"


def test_frames_and_texts_come_back_as_they_were():
    stream = io.BytesIO()
    texts = [TokenizedText(np.arange(1, n)) for n in (2, 9, 4)]
    typed = [TokenizedText(np.arange(3), np.array([0, 1, 1])), TokenizedText(np.arange(2), num_prompt=1)]
    for group in (texts, typed):
        body, payload = encode_texts(group)
        write_message(stream, Message(Kind.INFER, body=body, payload=payload))
    stream.seek(0)
    for group in (texts, typed):
        message = read_message(stream)
        for text, found in zip(group, decode_texts(message.body, bytes(message.payload)), strict=True):
            np.testing.assert_array_equal(text.ids, found.ids)
            assert text.types is None or text.types.tolist() == found.types.tolist()
            assert text.num_prompt == found.num_prompt
    assert read_message(stream) is None


def test_damaged_texts_are_refused():
    with pytest.raises(ValueError, match="message of"):
        list(decode_texts({"num_texts": 1, "has_types": False}, b"\1\0\0\0abc"))


class Device:
    """An instance whose batches take longer while the other device runs."""

    def __init__(self, name):
        self.name, self.info = name, EncoderInfo(2, 64, 100, True)
        self.costs = {EncoderVariant(1, 64, 8): 0.01}


def test_fine_tuned_depths_reach_the_queues_of_a_pipeline(tmp_path, monkeypatch):
    monkeypatch.setattr(
        pool_loader, "regress", lambda instance, limit_s: Estimate(instance.name, Line(0.01, 0), 1, limit_s)
    )
    (tmp_path / "openvino_model.xml").write_text("<net/>")
    devices, path = [Device("A"), Device("B")], tmp_path / "depths.json"

    def depths(properties, **latency):
        options = take_options({"QUEUE_POLICY": "windve", "QUEUE_DEPTHS": path, **latency})
        found = pool_loader.estimates_of(tmp_path, devices, EncoderChoices(properties=properties), options)
        return [queue.depth for queue in make_pool(devices, "windve", options.limit_s, 9, found).queue.devices]

    alone = [
        Estimate(device.name, Line(alpha, 0.1), 1.0, 1.0) for device, alpha in zip(devices, (0.01, 0.02), strict=True)
    ]
    assert [found.depth for found in alone] == [90, 45]
    tuned = fine_tune(lambda counts: [0.1 + 0.015 * counts[0], 0.1 + 0.03 * counts[1]], alone)
    assert [found.depth for found in tuned] == [60, 30]
    write_estimates(path, depths_key(tmp_path, ["A", "B"], EncoderChoices()), tuned)
    content = path.read_bytes()
    assert depths({"CACHE_DIR": "cache"}, LATENCY_MS=1000) == [60, 30]
    assert depths(None, LATENCY_MS=2000) == [190, 95], "another limit has the depths of the lines"
    assert path.read_bytes() == content
    assert depths({"INFERENCE_NUM_THREADS": 3}, LATENCY_MS=1000) == [100, 100], "what changes costs is measured again"


def test_depths_of_other_device_properties_are_not_used(tmp_path):
    (tmp_path / "openvino_model.xml").write_text("<net/>")

    def key(own, **properties):
        return depths_key(tmp_path, ["A", "B"], EncoderChoices(properties=properties), own)

    plain, f32 = key(None), key({"A": {"INFERENCE_PRECISION_HINT": "f32"}})
    others = [key({"B": {"INFERENCE_PRECISION_HINT": "f32"}}), key({"A": {"INFERENCE_PRECISION_HINT": "bf16"}})]
    assert len({plain, f32, *others}) == 4
    assert key({}) == key({"A": {}}) == key({"A": {"CACHE_DIR": "cache"}}) == key({"C": {"NUM_STREAMS": 1}}) == plain
    assert key({"A": {"NUM_STREAMS": 1}}, NUM_STREAMS=1) == key(None, NUM_STREAMS=1), "as for all devices"


@pytest.mark.parametrize("name", ["file/depths.json", "file/folder/depths.json"])
def test_depths_that_cannot_be_written_get_one_line(tmp_path, monkeypatch, name):
    monkeypatch.setattr(pool_loader, "regress", lambda instance, limit_s: Estimate("A", Line(0.01, 0), 1, limit_s))
    monkeypatch.setattr(pool_loader, "read_estimates", lambda path, key: ())
    (tmp_path / "openvino_model.xml").write_text("<net/>")
    (tmp_path / "file").write_text("")
    options = take_options({"QUEUE_POLICY": "windve", "LATENCY_MS": 10, "QUEUE_DEPTHS": tmp_path / name})
    with pytest.raises(ConfigError, match=r"QUEUE_DEPTHS '.*depths.json': cannot be written \(.*\): give a file"):
        pool_loader.estimates_of(tmp_path, [Device("A")], EncoderChoices(), options)


REPORTER = """
import sys
from staticllm.errors import *
from staticllm.children.answers import failed
from staticllm.wire.messages import Kind, Message, read_message, write_message
read_message(sys.stdin.buffer)
write_message(sys.stdout.buffer, {report})
read_message(sys.stdin.buffer)
"""


def reported(report):
    """Return the error that the parent of a worker process raises if that reports this."""
    spec = WorkerSpec("CPU#1", Path(), "CPU", (), EncoderChoices())
    code = REPORTER.format(report=report)
    worker = WorkerInstance(spec, lambda: [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"])
    try:
        with pytest.raises(StaticLLMError) as raised:
            worker.wait_ready()
    finally:
        worker.close()
    return raised.value


def test_an_error_of_a_worker_keeps_its_class_and_fields():
    error = reported("failed(UnsupportedModelError('add_pooling', 'no output'))")
    assert type(error) is UnsupportedModelError
    assert (str(error), error.stage, error.reason) == ("CPU#1: add_pooling: no output", "add_pooling", "no output")
    error = reported("failed(as_ours(OSError('the driver is gone')))")
    assert type(error) is DeviceError
    assert str(error) == "CPU#1: the device failed: the driver is gone"


@pytest.mark.parametrize("report", ["Message(Kind.FAILED)", "Message(Kind.FAILED, body={'type': 5})"])
def test_a_worker_that_reports_something_else_is_lost(report):
    assert type(reported(report)) is WorkerLostError
