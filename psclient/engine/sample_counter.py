"""How many samples a step comes from: counted where a model is called, with nothing of this in the model.

A hook in a module is pickled, copied, scripted and traced with the module. So calls are counted at the module's class,
whose ``__call__`` is replaced for as long as there is a counter.
"""

import logging
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from psclient.model.wrappers import unwrapped, wrappers
from psclient.rpc.lease_thread import LeaseThread

log = logging.getLogger("psclient")

_FIRST_BATCHES = 4
_MOST_ELEMENTS = 4096  # of one batch, spread over it

_lock = threading.RLock()
_counters: dict[int, tuple["SampleCounter", ...]] = {}
"""The open counters of a module, by the module's identity."""
_users: Counter[type[torch.nn.Module]] = Counter()
"""How many counters watch modules of a class."""
_restores: dict[type[torch.nn.Module], Callable[[], None]] = {}


class SampleCounter:
    """Counts the samples that pass through a model in training mode: the first dimension of its first tensor input.

    That tensor may be in a list, tuple or dict. A model is counted inside ``torch.compile`` and
    ``DistributedDataParallel``, too. Until its first call in training mode, calls of its direct submodules count
    instead: each submodule has a sum of its own, and the largest sum is the step's. ``on_batch`` gets each such tensor.

    Calls within a counted call, calls without gradients (``torch.no_grad()``), calls that recompute activations in a
    backward pass, and calls that are traced are not counted.
    """

    def __init__(self, model: torch.nn.Module, on_batch: Callable[[torch.Tensor], None] | None = None) -> None:
        self._on_batch = on_batch
        self._model = unwrapped(model)
        self._counts: dict[torch.nn.Module, int] = {}
        self._threads: set[int] = set()  # those inside a counted call
        self._vector: int | None = None  # the length of an input of one dimension
        self._warned: set[str] = set()
        self._watched: dict[torch.nn.Module, tuple[type[torch.nn.Module], ...]] = {}
        for module in (self._model, *map(unwrapped, self._model.children())):
            self._watch(module)

    @property
    def waiting(self) -> int:
        """Samples since the last call of :meth:`take`."""
        return self._counts.get(self._model) or max(self._counts.values(), default=0)

    def take(self, *, warn: bool = True) -> int:
        """Return the samples since the last call, at least 1; ``warn`` once if the number is probably wrong."""
        count, vector = self.waiting, self._vector
        self._counts, self._vector = {}, None
        self._threads.clear()  # an interrupt may have left one there
        if warn and not count:
            self._warn_once(
                "a step saw no call of model=, or of a direct submodule, in training mode with a tensor as its input, "
                "and counts as one sample. Pass the number, step(samples=...); if step() takes none (overlap=True, "
                "Outer, WAGMA), let model= be a module that the loop calls"
            )
        if warn and vector is not None:
            self._warn_once(
                "an input of model= has one dimension, [%d], and counts as %d samples. If it is one sample, pass "
                "step(samples=1), or a batch of one to the model: x.unsqueeze(0)",
                vector,
                vector,
            )
        return max(1, count)

    def leave_out(self, samples: int) -> None:
        """Count these no more, as far as they are there."""
        self._counts = {module: count - min(samples, count) for module, count in self._counts.items()}

    def close(self) -> None:
        """Count no more, and leave the classes as they were; harmless twice."""
        for module in tuple(self._watched):
            self._unwatch(module)

    def enter(self, module: torch.nn.Module, inputs: Iterable[Any]) -> bool:
        """Count a call that begins; return whether to :meth:`leave` at its end."""
        thread = threading.get_ident()
        traced, in_backward = torch._C._get_tracing_state() is not None, torch._C._current_graph_task_id() >= 0
        if thread in self._threads or traced or in_backward:
            return False
        self._threads.add(thread)
        if module.training and torch.is_grad_enabled():
            if module is self._model and len(self._watched) > 1:
                for other in [other for other in self._watched if other is not module]:
                    self._unwatch(other)
            first = _first_tensor(inputs)
            if first is not None:
                self._counts[module] = self._counts.get(module, 0) + first.shape[0]
                if first.dim() == 1:
                    self._vector = first.shape[0]
                if self._on_batch is not None:
                    self._on_batch(first)
        return True

    def leave(self) -> None:
        """End a call that was entered."""
        self._threads.discard(threading.get_ident())

    def _watch(self, module: torch.nn.Module) -> None:
        with _lock:
            if module in self._watched:
                return
            kinds = (type(module), *wrappers())
            for kind in kinds:
                if not _users[kind]:
                    _restores[kind] = _report_calls(kind)
                _users[kind] += 1
            self._watched[module] = kinds
            _counters[id(module)] = (*_counters.get(id(module), ()), self)

    def _unwatch(self, module: torch.nn.Module) -> None:
        with _lock:
            kinds = self._watched.pop(module, ())
            if not kinds:
                return
            others = tuple(each for each in _counters.pop(id(module)) if each is not self)
            if others:
                _counters[id(module)] = others
            for kind in kinds:
                _users[kind] -= 1
                if not _users[kind]:
                    _restores.pop(kind)()

    def _warn_once(self, text: str, *values: int) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text, *values)


