"""Backward in memory for fewer rows than come: the same bits."""

from __future__ import annotations

import pytest
import torch
from cases import assert_same, make_case, step, workspace
from test_save import WITH_EXACT, padded_rows

import uniep

ROWS = 256  # of two experts: each of the cases below has fewer than 128, padded to that


@pytest.mark.parametrize("choice", WITH_EXACT, ids=str)
def test_every_choice_gives_the_same_bits(choice):
    case = make_case(tokens=130, dropped=True)
    assert padded_rows(case.ids, case.shape[2]) > ROWS
    wanted = step(case)
    assert_same(step(case, backward_rows=ROWS, **choice), wanted)
    for schedule in ("sequential", "pipelined:3", "single,tile_m=32,lag=2"):
        with workspace(case, schedule=schedule, backward_rows=ROWS, **choice) as own:
            assert_same(step(case, workspace=own), wanted)


def test_half_of_the_rows_take_half_of_the_memory():
    case = make_case()
    with workspace(case, capacity_rows=4096) as own:
        rows, needed = own.rows, own.backward_bytes
    with workspace(case, capacity_rows=4096, backward_rows=rows // 2) as own:
        assert own.rows == rows
        assert abs(own.backward_bytes - needed / 2) < 2048


def test_a_layer_passes_it_on():
    torch.manual_seed(0)
    layers = [uniep.MoELayer(64, 32, 8, 2, backward_rows=rows) for rows in (None, 128)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(40, 64).bfloat16()
    for layer in layers:
        layer(x).float().square().sum().backward()
    assert torch.equal(layers[0].w1.grad, layers[1].w1.grad)
    assert torch.equal(layers[0].router.weight.grad, layers[1].router.weight.grad)


def test_an_expert_with_more_rows_is_refused():
    case = make_case(tokens=200).requires_grad()
    ids = torch.zeros_like(case.ids)
    rows = padded_rows(ids, case.shape[2])
    with workspace(case, backward_rows=128) as own:
        said = rf"expert 0 of rank 0 would receive {rows} rows.*backward_rows={rows} or more"
        with pytest.raises(RuntimeError, match=said):
            uniep.moe(case.x, ids, case.probs, case.w1, case.w2, workspace=own)
    with workspace(case, backward_rows=128, on_overflow="flag") as own:
        out = uniep.moe(case.x, ids, case.probs, case.w1, case.w2, workspace=own)
        assert own.overflow.tolist() == [4, rows]
        assert out.isnan().all()


def test_deferred_weights_are_refused():
    case = make_case(tokens=16)
    with pytest.raises(ValueError, match=r"deferred is given.*backward_rows is 128"):
        uniep.moe(
            case.x,
            case.ids,
            case.probs,
            case.w1,
            case.w2,
            backward_rows=128,
            deferred=uniep.DeferredWeights(),
        )


def test_a_number_that_is_no_multiple_is_refused():
    with pytest.raises(uniep.Error, match=r"backward_rows is 100; 0 .all., or a multiple of"):
        workspace(make_case(), backward_rows=100)
