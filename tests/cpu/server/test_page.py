"""Tests the web page in a real browser: chats, several at once, the scheduler, and the keyboard alone."""

from __future__ import annotations

import re
import threading

import httpx
import pytest

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'staticllm[browser]'"
)

from support.server.browsers import ScriptedModel, tab_of  # noqa: E402
from support.server.served import serving  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return ScriptedModel()


@pytest.fixture(scope="module")
def served(model):
    with serving(pipelines={"demo": model.load}, max_per_client=4) as served:
        yield served


def test_an_answer_streams_and_tells_its_figures(tab, model):
    model.pause = 0.02
    tab.ask("count 60", is_complete=False)
    tab.wait_for_text("n1 ")
    early = tab.text()
    assert "n59" not in early
    assert tab.stop.is_visible()
    tab.wait_for_text("n59")
    tab.rest()
    assert tab.text() == " ".join(f"n{number}" for number in range(60))
    figures = tab.page.locator(".stats").last.inner_text()
    assert all(part in figures for part in ("tokens", "tok/s", "first after", "prompt tokens cached"))
    assert "Answer: n0 n1" in tab.page.locator("#announcer").inner_text()
    tab.ask("again")
    assert tab.text() == "You said again."
    assert "[user]count 60" in model.prompts[-1]
    assert "[assistant]n0 n1" in model.prompts[-1]
    cached = tab.page.locator(".stats").last.inner_text().split(" of ")[0].rsplit(" ", 1)[-1].split("\n")[-1]
    assert int(cached) > 50


def test_stop_keeps_what_has_come_and_frees_the_engine(tab, model, served):
    model.pause = 0.02
    for press in (tab.stop.click, lambda: tab.field.press("Escape")):
        tab.ask("count 900", is_complete=False)
        tab.wait_for_text("n3 ")
        press()
        tab.rest()
        assert "n3" in tab.text()
        assert "n899" not in tab.text()
        assert "stopped" in tab.page.locator(".stats").last.inner_text()
        served.wait_until_idle()


def test_a_message_is_edited_and_an_answer_is_given_again(tab, model):
    tab.ask("one")
    tab.ask("two")
    tab.page.get_by_role("button", name="Edit message").first.click()
    field = tab.page.get_by_label("Edited message")
    assert field.input_value() == "one"
    field.press("Escape")
    assert field.count() == 0
    assert tab.answers.count() == 2
    tab.page.get_by_role("button", name="Edit message").first.click()
    field.fill("three")
    tab.page.get_by_role("button", name="Send again").click()
    tab.wait_for_text("You said three.")
    tab.rest()
    assert tab.answers.count() == 1
    assert "one" not in model.prompts[-1]
    count = len(model.prompts)
    tab.page.get_by_role("button", name="Answer again").click()
    tab.page.wait_for_timeout(100)
    tab.rest()
    assert len(model.prompts) == count + 1
    assert tab.text() == "You said three."
    assert tab.answers.count() == 1


def test_two_conversations_stream_at_once_and_survive_a_reload(tab, model, served):
    model.pause = 0.03
    tab.ask("count 150", is_complete=False)
    tab.wait_for_text("n2 ")
    tab.page.get_by_role("button", name="New conversation").click()
    assert tab.answers.count() == 0
    assert tab.send.is_visible()
    tab.ask("count 151", is_complete=False)
    tab.wait_for_text("n2 ")
    names = tab.page.locator(".conversation")
    assert names.count() == 2
    assert tab.page.locator(".mark.is-running").count() == 2
    assert served.state.hub.models["demo"].admission.num_running == 2
    names.filter(has_text="count 150").click()
    tab.wait_for_text("n10 ")
    assert "n149" not in tab.text()
    tab.rest()
    assert tab.text().endswith("n149")
    names.filter(has_text="count 151").click()
    tab.rest()
    assert tab.text().endswith("n150")
    tab.page.reload()
    tab.wait_for_text("n150")
    assert names.count() == 2
    names.filter(has_text="count 150").click()
    tab.wait_for_text("n149")
    names.filter(has_text="count 150").press("Tab")
    tab.page.get_by_role("button", name="Delete “count 150”").click()
    assert names.count() == 1
    tab.page.get_by_role("button", name="Undo").click()
    assert names.count() == 2
    tab.wait_for_text("n149")


