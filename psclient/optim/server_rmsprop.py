"""RMSprop on the server (Tieleman and Hinton, 2012), by the entries that are sent."""

from typing import Unpack

from psclient.compress.method import Method
from psclient.optim.arguments import Density, Options, Params
from psclient.optim.server_rule import ServerRule, recurrence

METHOD = Method("server_rmsprop", recurrence, server_remembers=True, groups_are_agreed=True)


class ServerRMSprop(ServerRule):
    """RMSprop whose running squares are on the server, once for all workers; no momentum.

    Per tensor::

        r += g + wd·θ                                  # on every worker
        send s = Q(p) of p = top ρ of |r|;  r[sent] = 0
        server: v = α·v + (1 − α)·s²                   # absent entries are zeros
                θ −= lr·s / (√v + ε)

    The values are those of ``ServerOptimizer("RMSprop")``, at a cost of the entries that are sent and not of the model:
    the rest stays as it is, so that replies are sparse. Without momentum, because asynchrony adds some. The rate is
    each group's ``lr`` on the worker, and travels with each push: torch's schedulers work as usual.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        alpha: ``α``, 0.5 to below 1; all workers must agree.
        eps: ``ε``, at least 1e-30; all workers must agree.
        weight_decay: L2 penalty, added to the gradient on the worker.
        density: ``ρ``; a number, or a function of the step.
        **connection: ``rounds=psclient.Rounds()`` for one step a round; see
            :class:`~psclient.optim.base.ParameterServerOptimizer`.

    Raises:
        RefusedError: ``alpha`` or ``eps`` is out of its range.
    """

    _method = METHOD
    _torch_name = "RMSprop"

    def __init__(
        self,
        params: Params,
        lr: float = 0.001,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        density: Density | None = None,
        **connection: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps}, weight_decay, density, **connection)
