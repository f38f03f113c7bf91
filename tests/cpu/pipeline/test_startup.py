"""Tests starting: the first programs serve while the others are compiled, and every failure is reported."""

import gc
import threading
import time

import numpy as np
import pytest
from support.attach.daemons import wait_for
from support.helpers import PROMPT, SHORT, tokens_of

from staticllm import StaticLLMPipeline
from staticllm.compiler_passes.artifacts.cache import BlobCache
from staticllm.compiler_passes.compiling import autotune
from staticllm.errors import BlobError, ConfigError, DeviceError, ModelError, SnapshotError
from staticllm.pipelines.launch import engine as launch
from staticllm.pipelines.launch import text_reader
from staticllm.pipelines.loading import background, decoder_kind, import_set
from staticllm.system.long_calls import wait_for_left
from tests.support.inside import launched_of

pytestmark = pytest.mark.usefixtures("shared_programs")

STAGED = {**SHORT, "PROGRAMS": "separate", "BACKGROUND_COMPILE": True, "MAX_NUM_SEQS": 2}


@pytest.fixture
def expected(zoo, original):
    return original(zoo / "llama").greedy(PROMPT, 12)


def test_the_first_token_comes_before_all_variants_are_compiled(zoo, expected):
    events = []
    with StaticLLMPipeline(
        zoo / "llama", **STAGED, on_progress=lambda e: events.append((time.perf_counter(), e))
    ) as pipe:
        first = []
        answer = pipe.generate(
            np.array([PROMPT]), max_new_tokens=12, ignore_eos=True,
            streamer=lambda text: first.append(time.perf_counter()) and None,
        )  # fmt: skip
        assert list(answer.tokens[0]) == expected
        answers = [tokens_of(pipe) for _ in range(10)]
        assert pipe.wait_until_complete(60)
        assert pipe.is_complete
        num_programs = len(pipe.engine.runner.programs)
        assert [*answers, tokens_of(pipe)] == [expected] * 11, "whatever programs are there, the words are the same"
    compiled = [(when, e) for when, e in events if e.stage == "compile" and e.is_done]
    stages = [e.stage for _, e in events]
    assert len(compiled) == num_programs > 4
    assert stages.index("ready") < stages.index("complete") == len(stages) - 1
    assert first[0] < compiled[-1][0], "the first token was there before the last program"


def test_all_installed_programs_are_used(zoo, expected):
    with StaticLLMPipeline(
        zoo / "llama", **STAGED, SCHEDULER="prefill_first"
    ) as pipe:  # a policy that does not depend on costs
        pipe.wait_until_complete()
        options = {"max_new_tokens": 12, "ignore_eos": True}
        handles = pipe.engine.run_between_steps(lambda: [pipe.submit(np.array([PROMPT]), **options) for _ in range(2)])
        assert [list(handle.result().tokens[0]) for handle in handles] == [expected] * 2
        assert {v.sequences for v in pipe.engine.runner.index.variants} == {1, 2}
        assert pipe.stats().num_steps < 24, "two answers share calls"


def test_a_staged_start_fills_the_cache(zoo, tmp_path, expected):
    with StaticLLMPipeline(zoo / "llama", **STAGED, CACHE_DIR=tmp_path) as pipe:
        assert tokens_of(pipe) == expected
        pipe.wait_until_complete()
    (entry,) = BlobCache(tmp_path).entries()
    events = []
    with StaticLLMPipeline(zoo / "llama", **STAGED, CACHE_DIR=tmp_path, on_progress=events.append) as pipe:
        assert pipe.is_complete
        assert tokens_of(pipe) == expected
    assert {e.stage for e in events} == {"import", "warm-up", "ready"}
    assert sum(e.stage == "import" and e.is_done for e in events) == len(entry.manifest.blobs)


