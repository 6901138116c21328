"""LDTE: real captures, the published search within its tolerance, a report that says what is missing."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.ldte import __main__ as program
from benchmarks.ldte import capture, published
from benchmarks.ldte import runs as ldte_runs
from benchmarks.ldte.capture import MOMENTUM, Moment, moments
from benchmarks.ldte.findings import ALL, examine
from benchmarks.ldte.runs import Job, Result, run
from benchmarks.ldte.speed import BY_TENSOR, LDTE, MERGED, TOPK, measure
from pscore.selection import entries_for
from tests.tiers import examples

CPU = torch.device("cpu")


class Images(torch.utils.data.Dataset):
    """As many noisy images as the test needs, of three classes."""

    classes = ("a", "b", "c")

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index)), index % 3


def tiny(name="", classes=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, classes))


@pytest.fixture
def small_runs(monkeypatch):
    """Jobs train a tiny model on noise."""
    monkeypatch.setattr(ldte_runs, "make_model", tiny)
    monkeypatch.setattr(ldte_runs, "training_images", lambda dataset, data, made: Images())


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    return list(moments(tiny(), Images(), 8, [1, 4, 5, 6], 0, CPU))


def test_a_capture_is_what_happened(captured):
    """Gradients are the model's; the residual of a step is that of the step before, accumulated, less what was sent."""
    assert [moment.step for moment in captured] == [1, 4, 5, 6]
    assert captured[0].names == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert all(not memory.any() for memory in captured[0].memories)
    before, after = captured[2].accumulated()[0], captured[3].memories[0]
    decay = capture.RATE * capture.WEIGHT_DECAY * 0.1  # is left out of accumulated(); parameters are below 0.1
    kept, sent = (after - before).abs() < decay, (after - MOMENTUM * before).abs() < decay
    assert bool((kept | sent).all())
    assert 0.5 < int((~kept).sum()) / entries_for(before.numel(), capture.DENSITY) < 1.5


def test_captures_repeat(captured):
    torch.manual_seed(0)
    again = next(moments(tiny(), Images(), 8, [4], 0, CPU))
    torch.testing.assert_close(again.gradients, captured[1].gradients)


def test_what_is_found_out_about_a_capture(captured):
    found = examine(captured[1])
    assert [(each.kind, each.tensor) for each in found] == [
        ("gradient", "1.weight"),
        ("gradient", ALL),
        ("residual", "1.weight"),
        ("residual", ALL),
    ]
    assert found[0].elements == 12_288
    assert found[0].normal > 0
    assert found[2].normal > 0
    assert [each.density for each in found[0].thresholds] == [0.01, 0.001]
    b = float(captured[1].gradients[0].abs().mean())
    k = 122
    above = int((captured[1].gradients[0].abs() > b * np.log(12_288 / k)).sum())
    assert found[0].thresholds[0].first == pytest.approx(above / k)


def test_a_vector_without_a_distribution_is_left_out():
    moment = Moment(1, 0.0, ["w"], [torch.zeros(5000)], [torch.zeros(5000)])
    assert examine(moment) == []


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(0, 1000), st.integers(2_000, 40_000), st.floats(0.001, 0.2), st.sampled_from(["laplace", "normal", "t"])
)
def test_the_published_search_selects_within_its_tolerance(seed, n, density, kind):
    draws = np.random.default_rng(seed)
    draw = {"laplace": draws.laplace, "normal": draws.normal, "t": lambda size: draws.standard_t(3, size)}[kind]
    x = torch.from_numpy(draw(size=n).astype(np.float32))
    k = entries_for(n, density)
    chosen = published.select(x, k)
    assert abs(chosen.numel() - k) <= max(1, published.TOLERANCE * k)
    left = x.abs().clone()
    left[chosen] = 0
    assert x.abs()[chosen].min() >= left.max()


def test_on_laplace_noise_the_estimate_is_right_at_once():
    x = np.abs(np.random.default_rng(0).laplace(size=1_000_000))
    found = published.search(lambda t: int((x > t).sum()), float(x.mean()), float(x.max()), x.size, 10_000)
    assert found.passes == 1
    assert found.first == found.count
    assert found.count == pytest.approx(10_000, rel=0.05)


