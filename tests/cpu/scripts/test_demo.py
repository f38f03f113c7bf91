"""Tests the script that a newcomer runs first: it answers, and loads its model once for all prompts."""

from __future__ import annotations

import sys

from staticllm import StaticLLMPipeline, demo_model_path


def test_all_prompts_are_asked_of_one_pipeline(root, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(root / "scripts"))
    import demo

    loaded = []
    monkeypatch.setattr(
        "staticllm.StaticLLMPipeline", lambda *given: (loaded.append(given), StaticLLMPipeline(*given))[1]
    )
    monkeypatch.setattr(sys, "argv", ["demo.py", "--model=", "--ask", "Hello", "What is an NPU?"])
    demo.main()
    said = capsys.readouterr().out
    assert loaded == [(demo_model_path(), "CPU")]
    assert [line for line in said.splitlines() if line.startswith("> ")] == ["> Hello", "> What is an NPU?"]
    assert said.count("TTFT") == 2


def test_the_script_starts_one_process_for_its_prompts(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "scripts"))
    import demo

    started = []
    monkeypatch.setattr(demo, "ensure_environment", lambda: root / "python")
    monkeypatch.setattr(demo, "run", lambda *command: started.append(command))
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    demo.main()
    (command,) = started
    assert command[-len(demo.PROMPTS) :] == demo.PROMPTS
