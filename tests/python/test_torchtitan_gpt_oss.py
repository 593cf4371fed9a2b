"""uniep.torchtitan's gpt-oss: another gate, biases, and rows of gate and up that alternate."""

from __future__ import annotations

import torch
from cases import make_case
from titan_cases import GRADIENT, OUTPUT, distances, gpt_oss_layers, layer_step


def test_gpt_oss_is_torchtitans() -> None:
    case = make_case(tokens=96, hidden=128, intermediate=64, topk=3)
    case.x = case.x * 2  # a few elements are beyond the limits of the gate, and few at a limit
    own, layer = gpt_oss_layers(case)
    wanted = layer_step(own, case, (4, 24))
    found = layer_step(layer, case, (4, 24))
    away = distances(found, wanted)
    print({name: f"{distance:.1e}" for name, distance in away.items()})
    assert away.pop("out") < OUTPUT
    assert {name: distance for name, distance in away.items() if not distance < GRADIENT} == {}


def test_state_dicts_of_gpt_oss_have_torchtitans_names_and_order() -> None:
    case = make_case()
    own, layer = gpt_oss_layers(case)
    saved, wanted = layer.state_dict(), own.state_dict()
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)
    torch.manual_seed(3)
    layer.float().init_states()
    drawn = layer.bfloat16().state_dict()
    assert all(torch.equal(drawn[name], wanted[name]) for name in wanted)
