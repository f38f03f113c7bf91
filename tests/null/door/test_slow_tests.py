"""Tests which tests are left to ``--all``."""

import ast

from support.slow_tests import choose_slow, is_listed, slow_tests


def functions_of(tree, prefix=""):
    """All tests of a module, in the words of the list."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name


def test_every_line_of_the_list_names_a_test(root):
    for line in slow_tests():
        module, _, function = line.partition("::")
        assert (root / module).is_file(), f"{line} in tests/support/slow_tests.txt: there is no such module"
        known = list(functions_of(ast.parse((root / module).read_text(encoding="utf-8"))))
        assert not function or function in known, f"{line} in tests/support/slow_tests.txt: there is no such test"


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
