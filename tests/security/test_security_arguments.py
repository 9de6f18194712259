"""Steps around every operator of the project's traces, with mutated arguments: never a traceback.

Replay's checks before a GPU is needed report their refusal in a line, or accept. `scripts/fuzz` mutates the same steps
(family `arguments`) for longer.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from gpusim.errors import GpusimError, OperatorError
from gpusim.formats.trace import Trace
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.gpu.replay.operators import check_schemas, resolve
from gpusim.gpu.replay.result_sizes import check_result_sizes
from gpusim.gpu.replay.saved import ordered_inputs
from gpusim.io.files import encode_json
from gpusim.text import MESSAGE_CHARACTERS
from gpusim.trace.store import parse_trace, read_trace
from tests.security.test_security import op, t, tensor, trace_of
from tests.support.operator_steps import changed_step, operator_steps, trace_files

SEEDS = range(8)
#: Per operator and seed: mutated steps checked without torch, and also on torch's fake tensors.
CASES, CASES_WITH_TORCH = 6, 1
GPU = torch.device("cuda", 0)


def checks(trace: Trace, with_torch: bool) -> None:
    """Run replay's checks before a GPU is needed."""
    check_operators(trace, "t.json")
    ordered_inputs(trace)
    if with_torch:
        check_schemas(trace)
        check_result_sizes(trace, [resolve(each.target) for each in trace.ops], GPU)


def test_there_is_a_step_for_every_operator_of_every_trace() -> None:
    held = {each.target for path in trace_files() for each in read_trace(path).ops}
    steps = operator_steps()
    assert {target for target in steps if steps[target]} == held
    for target in held:
        for step in steps[target]:
            assert any(each.target == target for each in step.ops)
            checks(parse_trace(encode_json(step), "t.json"), with_torch=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_changed_argument_of_any_operator_is_accepted_or_refused_in_a_line(
    seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    became: Counter[str] = Counter()
    for target, steps in operator_steps().items():
        for case in range(CASES):
            rng = random.Random(f"{seed}/{target}/{case}")
            changed, what = changed_step(rng.choice(steps), rng)
            said, name = "", "accepted"
            try:
                checks(parse_trace(encode_json(changed), "t.json"), with_torch=case < CASES_WITH_TORCH)
            except GpusimError as error:
                said, name = str(error), type(error).__name__
            except Exception as error:
                raise AssertionError(f"{type(error).__name__} for {what}") from error
            assert "\n" not in said, what
            assert len(said) <= MESSAGE_CHARACTERS, what
            became[name] += 1
    # Mutations that nothing accepts, or that reading refuses already, would test little.
    assert became["accepted"] > sum(became.values()) // 5
    assert became["OperatorError"] > sum(became.values()) // 10
    printed: Any = capfd.readouterr()
    assert "Traceback" not in printed.err


def test_call_that_torch_refuses_on_fake_tensors_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own log has a traceback for each."""
    made = op("aten.bmm.default", t(0), t(1), outputs=(2,))
    tensors = [tensor(2, 3), tensor(2, 3, storage=1), tensor(2, 3, storage=2, init=None)]
    check_result_sizes(trace_of([made], tensors), [resolve(made.target)], GPU)
    assert capfd.readouterr().err == ""


def test_range_that_is_far_too_long_is_refused_at_once() -> None:
    made = op("aten.arange.start_step", -(2**62), 2**62, 1, outputs=(0,), device={"device": "cuda"})
    bag = op("aten._embedding_bag.default", t(1), t(0), t(0), outputs=(2, 3, 4, 5))
    tensors = [
        tensor(4, dtype="int64", init=None),
        tensor(4, 4, storage=1),
        *(tensor(4, storage=2 + n, init=None) for n in range(4)),
    ]
    with pytest.raises(OperatorError, match="refused"):
        check_operators(trace_of([made, bag], tensors), "t")
