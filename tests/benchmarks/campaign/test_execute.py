"""Real runs, small: a server, workers, and the server's model tested at the end."""

import pytest

from benchmarks.campaign.execute import execute
from benchmarks.campaign.spec import Form, Spec
from benchmarks.campaign.worker import decay
from tests.tiers import long_but

pytestmark = pytest.mark.timeout(400)  # the first run of a machine compiles all loops before it forks


@pytest.mark.parametrize(("method", "workers"), long_but([("dgs", 2)], [("sgd", 1), ("dgs", 2)]))
def test_a_run_trains_and_counts(method, workers):
    outcome = execute(Spec("digits", method, workers, 0, 1920, 0.3, 0.6, Form(0.1)))
    assert outcome.score > 0.5
    assert outcome.loss < 1.6
    assert outcome.versions == 120
    assert outcome.refused == 0
    if method == "sgd":
        assert (outcome.up_bytes, outcome.down_bytes, outcome.p99_staleness) == (0, 0, 0)
    else:
        dense = 4 * 38_282 * outcome.versions
        assert 0.02 * dense < outcome.up_bytes < 0.2 * dense
        assert 0 < outcome.down_bytes < dense
        assert 0 < outcome.mean_staleness <= outcome.p99_staleness


def test_a_run_that_diverges_is_one_without_a_score():
    outcome = execute(Spec("digits", "sgd", 1, 0, 640, 1e25, 0.6, Form(0.1)))
    assert outcome.score is None


def test_the_rate_rises_and_falls_to_zero():
    rates = [decay(step, 40) for step in range(40)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] < 0.01
