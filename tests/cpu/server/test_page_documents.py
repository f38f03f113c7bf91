"""Tests documents on the page in a real browser: the passages that fit a question go into its prompt, with their sources."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import httpx
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'staticllm[browser]'")

from support.encoders.encoder_directories import a_directory
from support.server.browsers import ScriptedModel, tab_of
from support.server.served import serving

from staticllm.server.models.served import demo_spec, model_spec

pytestmark = pytest.mark.slow
MODULE = "/page/documents.js"


def long_text(num_paragraphs):
    return "\n\n".join(f"Paragraph {number} is about number {number}. " * 8 for number in range(num_paragraphs))


class ShortAnswers(ScriptedModel):
    def answer(self, prompt):
        self.prompts.append(prompt)
        return "It does."


@pytest.fixture(scope="module")
def model():
    return ShortAnswers()


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    embedder = a_directory(tmp_path_factory.mktemp("embedder"))
    specs = [demo_spec(), model_spec(f"embedder={embedder}")]
    with serving(specs, pipelines={"demo": model.load}) as served:
        yield served


def add(tab, *files):
    """Choose files: their names and texts."""
    found = [{"name": name, "mimeType": "", "buffer": data} for name, data in files]
    tab.page.locator("#attach-file").set_input_files(files=found)


def drop(tab, name, text):
    tab.page.evaluate(
        """([name, text]) => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([text], name, { type: "text/plain" }));
            for (const type of ["dragenter", "dragover", "drop"]) {
                const event = new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true });
                document.getElementById("log").dispatchEvent(event);
                if (type !== "dragenter" && !event.defaultPrevented) throw new Error("the browser would open the file");
            }
        }""",
        [name, text],
    )
    tab.page.locator("#documents li").wait_for()


def sent_to(tab, path):
    """Return the bodies of requests to a path, as they come."""
    bodies = []
    tab.page.on("request", lambda request: bodies.append(request.post_data_json) if path in request.url else None)
    return bodies


def test_passages_of_a_document_go_into_the_prompt_with_its_name(tab, model):
    tab.page.locator("#model option").first.wait_for(state="attached")
    embedded = sent_to(tab, "v1/embeddings")
    drop(tab, "report.md", long_text(40))
    tab.ask("What is paragraph 7 about?")
    prompt = model.prompts[-1]
    names = re.findall(r"\[report\.md, passage (\d+) of (\d+)\]", prompt)
    total = int(names[0][1])
    assert 0 < len(names) < total, "some of them, not all"
    assert [int(number) for number, _ in names] == sorted(int(number) for number, _ in names), "in their order"
    assert prompt.endswith("Question: What is paragraph 7 about?[assistant]")
    assert {body["input_type"] for body in embedded} == {"query", "document"}
    assert sum(len(body["input"]) for body in embedded if body["input_type"] == "document") == total
    shown = tab.page.locator(".user .sources li")
    assert shown.all_text_contents() == [f"report.md, passage {number}" for number, _ in names]
    count = len(embedded)
    tab.ask("And paragraph 8?")
    assert len(embedded) == count + 1, "the passages were embedded before"
    assert model.prompts[-1].count("[report.md, passage") <= len(names) + 1, (
        "those of the last question are not sent again"
    )


def test_documents_stay_after_a_reload_and_can_be_removed(tab, model):
    drop(tab, "notes.txt", "The key is under the mat.")
    tab.ask("Where is the key?")
    assert "[notes.txt]\nThe key is under the mat." in model.prompts[-1]
    tab.page.reload()
    tab.page.get_by_role("button", name="Remove notes.txt").click()
    assert tab.page.locator("#documents li").count() == 0
    tab.ask("And now?")
    assert "under the mat" not in model.prompts[-1]


def test_files_that_cannot_be_read_are_refused_by_a_line(tab):
    cases = [
        ("picture.png", b"\x89PNG\r\n", "is no text file"),
        ("paper.pdf", b"%PDF-1.7", "is no text file"),
        ("latin.txt", "größer".encode("latin-1"), "is no text in UTF-8"),
        ("empty.md", b" \n", "has no text"),
        ("zeros.txt", b"a\0b", "has no text"),
        ("long.txt", b"a" * 2_000_001, "cut it into parts"),
    ]
    for name, data, line in cases:
        add(tab, (name, data))
        tab.page.locator("#notice", has_text=line).wait_for()
        assert tab.page.locator("#documents li").count() == 0, name
    add(tab, *((f"{number}.txt", b"text") for number in range(9)))
    tab.page.locator("#notice", has_text="at most 8 documents").wait_for()
    assert tab.page.locator("#documents li").count() == 8


def test_without_an_embedder_the_whole_text_is_sent_if_it_fits(browser, model):
    with serving(pipelines={"demo": model.load}) as served, tab_of(browser, served.url) as tab:
        tab.open().page.locator("#model option").first.wait_for(state="attached")
        drop(tab, "notes.txt", "The key is under the mat.")
        assert "staticllm serve" in tab.page.locator("#no-embedder").inner_text()
        tab.ask("Where is the key?")
        assert "[notes.txt]\nThe key is under the mat." in model.prompts[-1]
        assert tab.page.locator(".user .sources li").all_text_contents() == ["notes.txt, whole"]
        count = len(model.prompts)
        add(tab, ("long.txt", long_text(200).encode()))
        tab.ask("And now?")
        error = tab.page.locator(".message .error:visible").inner_text()
        assert "too long for this model, which reads 2048 tokens" in error
        assert "Serve an embedding model" in error
        assert len(model.prompts) == count
        tab.page.get_by_role("button", name="Remove long.txt").click()
        tab.page.locator(".message .error:visible").get_by_role("button", name="Retry").click()
        tab.wait_for_text("It does.")


def test_passages_hold_all_of_a_text_and_are_short(tab):
    rng = random.Random(0)
    texts = []
    for _ in range(150):
        words = ["a" * rng.randint(1, 30) for _ in range(rng.randint(1, 900))]
        ends = rng.choices(
            [" ", ". ", "\n", "\n\n", "! ", "", "😀"], weights=[20, 3, 2, 1, 1, rng.choice([0, 40]), 1], k=len(words)
        )
        texts.append("".join(word + end for word, end in zip(words, ends, strict=True)))
    found = tab.page.evaluate(
        f"async (texts) => {{ const m = await import('{MODULE}'); return texts.map(m.passagesOf); }}", texts
    )
    for text, passages in zip(texts, found, strict=True):
        assert "".join("".join(passages).split()) == "".join(text.split())
        assert all(0 < len(each.encode("utf-16-le")) // 2 <= 900 for each in passages)


def test_the_nearest_passages_are_those_of_the_largest_cosine(tab):
    rng = random.Random(1)
    cases = []
    for _ in range(100):
        size = rng.randint(1, 8)
        vectors = [[rng.gauss(0, 1) for _ in range(size)] for _ in range(rng.randint(1, 20))]
        cases.append([[rng.gauss(0, 1) for _ in range(size)], vectors])
    found = tab.page.evaluate(
        f"async (cases) => {{ const m = await import('{MODULE}'); return cases.map(([q, v]) => m.nearest(q, v)); }}",
        cases,
    )

    def cosine(one, other):
        dot = sum(a * b for a, b in zip(one, other, strict=True))
        return dot / (sum(a * a for a in one) ** 0.5 * sum(b * b for b in other) ** 0.5)

    for (question, vectors), order in zip(cases, found, strict=True):
        scores = [cosine(question, vectors[at]) for at in order]
        assert sorted(order) == list(range(len(vectors)))
        assert all(before >= after - 1e-9 for before, after in pairwise(scores))


def test_a_prompt_that_is_read_shows_how_far(tab, model):
    model.pause = 0.2
    tab.ask("word " * 1500, is_complete=False)
    progress = tab.page.locator(".wait progress")
    progress.wait_for()
    tab.page.wait_for_function(
        """() => {
            const bar = document.querySelector(".wait progress");
            return bar && bar.value > 0 && bar.value < bar.max;
        }"""
    )
    assert re.search(r"Reading the prompt, tokens \d+ of \d+", tab.page.locator(".wait").inner_text())
    model.pause = 0.0
    tab.rest()
    assert tab.page.locator(".wait:visible").count() == 0


def test_tokens_are_counted_before_they_are_sent(tab, served):
    counted = sent_to(tab, "/tokenize")
    tab.ask("hello")
    tab.field.fill("two words")
    shown = tab.page.locator("#count")
    tab.page.wait_for_function("() => / of 2048 tokens$/.test(document.getElementById('count').textContent)")
    number = int(shown.inner_text().split()[0])
    answer = httpx.post(f"{served.url}/tokenize", json=counted[-1], timeout=60)
    assert number == answer.json()["count"]
    assert [each["content"] for each in counted[-1]["messages"]] == ["hello", "It does.", "two words"]
    tab.field.fill("word " * 3000)
    tab.page.locator("#count.is-long").wait_for()
    assert re.fullmatch(r"Too long: \d+ tokens, the model reads 2048 at once", shown.inner_text())
    assert "Too long" in tab.page.locator("#announcer").inner_text()
    tab.field.fill("")
    tab.page.wait_for_function("() => document.getElementById('count').textContent === ''")
