"""Copies and pickles of what belongs to a group, and a process that forgot to join one."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from cases import make_case
from ranks import run_ranks

import uniep
from uniep import group as group_module


def make_layer(**options):
    torch.manual_seed(3)
    return uniep.MoELayer(64, 32, 8, 2, **options)


def tokens(rank=0):
    torch.manual_seed(11 + rank)
    return torch.randn(16, 64, dtype=torch.bfloat16)


def assert_is_a_copy(layer, other, x):
    assert torch.equal(layer(x), other(x))
    assert other.w1.data_ptr() != layer.w1.data_ptr()
    with torch.no_grad():
        other.w1.zero_()
    assert layer.w1.any()


def test_copies_of_a_layer():
    for copied in (copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))):
        layer = make_layer(shared_experts=1, shared_gate=True)
        assert_is_a_copy(layer, copied(layer), tokens())


def test_a_choice_made_later_is_that_of_later_calls_and_copies():
    layer = make_layer(max_tokens=512)
    for copied in (copy.copy, copy.deepcopy, lambda own: pickle.loads(pickle.dumps(own))):
        layer.schedule = None
        before = copied(layer)
        layer.schedule = "nonsense"
        assert (before.max_tokens, before.schedule) == (512, None)
        before(tokens())
        after = copied(layer)
        for own in (layer, after):
            assert (own.max_tokens, own.schedule) == (512, "nonsense")
            with pytest.raises(RuntimeError, match="nonsense"):
                own(tokens())


def test_a_layer_may_leave_its_workspace():
    """Its weights are for the arithmetic that the workspace had."""
    with uniep.Workspace(None, 64, 32, 8, 2, 16, activation="geglu", device="cpu") as workspace:
        layer = make_layer(workspace=workspace)
        wanted = layer(tokens())
        layer.workspace = None
        assert torch.equal(layer(tokens()), wanted)
        layer.workspace = workspace
        assert torch.equal(layer(tokens()), wanted)


def test_copies_share_what_belongs_to_the_process():
    pool = uniep.RowPool(None, 64, 32, bytes=1 << 22, device="cpu")
    with uniep.Workspace(None, 64, 32, 8, 2, 16, device="cpu") as workspace:
        for options in ({"workspace": workspace}, {"row_pool": pool}, {"group": workspace.group}):
            layer = torch.nn.Sequential(make_layer(**options))
            other = copy.deepcopy(layer)
            for name, shared in options.items():
                assert getattr(other[0], name) is shared
            assert_is_a_copy(layer[0], other[0], tokens())
        for shared in (workspace, pool, workspace.group):
            with pytest.raises(TypeError, match=r"belongs to this process.*state_dict") as raised:
                pickle.dumps(shared)
            assert "\n" not in str(raised.value)


def test_a_copy_has_main_gradients_of_its_own():
    layer = make_layer(main_grad=torch.float32)
    layer(tokens()).float().sum().backward()
    other = copy.deepcopy(layer)
    assert torch.equal(other.w1.main_grad, layer.w1.main_grad)
    before = layer.w1.main_grad.clone()
    other(tokens()).float().sum().backward()
    assert torch.equal(layer.w1.main_grad, before)
    assert not torch.equal(other.w1.main_grad, before)
    assert other.w1.grad is None


def on_ranks():
    layer = make_layer(group=dist.group.WORLD)
    assert_is_a_copy(layer, copy.deepcopy(layer), tokens(dist.get_rank()))
    other = copy.copy(layer)
    assert other.w1 is layer.w1 and other.group is layer.group
    of_first = dist.new_group([0])
    if dist.get_rank() == 1:
        case = make_case()
        tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
        for joins in (
            lambda: make_layer(group=of_first),
            lambda: uniep.moe(*tensors, group=of_first),
            lambda: uniep.Group(of_first, device="cpu"),
        ):
            with pytest.raises(ValueError, match="not a member of process_group"):
                joins()
    with pytest.raises(TypeError, match="with a group cannot be pickled") as raised:
        torch.save(torch.nn.Sequential(layer), io.BytesIO())
    assert "\n" not in str(raised.value)


def test_copies_on_several_ranks():
    run_ranks(2, on_ranks)
    layer = make_layer(group=uniep.Group(device="cpu"))
    assert torch.equal(copy.copy(layer)(tokens()), layer(tokens()))


def test_warns_where_the_group_was_forgotten(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"WORLD_SIZE is 2.*init_process_group"):
        uniep.Group(dist.group.WORLD, device="cpu")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uniep.Group(device="cpu")


@pytest.mark.parametrize(
    ("spared", "cluster", "warned"),
    [
        (None, None, "UNIEP_SPARE_SMS is not set"),
        ("", "0", "UNIEP_SPARE_SMS is not set"),
        ("0", None, None),
        ("16", None, "UNIEP_SPARE_SMS is 16, but NCCL_CGA_CLUSTER_SIZE is not 0"),
        ("16", "4", "UNIEP_SPARE_SMS is 16, but NCCL_CGA_CLUSTER_SIZE is not 0"),
        ("16", "0", None),
        ("16", "1", None),
        ("32", None, None),
        ("all", None, None),  # which the library refuses
    ],
)
def test_warns_where_collectives_have_no_sms(monkeypatch, spared, cluster, warned):
    """As groups of GPUs do."""
    for name, value in {"UNIEP_SPARE_SMS": spared, "NCCL_CGA_CLUSTER_SIZE": cluster}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        group_module._warn_of_collectives()
    assert len(found) == (warned is not None)
    assert all(warned in str(w.message) and "NCCL_MAX_CTAS" in str(w.message) for w in found)


def alone_among_others():
    """Beside an initialised process group, a layer without one is meant to be alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_layer()(tokens())


def test_does_not_warn_where_there_is_a_process_group():
    run_ranks(2, alone_among_others)