def test_an_error_in_the_background_reaches_the_user(zoo, expected, monkeypatch):
    compile_each, calls, events, may_fail = background.compile_each, [], [], threading.Event()

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) > 2:
            may_fail.wait(60)
            raise DeviceError("the compiler is out of memory")
        return compile_each(*arguments)

    monkeypatch.setattr(background, "compile_each", failing)
    with StaticLLMPipeline(zoo / "llama", **STAGED, on_progress=events.append) as pipe:
        with pytest.warns(
            RuntimeWarning, match="the loaded programs keep serving: DeviceError: the compiler is out of memory"
        ):
            may_fail.set()
            wait_for(lambda: pipe.is_complete, 60)
            gc.collect()
        with pytest.raises(DeviceError, match="out of memory"):
            pipe.wait_until_complete()
        assert [e.message for e in events if e.stage == "error"] == ["DeviceError: the compiler is out of memory"]
        assert tokens_of(pipe) == expected, "the loaded programs keep serving"


def test_closing_ends_the_background(zoo, tmp_path):
    before = threading.active_count()
    pipe = StaticLLMPipeline(zoo / "llama", **STAGED, CACHE_DIR=tmp_path)
    pipe.close()
    deadline = time.perf_counter() + 20
    while threading.active_count() > before and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before
    with BlobCache(tmp_path).lease("any"), StaticLLMPipeline(zoo / "llama", **STAGED, CACHE_DIR=tmp_path) as again:
        again.wait_until_complete()  # the lock was released
    assert len(BlobCache(tmp_path).entries()) == 1


def test_devices_are_tried_in_turn_and_each_failure_is_reported(zoo, expected):
    events = []
    with (
        pytest.warns(RuntimeWarning, match="'TOASTER' is not on this machine.*trying CPU"),
        StaticLLMPipeline(zoo / "llama", "TOASTER,CPU", **SHORT, on_progress=events.append) as pipe,
    ):
        assert tokens_of(pipe) == expected
    (fallback,) = [e for e in events if e.stage == "fallback"]
    assert "TOASTER" in fallback.message
    assert "trying CPU" in fallback.message
    with pytest.warns(RuntimeWarning), pytest.raises(DeviceError, match="MIXER"):
        StaticLLMPipeline(zoo / "llama", "TOASTER,MIXER")
    with pytest.raises(ConfigError, match="unknown property 'NUM_STREAM'"):
        StaticLLMPipeline(zoo / "llama", "TOASTER,CPU", NUM_STREAM=1)


