"""Adagrad on the server (Duchi, Hazan and Singer, JMLR 2011), by the entries that are sent."""

from typing import Unpack

from psclient.compress.method import Method
from psclient.optim.arguments import Density, Options, Params
from psclient.optim.server_rule import ServerRule, recurrence

METHOD = Method("server_adagrad", recurrence, server_remembers=True, groups_are_agreed=True)


class ServerAdagrad(ServerRule):
    """Adagrad whose sums of squares are on the server, once for all workers: the usual choice for embeddings.

    Per tensor::

        r += g + wd·θ                                  # on every worker
        send s = Q(p) of p = top ρ of |r|;  r[sent] = 0
        server: v += s²
                θ −= lr / (1 + t·lr_decay) · s / (√v + ε)        # t steps of all workers before

    A step costs the entries that are sent. A gradient of zero changes neither ``v`` nor ``θ``, so that a push of the
    touched rows of an ``nn.Embedding(sparse=True)`` is the same step as one of the whole table. The values are those of
    ``torch.optim.Adagrad``. The rate is each group's ``lr`` on the worker, and travels with each push.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        lr_decay: by which the rate falls with the steps of all workers; all workers must agree.
        eps: ``ε``, at least 1e-30; all workers must agree.
        initial_accumulator_value: ``v`` at first; all workers must agree.
        weight_decay: L2 penalty, added to the gradient on the worker.
        density: ``ρ``; a number, or a function of the step.
        **connection: ``rounds=psclient.Rounds()`` for one step a round; see
            :class:`~psclient.optim.base.ParameterServerOptimizer`.

    Raises:
        RefusedError: an option is out of its range.
    """

    _method = METHOD
    _torch_name = "Adagrad"

    def __init__(
        self,
        params: Params,
        lr: float = 0.01,
        lr_decay: float = 0.0,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        weight_decay: float = 0.0,
        density: Density | None = None,
        **connection: Unpack[Options],
    ) -> None:
        options = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(params, options, weight_decay, density, **connection)
