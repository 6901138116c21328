"""MomentumSGD: the single-node baseline."""

from typing import Any

from torch.optim import SGD

from psclient.engine.state import method_of, split
from psclient.optim.arguments import Params, check_params, split_model


class MomentumSGD(SGD):
    """SGD with momentum on one machine, without a server: ``torch.optim.SGD`` itself, with the usual momentum.

    It is here so that a script can change its method by one name; everything it does is ``torch.optim.SGD``'s.

    Args:
        params: parameters, param groups, or a model.
        lr: learning rate.
        momentum: momentum factor.
        weight_decay: L2 penalty.
        **options: those of ``torch.optim.SGD``, as ``nesterov``.
    """

    def __init__(
        self, params: Params, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, **options: Any
    ) -> None:
        params, _ = split_model(params, None)
        super().__init__(check_params(params), lr=lr, momentum=momentum, weight_decay=weight_decay, **options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state of ``torch.optim.SGD`` over; raises :class:`ConfigurationError` for one of another method."""
        if method_of(state_dict) is not None:
            split(state_dict, "momentum_sgd")
        super().load_state_dict(state_dict)
