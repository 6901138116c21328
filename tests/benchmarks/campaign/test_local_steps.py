"""Forms of local steps that the product does not have: what each sends, and that they differ."""

import math

import pytest

from benchmarks.evidence.local_steps import FORMS, Form, main, train

SAMPLES = 8 * 8 * 8


@pytest.mark.parametrize(
    ("form", "least", "most"),
    [
        pytest.param(Form(period=2), 0.99, 1.0, marks=pytest.mark.long),
        (Form(period=2, density=0.1), 0.1, 0.2),
        pytest.param(Form(period=4, fragments=2), 0.99, 1.0, marks=pytest.mark.long),
        pytest.param(Form(period=2, slow_steps=0), 0.86, 0.875, marks=pytest.mark.long),  # seven of eight have moved
    ],
)
def test_a_form_sends_its_share(form, least, most):
    loss, share = train(form, 5e-3, SAMPLES, seed=0)
    assert least <= share <= most
    assert math.isfinite(loss)


@pytest.mark.long
def test_fragments_and_late_averages_train_another_model_than_the_plain_form():
    plain = train(Form(period=4), 5e-3, SAMPLES, seed=0)
    assert train(Form(period=4), 5e-3, SAMPLES, seed=0) == plain
    for form in (Form(period=4, fragments=2), Form(period=4, late=1), Form(period=4, slow=2)):
        assert train(form, 5e-3, SAMPLES, seed=0) != plain


def test_a_form_is_named(capsys):
    assert main(["sparse", "--samples", str(SAMPLES)]) == 0
    assert capsys.readouterr().out.startswith("sparse: ")
    with pytest.raises(SystemExit):
        main(["sparser"])
    assert "there are " + "; ".join(FORMS) in capsys.readouterr().err
