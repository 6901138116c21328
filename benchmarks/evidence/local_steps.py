"""``python -m benchmarks.evidence.local_steps``: forms of local steps that ``Outer`` does not have, in plain torch.

Each is held against what ``Outer`` does, on the same task and at the same bytes: docs/evidence/accuracy.md, "Outer with
300 times fewer bytes". No server, no codec: the densities are those at which 4 bits an entry and indices coded as
tightly as entropy allows take the bytes.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.campaign.tasks import TASKS, loss_of
from benchmarks.campaign.worker import clip, decay

WORKERS = 8
_TASK = TASKS["text-tiny"]
_WHOLE_BELOW, _LARGEST_CODE = 256, 7  # elements of a tensor that is sent whole; of a value in 4 bits

Values = dict[int, torch.Tensor]
"""Of parameters, by position."""


@dataclass(frozen=True, slots=True)
class Form:
    """One form of local steps: AdamW on the workers, plain averages on the server.

    Attributes:
        period: local steps of a worker from one push of a tensor to the next.
        density: share of a tensor's entries that is sent, in 4 bits; 1 for all in fp32.
        reply: likewise of the answers, which are then the largest differences to what the workers have.
        fragments: parts of the model, which are pushed in turn, each once a period (Streaming DiLoCo, 2025).
        late: steps that pass until the average is there, while the worker goes on (ibid., overlapped).
        ahead: share of the residual by which a worker's steps start ahead of the server's model.
        is_gated: sent is what a model in bf16 would show, in fp32 (PULSELoCo); no density.
        slow: how much slower the last worker is; it pushes after as many periods.
        slow_steps: the last worker takes so many steps a period instead, and none waits for it (DyLU).
        weighs: workers count by their steps (token weights).
    """

    period: int = 10
    density: float = 1.0
    reply: float = 1.0
    fragments: int = 1
    late: int = 0
    ahead: float = 0.0
    is_gated: bool = False
    slow: int = 1
    slow_steps: int | None = None
    weighs: bool = False

    def steps_of(self, worker: int) -> int:
        """Return the local steps that a worker takes in a period."""
        return self.period if self.slow_steps is None or worker < WORKERS - 1 else self.slow_steps


FORMS = {
    "dense": Form(),
    "sparse": Form(density=0.1),
    "dense, 5 fragments": Form(fragments=5),
    "sparse, 5 fragments": Form(density=0.1, fragments=5),
    "sparse, 5 fragments, a step late": Form(density=0.1, fragments=5, late=1),
    "sparse, a third ahead": Form(density=0.1, ahead=0.3),
    "sparse, all ahead": Form(density=0.1, ahead=1.0),
    "sparse, replies too": Form(density=0.1, reply=0.1),
    "sparse, replies too, 5 fragments": Form(density=0.1, reply=0.1, fragments=5),
    "sparser, replies too, 4 steps": Form(4, 0.038, reply=0.038),
    "sparser, larger replies, 4 steps": Form(4, 0.038, reply=0.15),
    "sparser, 4 steps": Form(4, 0.038),
    "sparser, 2 steps": Form(2, 0.016),
    "sparser, 1 step": Form(1, 0.0077),
    "sparser, 2 steps, a third ahead": Form(2, 0.016, ahead=0.3),
    "gated": Form(is_gated=True),
    "one 4 times slower": Form(slow=4),
    "one with 3 steps": Form(slow_steps=3),
    "one with 3 steps, weighed": Form(slow_steps=3, weighs=True),
    "one with none": Form(slow_steps=0),
}
"""What is tried, by name; the bytes of all sparse ones are about the same."""


class Worker:
    """A worker: its model, its residuals, and the server's model as it knows it."""

    def __init__(self, form: Form, number: int, rate: float, steps: int, seed: int) -> None:
        self.form, self.number, self._steps = form, number, steps
        self.model = _TASK.initial_model(seed)
        self.parameters = list(self.model.parameters())
        self._optimizer = torch.optim.AdamW(self.parameters, rate)
        self._rate, self._draws = rate, _TASK.draws(seed, number, WORKERS)
        self._start = [parameter.detach().clone() for parameter in self.parameters]
        self._residual = [torch.zeros_like(parameter) for parameter in self.parameters]

    @property
    def is_slow(self) -> bool:
        return self.number == WORKERS - 1 and self.form.slow > 1

    def step(self, number: int) -> None:
        """Take a local step, if one is due at this step of the fast workers."""
        if (self.is_slow and number % self.form.slow) or number % self.form.period >= self.form.steps_of(self.number):
            return
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * decay(number, self._steps)
        self._optimizer.zero_grad()
        loss_of(self.model, next(self._draws)).backward()  # type: ignore[no-untyped-call]
        clip(self.model)
        self._optimizer.step()

    def push(self, positions: Sequence[int]) -> Values:
        """Return what is sent of these tensors; the rest stays in the residual."""
        sent = {}
        for position in positions:
            residual = self._residual[position]
            residual += self._start[position] - self.parameters[position].detach()
            sent[position] = self._selected(residual, self._start[position])
            residual -= sent[position]
        return sent

    def take(self, server: Values, since: Values) -> None:
        """Go on from the server's values, and keep the local steps that were taken ``since`` the push."""
        for position, value in server.items():
            parameter, new = self.parameters[position], value - self.form.ahead * self._residual[position]
            self._start[position] = new.clone()
            with torch.no_grad():
                parameter.copy_(new + (parameter - since[position]) if self.form.late else new)

    def copies(self, positions: Sequence[int]) -> Values:
        return {position: self.parameters[position].detach().clone() for position in positions}

    def _selected(self, residual: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        if self.form.is_gated:
            return torch.where((start - residual).bfloat16() != start.bfloat16(), residual, 0)
        return largest(residual, self.form.density)


def largest(values: torch.Tensor, density: float) -> torch.Tensor:
    """Return the share of greatest magnitude in 4 bits, the others as zeros; small tensors whole."""
    if density == 1 or values.numel() < _WHOLE_BELOW:
        return values.clone()
    flat = values.flatten()
    chosen = flat.abs().topk(max(1, int(density * flat.numel()))).indices
    unit = flat[chosen].abs().max().clamp_min(1e-30) / _LARGEST_CODE
    return torch.zeros_like(flat).index_put((chosen,), (flat[chosen] / unit).round() * unit).view_as(values)


def train(form: Form, rate: float, samples: int, seed: int) -> tuple[float, float]:
    """Return the test loss of the server's model at the end, and the share of entries that was sent."""
    steps = samples // (WORKERS * _TASK.batch_size)
    workers = [Worker(form, number, rate, steps, seed) for number in range(WORKERS)]
    model = _TASK.initial_model(seed)
    server = list(model.parameters())
    image = [parameter.detach().clone() for parameter in server]  # what the workers have
    under_way: list[tuple[int, Values, list[tuple[Worker, Values]]]] = []
    sent = pushed = 0
    for step in range(steps):
        for worker in workers:
            worker.step(step)
        is_last = step + 1 == steps
        for positions in _due(form, [parameter.numel() for parameter in server], step, is_last=is_last):
            pushing = [
                each for each in workers if is_last or not each.is_slow or not (step + 1) % (form.slow * form.period)
            ]
            weights = [float(form.steps_of(each.number)) if form.weighs else 1.0 for each in pushing]
            for worker, weight in zip(pushing, weights, strict=True):
                for position, value in worker.push(positions).items():
                    sent, pushed = sent + int(value.count_nonzero()), pushed + value.numel()
                    with torch.no_grad():
                        server[position].sub_(value, alpha=weight / sum(weights))
            for position in positions:
                image[position] += largest(server[position].detach() - image[position], form.reply)
            new = {position: image[position].clone() for position in positions}
            under_way.append((step + form.late, new, [(each, each.copies(positions)) for each in pushing]))
        for due, new, pushers in under_way:
            if due <= step:
                for worker, since in pushers:
                    worker.take(new, since)
        under_way = [each for each in under_way if each[0] > step]
    return _TASK.evaluate(model, validation=False).loss, sent / max(1, pushed)


def _due(form: Form, sizes: Sequence[int], step: int, *, is_last: bool) -> Iterator[list[int]]:
    """Yield the tensors of each fragment that is pushed after a step."""
    middles = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes) / 2
    fragments = (middles / sum(sizes) * form.fragments).int().tolist()
    for fragment in range(form.fragments):
        if is_last or (step + 1) % form.period == fragment * form.period // form.fragments % form.period:
            yield [position for position, its in enumerate(fragments) if its == fragment]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the forms that are named, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence.local_steps", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="FORM", help="; ".join(FORMS))
    parser.add_argument("--rate", type=float, default=5e-3, help="of AdamW (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=64_000, help="of all workers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(FORMS)
    if unknown:
        parser.error(f"no such form: {', '.join(sorted(unknown))}; there are {'; '.join(FORMS)}")
    torch.set_num_threads(1)
    for name in options.names or FORMS:
        started = time.monotonic()
        loss, share = train(FORMS[name], options.rate, options.samples, options.seed)
        print(
            f"{name}: {loss:.3f} nats, {share:.1%} of the entries sent, {time.monotonic() - started:.0f} s", flush=True
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