def test_the_search_ends_where_it_cannot_succeed():
    """Equal magnitudes on both sides of k."""
    x = np.ones(1000)
    found = published.search(lambda t: int((x > t).sum()), 1.0, 1.0, 1000, 100)
    assert found.passes == 1 + published.MOST_HALVINGS


@pytest.mark.parametrize(("over", "vectors"), [(MERGED, 1), (BY_TENSOR, 1)])
def test_timing_compares_all_methods_on_the_same_steps(captured, over, vectors):
    memories = [memory.clone() for memory in captured[-1].memories]
    timing = measure(captured[1:], over, 0.01, 2, CPU)
    assert timing.vectors == vectors
    assert timing.elements == (12_288 if over == BY_TENSOR else 12_288 + 64 + 192 + 3)
    assert timing.times[TOPK]["median"] == 1
    assert timing.selected[TOPK] == [1, 1]
    assert all(0.6 < low <= high < 1.6 for low, high in timing.selected.values())
    assert timing.selecting[LDTE]["median"] <= timing.step[LDTE]["median"]
    torch.testing.assert_close(captured[-1].memories, memories, rtol=0, atol=0)


def test_results_are_written_and_read(small_runs, tmp_path):
    job = Job("cifar10", "densenet121", batch_size=8, steps=4, rounds=1)
    result = run(job, tmp_path, lambda what: None)
    assert Result.read(job, json.loads(json.dumps(result.plain()))) == result
    assert [*result.losses] == [1, 2, 4]


@pytest.mark.long
def test_the_command_writes_its_report_and_goes_on(small_runs, tmp_path, monkeypatch, capsys):
    command = ["--models", "resnet50", "densenet121", "--steps", "4", "--batch-size", "8", "--rounds", "1"]
    command += ["--output", str(tmp_path)]
    assert program.main(command) == 0
    assert {"report.md", "report.json", "ldte-distances.png", "journal.jsonl"} <= {p.name for p in tmp_path.iterdir()}
    text = (tmp_path / "report.md").read_text()
    for part in ("ResNet-50, CIFAR-100", "×1.55", "×1.12", "not measured", "not CIFAR", "ldte-distances.png"):
        assert part in text, part
    monkeypatch.setattr(program, "run", lambda *rest: pytest.fail("ran again"))
    assert program.main(command) == 0


def test_without_cifar_the_command_says_what_is_missing(tmp_path, capsys):
    if not capture.importlib.util.find_spec("torchvision"):
        pytest.skip("torchvision is not installed")
    command = ["--data", str(tmp_path / "none"), "--models", "densenet121", "--output", str(tmp_path / "out")]
    assert program.main(command) == 1
    assert "data_batch_1" in capsys.readouterr().err


def test_without_torchvision_the_command_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(capture.importlib.util, "find_spec", lambda name: None)
    assert program.main(["--output", str(tmp_path)]) == 1
    assert "torchvision" in capsys.readouterr().err


@pytest.mark.long
def test_one_model_on_digits_in_cifars_format(tmp_path):
    """The real thing, two steps of it."""
    if not capture.importlib.util.find_spec("torchvision"):
        pytest.skip("torchvision is not installed")
    result = run(Job("cifar100", "squeezenet1_1", batch_size=4, steps=2), tmp_path, lambda what: None)
    assert isinstance(result, Result)
    assert result.losses[1] == pytest.approx(np.log(100), rel=0.2)
    assert len(result.of("gradient", 2)) > 20
    assert (tmp_path / "cifar100" / "cifar-100-python" / "train").exists()
    assert Path(sys.modules["cifar10"].__file__).parent.name == "examples"


def test_the_senet_weighs_the_channels_of_every_block():
    if not capture.importlib.util.find_spec("torchvision"):
        pytest.skip("torchvision is not installed")
    from benchmarks.ldte.networks import SENET, make_model

    model = make_model(SENET, 10)
    squeezes = [module for module in model.modules() if type(module).__name__ == "SqueezeExcitation"]
    assert [each.fc1.in_channels // each.fc1.out_channels for each in squeezes] == [16] * 8
    plain = sum(parameter.numel() for parameter in make_model("resnet18", 10).parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) > plain
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