def _report_calls(kind: type[torch.nn.Module]) -> Callable[[], None]:
    """Replace the ``__call__`` of a class by one that reports to the counters; return what restores the class."""
    before: Callable[..., Any] | None = kind.__dict__.get("__call__")
    # If torch.compile cannot take a wrapper as a whole, it would trace this as it is called.
    enter = torch.compiler.disable(_enter)  # type: ignore[no-untyped-call]

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        entered: Sequence[SampleCounter] = ()
        if not is_compiling():  # if torch.compile traces through this, nothing of it is in the graph
            module = unwrapped(self)
            if id(module) in _counters:
                entered = enter(module, (*args, *kwargs.values()))
        try:
            return super(kind, self).__call__(*args, **kwargs) if before is None else before(self, *args, **kwargs)
        finally:
            for counter in entered:
                counter.leave()

    def restore() -> None:
        if kind.__dict__.get("__call__") is not __call__:  # replaced again since
            return
        if before is None:
            del kind.__call__
        else:
            kind.__call__ = before  # type: ignore[method-assign]

    __call__.__code__ = __call__.__code__.replace()  # of its own: torch.compile limits how many graphs one code has
    kind.__call__ = __call__  # type: ignore[method-assign]
    return restore


def _enter(module: torch.nn.Module, inputs: Sequence[Any]) -> list[SampleCounter]:
    return [each for each in _counters.get(id(module), ()) if each.enter(module, inputs)]


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            return value
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        found = _first_tensor(inner)
        if found is not None:
            return found
    return None


class FirstBatches:
    """Fingerprints a worker's first batches: the lease thread sends the result, and servers notice equal ones.

    Inputs that are all alike, as positions or a whole data set are, show no order: they have no fingerprint. Nor have
    inputs that cannot be read in place: in a compiled graph, or while a CUDA graph is captured.
    """

    def __init__(self, leases: LeaseThread) -> None:
        self._leases, self._left = leases, _FIRST_BATCHES
        self._sums: list[int] = []

    def see(self, batch: torch.Tensor) -> None:
        """Fingerprint the first tensor of a forward; after the first few this does nothing."""
        if is_compiling() or not self._left or (batch.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._left -= 1
        try:
            flat = batch.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _MOST_ELEMENTS)].cpu().contiguous()
            self._sums.append(zlib.crc32(some.view(torch.uint8).numpy().tobytes()))
        except (RuntimeError, TypeError):  # sparse, quantised, without memory
            self._left = 0
            return
        if not self._left and len(set(self._sums)) > 1:
            self._leases.first_batches = zlib.crc32(repr(self._sums).encode())
