"""How the tests run hypothesis' state machines: with the same draws each time, and as many times more examples as
TEST_EXAMPLES says (`make test-core EXAMPLES=5`). No shrinking: a failing machine has thousands of decisions that
take minutes to shrink; the printed run can be replayed as is."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

TIMES = int(os.environ.get("TEST_EXAMPLES", "1"))


def run_machine(machine: type[RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    """Run `examples` times TIMES machines of up to `steps` rules each."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples * TIMES,
            stateful_step_count=steps,
            phases=[Phase.explicit, Phase.generate],
            report_multiple_bugs=False,
            derandomize=True,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
