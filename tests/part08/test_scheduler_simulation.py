"""Thousands of random requests through the scheduler alone: no promise is broken at any step."""

import pytest

from tests.part08.simulation import SETTINGS, Simulation


@pytest.mark.parametrize("name", SETTINGS)
def test_no_promise_is_broken_at_any_step(name, record_property):
    setting = SETTINGS[name]
    simulation = Simulation(setting).run()
    for count in ("arrived", "steps", "checks", "preemptions", "failures"):
        record_property(count, getattr(simulation, count))
    assert simulation.arrived == setting.num_requests
    assert simulation.checks > 10 * simulation.steps
    assert simulation.failures > 0
    if "memory" in name or "barely" in name or "all of it" in name:
        assert simulation.preemptions > 10, "memory was never short: this simulation shows nothing"
