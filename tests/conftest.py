"""Where the tiny models are, and prompts for them. Only this file is a conftest: the house has one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
ZOO = Path(os.environ.get("STATICLLM_ZOO", ROOT.parent / "shared" / "zoo"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run the slow tests too, and all cases of those that take a sample"
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it for what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, count in (("all", 100), ("quick", 20)):
        hypothesis.settings.register_profile(name, max_examples=count)
    hypothesis.settings.load_profile("all" if config.getoption("--all") else "quick")
    config.addinivalue_line("markers", "slow: takes long; runs with --all only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: runs with --all"))


@pytest.fixture(scope="session", autouse=True)
def _precision() -> None:
    """``STATICLLM_TEST_PRECISION`` makes this the processor's own precision: tests must hold on machines of every kind."""
    if wanted := os.environ.get("STATICLLM_TEST_PRECISION"):
        from staticllm.devices import get_core

        get_core().set_property("CPU", {"INFERENCE_PRECISION_HINT": wanted})


@pytest.fixture(scope="session")
def in_full(pytestconfig: pytest.Config) -> bool:
    """Whether a test that takes a sample takes everything: with ``--all``."""
    return bool(pytestconfig.getoption("--all"))


@pytest.fixture(scope="session")
def num_cases(in_full: bool):
    """How many of so many cases are run: all with ``--all``, else a sample."""
    return lambda count: count if in_full else max(count // 50, 20)


@pytest.fixture(scope="session")
def zoo() -> Path:
    """The folder of tiny models. Without it the tests that need it are skipped, but never in CI."""
    if not ZOO.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"no tiny models at {ZOO}: set STATICLLM_ZOO")
        pytest.skip(f"no tiny models at {ZOO}: set STATICLLM_ZOO")
    return ZOO


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def model_path(zoo: Path):
    """From a name to a model directory: ``demo`` is the embedded model, any other name one of the zoo."""
    from staticllm import demo_model_path

    return lambda name: demo_model_path() if name == "demo" else zoo / name


@pytest.fixture(scope="session")
def _programs_of_this_run():
    from shared_programs import SharedPrograms

    from staticllm import demo_model_path

    return SharedPrograms([ZOO, demo_model_path()])


@pytest.fixture(scope="module")
def shared_programs(_programs_of_this_run) -> Iterator[None]:
    """In a module that uses this, what another test has compiled before is not compiled again."""
    with _programs_of_this_run.in_place():
        yield


@pytest.fixture(scope="module", params=["here", pytest.param("child", marks=pytest.mark.slow)])
def staticllm(request: pytest.FixtureRequest):
    """The command line: in this process, and with ``--all`` in a child process of its own too."""
    import command_line

    return command_line.in_here if request.param == "here" else command_line.in_child


@pytest.fixture(scope="session")
def _originals():
    from shared_programs import Original

    known: dict[Path, Original] = {}
    return lambda path: known.get(path) or known.setdefault(path, Original(path))


@pytest.fixture
def original(_originals):
    """From a model directory to the original model, at the beginning of a conversation."""

    def at_its_beginning(path: Path):
        _originals(path).reset()
        return _originals(path)

    return at_its_beginning


@pytest.fixture(scope="session")
def prompt_of():
    """Random token ids of a length, the same in every run; valid for every tiny model."""
    return lambda length, seed=0: np.random.default_rng([length, seed]).integers(8, 1000, length).tolist()
