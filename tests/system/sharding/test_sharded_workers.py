"""Ranks that have a model in parts are one worker: real processes over gloo, and real servers."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

import psclient
from psclient.model.blocks import Block
from psclient.rpc.local_server import LocalServer
from pscore.model.layout import TensorSpec
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl.client import call
from tests.system.sharding.shard_scenarios import (
    SPARSE,
    STEPS,
    Adapted,
    Pair,
    Shapes,
    gradient,
    launch_all,
)
from tests.system.tools import QUICK, wait_until

pytestmark = pytest.mark.xdist_group("ranks")

TWO = (
    "asgd",
    "adamw",
    "dgs",
    "dgc",
    "dropping",
    "rmsprop",
    "meets_errors",
    "begins_with_a_file",
    "saves",
    "large",
    "rounded",
    "images",
    "kept_in_16_bits",
    "refuses_other_groups",
    "refuses_other_steps",
    "ends_in_order",
)
FOUR = ("resumes", "hybrid", "tensor_parallel", "two_dimensions", "frozen", "rows")
LEFT = ("follower_dies", "leader_dies", "follower_dies_in_a_step", "leader_is_terminated")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run all scenarios; their servers live as long as the tests."""
    with ExitStack() as stack:

        def servers(count, mode="exact"):
            made = [stack.enter_context(LocalServer(down_mode=mode, lease_seconds=60)) for _ in range(count)]
            return [server.server for server in made]

        two, four, left = servers(13) + servers(1, "topk") + servers(4), servers(6), servers(4)
        folder = tmp_path_factory.mktemp("left")
        four[0] = two[10]  # where the others go on
        checkpoint = str(tmp_path_factory.mktemp("checkpoint") / "saved")
        found = launch_all(TWO, 2, tmp_path_factory.mktemp("two"), *two, checkpoint)
        found |= launch_all(FOUR, 4, tmp_path_factory.mktemp("four"), *four, checkpoint)
        found |= launch_all(LEFT, 2, folder, *left)
        yield found, {"two": two, "four": four, "left": left, "folder": folder}


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("method", ["asgd", "adamw"])
def test_a_dense_method_trains_as_distributed_data_parallel_does(runs, method):
    for found in runs[0][method]:
        assert (found["version"], found["samples"]) == (4, 4 * 256)
        for sharded, ddp in zip(found["sharded"], found["ddp"], strict=True):
            torch.testing.assert_close(sharded, ddp, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found["after eval"], found["expected after eval"], rtol=1e-4, atol=1e-5)
    one, other = runs[0][method]
    assert_equal(one["sharded"] + one["buffers"], other["sharded"] + other["buffers"])


class Blocks(nn.Module):
    """The distinct blocks of a model's parameters, each a parameter of its own."""

    def __init__(self, model, ranks):
        super().__init__()
        self.places = []
        for number, parameter in enumerate(model.parameters()):
            spec = TensorSpec(str(number), tuple(parameter.shape), torch.float32)
            distinct = dict.fromkeys(tuple(found["runs"][number]) for found in ranks)
            for place, runs_of_block in enumerate(distinct):
                block = Block(spec, runs_of_block)
                mine = torch.from_numpy(block.of(parameter.detach().reshape(-1).numpy(), 1)).view(block.shape)
                if mine.numel():
                    own = nn.Parameter(mine)
                    self.register_parameter(f"p{number}_{place}", own)
                    self.places.append((number, block, own))

    def give(self, step, shapes):
        for number, block, parameter in self.places:
            whole = gradient(step, number, shapes[number]).reshape(-1).numpy()
            parameter.grad = torch.from_numpy(block.of(whole, 1)).view(block.shape)


@pytest.mark.parametrize(
    ("scenario", "method", "model"),
    [
        ("dgs", "dgs", Shapes),
        ("dgc", "dgc", Shapes),
        ("dropping", "dropping", Shapes),
        ("rmsprop", "rmsprop", Shapes),
        ("hybrid", "dgc", Shapes),
        ("tensor_parallel", "dgs", Pair),
        ("two_dimensions", "dgc", Pair),
    ],
)
def test_a_sparse_method_is_one_process_that_selects_block_by_block(runs, scenario, method, model):
    kind, options = SPARSE[method]
    whole = model()
    ranks = runs[0][scenario]
    reference, shapes = Blocks(whole, ranks), [parameter.shape for parameter in whole.parameters()]
    with (
        LocalServer(down_mode="exact") as server,
        kind(reference.parameters(), model=reference, server=server, settings=QUICK, **options) as optimizer,
    ):
        for step in range(STEPS):
            reference.give(step, shapes)
            optimizer.step(samples=1)
        pushed = optimizer.report.push_entries
    for found in ranks:
        assert found["version"] == STEPS
        assert found["report"].push_entries == pushed
        for number, block, parameter in reference.places:
            ours = block.of(found["whole"][number].reshape(-1).numpy(), 1)
            assert torch.equal(torch.from_numpy(ours), parameter.detach().reshape(-1)), (number, block.runs)
    changed = [not torch.equal(ours, mine) for ours, mine in zip(ranks[0]["whole"], whole.parameters(), strict=True)]
    assert all(changed)