def test_a_conversation_that_is_deleted_while_it_streams_stays_deleted(tab, model, served):
    model.pause = 0.02
    tab.ask("count 900", is_complete=False)
    tab.wait_for_text("n3 ")
    tab.page.get_by_role("button", name="Delete “count 900”").click()
    served.wait_until_idle()
    tab.page.wait_for_timeout(1500)
    assert tab.page.locator(".conversation").count() == 0
    tab.page.reload()
    tab.page.get_by_text("Conversations stay in this browser.").wait_for()


def test_two_tabs_show_the_same_conversations(tab):
    tab.ask("one")
    other = tab.page.context.new_page()
    other.goto(tab.url)
    other.get_by_text("You said one.").wait_for()
    tab.ask("two")
    other.get_by_text("You said two.").wait_for()
    other.get_by_role("button", name="Delete “one”").click()
    tab.page.get_by_text("Conversations stay in this browser.").wait_for()
    other.close()


def test_leaving_the_page_stops_its_answer_and_keeps_what_had_come(tab, model, served):
    model.pause = 0.02
    tab.ask("count 900", is_complete=False)
    tab.wait_for_text("n20 ")
    tab.page.reload()
    served.wait_until_idle()
    tab.wait_for_text("n3 ")
    assert "stopped" in tab.page.locator(".stats").inner_text()
    assert tab.send.is_visible()


def test_an_error_is_one_line_with_a_retry(tab, model):
    def fail(prompt):
        raise RuntimeError("secret of the server")

    model.answer, good = fail, model.answer
    try:
        tab.ask("hello")
        error = tab.page.locator(".message .error")
        assert "unexpected RuntimeError" in error.inner_text()
        assert "secret" not in error.inner_text()
    finally:
        model.answer = good
    error.get_by_role("button", name="Retry").click()
    tab.wait_for_text("You said hello.")
    tab.rest()
    assert tab.page.locator(".message .error:visible").count() == 0
    assert tab.answers.count() == 1


def test_settings_reach_the_model_and_stay(tab, model):
    sent = []
    tab.page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    tab.page.get_by_role("button", name="Settings of this conversation").click()
    tab.page.get_by_label("System prompt").fill("Be brief.")
    tab.page.get_by_label("Temperature").fill("5")
    tab.page.get_by_role("button", name="Save").click()
    assert tab.page.get_by_role("dialog").is_visible(), "5 is out of range"
    tab.page.get_by_label("Temperature").fill("0")
    tab.page.get_by_label("Longest answer").fill("3")
    tab.page.get_by_role("button", name="Save").click()
    tab.ask("hello")
    assert sent[-1]["temperature"] == 0
    assert sent[-1]["max_tokens"] == 3
    assert "top_p" not in sent[-1]
    assert "[system]Be brief.[user]hello[assistant]" in model.prompts[-1]
    assert "length limit" in tab.page.locator(".stats").inner_text()
    tab.page.reload()
    tab.page.get_by_role("button", name="Settings of this conversation").click()
    assert tab.page.get_by_label("System prompt").input_value() == "Be brief."


def test_a_key_is_asked_for_and_forgotten_with_the_tab(browser, model):
    with serving(pipelines={"demo": model.load}, api_keys=("sesame",)) as served, tab_of(browser, served.url) as tab:
        tab.open()
        field = tab.page.get_by_label("API key")
        field.wait_for()
        assert "needs an API key" in tab.page.locator("#model-error").inner_text()
        field.fill("sesame")
        tab.page.get_by_role("button", name="Save").click()
        tab.ask("hello")
        assert tab.text() == "You said hello."
        assert tab.page.evaluate("JSON.stringify(localStorage)").count("sesame") == 0
        tab.page.goto(served.url + "/#scheduler")
        tab.page.locator("#answers").wait_for(state="attached")
        tab.page.wait_for_function("() => document.getElementById('card-running-note').textContent === 'of 4'")


