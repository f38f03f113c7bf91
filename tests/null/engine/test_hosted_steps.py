"""Tests an engine whose steps are jobs of another one, on a virtual clock: a stream beside long recordings keeps its bound."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
from support.engine.output_queues import outputs_of

from staticllm.core import Variant
from staticllm.pipelines.engine.engine import Engine, new_state
from staticllm.pipelines.engine.jobs import job_priority
from staticllm.pipelines.engine.options import EngineOptions
from staticllm.pipelines.engine.queued_calls import QueuedCalls
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.scheduling.interface import OWN_BOUND
from staticllm.pipelines.scheduling.job_scheduler import BOUND_USED
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.pipelines.scheduling.request_table import Limits
from staticllm.pipelines.simulator.cost_model import AnalyticCosts, HostCost
from staticllm.pipelines.simulator.simulated_programs import VOCAB_SIZE, VirtualClock, simulated_runner

CHAT_COSTS = AnalyticCosts(weights=0.015, row=0.0005)
SPEECH_COSTS = AnalyticCosts(weights=0.004, row=0.0005)
VARIANTS = (*(Variant(n, 512, n) for n in (1, 2, 4)), *(Variant(n, 512, 4) for n in (16, 64)))
STEP = CHAT_COSTS(VARIANTS[0])
PROMPT, TEXT, NUM_WINDOWS = 4, 30, 12
TINY = 1e-9


def options():
    return EngineOptions(Limits(4), 512, measure_costs=False, prefix_caching=False)


def request(num_tokens, num_prompt=PROMPT, priority=0, clock=None):
    prompt = tuple(VOCAB_SIZE + number for number in range(num_prompt))
    wanted = EngineRequest(prompt, max_new_tokens=num_tokens, priority=priority, arrival=clock())
    return new_state(wanted, VOCAB_SIZE, clock=clock)


class Device:
    """A chat's engine on this thread, and the engine of a speech model that it hosts."""

    def __init__(self, policy="dynamic", encode_seconds=0.02, num_blocks=1):
        self.clock = VirtualClock()
        self.calls = []  # kind, start and seconds of each
        self.chat = Engine(self.runner("chat", CHAT_COSTS), make_policy(policy), options(), clock=self.clock)
        self.chat.step_host.thread.start = lambda run: None  # steps run on the thread of the test
        runner = self.runner("speech", SPEECH_COSTS)
        self.speech = Engine(runner, make_policy("dynamic"), options(), clock=self.clock, host=self.chat)
        self.block_seconds = encode_seconds / num_blocks
        self.encoder = QueuedCalls(self.speech, lambda: [self.block_seconds] * num_blocks)
        self.speech.add_jobs(self.encoder)

    def runner(self, name, costs):
        runner = simulated_runner(VARIANTS, costs, 512, self.clock, HostCost())
        run = runner.run_step

        def noted(program, step, *rest, **options):
            begin = self.clock()
            found = run(program, step, *rest, **options)
            self.calls.append((name, begin, self.clock() - begin, len(step.segments)))
            return found

        runner.run_step = noted
        return runner

    def encode(self, blocks, meanwhile):
        seconds = self.block_seconds * len(blocks)
        self.calls.append(("encoder", self.clock(), seconds, 1))
        self.clock.advance(seconds)

    def recording(self, num_windows=NUM_WINDOWS, priority=0):
        """Yield between two steps until all windows of a recording are heard."""
        for _ in range(num_windows):
            heard = self.encoder.submit(self.encode, job_priority(priority))
            while not heard.done():
                yield
            heard.result()
            state = request(TEXT, priority=priority, clock=self.clock)
            self.speech.submit_state(state)
            while state.id in self.speech.steps.inbox or state.id in self.speech.core.requests:
                yield

    def run(self, *recordings, is_over=lambda: False):
        """Serve recordings to their ends, and return when each ended."""
        left = dict.fromkeys(recordings)
        ends = []
        for _ in range(100_000):
            for each in list(left):
                if next(each, self) is self:
                    del left[each]
                    ends.append(self.clock())
            if not left or is_over():
                return ends
            self.chat.steps.step()
        raise AssertionError("recordings are left")


def stream_beside(device, *recordings):
    """Return the times of the tokens of a stream while recordings are heard, and when these ended."""
    stream = request(480, 8, clock=device.clock)
    device.chat.submit_state(stream)
    while not stream.sequences[0].num_generated:
        device.chat.steps.step()
    begin = device.clock()
    ends = device.run(*recordings)
    assert stream.id in device.chat.core.requests, "the stream is longer than the recordings"
    return [moment for moment in stream.sequences[0].token_times if moment <= ends[-1]], ends[-1] - begin


