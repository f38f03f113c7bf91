"""The options and fixtures of all tests. The tests of the daemon and of the server have fixtures of their own."""

from __future__ import annotations

import os
import signal
import socket
import zlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from support.slow_tests import Stopwatch, is_listed, is_slow_module, slow_tests

ROOT = Path(__file__).resolve().parent.parent
ZOO = Path(os.environ.get("STATICLLM_ZOO", ROOT.parent / "shared" / "zoo"))


def share_of(text: str) -> tuple[int, int]:
    """Return index and count of a share such as ``2/3``."""
    index, _, count = text.partition("/")
    if not 1 <= int(index) <= int(count):
        raise ValueError(f"{text} is no share: the first of three is 1/3")
    return int(index), int(count)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run the slow tests too, and all cases of those that take a sample"
    )
    parser.addoption(
        "--share",
        type=share_of,
        help="run the test files of one share only, such as 2/3: runs in turns run all of them",
    )
    parser.addoption(
        "--write-slow", action="store_true", help="measure the tests and write tests/support/slow_tests.txt anew"
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    _without_delay(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells ignore SIGINT for background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    slow = [hypothesis.HealthCheck.too_slow]  # a busy machine is no fault
    for name, count in (("all", 100), ("quick", 8)):
        hypothesis.settings.register_profile(name, max_examples=count, deadline=None, suppress_health_check=slow)
    # no test asks the hub of Hugging Face; tests of names have one of their own
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    hypothesis.settings.load_profile("all" if config.getoption("--all") else "quick")
    config.addinivalue_line("markers", "slow: takes long; runs with --all only")
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(FailuresAtOnce(config))
    if config.getoption("--write-slow"):
        config.pluginmanager.register(Stopwatch())


def _without_delay(config: pytest.Config) -> None:
    """Let the workers' connections of pytest-rerunfailures send at once: it writes twice and then reads, once per test, and each
    time the kernel waits 40 ms for an acknowledgement. With 13,000 tests that is more than four minutes."""
    if isinstance(connection := getattr(getattr(config, "failures_db", None), "sock", None), socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Keep the signal stack of this thread: a pipeline of GenAI that a test drops may leave one that is unmapped.

    Then the next signal ends the process without a word, and a crash shows no traceback.
    """
    from staticllm.system.signal_stack import kept_signal_stack

    with kept_signal_stack():
        return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    name = collection_path.relative_to(ROOT).as_posix()
    if not (config.getoption("--all") or config.getoption("--write-slow")):
        return True if is_slow_module(name, collection_path.read_text(encoding="utf-8"), slow_tests()) else None
    if (share := config.getoption("--share")) is None:
        return None
    index, count = share
    return True if zlib.crc32(name.encode()) % count != index - 1 else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    listed = frozenset[str]() if config.getoption("--write-slow") else slow_tests()
    slow = [item for item in items if item.get_closest_marker("slow") or is_listed(item.nodeid, listed)]
    if slow:
        config.hook.pytest_deselected(items=slow)
        left_out = set(slow)
        items[:] = [item for item in items if item not in left_out]


class FailuresAtOnce:
    """Shows a failure when it happens: a run that is ended from outside prints no summary. One that ``--reruns`` runs again is
    shown too, because a test that passes then is still unstable."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.outcome in ("failed", "rerun") and reporter is not None:
            reporter.ensure_newline()
            reporter.write_sep("_", f"{report.outcome}: {report.nodeid}")
            reporter.write_line("\n".join(report.longreprtext.splitlines()[-40:]))


@pytest.fixture(scope="session", autouse=True)
def _precision() -> None:
    """Set the precision of the CPU to ``STATICLLM_TEST_PRECISION``, because tests must pass on every kind of machine."""
    if wanted := os.environ.get("STATICLLM_TEST_PRECISION"):
        from staticllm.devices import get_core

        get_core().set_property("CPU", {"INFERENCE_PRECISION_HINT": wanted})


@pytest.fixture(scope="session", autouse=True)
def _one_tls_context() -> Iterator[None]:
    """Read the certificates of authorities once: httpx reads them for each call without a client, in 20 ms."""
    if find_spec("httpx") is None:
        yield
        return
    from httpx._transports import default

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", cache(default.create_ssl_context))
        yield


@pytest.fixture(scope="session")
def in_full(pytestconfig: pytest.Config) -> bool:
    """Whether tests run all of their cases (``--all``) instead of a sample."""
    return bool(pytestconfig.getoption("--all"))


@pytest.fixture(scope="session")
def num_cases(in_full: bool):
    """Return a function from a number of cases to the number that is run: all with ``--all``, else a sample."""
    return lambda count: count if in_full else max(count // 50, 20)


@pytest.fixture(scope="session")
def zoo() -> Path:
    """The folder of tiny models. Without it, the tests that need it are skipped, or fail in CI."""
    if not ZOO.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"no tiny models at {ZOO}: set STATICLLM_ZOO")
        pytest.skip(f"no tiny models at {ZOO}: set STATICLLM_ZOO")
    return ZOO


@pytest.fixture
def run_folder(monkeypatch, tmp_path) -> Path:
    """A runtime folder of this test's own, for daemons and workers. Its name is short, because sockets have short paths."""
    folder = tmp_path / "r"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("STATICLLM_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def model_path(zoo: Path):
    """A function from a name to a model directory: the embedded model for ``demo``, otherwise a model of the zoo."""
    from staticllm import demo_model_path

    return lambda name: demo_model_path() if name == "demo" else zoo / name


@pytest.fixture(scope="session")
def models_of(model_path, tmp_path_factory):
    """A function from a name to a model with two adapters, made once."""
    from support.models.adapter_models import TARGETS, Models

    known = {}

    def models(name):
        if name not in known:
            known[name] = Models(model_path(name), TARGETS[name], tmp_path_factory.mktemp(name))
        return known[name]

    return models


@pytest.fixture(scope="session")
def llama(models_of):
    """A small model with two adapters, for tests of adapters."""
    return models_of("llama")


@pytest.fixture(scope="session")
def handles(llama):
    """The two adapters of ``llama``."""
    from staticllm import Adapter

    return [Adapter(path) for path in llama.files()]


@pytest.fixture(scope="module")
def adapted_pipe(llama, handles):
    """A pipeline of ``llama`` that was loaded with both adapters."""
    from support.helpers import SHORT

    from staticllm import AdapterConfig, StaticLLMPipeline

    with StaticLLMPipeline(llama.path, "CPU", adapters=AdapterConfig(handles), **SHORT) as pipe:
        yield pipe


@pytest.fixture(scope="session")
def _programs_of_this_run():
    from support.engine.shared_programs import SharedPrograms

    from staticllm import demo_model_path

    return SharedPrograms([ZOO, demo_model_path()])


@pytest.fixture(scope="module")
def shared_programs(_programs_of_this_run) -> Iterator[None]:
    """Reuse programs that an earlier test has compiled, in every module that uses this fixture."""
    with _programs_of_this_run.in_place():
        yield


@pytest.fixture(scope="module")
def shared_lowering() -> Iterator[None]:
    """Reuse encoders that an earlier test of the module has lowered."""
    from support.encoders.shared_lowering import SharedLowering

    with SharedLowering().in_place():
        yield


@pytest.fixture(scope="module")
def staticllm(request: pytest.FixtureRequest):
    """The command line, in this process, and with ``--all`` also in a child process if a test is marked ``IN_BOTH``."""
    from support import command_line

    return command_line.in_child if getattr(request, "param", "here") == "child" else command_line.in_here


@pytest.fixture(scope="session")
def _originals():
    from support.engine.shared_programs import Original

    return cache(Original)


@pytest.fixture
def original(_originals):
    """A function from a model directory to the original model, at the beginning of a conversation."""

    def at_its_beginning(path: Path, *, rope_limits: tuple[int, ...] = ()):
        found = _originals(path, rope_limits)
        found.reset()
        return found

    return at_its_beginning


@pytest.fixture(scope="session")
def prompt_of():
    """A function from a length to random token ids, which are the same in every run and valid for every tiny model."""
    return lambda length, seed=0: np.random.default_rng([length, seed]).integers(8, 1000, length).tolist()