def test_the_scheduler_shows_what_runs_and_what_waits(tab, model, served):
    model.pause = 0.03
    body = {"messages": [{"role": "user", "content": "count 120"}]}
    url = served.url + "/v1/chat/completions"
    tab.page.get_by_role("link", name="Scheduler").click()
    tab.page.locator("#card-running-note", has_text="of 4").wait_for()  # the first reading has come
    earlier = tab.page.locator("#answers tr").count()
    threads = [threading.Thread(target=httpx.post, args=(url,), kwargs={"json": body, "timeout": 60}) for _ in range(6)]
    for thread in threads:
        thread.start()
    rows = tab.page.locator("#requests tr")
    badges = "document.querySelectorAll('#requests .badge"
    tab.page.wait_for_function(f"() => {badges}.running').length === 4 && {badges}.queued').length === 2")
    assert rows.count() == 6 and tab.page.locator("#card-waiting").inner_text() == "2"
    assert "decode" in tab.page.locator("#calls tr").first.inner_text()
    tab.page.wait_for_function(
        "() => document.querySelector('#requests [role=progressbar]').getAttribute('aria-valuenow') > 0"
    )
    for thread in threads:
        thread.join()
    tab.page.get_by_text("No request is in the engine").wait_for()
    assert tab.page.locator("#answers tr").count() == min(8, earlier + 6), (
        "the first reading also tells of earlier answers"
    )
    assert tab.page.locator("#plot-ttft .dot").count() >= 6
    assert tab.page.locator("#plot-gap rect").count() > 0
    assert tab.page.locator("#strip g").count() > 50
    served.wait_until_idle()


def a_desk(answer):
    """A feed of a device that chats, agents and texts share; texts take a quarter of the time."""
    shown = answer.json()
    common = {"arrival": shown["now"] - 2, "prompt_tokens": 50, "cached_tokens": 0, "computed_tokens": 50}
    common |= {"output_tokens": 3, "max_output_tokens": 9, "ttft_ms": 12.5}
    classes = ["reactive"] * 12 + ["proactive"] * 14
    shown["requests"] = [
        {**common, "id": number, "status": "running" if number % 2 else "swapped", "class": kind, "priority": 0}
        for number, kind in enumerate(classes)
    ]
    call = {"number": 1, "rows": 16, "kv_len": 1024, "ms": 400, "proactive": 9, "prefill": [[1, 4]], "preempted": []}
    call |= {"decode": list(range(12)), "drafted": 0, "accepted": 0, "gap_ms": 20}
    call |= {"failed": False, "is_inserted": False, "inserted": 0}
    shown["calls"] = [{**call, "start": shown["now"] - 1.5}]
    shown["totals"]["job_seconds"] = shown["now"] / 4
    shown["clients"] = [
        {"name": "client editor", "share": 3, "seconds": 3},
        {"name": "others", "share": 1, "seconds": 1},
    ]
    return shown


CUT_OFF = """() => [
    ...[...document.querySelectorAll('.cards *')].filter((each) => each.scrollWidth > each.clientWidth + 1),
    ...[...document.querySelectorAll('.plot text')].filter((each) => each.getBBox().x < 0),
].map((each) => each.id || each.textContent)"""


def test_classes_texts_and_clients_are_shown_and_nothing_is_cut_off(tab, served):
    page = tab.page
    page.route("**/api/scheduler*", lambda route: route.fulfill(json=a_desk(route.fetch())))
    page.goto(served.url + "/#scheduler")
    page.locator("#card-busy-note", has_text="texts").wait_for()
    page.wait_for_timeout(1500)
    running, busy = (page.locator(f"#card-{name}-note").inner_text() for name in ("running", "busy"))
    assert running.replace("\xa0", " ") == "of 4, 7 proactive"  # of those that decode
    assert re.fullmatch(r"\d+ % prefill, \d+ % texts, \d+ % proactive", busy.replace("\xa0", " "))
    assert page.locator("#share-now").inner_text().count("%") == 3
    assert page.locator("#plot-share rect.jobs").count() > 0
    assert " ".join(page.locator("#clients").inner_text().split()) == "client editor 3 3.0 s 75 % others 1 1.0 s 25 %"
    assert page.locator("#requests .badge:visible", has_text="proactive").count() == 14
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for width in (1920, 1280, 1161, 1160, 761, 420, 401, 340):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(CUT_OFF) == [], width
            assert page.evaluate("document.getElementById('scheduler-body').scrollWidth") <= width


