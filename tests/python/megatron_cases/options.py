"""Options, specs, routes and capacity."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_cases.support import (
    EXPERTS,
    expect_raises,
    expect_same,
    make_config,
    make_layer,
    make_pair,
    make_spec,
    make_tokens,
    run_layer,
)


def case_refused_options() -> None:
    """Each gives a sentence with option, value and what is accepted, when the layer is built."""
    from megatron.core.activations import quick_gelu
    from megatron.core.transformer.transformer_config import TransformerConfig

    refused: list[tuple[dict[str, Any], list[str]]] = [
        ({"activation_func": F.mish}, ["activation_func is mish", "'silu', 'gelu', 'relu'"]),
        (
            {"activation_func": F.relu, "gated_linear_unit": False},
            ["activation_func is relu", "'squared_relu'", "gated_linear_unit is False"],
        ),
        (
            {"activation_func": quick_gelu},
            ["glu_linear_offset is 0.0", "1.0 where activation_func is quick_gelu"],
        ),
        ({"glu_linear_offset": 1.0}, ["glu_linear_offset is 1.0", "0.0"]),
        (
            {"activation_func_clamp_value": 7.0},
            ["activation_func_clamp_value is 7.0", "None or 10.0"],
        ),
        ({"moe_mlp_glu_interleave_size": 32}, ["moe_mlp_glu_interleave_size is 32", "None"]),
        ({"fp8": "hybrid"}, ["fp8 is hybrid", "None"]),
        ({"fp4": "e2m1"}, ["fp4 is e2m1", "None"]),
        ({"params_dtype": torch.float32, "bf16": False}, ["params_dtype is torch.float32"]),
        ({"expert_tensor_parallel_size": 2}, ["expert_tensor_parallel_size is 2", "1"]),
        ({"expert_gtp_weight_remat_size": 2}, ["expert_gtp_weight_remat_size is 2", "1"]),
        ({"moe_latent_size": 32}, ["moe_latent_size is 32", "None"]),
        ({"moe_apply_probs_on_input": True}, ["moe_apply_probs_on_input is True", "False"]),
        (
            {"moe_pad_expert_input_to_capacity": True},
            ["moe_pad_expert_input_to_capacity is True", "False"],
        ),
        (
            {"moe_router_padding_for_quantization": True},
            ["moe_router_padding_for_quantization is True", "False"],
        ),
        ({"moe_shared_expert_overlap": True}, ["moe_shared_expert_overlap is True", "False"]),
        ({"moe_paged_stash": True}, ["moe_paged_stash is True", "False"]),
        (
            {"overlap_dispatch_backward_with_experts_wgrad": True},
            ["overlap_dispatch_backward_with_experts_wgrad is True", "False"],
        ),
        (
            {"transformer_impl": "inference_optimized"},
            ["transformer_impl is inference_optimized", "local or transformer_engine"],
        ),
        (
            {"cuda_graph_impl": "local", "cuda_graph_modules": [], "cuda_graph_scope": []},
            ["cuda_graph_modules is []", "cuda_graph_impl is 'local'", "full_iteration"],
        ),
        (
            {
                "cuda_graph_impl": "transformer_engine",
                "cuda_graph_modules": ["attn", "moe"],
                "cuda_graph_scope": ["attn", "moe"],
            },
            ["cuda_graph_modules is ['attn', 'moe']", "moe_router"],
        ),
        (
            {"overlap_moe_expert_parallel_comm": True, "moe_token_dispatcher_type": "flex"},
            ["moe_token_dispatcher_type is flex", "alltoall"],
        ),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]},
            ["offload_modules is ['moe_act']", "without them"],
        ),
    ]
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    tried = 0
    for options, words in refused:
        config = make_config()
        options = {name: value for name, value in options.items() if name in known}
        if not options:
            continue  # another version's
        for name, value in options.items():  # as Megatron itself accepts them with other options
            setattr(config, name, value)
        message = expect_raises(ValueError, words[0], make_layer, config, layout="stacked")
        assert all(word in message for word in words), f"{words} are not all in: {message}"
        assert "must be" in message, message
        tried += 1
    assert tried >= 15, f"{tried} options are known to this megatron-core"
    wrong = "layout is 'per-expert'; it must be 'stacked' or 'per_expert'"
    expect_raises(ValueError, wrong, make_layer, make_config(), layout="per-expert")

    for options in (
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_router"]},
        {"use_te_activation_func": True, "moe_permute_fusion": True},
    ):
        config = make_config()
        for name, value in options.items():
            setattr(config, name, value)
        if "cuda_graph_modules" in options and "cuda_graph_modules" not in known:
            config.cuda_graph_scope = options["cuda_graph_modules"]
        make_layer(config, layout="stacked")


def case_specs() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from uniep.megatron import UniepExperts, with_uniep

    def submodules(mlp: Any) -> Any:
        return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules

    spec = make_spec()
    before = copy.deepcopy(spec.submodules.mlp)
    changed = with_uniep(spec, max_tokens=64)
    assert "UniepMoELayer" in str(changed.submodules.mlp)
    assert "Uniep" not in str(spec.submodules.mlp), "the spec itself was changed"
    assert str(before) == str(spec.submodules.mlp)
    experts = submodules(changed.submodules.mlp).experts
    assert experts.module is UniepExperts and experts.params == {"max_tokens": 64}

    config = make_config(num_layers=3, moe_layer_freq=[0, 1, 0])
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    layers = with_uniep(block).layer_specs
    assert ["Uniep" in str(layer) for layer in layers] == [False, True, False]

    expect_raises(TypeError, "unknown", with_uniep, spec, unknown=1)
    dense = get_gpt_decoder_block_spec(
        make_config(num_moe_experts=None, moe_ffn_hidden_size=None, expert_model_parallel_size=1),
        use_transformer_engine=False,
    )
    expect_raises(ValueError, "has no MoELayer", with_uniep, dense)
    expect_raises(ValueError, "derived from it", with_uniep, changed)
    other = with_uniep(spec)
    submodules(other.submodules.mlp).experts = submodules(spec.submodules.mlp).experts
    mlp = other.submodules.mlp
    from megatron.core.transformer.spec_utils import build_module

    build = mlp if callable(mlp) else lambda config: build_module(mlp, config=config)
    expect_raises(ValueError, "it must build UniepExperts", build, config=make_config())


def case_routes() -> None:
    from uniep.megatron import routes

    torch.manual_seed(5)
    tokens, topk = 40, 3
    routing_map = torch.zeros(tokens, EXPERTS, dtype=torch.bool)
    for token in range(tokens):
        count = token % (topk + 1)  # from none to all
        routing_map[token, torch.randperm(EXPERTS)[:count]] = True
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        probs = torch.rand(tokens, EXPERTS, dtype=dtype)
        probs[routing_map & (torch.rand(tokens, EXPERTS) < 0.2)] = 0  # a route with probability 0
        probs.requires_grad_()
        ids, weights = routes(probs, routing_map, topk)
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        gradient = torch.rand(tokens, topk)
        weights.backward(gradient)  # type: ignore[no-untyped-call]
        assert probs.grad is not None
        wanted = torch.zeros(tokens, EXPERTS, dtype=dtype)
        for token in range(tokens):
            experts = routing_map[token].nonzero().flatten().tolist()
            assert ids[token].tolist() == experts + [-1] * (topk - len(experts))
            for k, expert in enumerate(experts):
                assert weights[token, k] == probs[token, expert].float()
                wanted[token, expert] = gradient[token, k].to(dtype)
            assert not weights[token, len(experts) :].any()
        expect_same([probs.grad], [wanted], "gradient of probabilities")

    _, ours = make_pair()
    ours.route = lambda x, *_: (torch.rand(32, EXPERTS), torch.ones(32, EXPERTS, dtype=torch.bool))
    expect_raises(ValueError, f"a token has {EXPERTS} routes", ours, make_tokens())


def case_tokens_and_capacity() -> None:
    """Room is made for the largest rank; what does not fit is told by Megatron's own names."""
    from uniep.megatron.experts import _workspaces

    layers = [make_layer(make_config(), layout="stacked") for _ in range(2)]
    # Every rank has another number of tokens.
    lengths = [16 - 4 * dist.get_rank(), 8]
    for length in lengths:
        for layer in layers:
            run_layer(layer, make_tokens(length=length))
    assert layers[0].experts.routed.workspace is layers[1].experts.routed.workspace, "not shared"
    # Where Python has ended it on one rank only, as it may for layers that are no longer used, all
    # ranks make another.
    if dist.get_rank() == 0:
        _workspaces.clear()
    another = make_layer(make_config(), layout="stacked")
    run_layer(another, make_tokens())
    assert another.experts.routed.workspace is not layers[0].experts.routed.workspace
    if dist.get_world_size() > 1:  # whichever has too many, all hear of it
        last = dist.get_rank() == dist.get_world_size() - 1
        hint = "; give with_uniep(spec, max_tokens=...)"
        message = expect_raises(
            RuntimeError, hint, layers[0], make_tokens(length=20 if last else 8)
        )
        assert f"rank {dist.get_world_size() - 1}" in message, message
        run_layer(layers[0], make_tokens())
    else:
        run_layer(layers[0], make_tokens(length=20))

    torch.manual_seed(1)
    room = 128 * EXPERTS // dist.get_world_size()  # uniep rounds each expert's rows up to 128
    layer = make_layer(make_config(), on_overflow="flag", capacity_rows=room, max_tokens=512)
    dispatcher = layer.token_dispatcher
    assert dispatcher.check_over_budget() is None and dispatcher.check_required_capacity() is None
    with torch.no_grad():
        assert not layer(make_tokens())[0].isnan().any()
        assert dispatcher.check_over_budget().tolist() == [False]
        x = make_tokens(length=256)
        assert layer(x)[0].isnan().all(), "more rows than there is room for"
        assert dispatcher.check_over_budget().tolist() == [True]
        required = dispatcher.check_required_capacity()
        assert required.shape == (1,) and int(required) > room
        most = required.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dispatcher.grow_ep_recv_capacity(int(most))
        dispatcher.reset_over_budget()
        assert not layer(x)[0].isnan().any()
        assert dispatcher.check_over_budget().tolist() == [False]
        dispatcher.reset_over_budget()
        assert dispatcher.check_required_capacity().tolist() == [0]

        config = make_config()
        config.moe_expert_rank_capacity_factor = 1.5
        layer = make_layer(config, max_tokens=32)
        layer(make_tokens())
        rows = layer.experts.routed.workspace.rows
        assert rows >= 32 * 2 * 1.5, rows
        small = make_layer(make_config(), capacity_rows=1, max_tokens=32)
        expect_raises(RuntimeError, "capacity_rows is 1", small, make_tokens())


