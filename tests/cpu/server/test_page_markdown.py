"""Tests in a real browser that Markdown is shown, and that no answer of a hostile model becomes more than text and safe links."""

from __future__ import annotations

import pytest

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'staticllm[browser]'"
)

from support.server.browsers import ScriptedModel, tab_of  # noqa: E402
from support.server.served import serving  # noqa: E402

pytestmark = pytest.mark.slow
HOSTILE = """
<script>window.hacked = 1</script>

<img src=x onerror="window.hacked = 1"> <svg onload="window.hacked = 1"></svg>
<a href="javascript:window.hacked=1">raw</a> <iframe srcdoc="<script>parent.hacked=1</script>"></iframe>

[one](javascript:window.hacked=1) [two](JaVaScRiPt:window.hacked=1) [three](data:text/html,<script>1</script>)
[four](java\tscript:window.hacked=1) [five](vbscript:x) [six](//evil.invalid/x) [seven](&#106;avascript:x)
[good](https://example.org/a?b=c) ![picture](https://evil.invalid/pixel.png) <https://example.org/auto>

```html
<script>window.hacked = 1</script>
```

| head <img src=x onerror=window.hacked=1> | b |
|---|:-:|
| `</td><script>window.hacked=1</script>` | **bold** |
"""
LIVELY = "# Title\n\nSome **bold**, *slanted* and `code`.\n\n- one\n- two\n  - three\n\n1. first\n2. second\n\n> said\n"
ANSWERS = {"hostile": HOSTILE, "lively": LIVELY, "think": "<think>first this</think>then that"}
FORBIDDEN = {
    "document.body.innerHTML = '<b>x</b>';": "TrustedHTML",
    "document.createElement('script').src = 'data:text/javascript,window.hacked=1';": "TrustedScriptURL",
    "document.body.setAttribute('onclick', 'window.hacked = 1');": "TrustedScript",
}
ALLOWED = "A BLOCKQUOTE BR BUTTON CODE DEL DIV EM H2 H3 H4 H5 H6 HR LI OL P PRE SPAN STRONG SVG TABLE TBODY TD TH THEAD TR UL USE"
FUZZ = r"""async ({ allowed, rounds }) => {
  const { showMarkdown } = await import("/page/markdown.js");
  const parts = ["<script>", "</script>", "<img src=x onerror=hacked=1>", "javascript:hacked=1", "[", "](", ")", "!", "`",
    "```", "~~~", "*", "**", "_", "__", "~~", "#", "# ", "> ", "- ", "1. ", "  ", "    ", "|", "|---|", "\\", "\n", "\n\n",
    "\t", "<", ">", "&lt;", "https://x.invalid/", "data:text/html,x", "\"", "'", "text", "\u202e", "\u0000", "\ud800", "é",
    "🙂", "---", "mailto:a@b"];
  let seed = 1;
  const random = (limit) => (seed = (seed * 48271) % 2147483647) % limit;
  const box = document.createElement("div");
  document.body.append(box);
  for (let round = 0; round < rounds; round += 1) {
    let text = "";
    for (let count = 1 + random(40); count; count -= 1) {
      text += parts[random(parts.length)];
      if (random(3) === 0) showMarkdown(box, text);  // as if it came in pieces
    }
    showMarkdown(box, text);
    const whole = box.innerText;
    box.replaceChildren();
    box.shownBlocks = undefined;
    showMarkdown(box, text);
    if (box.innerText !== whole) return `pieces differ: ${JSON.stringify(text)}`;
    for (const node of box.querySelectorAll("*")) {
      if (!allowed.includes(node.tagName.toUpperCase())) return `${node.tagName}: ${JSON.stringify(text)}`;
      for (const { name, value } of node.attributes) {
        const isBadLink = name === "href" && node.tagName === "A" && !/^(https?:|mailto:)/.test(value);
        const isBad = isBadLink || name.startsWith("on") || name === "style" || name === "src";
        if (isBad) return `${name}=${value}: ${JSON.stringify(text)}`;
      }
    }
  }
  return window.hacked ?? "";
}"""


@pytest.fixture(scope="module")
def model():
    return ScriptedModel(ANSWERS)


