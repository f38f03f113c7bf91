"""Opens the page of a server in a headless Chromium, and fails on errors of its scripts and of its security policy.

The model behind it answers what a test wants.
"""

from __future__ import annotations

import contextlib
import shutil
import time

import openvino_genai as genai
import pytest

from staticllm import demo_model_path
from staticllm.testing import fake_pipeline

SECONDS = 30
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    "{# <think> </think> #}"
)


def launched(playwright):
    """Return a Chromium: that of the system, or playwright's own; skip without one."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    except Exception as error:
        pytest.skip(f"no Chromium: install one, or run 'playwright install chromium' ({str(error).splitlines()[0]})")


class Tab:
    """A page in a browser, with the names that users know its parts by."""

    def __init__(self, page, url):
        self.page, self.url, self.problems = page, url, []
        page.set_default_timeout(SECONDS * 1000)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", self._note)

    def _note(self, message):
        is_status = message.text.startswith("Failed to load resource")  # a status of ours, which the page shows
        if message.type in ("error", "warning") and not is_status:
            self.problems.append(f"{message.type}: {message.text}")

    def open(self, path="/"):
        self.page.goto(self.url + path)
        return self

    @property
    def field(self):
        return self.page.get_by_label("Message", exact=True)

    @property
    def answers(self):
        return self.page.get_by_role("article", name="Answer")

    @property
    def send(self):
        return self.page.get_by_role("button", name="Send", exact=True)

    @property
    def stop(self):
        return self.page.get_by_role("button", name="Stop", exact=True)

    def ask(self, text, is_complete=True):
        self.field.fill(text)
        self.field.press("Enter")
        if is_complete:
            self.rest()

    def rest(self):
        """Wait until the shown conversation is not being answered."""
        self.send.wait_for()

    def wait_for_text(self, text, answer=-1):
        self.page.wait_for_function(
            "([text, at]) => [...document.querySelectorAll('.assistant .markdown')].at(at)?.textContent.includes(text)",
            arg=[text, answer],
        )

    def text(self, answer=-1):
        return self.page.locator(".assistant .markdown").nth(answer).inner_text()


@contextlib.contextmanager
def tab_of(browser, url, **options):
    """Yield a tab with a storage of its own, and check that nothing went wrong in it."""
    context = browser.new_context(**options)
    try:
        tab = Tab(context.new_page(), url)
        yield tab
        assert tab.problems == []
    finally:
        context.close()


class ScriptedModel:
    """A model that answers what its last message asks for: of ``answers``, or ``count N``. ``pause`` is the time of a call."""

    def __init__(self, answers=()):
        self.pause, self.prompts, self._answers = 0.0, [], dict(answers)

    def load(self, device, properties, on_progress):
        tokenizer = genai.Tokenizer(str(demo_model_path()))
        tokenizer.chat_template = TEMPLATE
        lengths = {"MAX_PROMPT_LEN": 2048, "MIN_RESPONSE_LEN": 4000, "MAX_NUM_SEQS": 4, "MEASURE_COSTS": False}
        pipe = fake_pipeline(lambda prompt: self.answer(prompt), tokenizer=tokenizer, **lengths)  # noqa: PLW0108 - a test replaces it
        config = pipe.get_generation_config()
        config.max_new_tokens = 4000
        pipe.set_generation_config(config)
        runner = pipe.engine.runner
        run = runner.run

        def slow(*arguments):
            time.sleep(self.pause)
            return run(*arguments)

        runner.run = slow
        return pipe

    def answer(self, prompt):
        self.prompts.append(prompt)
        asked = prompt.rsplit("[user]", 1)[1].removesuffix("[assistant]").strip()
        if asked.startswith("count"):
            return " ".join(f"n{number}" for number in range(int(asked.split()[1])))
        return self._answers.get(asked, f"You said {asked}.")
