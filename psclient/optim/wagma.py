"""WAGMA-SGD: wait-avoiding group model averaging (Li et al., IEEE TPDS 2021)."""

from typing import Any, ClassVar, Literal

from torch.optim.optimizer import ParamsT

from psclient.compress.method import Group, Recurrence
from psclient.errors import ConfigurationError
from psclient.optim.arguments import Density
from psclient.optim.base import ParameterServerOptimizer


class WAGMA(ParameterServerOptimizer):
    """WAGMA-SGD: every worker trains a model of its own, which is averaged with those of a changing group.

    Per tensor, with ``θ`` this worker's model (algorithm 2)::

        u = m·u + (g + wd·θ)
        W' = θ − lr·u                        # nesterov: θ − lr·(g + wd·θ + m·u)
        θ = average of W' over my group      # every τ + 1 iterations: over all live workers, who wait for each other

    The server keeps ``θ``; the worker sends its change and pulls ``θ`` after the average. Nobody waits for a slow
    member of a group beyond a short grace: its last model stands in for it, and ``late`` decides about its next one.

    With ``density < 1`` the changes are sparse, with error feedback: ``r += lr·u; send p = top ρ of |r|; r −= p``. Then
    models differ only where something was sent since they last were equal, and replies are as sparse as that.
    What does not arrive, a refused push or a quantisation error, stays in ``r`` too: ``Σ lr·u = Σ applied + r``.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        momentum: local momentum ``m``.
        weight_decay: L2 penalty, added to the gradient.
        nesterov: Nesterov's form of the momentum.
        group_size: workers in a group, ``S``; 0 for the power of two nearest ``√W``.
        tau: ``τ``: every ``τ + 1`` iterations all live workers average and wait for each other; 0 for each iteration.
        late: the rule for a worker whose model comes after its group's average over ``n`` models: ``"replace"``: the
            model replaces the old one that stood in for it; ``"paper"``: it is added, ``(sum + W') / (n + 1)``.
        density: ``ρ``, the share of a tensor's entries that is sent; a number, or a function of the step.
        **connection: see :class:`~psclient.optim.base.ParameterServerOptimizer`.

    Raises:
        ConfigurationError: an argument is out of its range.
    """

    name: ClassVar[str] = "wagma"
    default_density: ClassVar[float] = 1.0
    momentum_is_torchs: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        group_size: int = 0,
        tau: int = 10,
        late: Literal["replace", "paper"] = "replace",
        density: Density | None = None,
        **connection: Any,
    ) -> None:
        if nesterov and not momentum:
            raise ConfigurationError("nesterov needs a momentum above 0")
        if not isinstance(group_size, int) or group_size < 0 or group_size == 1:
            raise ConfigurationError(f"group_size must be 0 (chosen by the number of workers) or above 1: {group_size}")
        if connection.get("rounds") is not None:
            raise ConfigurationError("WAGMA averages models in groups; rounds= is for methods that share one model")
        if not isinstance(tau, int) or tau < 0:
            raise ConfigurationError(f"tau must be at least 0, not {tau}")
        if late not in ("replace", "paper"):
            raise ConfigurationError(f"late must be 'replace' or 'paper', not {late!r}")
        agreed = {"update": "average", "group_size": str(group_size), "tau": str(tau), "late": late}
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults, density, agreed, **connection)

    @staticmethod
    def recurrence(group: Group) -> Recurrence:
        """``lr·u``, whole or into the residual."""
        wd, m, whole = group["weight_decay"], group["momentum"], group["density"] >= 1
        return Recurrence(decay=wd, factor=m, nesterov=group["nesterov"], rate=group["lr"], whole=whole)
