"""What the README shows, run as it stands there."""

import re


def test_the_python_of_the_readme_runs(root, capsys):
    text = (root / "README.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 10


def test_the_serving_example_of_the_documentation_runs(root, capsys):
    text = (root / "docs" / "scheduling.md").read_text(encoding="utf-8")
    exec(compile(re.findall(r"```python\n(.*?)```", text, re.S)[0], "scheduling.md", "exec"), {})
    assert "NPU" in capsys.readouterr().out


def test_text_is_on_the_screen_by_line_40(root):
    lines = (root / "README.md").read_text(encoding="utf-8").splitlines()
    assert any("python scripts/demo.py" in line for line in lines[:25])
    assert any("staticllm run" in line for line in lines[:40])


def test_links_lead_somewhere(root):
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
