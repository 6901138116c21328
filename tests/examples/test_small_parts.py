"""The rooms that the training scripts share: data files, text, schedules, shares, the GPT, what is reported."""

import argparse
import itertools
import json
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import checkpoints, curves, datafiles, launch, methods, smalldata
from support.gpt import GPT
from support.launch import Place
from support.reporter import Reporter
from support.samplers import EqualShares
from support.text import Windows, read_text


def place(index=0, workers=1, out=None, **more):
    return Place("", f"worker-{index}", index, workers, torch.device("cpu"), out, False, **more)


def md5sum(folder, names):
    import hashlib

    return "".join(f"{hashlib.md5((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)


def test_missing_files_are_asked_for_by_path(tmp_path):
    (tmp_path / "here").write_text("x")
    with pytest.raises(datafiles.MissingDataError, match=r"missing: .*/there\. Get it from X"):
        datafiles.require_files(tmp_path, {"here": "", "there": ""}, "Get it from X")


def test_a_damaged_file_is_named(tmp_path):
    for name in ("good", "bad"):
        (tmp_path / name).write_text(name)
    (tmp_path / "sums").write_text(md5sum(tmp_path, ["good", "bad"]))
    sums = datafiles.read_md5s(tmp_path / "sums")
    datafiles.require_files(tmp_path, sums, "")
    (tmp_path / "bad").write_text("changed")
    with pytest.raises(datafiles.DamagedDataError, match=r"/bad is damaged: its MD5 is \w{32}, not \w{32}"):
        datafiles.require_files(tmp_path, sums, "")


def test_what_is_no_output_of_md5sum_is_refused_with_its_line(tmp_path):
    (tmp_path / "sums").write_text("0123456789abcdef0123456789abcdef  a\nnothing\n")
    with pytest.raises(ValueError, match=r"sums, line 2"):
        datafiles.read_md5s(tmp_path / "sums")


def test_text_is_split_by_files_and_both_parts_have_some(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_bytes(bytes([number]) * 10)
    training, held_out = read_text(tmp_path, 1000)
    assert sorted(set(held_out.tolist())) == [9, 19]
    assert sorted(set(training.tolist())) == [n for n in range(20) if n not in (9, 19)]


@pytest.mark.long
def test_the_standard_library_is_read_no_further_than_asked_and_always_alike():
    one, two = read_text(None, 200_000), read_text(None, 200_000)
    assert 200_000 <= len(one[0]) + len(one[1]) < 700_000
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("files", [[], ["one.txt"]])
def test_a_folder_with_too_little_text_is_refused_by_name(tmp_path, files):
    for name in files:
        (tmp_path / name).write_text("text")
    with pytest.raises(datafiles.MissingDataError, match="every tenth is to test with"):
        read_text(tmp_path, 1000)
    with pytest.raises(datafiles.MissingDataError, match="not a folder"):
        read_text(tmp_path / "none", 1000)


def test_windows_lie_end_to_end_and_targets_are_the_next_bytes():
    text = torch.arange(11, dtype=torch.uint8)
    windows = Windows(text, 5)
    assert len(windows) == 2
    assert [part.tolist() for part in windows[1]] == [[5, 6, 7, 8, 9], [6, 7, 8, 9, 10]]
    with pytest.raises(datafiles.MissingDataError, match="give more text"):
        Windows(text, 11)


def test_the_gpt_sees_no_byte_that_is_to_come():
    torch.manual_seed(0)
    model = GPT(2, 2, 16, 8).eval()
    text = torch.randint(256, (1, 8))
    changed = text.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 256
    assert torch.allclose(model(text)[0, :5], model(changed)[0, :5], atol=1e-6)
    assert not torch.allclose(model(text)[0, 5:], model(changed)[0, 5:])
    assert model.head.weight is model.tokens.weight
    assert len(model.write(b"def ", 20)) == 24


@pytest.mark.parametrize("kind", ["cosine", "step"])
@pytest.mark.parametrize("warmup", [0.0, 2.0])
def test_a_schedule_warms_up_and_comes_down_where_it_should(kind, warmup):
    length = methods.Length(epochs=10, steps_per_epoch=20, warmup_epochs=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    clock = methods.build(length.schedule(kind, 2), optimizer)
    assert length.versions(2) == 100
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        clock.step()
    assert max(rates) == pytest.approx(1.0)
    assert rates[0] == pytest.approx(1.0 if not warmup else 1 / 21)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(rates[: 1 + int(10 * warmup)]))
    if kind == "cosine":
        assert rates[-1] < 0.01
    else:
        assert [round(rates[i], 6) for i in (49, 50, 74, 75)] == [1.0, 0.1, 0.1, 0.01]


def test_the_rate_drops_after_the_epochs_that_are_named():
    length = methods.Length(epochs=10, steps_per_epoch=20, warmup_epochs=0.0, drops=(3.0, 4.5))
    assert length.schedule("step", 2) == ("MultiStepLR", {"milestones": [30, 45], "gamma": 0.1})


def test_the_shares_of_an_epoch_are_equal_disjoint_and_another_epochs_are_others():
    drawn = {}
    for index in range(3):
        sampler = EqualShares(range(32), place(index, 3), seed=1, start=2)
        drawn[index] = [list(sampler) for _ in sampler.epochs(4)]
        assert len(drawn[index]) == 2
    for epoch in range(2):
        parts = [drawn[index][epoch] for index in range(3)]
        assert [len(part) for part in parts] == [10, 10, 10]
        assert len(set(itertools.chain(*parts))) == 30
    assert drawn[0][0] != drawn[0][1]


def test_the_small_data_are_in_the_real_formats(tmp_path):
    from support.vision import torchvision

    for write, kind, classes in (
        (smalldata.write_cifar10, torchvision.datasets.CIFAR10, 10),
        (smalldata.write_cifar100, torchvision.datasets.CIFAR100, 100),
    ):
        folder = write(tmp_path / kind.__name__)
        changed = type(kind.__name__, (kind,), {})
        datafiles.expect_md5s(changed, datafiles.read_md5s(folder / "md5sums.txt"))
        train, test = changed(folder, train=True), changed(folder, train=False)
        assert (len(train), len(test), len(train.classes)) == (1500, 297, classes)
        image, label = train[0]
        assert image.size == (32, 32)
        assert 0 <= label < classes
        with pytest.raises(ValueError, match="no MD5 is given for"):
            datafiles.expect_md5s(kind, {})


def test_what_is_reported_can_be_read_again_and_drawn(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    totals = types.SimpleNamespace(push_bytes=1, pull_bytes=2, buffer_bytes=3)
    optimizer = types.SimpleNamespace(
        param_groups=[{"lr": 0.5}], totals=totals, report=types.SimpleNamespace(staleness=4), version=7, live_workers=2
    )
    with Reporter(place(out=tmp_path), optimizer, 10) as reporter:
        reporter._point -= 100
        reporter.step(0, torch.tensor(1.5), 32)
        reporter.step(0, torch.tensor(1.5), 32)  # too soon after the last
        reporter.evaluation(0, accuracy=0.5)
    with Reporter(place(1, 2, out=tmp_path), optimizer, 10) as silent:
        silent.evaluation(0, accuracy=0.1)
    train, test = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [train[name] for name in ("kind", "loss", "version", "bytes", "epoch")] == ["train", 1.5, 7, 6, 1]
    assert (test["kind"], test["accuracy"]) == ("test", 0.5)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("test/accuracy")] == [(7, 0.5)]
    assert events.Scalars("train/learning_rate")[0].value == 0.5
    with Reporter(replace(place(out=tmp_path), resume=True), optimizer, 10) as resumed:
        resumed.evaluation(1, accuracy=0.6)
    assert [line["bytes"] for line in curves.read(tmp_path)] == [6, 12], "a resumed run goes on where it was"
    curves.draw([tmp_path], tmp_path / "picture.png", "accuracy")
    from PIL import Image

    assert np.asarray(Image.open(tmp_path / "picture.png")).std() > 0
    with pytest.raises(datafiles.MissingDataError, match=r"metrics\.jsonl is missing"):
        curves.read(tmp_path / "none")


def test_a_line_that_a_kill_has_cut_is_left_out_and_the_next_is_a_line_of_its_own(tmp_path):
    whole = json.dumps({"kind": "test", "bytes": 1, "perplexity": 2.0})
    (tmp_path / "metrics.jsonl").write_text(f'{whole}\n{{"kind": "te')
    with Reporter(place(out=tmp_path), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), 1) as reporter:
        reporter.evaluation(0, perplexity=1.5)
    assert [line["perplexity"] for line in curves.read(tmp_path)] == [2.0, 1.5]


def test_a_run_without_the_figure_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "test", "bytes": 1, "accuracy": 0.5}\n')
    with pytest.raises(datafiles.MissingDataError, match=r"metrics.jsonl has no test with perplexity"):
        curves.draw([tmp_path], tmp_path / "picture.png", "perplexity")


@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_a_damaged_or_foreign_checkpoint_is_named(tmp_path, damage):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    here = Place("", "worker-0", 0, 1, torch.device("cpu"), tmp_path, resume=True)
    if damage is None:
        torch.save({"optimizer": optimizer.state_dict(), "epoch": 1}, tmp_path / "worker-0.pt")  # that of a server's
    else:
        (tmp_path / "worker-0.pt").write_bytes(damage)
    with pytest.raises(ValueError, match=r"worker-0.pt is damaged, or was written with another method or model"):
        checkpoints.load(here, optimizer, methods.STILL, model)


def test_a_number_that_is_too_small_is_refused(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=launch.at_least(1))
    assert parser.parse_args(["--batch-size", "1"]).batch_size == 1
    for given in ("0", "x"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--batch-size", given])
    said = capsys.readouterr().err
    assert "--batch-size: must be at least 1, not 0" in said
    assert "invalid int value: 'x'" in said
