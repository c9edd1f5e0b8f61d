"""A swapped request that returns when the prefix cache still has all of it on the device."""

from __future__ import annotations

import pytest

from tests.fakes.core import CoreDriver, generate_alone, make_config
from tests.fakes.transfers import copies


@pytest.mark.parametrize(("elder", "younger"), [((6, 6), 16), ((6, 7), 16), ((6, 7), 15), ((7, 6), 16)])
def test_a_plan_that_only_makes_its_row_goes_out(elder: tuple[int, int], younger: int) -> None:
    """It was swapped out at the end of a block, and its blocks have no new owner: there is nothing to copy back."""
    driver = CoreDriver(make_config(num_blocks=8, num_host_blocks=48, preemption_mode="swap"), record=True)
    num_prompt_tokens, max_tokens = elder
    requests = {
        "elder": ([9 + i for i in range(num_prompt_tokens)], max_tokens),
        "younger": ([40 + i for i in range(younger)], 8),
    }
    for name, (prompt, length) in requests.items():
        driver.add(name, prompt, max_tokens=length)
    driver.run()
    plans = driver.executor.plans
    assert any(plan.new_sequences and not plan.seq_ids and not copies(plan).swap_in for plan in plans)
    for name, (prompt, length) in requests.items():
        assert driver.tokens[name, 0] == generate_alone(prompt, max_tokens=length)[0]