def case_a_pool_that_is_too_small() -> None:
    """It is over the budget, too, but more rows do not mend it."""
    layer = make_layer(make_config(), on_overflow="flag", row_pool=1 << 16)
    dispatcher = layer.token_dispatcher
    assert run_layer(layer, make_tokens())[0].isnan().all(), "more pages than the pool has"
    assert dispatcher.check_over_budget().tolist() == [True]
    expect_raises(
        RuntimeError, "with_uniep(spec, row_pool=...)", dispatcher.grow_ep_recv_capacity, 1024
    )
    dispatcher.reset_over_budget()
    dispatcher.grow_ep_recv_capacity(1024)
    assert layer.experts.routed.workspace.rows >= 1024


def case_padding_of_decoding() -> None:
    """Megatron's inference asks for it where the layer has long been built."""
    layer = make_layer(make_config(), layout="stacked")
    with torch.no_grad():
        layer(make_tokens())
        layer.token_dispatcher._checked = True  # as behind a first call on a GPU
        layer.config.moe_expert_capacity_factor = EXPERTS / 2
        layer.config.moe_pad_expert_input_to_capacity = True
        expect_raises(ValueError, "moe_pad_expert_input_to_capacity is True", layer, make_tokens())
        layer.config.moe_expert_capacity_factor = None
        layer.config.moe_pad_expert_input_to_capacity = False
        layer(make_tokens())
