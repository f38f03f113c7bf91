"""Tests embeddings on two groups of cores: the same vectors as alone, worker processes that are killed, and 200 threads."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from support.command_line import in_here
from support.encoders.encoder_models import TinyEncoder, by_distance, symmetric_alibi, unpack

from staticllm import demo_model_path
from staticllm.core import EncoderVariant
from staticllm.errors import ConfigError, DeviceError, ModelError, PromptError
from staticllm.pipelines.embedding.encoder_kind import EncoderChoices
from staticllm.pipelines.embedding.pool.instances import WorkerLostError
from staticllm.pipelines.embedding.pool.measured_depths import measure_depths, run_alone, run_together
from staticllm.pipelines.embedding.pool.pool_loader import load_instances
from staticllm.pipelines.embedding.pool.pool_plan import PoolPlan
from staticllm.pipelines.embedding.windve.affinity import unsupported
from staticllm.pipelines.embedding.windve.detector import Detection, UsedDevice
from staticllm.pipelines.embedding.windve.queue_depth import read_estimates
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline
from tests.support.inside import driver_of

pytestmark = [
    pytest.mark.usefixtures("shared_lowering"),
    pytest.mark.skipif(
        bool(unsupported()) or len(os.sched_getaffinity(0)) < 2, reason="needs two cores that threads can be bound to"
    ),
]
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
TEXTS = [f"{'a story about a fox ' * (number % 7)}and {number}" for number in range(60)]


def groups():
    first, *_, last = sorted(os.sched_getaffinity(0))
    return f"CPU#{last},CPU#{first}"


@pytest.fixture(scope="module", params=["own graph", "bert"])
def directory(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        for suffix in ("xml", "bin"):
            shutil.copy(demo_model_path() / f"{name}.{suffix}", folder)
    if request.param == "own graph":
        vocabulary = genai.Tokenizer(demo_model_path()).get_vocab()
        model = TinyEncoder(by_distance(symmetric_alibi), vocabulary=max(vocabulary.values()) + 1).model()
        ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    else:
        unpack(request.param, folder)
    return folder


def devices():
    return tuple(UsedDevice(name, "CPU", (int(name[4:]),)) for name in groups().split(","))


@pytest.fixture(scope="module")
def loaded(directory):
    choices = EncoderChoices(max_length=40, properties=F32)
    found = load_instances(directory, PoolPlan(Detection(devices()), {used.name: choices for used in devices()}))
    yield found
    found.close()


def ids(instance, number=30):
    from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText

    rng = np.random.default_rng(0)
    sizes = rng.integers(1, instance.info.max_length + 1, number)
    return [TokenizedText(rng.integers(5, 90, size)) for size in sizes]


def test_instances_embed_as_an_encoder_alone(directory, loaded):
    from staticllm.pipelines.embedding.encoder_job import load_encoder
    from staticllm.pipelines.embedding.pool.instances import embed_texts

    texts = ids(loaded.instances[0])
    runner = load_encoder(directory, "CPU", EncoderChoices(max_length=40, properties=F32)).runner
    expected = np.concatenate([embed_texts(runner, [text]) for text in texts])
    for instance in loaded.instances:
        found = instance.embed(texts)
        assert np.abs(found - expected).max() < 1e-6
        assert set(instance.costs) == set(runner.variants)
        assert isinstance(next(iter(instance.costs)), EncoderVariant)


def test_workers_are_bound_to_their_cores(loaded):
    for instance, used in zip(loaded.instances, devices(), strict=True):
        for thread in Path(f"/proc/{instance.pid}/task").iterdir():
            assert os.sched_getaffinity(int(thread.name)) == set(used.cores), f"{used.name}, thread {thread}"


def test_a_killed_worker_is_started_again(loaded):
    instance = loaded.instances[0]
    texts, pid = ids(instance), instance.pid
    expected = instance.embed(texts)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=r"the worker process of CPU#\d+ ended by signal 9"):
        instance.embed(texts)
    instance.recover()
    assert instance.pid != pid
    assert np.abs(instance.embed(texts) - expected).max() < 1e-6  # costs may have changed the shapes


def test_ctrl_c_does_not_reach_workers(loaded):
    instance = loaded.instances[1]
    os.kill(instance.pid, signal.SIGINT)
    assert instance.embed(ids(instance)).shape == (30, instance.info.width)


def test_an_error_of_the_model_leaves_the_worker_alive(loaded):
    from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText

    instance, pid = loaded.instances[0], loaded.instances[0].pid
    with pytest.raises(DeviceError, match=r"^CPU#\d+: .*") as raised:
        instance.embed([TokenizedText(np.zeros(4000, np.int64))])
    assert "\n" not in str(raised.value)
    instance.recover()
    assert instance.pid == pid


def test_depths_are_measured_on_both(loaded):
    stages = []
    runs = [run_alone(instance, 20) for instance in loaded.instances]
    assert all(seconds > 0 for seconds in run_together(runs, [3, 2]))
    assert run_together(runs, [0, 2])[0] == 0
    limit = 1.5 * max(run(8) for run in runs)
    found = measure_depths(loaded.instances, limit, stages.append, length=20)
    assert [depth.estimate.name for depth in found] == groups().split(",")
    assert len(stages) == 5
    for depth in found:
        assert depth.regression > 0
        assert depth.estimate.line.alpha > 0


@pytest.fixture(scope="module")
def texts_directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        for suffix in ("xml", "bin"):
            shutil.copy(demo_model_path() / f"{name}.{suffix}", folder)
    vocabulary = genai.Tokenizer(demo_model_path()).get_vocab()
    model = TinyEncoder(by_distance(symmetric_alibi), vocabulary=max(vocabulary.values()) + 1).model()
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


def test_a_pipeline_on_two_groups_of_cores(texts_directory):
    with StaticEmbeddingPipeline(texts_directory, "CPU", max_length=64, **F32) as alone:
        expected = alone.encode(TEXTS)
    with StaticEmbeddingPipeline(texts_directory, groups(), max_length=64, LATENCY_MS=5000, **F32) as pipe:
        assert np.abs(pipe.encode(TEXTS) - expected).max() < 1e-6
        workers = [device.instance for device in driver_of(pipe).pool.devices]
        with ThreadPoolExecutor(200) as threads:
            futures = [threads.submit(pipe.encode, [text], priority=n % 2) for n, text in enumerate(TEXTS * 5)]
            os.kill(workers[0].pid, signal.SIGKILL)
            found = np.concatenate([future.result(120) for future in futures])
        assert np.abs(found.reshape(5, *expected.shape) - expected).max() < 1e-6
        pids = [worker.pid for worker in workers]
    assert all(is_gone(pid) for pid in pids)


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except OSError:
        return True
    return False


def test_queue_depths_of_algorithm_1_are_measured_and_kept(texts_directory, tmp_path):
    path = tmp_path / "depths.json"
    options = {"LATENCY_MS": 20.0, "QUEUE_POLICY": "windve", "QUEUE_DEPTHS": path, "max_length": 64, **F32}
    with StaticEmbeddingPipeline(texts_directory, groups(), **options) as pipe:
        written = path.read_bytes()
        queues = [device.queue for device in driver_of(pipe).pool.devices]
        assert all(queue.depth > 0 for queue in queues)
        with pytest.raises(PromptError, match="idle, the devices take only the first"):
            pipe.encode(TEXTS * (1 + sum(queue.depth for queue in queues) // len(TEXTS)), priority=1)
        assert pipe.encode(TEXTS[:1], priority=1).shape == (1, pipe.width)
    with StaticEmbeddingPipeline(texts_directory, groups(), **options):
        assert path.read_bytes() == written, "measured once"


def test_bad_input_gets_one_line(texts_directory, tmp_path):
    with pytest.raises(ConfigError, match="share processor"):
        StaticEmbeddingPipeline(texts_directory, "CPU#0,CPU#0-1")
    with pytest.raises(ConfigError, match="DEVICE_PROPERTIES for 'TPU'"):
        StaticEmbeddingPipeline(texts_directory, groups(), DEVICE_PROPERTIES={"TPU": {}})
    with pytest.raises(ConfigError, match=r"CPU#.*NO_SUCH_PROPERTY") as raised:
        StaticEmbeddingPipeline(texts_directory, groups(), NO_SUCH_PROPERTY=1)
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="str, numbers and bool only"):
        StaticEmbeddingPipeline(texts_directory, groups(), NUM_STREAMS=object())
    broken = tmp_path / "broken"
    shutil.copytree(texts_directory, broken)
    (broken / "openvino_model.bin").write_bytes(b"")
    with pytest.raises((ModelError, DeviceError), match="needs") as raised:
        StaticEmbeddingPipeline(broken, groups())
    assert "\n" not in str(raised.value)


def test_workers_end_with_their_parent(texts_directory):
    code = (
        "import sys, time; from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline as P\n"
        f"pipe = P({str(texts_directory)!r}, {groups()!r}, max_length=64)\n"
        "print(*(d.instance.pid for d in pipe._driver.pool.devices), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    until = time.monotonic() + 20
    while not all(map(is_gone, pids)):
        assert time.monotonic() < until, "a worker goes on without its parent"
        time.sleep(0.05)


def test_plan_measures_queue_depths_which_a_pipeline_reads(texts_directory, tmp_path):
    path = tmp_path / "depths.json"
    options = ["--embed", "--measured", "--device", groups(), "--precision", "f32", "--limit-s", "0.02"]
    found = in_here("plan", texts_directory, *options, "--estimates", path)
    assert found.returncode == 0, found.stderr
    assert [line.split()[0] for line in found.stdout.splitlines()[1:]] == groups().split(",")
    assert [e.name for e in read_estimates(path)] == groups().split(",")
    written = path.read_bytes()
    with StaticEmbeddingPipeline(
        texts_directory, groups(), LATENCY_MS=20.0, QUEUE_POLICY="windve", QUEUE_DEPTHS=path, **F32
    ):
        assert path.read_bytes() == written, "the same model, devices and options"
    refused = in_here("plan", "--embed", "--measured", "--depths", "1,2")
    assert "--depths has no meaning with --measured" in refused.stderr