@pytest.mark.filterwarnings("ignore:device 'TOASTER'")
@pytest.mark.parametrize("is_staged", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_cpu_serves_until_the_device_can(is_staged, zoo, expected):
    """The device that the pipeline waits for is the CPU again here, with programs of its own."""
    options = {**STAGED, "BACKGROUND_COMPILE": is_staged}
    with StaticLLMPipeline(zoo / "llama", "TOASTER,CPU", **options, SERVE_FROM_CPU=True) as pipe:
        first = pipe.engine.runner
        running = [pipe.submit(np.array([PROMPT]), max_new_tokens=12, ignore_eos=True) for _ in range(4)]
        assert pipe.wait_until_complete(60)
        later = [pipe.submit(np.array([PROMPT]), max_new_tokens=12, ignore_eos=True) for _ in range(4)]
        assert [list(handle.result().tokens[0])[:12] for handle in (*running, *later)] == [expected] * 8
        assert tokens_of(pipe) == expected
        assert pipe.engine.runner is not first
        assert len(pipe.engine.runner.programs) > 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:device 'TOASTER'")
def test_config_and_kv_type_are_those_of_the_serving_device(zoo, tmp_path, monkeypatch):
    gate, load_first = threading.Event(), launch.load_first

    def held_back(*arguments):
        gate.wait(60)
        return load_first(*arguments)

    monkeypatch.setattr(launch, "load_first", held_back)
    options = {**STAGED, "KV_CACHE_PRECISION": "f16", "SERVE_FROM_CPU": True}
    with StaticLLMPipeline(zoo / "llama", "TOASTER,CPU", **options) as pipe:
        assert pipe.config.programs == "auto"
        assert pipe.config.kv_cache_precision is None
        tokens_of(pipe)
        assert pipe.save_snapshot(tmp_path / "rows", np.array([PROMPT])) > 20
        assert pipe.load_snapshot(tmp_path / "rows") > 20
        gate.set()
        assert pipe.wait_until_complete(60)
        tokens_of(pipe)
        assert pipe.config.programs == "separate"
        assert pipe.config.kv_cache_precision == "f16"
        with pytest.raises(SnapshotError, match=r"is of another KV type .f32, here f16"):
            pipe.load_snapshot(tmp_path / "rows")


def test_a_small_model_serves_from_one_program_until_decoding_has_its_own(zoo, expected, monkeypatch):
    gate, compile_each = threading.Event(), background.compile_each

    def held_back(plan, on_progress):
        assert {variant.phase for variant in plan.variants} == {"generate"}
        gate.wait(30)
        return compile_each(plan, on_progress)

    monkeypatch.setattr(background, "compile_each", held_back)
    with StaticLLMPipeline(zoo / "llama", **SHORT, MAX_NUM_SEQS=2, PROGRAMS="phases") as pipe:
        programs = pipe.engine.runner.programs
        assert len({id(programs.compiled(variant)) for variant in programs}) == 1
        assert tokens_of(pipe) == expected
        gate.set()
        assert pipe.wait_until_complete(60)
        phases = {
            phase: {id(programs.compiled(v)) for v in programs if v.phase == phase} for phase in ("prefill", "generate")
        }
        assert [len(found) for found in phases.values()] == [1, 1]
        assert phases["prefill"] != phases["generate"]
        assert tokens_of(pipe) == expected
        assert not pipe.engine.runner.probe.is_paused


@pytest.mark.parametrize("options", [{"BACKGROUND_COMPILE": False}, {"GENERATE_CONFIG": {"INFERENCE_NUM_THREADS": 1}}])
def test_phases_that_compute_differently_or_at_once_have_their_programs_from_the_start(options, zoo, expected):
    with StaticLLMPipeline(zoo / "llama", **SHORT, MAX_NUM_SEQS=2, PROGRAMS="phases", **options) as pipe:
        assert pipe.is_complete
        programs = pipe.engine.runner.programs
        assert len({id(programs.compiled(variant)) for variant in programs}) == 2
        assert tokens_of(pipe) == expected


def test_an_unreadable_tokenizer_ends_the_loading(zoo, monkeypatch):
    def unreadable(directory):
        raise ModelError(f"the tokenizer in {str(directory)!r} cannot be read: it is only a test")

    monkeypatch.setattr(text_reader, "read_tokenizer", unreadable)
    before, events = threading.active_count(), []
    with pytest.raises(ModelError, match="only a test"):
        StaticLLMPipeline(zoo / "llama", **SHORT, on_progress=events.append)
    assert "compile" in [event.stage for event in events]
    assert "ready" not in [event.stage for event in events]
    assert threading.active_count() == before


def test_loading_that_fails_leaves_the_tokenizer_to_end_alone(zoo, monkeypatch):
    read, may_end, has_ended = text_reader.read_tokenizer, threading.Event(), threading.Event()

    def slow(directory):
        tokenizer = read(directory)
        may_end.wait(60)
        has_ended.set()
        return tokenizer

    def refuse(event):
        if event.stage == "warm-up":
            raise KeyboardInterrupt

    monkeypatch.setattr(text_reader, "read_tokenizer", slow)
    with pytest.raises(KeyboardInterrupt):
        StaticLLMPipeline(zoo / "llama", **SHORT, on_progress=refuse)
    assert not has_ended.is_set(), "nobody waits for it"
    may_end.set()
    wait_for_left()
    assert has_ended.wait(5)


SINGLE = {**SHORT, "PROGRAMS": "few_rows", "MAX_NUM_SEQS": 2}


def programs_of(pipe, few_rows=1):
    """Return the compiled models for calls of few rows, and those for all other calls."""
    programs = pipe.engine.runner.programs
    return [{id(programs.compiled(v)) for v in programs if (v.rows <= few_rows) == is_few} for is_few in (True, False)]


def probe_finds(few_rows, monkeypatch):
    """Let the calibration find that calls of up to ``few_rows`` rows are faster in a program of their own."""

    def found(core, device, model, phases, layout, kept):
        if layout == "shared":
            return autotune.Tuning(dict(phases))
        return autotune.Tuning({**phases, "few_rows": phases["generate"]}, few_rows)

    monkeypatch.setattr(decoder_kind, "calibrated", found)


@pytest.mark.parametrize("few_rows", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_the_program_for_few_rows_comes_later_and_changes_no_token(few_rows, zoo, expected, monkeypatch):
    gate, compile_each = threading.Event(), background.compile_each
    probe_finds(few_rows, monkeypatch)

    def held_back(plan, on_progress):
        if all(variant.rows <= few_rows for variant in plan.variants):
            gate.wait(30)
        return compile_each(plan, on_progress)

    monkeypatch.setattr(background, "compile_each", held_back)
    with StaticLLMPipeline(zoo / "llama", **SINGLE) as pipe:
        single, others = programs_of(pipe, few_rows)
        assert single == others
        assert not pipe.is_complete
        assert tokens_of(pipe) == expected
        handle = pipe.submit(np.array([PROMPT]), max_new_tokens=64, ignore_eos=True)
        tokens = handle.tokens()
        begun = [next(tokens) for _ in range(4)]
        gate.set()
        assert pipe.wait_until_complete(60)
        assert [*begun, *tokens][:12] == expected, "taken over in the middle of an answer"
        single, others = programs_of(pipe, few_rows)
        assert len(single) == len(others) == 1
        assert single != others
        assert tokens_of(pipe) == expected
        programs = pipe.engine.runner.programs
        bound = [
            programs[variant].compiled is programs.compiled(variant) for variant in programs if variant.rows <= few_rows
        ]
        assert len(bound) > 1, "there is only one variant of few rows"
        assert all(bound), "a variant that already ran kept its old program"


@pytest.mark.slow
@pytest.mark.parametrize("few_rows", [1, 16])
def test_the_program_for_few_rows_comes_first_with_background_compile_off(
    few_rows, zoo, expected, tmp_path, monkeypatch
):
    probe_finds(few_rows, monkeypatch)
    with StaticLLMPipeline(zoo / "llama", **SINGLE, BACKGROUND_COMPILE=False) as pipe:
        assert pipe.is_complete
        assert programs_of(pipe, few_rows)[0] != programs_of(pipe, few_rows)[1]
        assert tokens_of(pipe) == expected
    for origin in ("compiled", "from the cache"):
        with StaticLLMPipeline(zoo / "llama", **SINGLE, CACHE_DIR=tmp_path) as pipe:
            assert pipe.wait_until_complete(60), origin  # a set's second program is imported in the background
            assert programs_of(pipe, few_rows)[0] != programs_of(pipe, few_rows)[1], origin
            assert tokens_of(pipe) == expected, origin
    (entry,) = BlobCache(tmp_path).entries()
    assert entry.manifest.programs == "few_rows"
    assert entry.manifest.few_rows == few_rows
    assert len(entry.manifest.blobs) == 2


@pytest.fixture
def three_programs(zoo, tmp_path, monkeypatch):
    """A cached set with a program for prompts, one for single rows, and one for steps of several requests."""
    probe_finds(1, monkeypatch)
    options = {**SHORT, "PROGRAMS": "phases", "MAX_NUM_SEQS": 2, "CACHE_DIR": tmp_path}
    with StaticLLMPipeline(zoo / "llama", **options) as pipe:
        assert len(launched_of(pipe).loaded.programs.compiled) == len(pipe.engine.runner.programs)
    (entry,) = BlobCache(tmp_path).entries()
    assert len(entry.manifest.blobs) == 3
    return options


def test_what_the_first_answer_needs_is_imported_first(three_programs, zoo, expected):
    events = []
    with StaticLLMPipeline(zoo / "llama", **three_programs, on_progress=events.append) as pipe:
        runner = pipe.engine.runner
        assert not any(variant.sequences > 1 and variant.rows == variant.sequences for variant in runner.programs)
        stages = [event.stage for event in events if event.is_done]
        assert stages == ["import", "import", "warm-up", "warm-up", "ready"]
        assert tokens_of(pipe) == expected
        assert pipe.wait_until_complete(60)
        assert pipe.is_complete
        assert [event.stage for event in events if event.is_done][5:] == ["import", "complete"]
        kept = launched_of(pipe).loaded.kept_costs.read()
        assert all(runner.costs.is_stable(variant) for variant in runner.programs if variant in kept)
        options = {"max_new_tokens": 12, "ignore_eos": True}
        handles = pipe.engine.run_between_steps(lambda: [pipe.submit(np.array([PROMPT]), **options) for _ in range(2)])
        assert [list(handle.result().tokens[0]) for handle in handles] == [expected] * 2
        assert any(variant.sequences == 2 for variant in runner.costs.measured)


def test_an_import_waits_for_a_rest_unless_several_requests_run(three_programs, zoo, monkeypatch):
    monkeypatch.setattr(launch, "PATIENCE_SECONDS", 60.0)
    with StaticLLMPipeline(zoo / "llama", **three_programs) as pipe:
        options = {"max_new_tokens": 60, "ignore_eos": True}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "REST_SECONDS", 60.0)
            assert not pipe.wait_until_complete(0.3), "nothing else needs the program"
            handles = pipe.engine.run_between_steps(
                lambda: [pipe.submit(np.array([PROMPT]), **options) for _ in range(2)]
            )
            assert pipe.wait_until_complete(60)
        assert len({tuple(handle.result().tokens[0]) for handle in handles}) == 1


def test_closing_does_not_wait_for_a_rest(three_programs, zoo, monkeypatch):
    monkeypatch.setattr(launch, "REST_SECONDS", 60.0)
    events = []
    pipe = StaticLLMPipeline(zoo / "llama", **three_programs, on_progress=events.append)
    begin = time.perf_counter()
    pipe.close()
    assert time.perf_counter() - begin < 2.0
    assert [event.stage for event in events if event.is_done].count("import") == 2
    assert BlobCache(three_programs["CACHE_DIR"]).entries()[0].manifest is not None
    with StaticLLMPipeline(zoo / "llama", **three_programs, BACKGROUND_COMPILE=False) as pipe:
        assert pipe.is_complete, "the lease was given back, and BACKGROUND_COMPILE=False imports everything"


def test_a_program_that_is_refused_later_leaves_the_others_serving(three_programs, zoo, expected, monkeypatch):

    import_blob, calls = import_set.import_blob, []

    def refuse_third(core, blob, target):
        calls.append(target)
        if len(calls) == 3:
            raise BlobError("CPU refused a blob")
        return import_blob(core, blob, target)

    monkeypatch.setattr(import_set, "import_blob", refuse_third)
    with (
        pytest.warns(RuntimeWarning, match="the loaded programs keep serving: BlobError: CPU refused"),
        StaticLLMPipeline(zoo / "llama", **three_programs) as pipe,
    ):
        with pytest.raises(BlobError, match="refused"):
            pipe.wait_until_complete(60)
        options = {"max_new_tokens": 12, "ignore_eos": True}
        handles = [pipe.submit(np.array([PROMPT]), **options) for _ in range(2)]
        assert [list(handle.result().tokens[0]) for handle in handles] == [expected] * 2
    assert not BlobCache(three_programs["CACHE_DIR"]).entries(), "the next start compiles the model again"
