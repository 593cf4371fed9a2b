"""The layer beside Megatron's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megatron_cases.support import (
    EXPERTS,
    GRADIENT,
    HIDDEN,
    KINK_GRADIENT,
    MODEL_GRADIENT,
    OTHER_OUTPUT,
    OUTPUT,
    expect_close,
    expect_raises,
    expect_same,
    gathered,
    make_config,
    make_layer,
    make_pair,
    make_spec,
    make_tokens,
    of_experts,
    other_experts,
    run_layer,
    text,
)
from uniep.arithmetic import Arithmetic

_ROUTERS: list[dict[str, Any]] = [
    {},
    {"moe_router_topk": 4, "moe_shared_expert_intermediate_size": 32, "moe_aux_loss_coeff": 1e-2},
    {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk": 3,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": False,
    },
    {"moe_router_dtype": None, "moe_router_pre_softmax": True},
]


def case_equals_megatron() -> None:
    for number, router in enumerate(_ROUTERS):
        for layout in ("stacked", "per_expert"):
            theirs, ours = make_pair(number, layout=layout, **router)
            wanted, found = (
                run_layer(theirs, make_tokens(number)),
                run_layer(ours, make_tokens(number)),
            )
            what = f"router {number}, {layout}"
            expect_close(found[0], wanted[0], OUTPUT, f"out, {what}")
            expect_close(found[1], wanted[1], GRADIENT, f"dx, {what}")
            for gradient, own in zip(
                of_experts(theirs, "grad"), of_experts(ours, "grad"), strict=True
            ):
                expect_close(own, gradient, GRADIENT, f"dw, {what}")
            expect_close(
                ours.router.weight.grad, theirs.router.weight.grad, GRADIENT, f"router, {what}"
            )
            if theirs.shared_experts is not None:
                for own, other in zip(
                    ours.shared_experts.parameters(),
                    theirs.shared_experts.parameters(),
                    strict=True,
                ):
                    expect_same([own.grad], [other.grad], f"shared experts, {what}")


def case_other_experts() -> None:
    torch.compiler.set_stance("force_eager")  # Megatron compiles its activations
    layers = []  # all at once: none takes the workspace of another kind
    for activation, options in other_experts().items():
        for layout in ("stacked", "per_expert"):
            theirs, ours = make_pair(layout=layout, **options)
            layers.append(ours)
            wanted, found = run_layer(theirs, make_tokens()), run_layer(ours, make_tokens())
            what = f"{activation}, {layout}"
            workspace = ours.experts.routed.workspace.arithmetic
            bias = bool(options.get("add_bias_linear"))
            assert workspace == Arithmetic(activation, "before", bias), workspace
            expect_close(found[0], wanted[0], OTHER_OUTPUT, f"out, {what}")
            # At relu's kink, and at limits, a rounding of h decides.
            limit = (
                KINK_GRADIENT if activation in ("reglu", "gpt_oss", "swiglu_clamped") else GRADIENT
            )
            expect_close(found[1], wanted[1], limit, f"dx, {what}")
            theirs_grads, own_grads = of_experts(theirs, "grad"), of_experts(ours, "grad")
            assert len(own_grads) == (4 if bias else 2)
            for gradient, own in zip(theirs_grads, own_grads, strict=True):
                expect_close(own, gradient, limit, f"gradient {list(own.shape)}, {what}")
            expect_close(
                ours.router.weight.grad, theirs.router.weight.grad, limit, f"router, {what}"
            )


def case_biases_in_main_grads() -> None:
    """Main gradients and delayed ones are those of a plain backward, for biases too."""
    for layout, delay in ((a, b) for a in ("stacked", "per_expert") for b in (False, True)):
        what = f"{layout} {delay=}"
        _, plain = make_pair(layout=layout, add_bias_linear=True)
        out = run_layer(plain, make_tokens())
        wanted = of_experts(plain, "grad")
        for fused in (False, True):
            _, ours = make_pair(layout=layout, add_bias_linear=True)
            ours.config.gradient_accumulation_fusion = fused
            ours.config.delay_wgrad_compute = delay
            if fused:
                for linear in (ours.experts.linear_fc1, ours.experts.linear_fc2):
                    for kind in ("weight", "bias"):
                        params = list(linear.named(kind).values())
                        grads = torch.zeros(len(params), *params[0].shape, dtype=torch.bfloat16)
                        for param, grad in zip(params, grads, strict=True):
                            param.main_grad = grad
            expect_same(run_layer(ours, make_tokens()), out, what)
            if delay:
                assert fused or all(param.grad is None for param in ours.experts.parameters())
                ours.experts.backward_dw()
            expect_same(
                of_experts(ours, "main_grad" if fused else "grad"), wanted, f"{what} {fused=}"
            )


def case_what_optimizers_see() -> None:
    """Muon takes what has two dimensions; biases of experts are no ranks' parts of one."""
    seen = {}
    for layout in ("megatron", "stacked", "per_expert"):
        config = make_config(add_bias_linear=True)
        config.sequence_parallel = True  # as it is with tensor parallelism
        layer = make_layer(config) if layout == "megatron" else make_layer(config, layout=layout)
        named = list(layer.experts.named_parameters())
        seen[layout] = {
            (kind, param.dim(), getattr(param, "sequence_parallel", False))
            for name, param in named
            for kind in ("fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias")
            if kind in name
        }
    names = ("fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias")
    for layout, dims in (("stacked", (3, 3, 2, 2)), ("per_expert", (2, 2, 1, 1))):
        assert seen[layout] == {(name, dim, False) for name, dim in zip(names, dims, strict=True)}
    # Where Megatron no longer says so, docs/megatron.md need not warn.
    assert seen["megatron"] - seen["per_expert"] == {("fc2.bias", 1, True)}