def test_nobody_is_watched_behind_a_hidden_view(tab, served):
    tab.page.get_by_role("link", name="Scheduler").click()
    tab.page.get_by_text("No request is in the engine").wait_for()
    tab.page.get_by_role("link", name="Chat", exact=True).click()
    seen = []
    tab.page.on("request", lambda request: seen.append(request.url))
    tab.page.wait_for_timeout(1500)
    assert not [url for url in seen if "scheduler" in url]


def test_the_keyboard_alone_is_enough(tab, model):
    page = tab.page
    focused = "() => { const now = document.activeElement; return now.getAttribute('aria-label') || now.textContent || now.id; }"
    page.wait_for_function("() => document.activeElement.id === 'message'")
    page.keyboard.type("first")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    tab.wait_for_text("You said first")
    tab.rest()
    page.keyboard.press("Control+Shift+O")
    page.keyboard.type("second")
    page.keyboard.press("Enter")
    tab.wait_for_text("You said second")
    tab.rest()
    page.keyboard.press("Alt+ArrowDown")
    tab.wait_for_text("You said first")
    seen = []
    for _ in range(25):
        page.keyboard.press("Shift+Tab")
        seen.append(page.evaluate(focused).strip())
        outline = page.evaluate(
            "getComputedStyle(document.activeElement.closest('form') ?? document.activeElement).boxShadow"
        )
        outline += page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "nonenone" or page.evaluate("document.activeElement === document.body"), seen[-1]
    wanted = [
        "Answer again",
        "Copy answer",
        "Edit message",
        "Settings of this conversation",
        "New conversation",
        "Scheduler",
        "Chat",
    ]
    places = [seen.index(name) for name in wanted]
    assert places == sorted(places), f"the order of focus is {seen}"
    while "Edit message" not in page.evaluate(focused):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("third")
    page.keyboard.press("Enter")
    tab.wait_for_text("You said third")


def test_a_phone_has_everything_behind_its_menu(browser, served):
    with tab_of(browser, served.url, viewport={"width": 360, "height": 640}) as tab:
        tab.open().ask("hello")
        width = "() => document.documentElement.scrollWidth"
        assert tab.page.evaluate(width) == 360
        assert not tab.page.get_by_role("button", name="New conversation").is_visible()
        tab.page.get_by_role("button", name="Menu").click()
        tab.page.get_by_role("link", name="Scheduler").click()
        tab.page.get_by_role("heading", name="Last answers").wait_for()
        assert tab.page.evaluate(width) == 360
        tab.page.get_by_role("button", name="Menu").click()
        tab.page.keyboard.press("Escape")
        tab.page.get_by_role("button", name="New conversation").wait_for(state="hidden")
        assert tab.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Menu"


def test_the_number_and_size_of_conversations_is_bounded(tab):
    tab.page.evaluate(
        """() => { for (let at = 0; at < 75; at += 1) { const id = `x${at}`; localStorage.setItem(`staticllm.conversation.${id}`,
        JSON.stringify({ id, title: id, updated: at, messages: [{ id: 'm', role: 'user', content: 'y'.repeat(30000) }] })); } }"""
    )
    tab.page.evaluate("localStorage.setItem('staticllm.conversation.bad', '{not json')")
    tab.page.reload()
    tab.page.get_by_role("button", name="New conversation").click()
    tab.ask("hello")
    kept = tab.page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('staticllm.conversation.x'))")
    assert len(kept) == 59
    assert "staticllm.conversation.x0" not in kept
    assert "staticllm.conversation.x74" in kept
    assert tab.text() == "You said hello."
    tab.page.evaluate(
        """async () => { const { Conversations } = await import("/page/conversations.js");
        const all = new Conversations({ onChange() {}, isBusy: () => false });
        all.save({ id: "huge", updated: 1, messages: [{ id: "m", role: "user", content: "y".repeat(4100000) }] }); }"""
    )
    left = tab.page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('staticllm.conversation.'))")
    assert len(left) >= 59, "one that cannot be kept takes no place of others"
    assert "staticllm.conversation.huge" not in left, "one that cannot be kept takes no place of others"
