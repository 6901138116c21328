"""A model in the place of its parameters, as Hugging Face's ``Trainer`` hands it over."""

import pytest
import torch

import psclient
from psclient.errors import ConfigurationError
from tests.system.tools import QUICK, make_data, make_model, train_step

METHODS = {
    "asgd": (psclient.ASGD, {"lr": 0.1}),
    "dgs": (psclient.DGS, {"lr": 0.1}),
    "dgc": (psclient.DGC, {"lr": 0.1}),
    "dropping": (psclient.GradientDropping, {"lr": 0.1}),
    "rmsprop": (psclient.ServerRMSprop, {}),
    "adamw": (psclient.ServerOptimizer, {"optimizer": "AdamW"}),
    "ssgd": (psclient.SSGD, {"lr": 0.1}),
    "alone": (psclient.MomentumSGD, {"lr": 0.1}),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_model_stands_for_its_parameters_and_for_itself(method):
    kind, options = METHODS[method]
    options = options | ({} if method == "alone" else {"settings": QUICK})
    results = []
    for as_params in (True, False):
        model = make_model()
        model[0].requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        given = {"params": model} if as_params else {"params": trained}
        if not as_params and method != "alone":
            given["model"] = model
        optimizer = kind(**given, **options)
        assert sum(map(len, (group["params"] for group in optimizer.param_groups))) == len(trained)
        for step in range(3):
            train_step(model, optimizer, *make_data(step))
        results.append([parameter.detach().clone() for parameter in model.parameters()])
        if method != "alone":
            assert optimizer.totals.samples == 3 * 256, "samples are counted at the calls of the model"
            optimizer.close()
    assert all(map(torch.equal, *results))


def test_two_models_are_refused():
    with pytest.raises(ConfigurationError, match="model= is another"):
        psclient.DGS(make_model(), lr=0.1, model=make_model())
