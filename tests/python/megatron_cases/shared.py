"""Shared experts in the pass of the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_cases.support import (
    GRADIENT,
    INTERMEDIATE,
    OTHER_OUTPUT,
    OUTPUT,
    expect_close,
    expect_raises,
    expect_same,
    make_config,
    make_layer,
    make_tokens,
    of_experts,
    run_layer,
)

_WIDTH = "moe_shared_expert_intermediate_size"
_KINDS: list[dict[str, Any]] = [
    {_WIDTH: INTERMEDIATE},
    {_WIDTH: INTERMEDIATE, "moe_shared_expert_gate": True},
    {_WIDTH: 2 * INTERMEDIATE, "moe_shared_expert_gate": True, "moe_router_topk": 4},
]


def _kinds() -> list[dict[str, Any]]:
    from megatron.core.activations import squared_relu

    alone = {"activation_func": squared_relu, "gated_linear_unit": False}
    return [*_KINDS, {_WIDTH: 2 * INTERMEDIATE, **alone}]


def _layers(
    number: int, options: dict[str, Any], layout: str = "stacked", **own: Any
) -> tuple[Any, Any]:
    """Megatron's, and uniep's with its shared experts in the pass; the same weights."""
    torch.manual_seed(number)
    theirs = make_layer(make_config(**options))
    ours = make_layer(make_config(**options), layout=layout, shared_experts="fused", **own)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def _of_shared(layer: Any, attribute: str) -> list[Tensor]:
    return [getattr(param, attribute).clone() for param in layer.shared_experts.parameters()]


def case_shared_experts_in_the_pass() -> None:
    """Outputs and all gradients are near Megatron's; the module itself never runs."""
    for number, options in enumerate(_kinds()):
        for layout in ("stacked", "per_expert"):
            theirs, ours = _layers(number, options, layout)
            ours.shared_experts.register_forward_hook(_never)
            wanted = run_layer(theirs, make_tokens(number))
            found = run_layer(ours, make_tokens(number))
            what = f"shared experts {number}, {layout}"
            # Of several, each is rounded before they are added up.
            limit = OUTPUT if options[_WIDTH] == INTERMEDIATE else OTHER_OUTPUT
            expect_close(found[0], wanted[0], limit, f"out, {what}")
            expect_close(found[1], wanted[1], GRADIENT, f"dx, {what}")
            for take in (of_experts, _of_shared):
                for own, other in zip(take(ours, "grad"), take(theirs, "grad"), strict=True):
                    expect_close(own, other, GRADIENT, f"gradient {list(own.shape)}, {what}")


def _never(*_: Any) -> None:
    raise AssertionError("the shared experts ran apart")


def case_shared_experts_have_the_bits_of_plain() -> None:
    import uniep.plain

    for number, options in enumerate([*_kinds(), _KINDS[1]]):
        groups = 1 if number < len(_kinds()) else 2  # beside the pass
        _, ours = _layers(number, options, combine_groups=groups)
        args, given, out = _call_of(ours, number)
        shared = {name: given[name] for name in given if name.startswith("shared")}
        plain = uniep.plain.moe(
            *args,
            ascending=True,
            activation=ours.experts.routed.activation,
            group=ours.experts.routed.group,
            combine_groups=groups,
            **shared,
        )
        expect_same([out], [plain], f"plain, shared experts {number}")
        if options[_WIDTH] == INTERMEDIATE:  # read where it lies
            module = ours.shared_experts
            for name, linear in (("w1", module.linear_fc1), ("w2", module.linear_fc2)):
                assert shared[f"shared_{name}"].data_ptr() == linear.weight.data_ptr()


def _call_of(layer: Any, number: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """What a forward gives to uniep.moe, and gets."""
    import uniep

    calls: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = []
    own_moe = uniep.moe

    def watched(*args: Any, **given: Any) -> Tensor:
        calls.append((args, given, own_moe(*args, **given)))
        return calls[-1][2]

    uniep.moe = watched
    try:
        layer(make_tokens(number))
    finally:
        uniep.moe = own_moe
    assert len(calls) == 1
    return calls[0]


def case_shared_experts_in_main_grads() -> None:
    """main_grad has the bits of grad, where both begin with nothing."""
    for number, options in enumerate([*_KINDS[:2], _KINDS[1]]):
        groups = 1 + number // 2
        _, plain = _layers(number, options, combine_groups=groups)
        out = run_layer(plain, make_tokens())
        _, ours = _layers(number, options, combine_groups=groups)
        ours.config.gradient_accumulation_fusion = True
        for param in (*ours.experts.parameters(), *ours.shared_experts.parameters()):
            param.main_grad = torch.zeros_like(param)
        expect_same(run_layer(ours, make_tokens()), out, "fused accumulation")
        expect_same(of_experts(ours, "main_grad"), of_experts(plain, "grad"), "dw")
        module, other = ours.shared_experts, plain.shared_experts
        for name in ("linear_fc1", "linear_fc2"):
            weight = getattr(module, name).weight
            expect_same([weight.main_grad], [getattr(other, name).weight.grad], name)
            assert weight.grad_added_to_main_grad
        if options.get("moe_shared_expert_gate"):  # which PyTorch computes
            expect_same([module.gate_weight.grad], [other.gate_weight.grad], "gate")


def case_shared_experts_that_are_refused() -> None:
    def refused(kind: Any, sentence: str, changed: str = "", **options: Any) -> None:
        config = make_config(**options)
        if changed:  # Megatron itself asks for others beside it
            setattr(config, changed, True)
        expect_raises(kind, sentence, make_layer, config, shared_experts="fused")

    refused(ValueError, f"{_WIDTH} is None; with shared_experts='fused'")
    refused(NotImplementedError, "the shared experts have 32 columns, and each", **{_WIDTH: 32})
    for option in ("delay_wgrad_compute", "overlap_moe_expert_parallel_comm"):
        words = f"{option} is True; with shared_experts='fused' it must be False"
        refused(ValueError, words, option, **_KINDS[0])
    graphs = make_config(**_KINDS[0])
    graphs.cuda_graph_impl = "transformer_engine"
    graphs.cuda_graph_modules = graphs.cuda_graph_scope = ["attn", "moe_router"]
    words = "cuda_graph_impl is 'transformer_engine' with 'moe_router'"
    expect_raises(ValueError, words, make_layer, graphs, shared_experts="fused")
    expect_raises(
        ValueError,
        "shared_experts is 'within'; it must be 'apart' or 'fused'",
        make_layer,
        make_config(),
        shared_experts="within",
    )
    _, ours = _layers(0, _KINDS[2])
    ours.config.gradient_accumulation_fusion = True
    for param in ours.parameters():
        param.main_grad = torch.zeros_like(param)
    expect_raises(ValueError, "the shared experts are 2 of the routed ones'", ours, make_tokens())
