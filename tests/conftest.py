"""Shared test rules: which tests a machine without a GPU skips, and that nothing else is skipped silently."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: shared CI machines stall. Derandomized: a run fails because of the change, never because of the draw.
# `--hypothesis-profile=default` searches at random. Hypothesis also draws the constants of all modules imported so far,
# so a test may see other examples alone than behind others.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")

# Inductor's kernels for the CPU stand for those of a GPU: without vector instructions they compile faster, and it need
# not try which of these there are (8 s).
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Compiled engines with the passes that a first start uses (`gpusim.engine.compiled.warm`): a third less time to compile
# the ten forms of the event loop. Processes that tests start inherit it.
os.environ.setdefault("NUMBA_OPT", "1")

# One thread for each process: tests run side by side, and OpenMP's threads spin while they wait for each other. Beside
# a busy process, an example with tiny operators takes 56 s of CPU time with two threads, and 5 s with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

NO_GPU = "needs a CUDA GPU: "

_UNEXPECTED_SKIPS = pytest.StashKey[list[str]]()
_FILE = pytest.StashKey[Path]()


@functools.cache
def gpus() -> tuple[int, str]:
    """Return the number of GPUs that torch can use, and the reason for none. Imports torch: only for tests that need
    it.
    """
    try:
        import torch
    except ImportError as cause:
        return 0, f"torch cannot be imported ({cause})"
    with warnings.catch_warnings(action="ignore"):  # a CUDA build of torch warns where there is no driver
        available = torch.cuda.is_available()
    if not available:
        return 0, f"torch {torch.__version__} finds none"
    # `is_available` can be true with every device hidden.
    count = torch.cuda.device_count()
    return count, "" if count else "every device is hidden (CUDA_VISIBLE_DEVICES)"


def gpus_wanted(marker: pytest.Mark) -> int:
    """Return the `count` of a `gpu(count=1)` marker."""
    return int(marker.kwargs.get("count", marker.args[0] if marker.args else 1))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_UNEXPECTED_SKIPS] = []
    gc.set_threshold(100_000, 50, 50)
    # A shell starts programs in the background with Ctrl-C ignored, and so would be what tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    pass_over_the_objects_of_now()


def pass_over_the_objects_of_now() -> None:
    """Exclude what is alive from later garbage collections: hundreds of modules, torch and its compiler among them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.stash.get(_FILE, None) != item.path:  # its tests have imported more
        item.config.stash[_FILE] = item.path
        pass_over_the_objects_of_now()
    if item.get_closest_marker("cluster") is not None:
        missing = [name for name in ("distributed", "pyarrow") if importlib.util.find_spec(name) is None]
        if missing:
            pytest.skip(f"needs {' and '.join(missing)}: pip install '.[sweep]'")
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    wanted = gpus_wanted(marker)
    found, problem = gpus()
    if found < wanted:
        pytest.skip(NO_GPU + (problem or f"{wanted} of them, and this machine has {found}"))


# --- In CI a skipped test is a failed run: the only reason accepted is the missing GPU. ---


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterable[None]:
    report = yield
    _note_skip(collector.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterable[None]:
    report = yield
    _note_skip(item.config, report)
    return report


def _note_skip(config: pytest.Config, report: pytest.CollectReport | pytest.TestReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(NO_GPU):
        config.stash[_UNEXPECTED_SKIPS].append(f"{report.nodeid}: {reason}")


def _skips_that_fail(config: pytest.Config) -> list[str]:
    return config.stash[_UNEXPECTED_SKIPS] if os.environ.get("CI") == "true" else []


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and _skips_that_fail(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for skip in _skips_that_fail(config):
        terminalreporter.write_line(f"FAILED: skipped in CI, and not for want of a GPU: {skip}", red=True)
