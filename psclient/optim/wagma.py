"""WAGMA-SGD: wait-avoiding group model averaging (Li et al., IEEE TPDS 2021)."""

from typing import Literal, NoReturn, Unpack

from torch.optim import Optimizer

from psclient.compress.method import Group, Method, Recurrence
from psclient.errors import ConfigurationError
from psclient.optim.arguments import CommonOptions, Density
from psclient.optim.local_optimizer import LocalOptimizer
from psclient.whole_numbers import whole_number


def recurrence(group: Group) -> Recurrence:
    """``r += θ − W'``; at ρ = 1 all of it is sent."""
    return Recurrence(whole=group["density"] >= 1)


METHOD = Method("wagma", recurrence, default_density=1.0, asynchronous=False, groups_are_agreed=True)


class WAGMA(LocalOptimizer):
    """WAGMA-SGD: every worker trains a model of its own, which is averaged with those of a changing group.

    With ``θ`` this worker's model (algorithm 2)::

        W' = one step of the inner optimizer from θ
        θ = average of W' over my group      # every τ + 1 iterations: over all live workers, who wait for each other

    The server keeps ``θ``; the worker sends ``θ − W'`` and pulls ``θ`` after the average. Nobody waits for a slow
    member of a group beyond a short grace: its last model stands in for it, and ``late`` decides about its next one.
    The inner optimizer's state (momentum, Adam's moments) stays on the worker and is averaged with nobody's.

    In a training loop it stands where the inner optimizer stood; the param groups are the inner optimizer's::

        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = psclient.WAGMA(inner, model=model, server="host:50051")

    With ``density < 1`` the changes are sparse, with error feedback: ``r += θ − W'; send p = top ρ of |r|; r −= p``.
    Then models differ only where something was sent since they last were equal, and replies are as sparse as that.
    What does not arrive, a refused push or a quantisation error, stays in ``r`` too: ``Σ (θ − W') = Σ applied + r``.

    Args:
        inner_optimizer: takes the steps; everything that it trains is trained.
        group_size: workers in a group, ``S``; 0 for the power of two nearest ``√W``.
        tau: ``τ``: every ``τ + 1`` iterations all live workers average and wait for each other; 0 for each iteration.
        late: the rule for a worker whose model comes after its group's average over ``n`` models: ``"replace"``: the
            model replaces the old one that stood in for it; ``"paper"``: it is added, ``(sum + W') / (n + 1)``.
        density: ``ρ``, the share of a tensor's entries that is sent; a number, or a function of the step.
        **connection: see :class:`~psclient.optim.base.ParameterServerOptimizer`; without ``overlap`` and ``rounds``.

    Raises:
        ConfigurationError: an argument is out of its range, or the inner optimizer cannot step without a closure; in
            ``step()``, ``samples`` is given.
        NonFiniteGradientError: in ``step()``: the local step has led to a parameter that is not finite; the step is
            undone.
    """

    _method = METHOD

    def __init__(
        self,
        inner_optimizer: Optimizer,
        *,
        group_size: int = 0,
        tau: int = 10,
        late: Literal["replace", "paper"] = "replace",
        density: Density | None = None,
        **connection: Unpack[CommonOptions],
    ) -> None:
        group_size = whole_number(group_size, "group_size must be 0 (chosen by the number of workers) or above 1")
        if group_size == 1:
            raise ConfigurationError("group_size must be 0 (chosen by the number of workers) or above 1, not 1")
        if connection.get("rounds") is not None:
            raise ConfigurationError("WAGMA averages models in groups; rounds= is for methods that share one model")
        tau = whole_number(tau, "tau must be a number of iterations")
        if late not in ("replace", "paper"):
            raise ConfigurationError(f"late must be 'replace' or 'paper', not {late!r}")
        agreed = {"update": "average", "group_size": str(group_size), "tau": str(tau), "late": late}
        super().__init__(inner_optimizer, 1, {}, density, agreed, averages=True, **connection)

    def wait_for_all(self, seconds: float = 3600.0) -> NoReturn:
        """Refused: each worker has a model of its own until the run ends.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "WAGMA's workers have a model each until the run is over, and become their mean then: end it (psservice "
            "finish, or --end-samples of psservice serve), and pull()"
        )