def alone(count=1, **encoder):
    device = Device(**encoder)
    return device.run(*(device.recording() for _ in range(count)))[-1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("priority", [0, -1])
@pytest.mark.parametrize("count", [1, 4])
def test_a_stream_keeps_its_bound_beside_long_recordings_which_have_their_share(policy, priority, count):
    device = Device(policy)
    times, seconds = stream_beside(device, *(device.recording(priority=priority) for _ in range(count)))
    assert max(b - a for a, b in pairwise(times)) <= OWN_BOUND.seconds * BOUND_USED + TINY
    assert alone(count) / seconds >= 0.6
    device.chat.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("priority", [0, -1])
@pytest.mark.parametrize("count", [1, 4])
def test_a_stream_keeps_its_bound_beside_windows_that_are_heard_in_blocks(policy, priority, count):
    """A window takes twice the bound, as on a CPU. Its share is 0.2 of its speed alone if it is heard in one piece."""
    in_blocks = {"encode_seconds": 0.2, "num_blocks": 6}
    device = Device(policy, **in_blocks)
    times, seconds = stream_beside(device, *(device.recording(priority=priority) for _ in range(count)))
    assert max(b - a for a, b in pairwise(times)) <= OWN_BOUND.seconds * BOUND_USED + TINY
    assert alone(count, **in_blocks) / seconds >= 0.6
    device.chat.close()


def test_calls_between_two_tokens_of_the_stream_are_as_many_as_the_bound_holds():
    device = Device()
    times, _ = stream_beside(device, device.recording())
    for a, b in pairwise(times):
        between = [call for call in device.calls if a <= call[1] < b and call[0] != "chat"]
        assert sum(seconds for _, _, seconds, _ in between) <= OWN_BOUND.seconds * BOUND_USED - STEP + TINY


@pytest.mark.parametrize("encode_seconds", [0.02, 0.2])
def test_windows_of_several_recordings_share_the_calls_of_the_decoder(encode_seconds):
    device = Device(encode_seconds=encode_seconds)
    device.run(*(device.recording() for _ in range(4)))
    rows = [count for name, _, _, count in device.calls if name == "speech"]
    assert sum(rows) / len(rows) > 3.5, "of four recordings at once"


def test_a_call_that_is_longer_than_the_bound_breaks_it_once_a_window():
    device = Device(encode_seconds=0.2)
    times, _ = stream_beside(device, device.recording(num_windows=4))
    gaps = [b - a for a, b in pairwise(times)]
    late = [gap for gap in gaps if gap > OWN_BOUND.seconds]
    assert len(late) == 4
    assert max(late) <= 0.2 + STEP + TINY


def test_a_prompt_goes_before_proactive_recordings_and_waits_for_one_call():
    device = Device()
    first = device.recording(priority=-1)
    for _ in range(20):
        next(first)
        device.chat.steps.step()
    chat = request(4, 8, clock=device.clock)
    before = len(device.calls)
    device.chat.submit_state(chat)
    while not chat.sequences[0].num_generated:
        device.chat.steps.step()
    assert [name for name, *_ in device.calls[before:]] == ["chat"]
    device.run(first)
    device.chat.close()


def test_the_host_posts_its_tokens_while_a_step_of_the_other_runs():
    device = Device()
    stream = request(40, 8, clock=device.clock)
    device.chat.submit_state(stream)
    recording = device.recording()
    counts, posted = [], []
    run = device.speech.runner.run_step

    def noted(program, step, meanwhile, *rest, **options):
        def told():
            meanwhile()
            posted.extend(outputs_of(stream))
            counts.append((len(posted), stream.sequences[0].num_generated))

        return run(program, step, told, *rest, **options)

    device.speech.runner.run_step = noted
    device.run(recording, is_over=lambda: len(counts) > 20)
    assert len(counts) > 20
    assert all(num_posted == num_chosen for num_posted, num_chosen in counts)


def test_the_main_thread_does_not_end_requests_because_ctrl_c_could_come_between():
    """Those that it had taken from the inbox were never ended: transcriptions waited for good."""
    device, ended = Device(), []
    wanted = [request(TEXT, clock=device.clock) for _ in range(3)]
    for each in wanted:
        each.queue.add_listener(lambda output: ended.append(threading.current_thread().name))
        device.speech.submit_state(each)
    device.speech.close()
    assert ended == ["staticllm-close"] * 3
    device.chat.close()


@pytest.mark.parametrize("end", ["cancel", "a bug"])
def test_a_draining_close_ends_when_the_last_request_ends_without_a_step(end, monkeypatch):
    """The next job ends the request, so that no step is made that could tell whoever waits."""
    device = Device()
    state = request(TEXT, clock=device.clock)
    device.speech.submit_state(state)
    closing = threading.Thread(target=device.speech.close, args=(True,))
    closing.start()
    while not device.speech.step_host.is_closing:
        time.sleep(1e-3)
    if end == "cancel":
        device.speech.cancel(state.id)
    else:
        monkeypatch.setattr(device.speech.core, "end_expired", lambda: 1 / 0)
    device.chat.steps.step()
    closing.join(20)
    assert not closing.is_alive()
    assert not state.unfinished


def test_a_source_that_was_detached_stays_open_when_the_engine_closes():
    device = Device()
    device.speech.detach_jobs(device.encoder)
    device.speech.close()
    device.chat.add_jobs(device.encoder)
    heard = device.encoder.submit(device.encode, 0)
    device.chat.steps.step()
    assert heard.done() and heard.exception() is None


def test_the_texts_of_a_hosted_engine_go_with_its_host():
    device = Device()
    device.speech.steps.text = object()
    device.speech.submit_state(request(TEXT, clock=device.clock))
    device.chat.core.jobs.close()
    assert device.speech.steps.text is None