@pytest.fixture(scope="module")
def served(model):
    with serving(pipelines={"demo": model.load}, max_per_client=4) as served:
        yield served


def test_hostile_answers_stay_text(tab):
    requests = []
    tab.page.on("request", lambda request: requests.append(request.url))
    tab.ask("hostile")
    page, shown = tab.page, tab.page.locator(".markdown")
    assert page.evaluate("window.hacked") is None
    assert (
        shown.locator("script, img, iframe, svg:not(.icon), object, embed, form, style, [onerror], [onload]").count()
        == 0
    )
    links = [link.get_attribute("href") for link in shown.locator("a").all()]
    assert links == [
        "https://example.org/a?b=c", "https://evil.invalid/pixel.png", "https://example.org/auto",
    ]  # fmt: skip
    assert all("noopener" in link.get_attribute("rel") for link in shown.locator("a").all())
    assert "<script>window.hacked = 1</script>" in tab.text()
    assert 'onerror="window.hacked = 1"' in tab.text()
    assert shown.locator("td code").inner_text() == "</td><script>window.hacked=1</script>"
    assert shown.locator("td strong").inner_text() == "bold"
    assert not [url for url in requests if "evil" in url]


def test_the_policy_forbids_html_from_strings_and_inline_scripts(browser, served):
    with tab_of(browser, served.url) as tab:
        page = tab.open().page
        for statement, kind in FORBIDDEN.items():
            message = page.evaluate(f"() => {{ try {{ {statement} }} catch (error) {{ return error.message; }} }}")
            assert kind in message, statement
        assert page.evaluate("window.hacked") is None
        assert tab.problems, "the browser reports what the policy has stopped"
        tab.problems.clear()


def test_markdown_and_reasoning_are_shown(tab):
    tab.ask("lively")
    shown = tab.page.locator(".markdown").last
    assert shown.locator("h2").inner_text() == "Title"
    assert shown.locator("strong").inner_text() == "bold"
    assert shown.locator("em").inner_text() == "slanted"
    assert shown.locator("ul > li").count() == 3
    assert shown.locator("ul ul > li").inner_text() == "three"
    assert shown.locator("ol > li").count() == 2
    assert shown.locator("blockquote").inner_text() == "said"
    tab.ask("think")
    assert tab.text() == "then that"
    reasoning = tab.page.locator("details.reasoning").last
    assert not reasoning.locator(".reasoning-text").is_visible()
    reasoning.locator("summary").click()
    assert reasoning.locator(".reasoning-text").inner_text() == "first this"


def test_no_text_makes_anything_but_known_elements(tab, in_full):
    options = {"allowed": ALLOWED.split(), "rounds": 5000 if in_full else 500}
    assert tab.page.evaluate(FUZZ, options) == ""


PARTS = [
    "**a ", "*a* ", "[", "![", "[a](", "`", "``a", "_a", "~~", "> ", "- ", "  - ", "<", "h", "https://", "*_",
    "1. a\n", "|a", "|\n|-",
]  # fmt: skip
SHOW = """async (text) => {
  const { showMarkdown } = await import("/page/markdown.js");
  const begin = performance.now();
  showMarkdown(document.createElement("div"), text);
  return performance.now() - begin;
}"""


@pytest.mark.parametrize("part", PARTS)
def test_no_text_keeps_the_browser_busy(tab, part):
    """100 000 characters take a fraction of a second; with work that grows with their square they would take minutes."""
    assert tab.page.evaluate(SHOW, part * (100_000 // len(part))) < 20_000


def test_a_heading_of_spaces_takes_no_time_and_loses_its_marks(tab):
    assert tab.page.evaluate(SHOW, "# a" + " " * 300_000 + "b") < 5_000
    assert tab.page.evaluate(SHOW, "a | b\n" + "-" + " " * 300_000 + "b") < 5_000
    shown = """async () => {
      const { showMarkdown } = await import("/page/markdown.js"), box = document.createElement("div");
      showMarkdown(box, "# a #  \\n\\n## b#\\n\\n### c ### d");
      return [...box.children].map((each) => each.textContent);
    }"""
    assert tab.page.evaluate(shown) == ["a", "b#", "c ### d"]