def test_the_server_has_the_names_and_the_values_of_the_whole_model(runs):
    saved = psclient.download(runs[1]["two"][4])
    assert list(saved) == [name for name, _ in Shapes().named_parameters()]
    assert_equal(saved.values(), runs[0]["dgs"][0]["whole"])


def test_errors_are_those_of_all_ranks(runs):
    one, other = runs[0]["meets_errors"]
    for found in (one, other):
        assert found["not finite"][0] == "NonFiniteGradientError"
        assert "'d'" in found["not finite"][1]
        assert found["partial"][0] == "ConfigurationError"
        assert "redistribute(placements=parameter.placements)" in found["partial"][1]
        assert found["version"] == 1
        assert found["loaded"][0] == "ModelLoadedError"
        assert found["other calls"][0] == "ConfigurationError"
        assert_equal(found["pulled"], found["whole"])
    assert_equal(one["whole"], other["whole"])


def test_a_model_that_is_loaded_before_the_first_push_begins_the_run(runs):
    for found in runs[0]["begins_with_a_file"]:
        assert_equal(found["whole"], [each.detach() for each in Shapes(2).parameters()])
    late = Shapes(3)
    with psclient.ASGD(late.parameters(), lr=0.1, model=late, server=runs[1]["two"][9], settings=QUICK) as optimizer:
        late.load_state_dict(Shapes(2).state_dict())  # the same: by the digest that the ranks have made of their blocks
        optimizer.pull()
        assert_equal(late.parameters(), Shapes(2).parameters())


def test_the_state_goes_to_another_optimizer_and_to_another_number_of_ranks(runs):
    saved = runs[0]["saves"]
    for found in saved:
        assert found["pushed"] == 0
        assert any(residual.any() for residual in found["residuals"])
        assert_equal(found["residuals"], found["collected"])
        assert_equal(found["residuals"], found["loaded"])
    assert saved[1]["alone"][0] == "ConfigurationError"
    assert saved[0]["alone"][0] == "NodeBrokenError"
    for found in runs[0]["resumes"]:
        assert_equal(found["loaded"], saved[0]["residuals"])
        assert_equal(found["whole"], runs[0]["resumes"][0]["whole"])


