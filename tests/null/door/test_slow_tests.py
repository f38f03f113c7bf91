"""Tests which tests are left to ``--all``."""

import ast
from functools import cache

from support.slow_tests import choose_slow, is_listed, is_slow_module, slow_tests


def functions_of(tree, prefix=""):
    """All tests of a module, in the words of the list."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name


@cache
def known_in(path):
    return frozenset(functions_of(ast.parse(path.read_text(encoding="utf-8"))))


def test_every_line_of_the_list_names_a_test(root):
    for line in slow_tests():
        module, _, function = line.partition("::")
        assert (root / module).is_file(), f"{line} in tests/support/slow_tests.txt: there is no such module"
        is_known = not function or function in known_in(root / module)
        assert is_known, f"{line} in tests/support/slow_tests.txt: there is no such test"


def test_parameters_and_whole_modules_are_found():
    listed = frozenset({"tests/a.py", "tests/b.py::test_one", "tests/b.py::TestKind::test_two"})
    found = [
        "tests/a.py::test_any",
        "tests/b.py::test_one",
        "tests/b.py::test_one[x-[y]]",
        "tests/b.py::TestKind::test_two[1]",
    ]
    assert all(is_listed(nodeid, listed) for nodeid in found)
    assert not any(is_listed(nodeid, listed) for nodeid in ("tests/b.py::test_one_more", "tests/b.py::test_two"))


def test_long_functions_are_chosen_and_modules_whose_rest_is_long():
    seconds = {
        ("quick.py", "test_a"): 1.9,
        ("mixed.py", "test_a"): 1.9, ("mixed.py", "test_b"): 0.4, ("mixed.py", ""): 1.0,
        ("fixtures.py", "test_a"): 0.6, ("fixtures.py", "test_b"): 0.1, ("fixtures.py", ""): 3.0,
    }  # fmt: skip
    assert choose_slow(seconds) == ["fixtures.py", "mixed.py::test_a"]


def test_a_module_of_slow_tests_alone_is_known_by_its_text():
    marked = (
        "import pytest\n\n\n@pytest.mark.slow\n@pytest.mark.parametrize(\n    'x', [1]\n)\ndef test_a(x):\n    pass\n"
    )
    listed = frozenset({"tests/m.py::test_b"})
    assert is_slow_module("tests/m.py", marked, listed)
    assert is_slow_module("tests/m.py", marked + "\n\ndef test_b():\n    pass\n", listed)
    assert is_slow_module(
        "tests/m.py", "import pytest\n\npytestmark = pytest.mark.slow\n\n\ndef test_c():\n    pass\n", listed
    )
    assert is_slow_module("tests/m.py", "def test_c():\n    pass\n", frozenset({"tests/m.py"}))
    assert not is_slow_module("tests/m.py", marked + "\n\ndef test_c():\n    pass\n", listed)
    assert not is_slow_module("tests/m.py", marked + "\n\nasync def test_c():\n    pass\n", listed)
    assert not is_slow_module(
        "tests/m.py", marked + "\n\nclass TestMore:\n    def test_d(self):\n        pass\n", listed
    )