def case_layouts_have_the_same_bits() -> None:
    results = []
    for layout in ("stacked", "per_expert"):
        _, ours = make_pair(layout=layout)
        results.append([*run_layer(ours, make_tokens()), *of_experts(ours, "grad")])
    expect_same(results[0], results[1], "layouts")


def case_row_pool() -> None:
    """Layers of a shape share one; with their backward all pages are free again."""
    _, ours = make_pair()
    wanted = [*run_layer(ours, make_tokens()), *of_experts(ours, "grad")]
    for save in ("rows", "tokens"):
        layers = [make_layer(make_config(), save=save, row_pool=1 << 21) for _ in range(2)]
        results = []
        for layer in layers:
            layer.load_state_dict(ours.state_dict())
            results.append([*run_layer(layer, make_tokens()), *of_experts(layer, "grad")])
        first, other = (layer.experts.routed.workspace for layer in layers)
        assert first.pages is other.pages, "not shared"
        (pool,) = (p for p in first.group.row_pools.values() if p.memory is first.pages)
        assert pool.free_pages == pool.pages > pool.fewest_free_pages
        for found in results:
            expect_same(found, wanted, f"save={save}")


def case_backward_rows() -> None:
    """Experts take turns in memory for fewer rows, a workspace of its own; the same bits."""
    _, ours = make_pair()
    wanted = [*run_layer(ours, make_tokens()), *of_experts(ours, "grad")]
    layers = [make_layer(make_config(), backward_rows=rows) for rows in (0, 256)]
    for layer in layers:
        layer.load_state_dict(ours.state_dict())
        expect_same(
            [*run_layer(layer, make_tokens()), *of_experts(layer, "grad")], wanted, "backward_rows"
        )
    every, fewer = (layer.experts.routed.workspace for layer in layers)
    assert fewer.backward_rows == 256
    assert fewer.backward_bytes < every.backward_bytes
    delayed = make_config()
    delayed.delay_wgrad_compute = True
    sentence = "backward_rows is 256; where delay_wgrad_compute is True"
    expect_raises(ValueError, sentence, make_layer, delayed, backward_rows=256)


def case_dropped_routes() -> None:
    """moe_expert_capacity_factor without padding: the router drops routes, uniep takes the rest."""
    from uniep.megatron import UniepMoELayer

    config = make_config(moe_token_dispatcher_type="alltoall", moe_expert_capacity_factor=0.5)
    torch.manual_seed(3)
    layer = make_layer(config, layout="stacked")
    assert isinstance(layer, UniepMoELayer)
    found = run_layer(layer, make_tokens())
    probs, routing_map = layer.route(make_tokens())
    assert int((routing_map.sum(1) < config.moe_router_topk).sum()) > 0, "nothing was dropped"
    w1, w2 = gathered(of_experts(layer, "data"))
    x = make_tokens().view(-1, HIDDEN)
    wanted = torch.zeros(len(x), HIDDEN)
    for expert in range(EXPERTS):
        rows = routing_map[:, expert]
        gate, up = (x[rows].float() @ w1[expert].float().t()).chunk(2, 1)
        a = probs[rows, expert, None].float() * F.silu(gate) * up
        wanted[rows] += a @ w2[expert].float().t()
    expect_close(found[0].view(-1, HIDDEN), wanted.detach(), 1e-2, "out with dropped routes")