def test_rounding_errors_come_back_to_their_blocks(runs):
    expected = [parameter.detach() for parameter in Shapes().parameters()]
    for step in range(STEPS):
        expected = [each - 0.1 * gradient(step, number, each.shape) for number, each in enumerate(expected)]
    for found in runs[0]["rounded"]:
        for ours, wanted in zip(found["whole"], expected, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_residuals_of_all_ranks_may_be_kept_in_16_bits(runs):
    expected = [parameter.detach() for parameter in Shapes().parameters()]
    for step in range(STEPS):
        expected = [each - 0.1 * gradient(step, number, each.shape) for number, each in enumerate(expected)]
    for found in runs[0]["kept_in_16_bits"]:
        assert found["types"] == {"torch.bfloat16"}
        assert_equal(found["whole"], runs[0]["kept_in_16_bits"][0]["whole"])
        for ours, wanted in zip(found["whole"], expected, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0.01, atol=0.01)


def test_half_precision_follows_the_largest_differences(runs):
    saved = psclient.download(runs[1]["two"][13])
    leader, follower = runs[0]["images"]
    assert leader["mode"] == follower["mode"] == "topk"
    assert_equal(leader["before"] + leader["whole"], follower["before"] + follower["whole"])
    assert_equal(leader["whole"], [each.bfloat16() for each in saved.values()])
    for ours, theirs in zip(leader["before"], saved.values(), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.1, atol=0.5)


def test_a_whole_model_is_passed_on_in_parts(runs):
    torch.manual_seed(0)
    expected = nn.Linear(1500, 2000)
    leader, follower = runs[0]["large"]
    assert sum(leader["sizes"]) == sum(parameter.numel() for parameter in expected.parameters())
    assert max(leader["sizes"]) <= 1 << 20
    assert not follower["sizes"]
    for found in (leader, follower):
        assert_equal(found["whole"], [parameter.detach() for parameter in expected.parameters()])


def test_a_frozen_base_in_parts_has_the_digest_of_the_whole(runs):
    expected = Adapted()
    adapter = expected.adapter.detach().float()
    for step in range(2):
        adapter -= 0.1 * gradient(step, 0, adapter.shape).bfloat16().float()
    for found in runs[0]["frozen"]:
        assert found["version"] == 2
        assert torch.equal(found["whole"][0], expected.base)
        torch.testing.assert_close(found["whole"][1].float(), adapter, rtol=1e-2, atol=1e-2)
        assert found["changed"][0] == "ModelChangedError"
    whole = Adapted()
    with psclient.ASGD([whole.adapter], lr=0.1, model=whole, server=runs[1]["four"][4], settings=QUICK) as optimizer:
        assert optimizer.version == 2  # the run has taken it in: the base has the same digest


def test_a_group_without_ranks_of_the_mesh_is_refused_by_each(runs):
    for rank, found in enumerate(runs[0]["refuses_other_groups"]):
        kind, text = found["alone"]
        assert kind == "ConfigurationError"
        assert f"'a' lies on the ranks [0, 1] of its mesh, and group has the ranks [{rank}]" in text
        assert "new_group([0, 1])" in text


def test_arguments_and_groups_that_differ_among_ranks_are_refused_by_all(runs):
    for found in runs[0]["refuses_other_groups"]:
        assert found["rate"][0] == found["groups"][0] == "ConfigurationError"
        assert "on rank 1 of this node lr is 1.1, and on rank 0 0.1" in found["rate"][1]
        assert "which parameters group 0 has, by position, is [0, 1, 2], and on rank 0 [0, 1]" in found["groups"][1]
    for found in runs[0]["refuses_other_steps"]:
        assert found["rate"][0] == found["group"][0] == "ConfigurationError"
        assert "on rank 1 of this node lr of group 0 is 1.1, and on rank 0 0.1" in found["rate"][1]
        assert "the number of param groups is 1, and on rank 0 2" in found["group"][1]


def test_a_rank_without_any_gradient_is_refused_and_one_without_some_is_not(runs):
    for found in runs[0]["refuses_other_steps"]:
        for name, (lacks, has) in {"no gradient": (1, 0), "no gradient of the leader": (0, 1)}.items():
            assert found[name][0] == "ConfigurationError"
            assert (
                f"rank {lacks} of the group has no gradient at all in this step, and rank {has} has" in found[name][1]
            )
        assert found["version"] == 0
        assert found["untouched"]
    leader, _ = runs[0]["refuses_other_steps"]
    for number, (name, parameter) in enumerate(Shapes().named_parameters()):
        change = 0.1 * gradient(0, number, parameter.shape)
        if name == "d":
            mask = torch.zeros(parameter.numel())
            mask[leader["d"]] = 1
            change *= mask.view(change.shape)
        if name == "e":
            change.zero_()  # in no group
        torch.testing.assert_close(leader["whole"][number], parameter.detach() - change, rtol=1e-5, atol=1e-6)


def test_gradients_of_equal_blocks_must_be_equal(runs):
    for found in runs[0]["rows"]:
        assert found["version"] == 0
        assert found["error"][0] == "ConfigurationError"
        assert "ranks 0 and 2 have the same values of 'a', and their gradients have to be equal" in found["error"][1]


def test_the_lines_of_the_guide_push_what_all_ranks_hold_at_sigterm(runs):
    assert [found["steps"] for found in runs[0]["ends_in_order"]] == [STEPS, STEPS]
    saved = psclient.download(runs[1]["two"][17])
    for number, (name, parameter) in enumerate(Shapes().named_parameters()):
        change = sum(0.1 * gradient(step, number, parameter.shape) for step in range(STEPS))
        torch.testing.assert_close(saved[name], parameter.detach() - change, rtol=1e-5, atol=1e-5)


def test_the_log_says_whose_residuals_are_lost_at_sigterm(runs):
    log = (runs[1]["folder"] / "leader_is_terminated" / "log").read_text()
    assert "has pushed what the blocks of rank 0 held (what other ranks held since the last flush() is lost" in log


@pytest.mark.parametrize("scenario", LEFT)
def test_a_killed_rank_ends_its_worker(runs, scenario):
    found = runs[0][scenario]
    survivor = found[1] if scenario in ("leader_dies", "leader_is_terminated") else found[0]
    assert survivor["error"][0] == "NodeBrokenError"
    assert [each is None for each in found].count(True) == 1
    address = runs[1]["left"][LEFT.index(scenario)]
    if scenario != "leader_dies":  # whose lease ends by itself
        wait_until(lambda: not call(address, "GetStatus", pb.GetStatusRequest(), 10.0).workers)
