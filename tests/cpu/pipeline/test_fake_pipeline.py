"""The fake pipeline: an application's tests get from it what a pipeline does, and nothing is compiled."""

from __future__ import annotations

import asyncio
import re
import threading
import time

import numpy as np
import openvino as ov
import openvino_genai
import pytest

from staticllm import BusyError, ConfigError, ModelError, PromptTooLongError, StaticLLMError, StaticLLMPipeline
from staticllm.pipelines.costs import probe
from staticllm.pipelines.engine.request import OutputQueue
from staticllm.pipelines.launch import engine as launch
from staticllm.pipelines.text import handle, output_processor
from staticllm.system.threads import start_thread
from staticllm.testing import fake_answer, fake_pipeline

SHORT = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 64}
ANSWER = "It is sunny. Grüße 🙂"


def test_nothing_is_loaded_or_compiled(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a fake pipeline compiles nothing")

    monkeypatch.setattr(launch, "load", refuse)
    events = []
    with fake_pipeline("yes", on_progress=events.append, **SHORT) as pipe:
        monkeypatch.setattr(ov.Core, "compile_model", refuse)
        assert isinstance(pipe, StaticLLMPipeline)
        assert pipe.is_complete
        assert pipe.generate("hello") == "yes"
    assert [event.stage for event in events] == ["ready"]


def test_every_answer_is_the_reply():
    with fake_pipeline(ANSWER, **SHORT) as pipe:
        seen = []
        result = pipe.generate("How is the weather?", streamer=seen.append)
        assert result == "".join(seen) == ANSWER
        assert result.finish_reasons == ["stop"]
        assert "".join(pipe.submit("And tomorrow?")) == ANSWER
        assert pipe.generate(["a", "b", "c"]).texts == [ANSWER] * 3
        sampled = pipe.generate("a", do_sample=True, temperature=1.0, rng_seed=3, num_return_sequences=3)
        assert sampled.texts == [ANSWER] * 3
        cut = pipe.generate("a", max_new_tokens=3)
        assert cut
        assert ANSWER.startswith(cut)
        assert cut.finish_reasons == ["length"]
        assert pipe.generate("a", stop_strings={"sunny"}) == "It is "


def test_a_function_sees_the_prompt_and_the_turns_before():
    prompts = []

    def reply(prompt):
        prompts.append(prompt)
        return f"answer {len(prompts)}"

    with fake_pipeline(reply, **SHORT) as pipe:
        pipe.start_chat()
        assert [pipe.generate(text) for text in ("one", "two", "three")] == ["answer 1", "answer 2", "answer 3"]
        assert "one" in prompts[0]
        assert "two" not in prompts[0]
        assert [part for part in ("one", "answer 1", "two", "answer 2", "three") if part not in prompts[2]] == []
        assert pipe.stats().prefix_hit_tokens > 0, "the turns before are not computed again"


def test_an_error_in_the_function_reaches_the_caller_and_the_pipeline_stays_usable():
    def reply(prompt):
        if "bad" in prompt:
            raise LookupError("no reply to this")
        return "fine"

    with fake_pipeline(reply, **SHORT) as pipe:
        with pytest.raises(LookupError, match="no reply to this"):
            pipe.submit("bad")
        assert pipe.generate("good") == "fine"


def test_without_a_reply_the_tokens_can_be_predicted():
    with fake_pipeline(**SHORT) as pipe:
        prompts = [[5, 6, 7], [5, 6, 8, 9], list(range(100, 150))]
        handles = [pipe.submit(np.array(prompt), max_new_tokens=9, ignore_eos=True) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            expected = fake_answer(prompt, 9, vocab_size=pipe.vocab_size)[len(prompt) :]
            assert handle.result().tokens == [expected]


def test_requests_at_the_same_time_get_their_own_answers():
    with fake_pipeline(lambda prompt: " ".join(re.findall(r"\d+", prompt)) * 3, MAX_NUM_SEQS=4, **SHORT) as pipe:
        results = {}
        threads = [
            threading.Thread(target=lambda n=n: results.update({n: pipe.generate(f"number {n}")})) for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert results == {n: str(n) * 3 for n in range(20)}


def test_the_tokenizer_of_another_model_is_used(zoo):
    tokenizer = openvino_genai.Tokenizer(str(zoo / "llama"))
    with fake_pipeline("It is sunny.", tokenizer=tokenizer, **SHORT) as pipe:
        answer = pipe.generate("How is the weather?", apply_chat_template=False)
        assert answer == "It is sunny."
        assert answer.finish_reasons == ["stop"]
        assert answer.tokens[0][-1] == tokenizer.get_eos_token_id()
        assert pipe.vocab_size == len(tokenizer.get_vocab())


@pytest.mark.parametrize("number", range(3))
def test_the_snippets_of_the_page_run(root, number):
    page = (root / "docs" / "testing.md").read_text(encoding="utf-8")
    exec(compile(re.findall(r"```python\n(.*?)```", page, re.S)[number], "testing.md", "exec"), {})


def test_an_idle_fake_pipeline_says_nothing(caplog, monkeypatch):
    """It measured costs with what earlier requests had left, which the fake device refuses: a warning for each."""
    monkeypatch.setattr(probe, "IDLE_SECONDS", 0.01)
    with fake_pipeline("yes", **SHORT) as pipe:
        pipe.generate("hello")
        time.sleep(0.2)
    assert not caplog.records


def test_requests_of_a_failed_call_have_ended_when_it_raises():
    """The first prompt still waited, so that the next call was refused."""
    with fake_pipeline("yes", MAX_WAITING=1, **SHORT) as pipe:
        for _ in range(100):
            with pytest.raises(PromptTooLongError):
                pipe.generate(["hello there", "x " * 100])
            assert pipe.generate("hello") == "yes"


def test_a_callback_whose_thread_was_interrupted_at_its_start_gets_no_text(monkeypatch):
    def interrupt(run, name):
        if name != "staticllm-callback":
            return start_thread(run, name)
        readers.append(start_thread(run, name))
        raise KeyboardInterrupt

    readers, texts, may_step = [], [], threading.Event()
    with fake_pipeline(**SHORT) as pipe, monkeypatch.context() as patch:
        patch.setattr(handle, "start_thread", interrupt)
        pipe.engine.call_soon(lambda: may_step.wait(60))
        with pytest.raises(KeyboardInterrupt):
            pipe.submit("hello", callback=texts.append, max_new_tokens=9, ignore_eos=True)
        may_step.set()
        readers[0].join(60)
        assert not "".join(texts), "nobody has the handle"


def test_a_wait_that_is_interrupted_loses_no_token(monkeypatch):
    """Ctrl-C in ``result`` came when the token was taken and not yet read: the next ``result`` was one token short."""
    prompt = np.arange(5, 20)
    with fake_pipeline(**SHORT) as pipe:
        asked = pipe.submit(prompt, max_new_tokens=12, ignore_eos=True)
        wait, waits = OutputQueue.wait, []

        def interrupted_wait(self, timeout=None):
            has_come = wait(self, timeout)
            waits.append(has_come)
            if len(waits) in (3, 4, 8):
                raise KeyboardInterrupt
            return has_come

        with monkeypatch.context() as patch:
            patch.setattr(OutputQueue, "wait", interrupted_wait)
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    asked.result()
        assert list(asked.result().tokens[0]) == fake_answer(prompt, 12, vocab_size=pipe.vocab_size)[15:]


def test_an_answer_of_which_a_token_was_lost_says_so(monkeypatch):
    with fake_pipeline(**SHORT) as pipe:
        asked = pipe.submit("hello", max_new_tokens=12, ignore_eos=True)
        push, pushed = output_processor.OutputProcessor.push, []

        def interrupted_push(self, output):
            pushed.append(output)
            if len(pushed) == 5:
                raise KeyboardInterrupt
            return push(self, output)

        with monkeypatch.context() as patch:
            patch.setattr(output_processor.OutputProcessor, "push", interrupted_push)
            with pytest.raises(KeyboardInterrupt):
                asked.result()
        for _ in range(2):
            with pytest.raises(StaticLLMError, match="interrupted by KeyboardInterrupt while it took a token"):
                asked.result()

        async def read():
            return await asked

        with pytest.raises(StaticLLMError, match="submit the request again"):
            asyncio.run(read())
        asked.stop()
        assert asked.is_done and asked.finish_reason == "error"
        assert len(pipe.generate("hello", max_new_tokens=12, ignore_eos=True).tokens[0]) == 12


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, ModelError("no text")])
def test_an_error_at_the_end_of_an_answer_is_that_of_every_reader(error, monkeypatch):
    """The end was lost: the next reader waited forever."""
    with fake_pipeline(**SHORT) as pipe:
        asked = pipe.submit("hello", max_new_tokens=4, ignore_eos=True)

        def fail(*_):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(output_processor.OutputProcessor, "finish", fail)
            with pytest.raises(error if isinstance(error, type) else type(error)):
                asked.result()
        for _ in range(2):
            with pytest.raises(StaticLLMError):
                asked.result(60)


def test_an_error_of_one_prompt_does_not_wait_long_for_the_others(monkeypatch):
    monkeypatch.setattr(handle, "END_SECONDS", 0.2)
    may_step = threading.Event()
    with fake_pipeline(**SHORT) as pipe:
        pipe.engine.call_soon(lambda: may_step.wait(60))
        begin = time.monotonic()
        with pytest.raises(PromptTooLongError):
            pipe.generate(["hello there", "x " * 100])
        assert time.monotonic() - begin < 20
        may_step.set()
        assert len(pipe.generate("hello", max_new_tokens=4, ignore_eos=True).tokens[0]) == 4


def test_outputs_are_taken_in_order_with_and_without_waiting():
    outputs = OutputQueue()
    assert outputs.get(0) is None and outputs.get(0.01) is None and not outputs.wait(0)
    for number in range(6):
        outputs.put(number)
    assert [outputs.get(0), outputs.get(), outputs.get(1)] == [0, 1, 2]
    assert outputs.wait() and outputs.wait(0)
    assert [outputs.get(0) for _ in range(4)] == [3, 4, 5, None]
    assert outputs.get(0.01) is None, "news of outputs that were taken without waiting"
    begin = threading.Timer(0.1, lambda: outputs.put(6))
    begin.start()
    assert outputs.get(60) == 6
    begin.join()


def test_limits_and_errors_are_the_real_ones():
    with fake_pipeline("yes", MAX_NUM_SEQS=1, MAX_WAITING=1, **SHORT) as pipe:
        with pytest.raises(PromptTooLongError, match="64"):
            pipe.generate(np.arange(5, 70))
        with pytest.raises(BusyError, match="MAX_WAITING is 1"):
            pipe.engine.run_between_steps(lambda: [pipe.submit("a") for _ in range(3)])
    with pytest.raises(ConfigError, match="MAX_PROMT_LEN"):
        fake_pipeline("yes", MAX_PROMT_LEN=64)