def case_model_equals_megatron() -> None:
    """Loss and gradients of a GPTModel with dense and MoE layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from uniep.megatron import UniepMoELayer, with_uniep

    models = []
    for ours in (False, True):
        torch.manual_seed(3)
        config = make_config(
            num_layers=3, moe_layer_freq=[0, 1, 1], moe_shared_expert_intermediate_size=32
        )
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        spec = with_uniep(spec) if ours else spec
        model = GPTModel(config, spec, 128, 32, position_embedding_type="rope").bfloat16()
        assert isinstance(model.decoder.layers[1].mlp, UniepMoELayer) == ours
        models.append(model)
    theirs, ours_model = models
    ours_model.load_state_dict(theirs.state_dict())
    losses = []
    for model in models:
        loss = model(**text(0)).float().mean()
        loss.backward()
        losses.append(loss.detach())
    expect_close(losses[1], losses[0], 1e-3, "loss")
    gradients = {name: param.grad for name, param in theirs.named_parameters()}
    for name, param in ours_model.named_parameters():
        assert param.grad is not None, name
        if name in gradients:
            expect_close(param.grad, gradients[name], MODEL_GRADIENT, f"gradient of {name}")
    for layer, other in zip(ours_model.decoder.layers[1:], theirs.decoder.layers[1:], strict=True):
        for own, gradient in zip(
            of_experts(layer.mlp, "grad"), of_experts(other.mlp, "grad"), strict=True
        ):
            expect_close(own, gradient, MODEL_GRADIENT, "gradient of experts in a model")


def case_groups_that_a_model_is_given() -> None:
    """Megatron hands them to MoELayer itself, but not to a class that is derived from it."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    from uniep.megatron import with_uniep

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.ep = groups.tp_ep = groups.expt_tp = alone
    groups.expt_dp = dist.group.WORLD
    config = make_config(expert_model_parallel_size=1)
    spec = with_uniep(make_spec(), pg_collection=groups)
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups).mlp
    assert layer.ep_group is alone
    assert layer.num_local_experts == EXPERTS
    if dist.get_world_size() == 1:
        return
    expect_raises(
        ValueError,
        "pg_collection",
        build_module,
        with_uniep(make_spec()),
        config=config,
        layer_number=1,
        pg_collection=groups,
    )


def case_evaluation() -> None:
    _, ours = make_pair()
    wanted = ours(make_tokens())[0].detach()
    with torch.no_grad():
        expect_same([ours(make_tokens())[0]], [wanted], "under no_grad")
    ours.eval()
    expect_same([ours(make_tokens())[0].detach()], [wanted], "in eval")
    for param in ours.experts.parameters():
        param.requires_grad_(False)
    ours.train()
    run_layer(ours, make_tokens())
    assert all(param.grad is None for param in ours.experts.parameters()), "frozen experts"


def case_recompute() -> None:
    """recompute_modules "moe" gives the bits of a layer without, and "moe_act" changes nothing."""
    results = []
    for modules in ([], ["moe"], ["moe_act"]):
        config = make_config(moe_grouped_gemm=True)
        torch.manual_seed(1)
        if modules:
            config.recompute_granularity, config.recompute_modules = "selective", modules
        ours = make_layer(config, layout="stacked")
        assert ours.moe_layer_recompute == (modules == ["moe"])
        results.append(
            [*run_layer(ours, make_tokens()), *of_experts(ours, "grad"), ours.router.weight.grad]
        )
    for recomputed in results[1:]:
        expect_same(recomputed, results[0], "recomputed")


def case_combine_groups() -> None:
    """The layer is given them, and its sums are others."""
    torch.manual_seed(1)
    one = make_layer(make_config())
    groups = make_layer(make_config(), combine_groups=4, combine_partials="bf16")
    groups.load_state_dict(one.state_dict())
    found, wanted = run_layer(groups, make_tokens())[0], run_layer(one, make_tokens())[0]
    arithmetic = groups.experts.routed.workspace.arithmetic
    assert arithmetic == Arithmetic(combine_groups=4, combine_partials="bf16"), arithmetic
    assert not torch.equal(found, wanted)
    expect_close(found, wanted, OUTPUT, "out")


def case_fsdp2() -> None:
    """Parameters that FSDP2 has put in the place of others are what is run and trained."""
    subgroup, _ = dist.new_subgroups(1)
    for layout in ("stacked", "per_expert"):
        results = []
        for sharded in (False, True):
            _, ours = make_pair(layout=layout)
            ours.bfloat16()
            if sharded:
                fully_shard(ours, mesh=DeviceMesh.from_group(subgroup, "cpu"))
            optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
            for step in range(2):
                x = make_tokens(step)
                out, _ = ours(x)
                out.float().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            wanted = [w.clone() for w in ours.state_dict().values() if isinstance(w, Tensor)]
            ours.load_state_dict(ours.state_dict())
            loaded = [w for w in ours.state_dict().values() if isinstance(w, Tensor)]
            expect_same(loaded, wanted, f"its own state, {layout}")
            results.append([out.detach(), *(w.detach() for w in of_experts(ours, "data"))])
        plain, found = results
        whole = [getattr(tensor, "full_tensor", lambda t=tensor: t)() for tensor in found]
        expect_same(whole, plain, f"FSDP2, {layout}")
