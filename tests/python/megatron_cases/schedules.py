"""Schedules that compute parts of a layer apart."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cases.on_cpu import OnCpu
from megatron_cases.support import (
    expect_same,
    in_ddp,
    make_config,
    make_layer,
    make_pair,
    make_tokens,
    text,
)


def case_overlapped_schedule() -> str | None:
    """Megatron's 1F1B overlap, which frees inputs, with and without delay_wgrad_compute."""
    if dist.get_world_size() == 1:
        return "skipped: overlap_moe_expert_parallel_comm needs two ranks"
    try:
        from megatron.core.models.common.model_chunk_schedule_plan import (
            TransformerModelChunkSchedulePlan as Plan,
        )
    except ImportError:
        return "skipped: this megatron-core has another module for it"
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.pipeline_parallel.utils import set_streams

    from uniep.megatron import with_uniep

    set_streams()

    def build(layout: str, overlap: bool, fused: bool, delay: bool, **options: Any) -> Any:
        torch.manual_seed(3)
        config = make_config(
            num_layers=2,
            moe_layer_freq=[0, 1],
            moe_token_dispatcher_type="alltoall",
            overlap_moe_expert_parallel_comm=overlap,
            delay_wgrad_compute=delay,
        )
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        spec = with_uniep(spec, layout=layout, **options)
        model = GPTModel(config, spec, 128, 32, position_embedding_type="rope").bfloat16()
        config.gradient_accumulation_fusion = fused
        for name in ("linear_fc1", "linear_fc2") if fused else ():
            params = list(getattr(model.decoder.layers[1].mlp.experts, name).named().values())
            whole = torch.zeros(len(params), *params[0].shape)
            for param, grad in zip(params, whole, strict=True):
                param.main_grad = grad
        return model

    for layout, fused, delay, options in (
        ("stacked", True, True, {}),
        ("stacked", False, True, {"save": "none"}),
        ("stacked", False, False, {"save": "none", "row_pool": 1 << 22}),
        ("per_expert", True, True, {"save": "tokens"}),
        ("per_expert", False, True, {}),
    ):
        plain = build(layout, False, fused, False)
        wanted = []
        for step in range(2):
            loss = plain(**text(step)).float()
            loss.backward(torch.ones_like(loss))
            wanted.append(loss.detach())
        model = build(layout, True, fused, delay, **options)
        first, second = (model.build_schedule_plan(**text(step)) for step in range(2))
        one = Plan.run(first, None)
        other = Plan.run(second, first, b_grad=torch.ones_like(one))
        Plan.run(None, second, b_grad=torch.ones_like(other))
        what = f"{layout} {fused=} {delay=} {options}"
        expect_same([one.detach(), other.detach()], wanted, f"losses, {what}")
        for (name, param), reference in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            for attribute in ("grad", "main_grad"):
                pair = [getattr(p, attribute, None) for p in (param, reference)]
                assert (pair[0] is None) == (pair[1] is None), f"{attribute} of {name}, {what}"
                if pair[0] is not None:
                    expect_same([pair[0]], [pair[1]], f"{attribute} of {name}, {what}")
    return None


def case_whole_steps_of_overlapped_schedules() -> str | None:
    """Megatron's steps with 1F1B overlap and delayed gradients have the bits of plain ones."""
    if dist.get_world_size() == 1:
        return "skipped: overlap_moe_expert_parallel_comm needs two ranks"
    if importlib.util.find_spec("megatron.core.pipeline_parallel.combined_1f1b") is None:
        return "skipped: this megatron-core has no such schedule"
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.utils import set_streams
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from uniep.megatron import with_uniep

    set_streams()
    # One that a backward outside of a step has made has another shape, which a step refuses.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None

    def build(fused: bool, delay: bool) -> Any:
        torch.manual_seed(3)
        config = make_config(
            num_layers=2,
            moe_layer_freq=[0, 1],
            moe_token_dispatcher_type="alltoall",
            overlap_moe_expert_parallel_comm=delay,
            delay_wgrad_compute=delay,
            finalize_model_grads_func=finalize_model_grads,
        )
        spec = with_uniep(get_gpt_decoder_block_spec(config, use_transformer_engine=False))
        model = GPTModel(config, spec, 128, 32, position_embedding_type="rope").bfloat16()
        config.gradient_accumulation_fusion = fused
        model = in_ddp(model, fp32=True, distributed=True, delay=delay, overlap=True)
        config.no_sync_func = model.no_sync
        return model

    def forward_step(data: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        def loss_of(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}

        of = model.build_schedule_plan if return_schedule_plan else model
        return of(**next(data)), loss_of

    def step(model: Any) -> list[Tensor]:
        """Losses of three microbatches, and all main gradients."""
        model.zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([text(number) for number in range(3)]),
            model=[model],
            num_microbatches=3,
            seq_length=32,
            micro_batch_size=2,
            forward_only=False,
        )
        grads = [param.main_grad for param in model.parameters()]
        assert all(grad.any() for grad in grads)
        return [*(loss["loss"] for loss in losses), *grads]

    with OnCpu():
        for fused in (False, True):
            expect_same(step(build(fused, True)), step(build(fused, False)), f"steps, {fused=}")
    return None


def case_parts_of_a_captured_layer() -> None:
    """Router, experts and the rest as three calls, as Megatron's partial CUDA graphs make them."""
    _, ours = make_pair(moe_shared_expert_intermediate_size=32)
    wanted = ours(make_tokens())[0]
    assert ours.token_dispatcher.cudagraph_attrs == ["topk_ids"]
    ours.fwd_execution_map = ["route"]
    hidden, probs, shared = ours(make_tokens(), intermediate_tensors=())
    kept = ours.token_dispatcher.topk_ids
    ours.token_dispatcher.topk_ids = None
    ours.token_dispatcher.topk_ids = kept.clone()  # as a graph's replay hands it back
    ours.fwd_execution_map = ["expert_compute"]
    out, _ = ours(None, intermediate_tensors=(hidden, probs))
    ours.fwd_execution_map = ["postprocess"]
    expect_same([ours(None, intermediate_tensors=(out, shared))], [wanted], "three calls")


def case_graphs_whose_inputs_are_freed() -> None:
    """Megatron's graph of the router may free the norm's output, which experts are to outlive."""

    def shares_memory(**options: Any) -> bool:
        layer = make_layer(make_config(), layout="stacked")
        for name, value in options.items():  # as Megatron takes them with Transformer Engine
            setattr(layer.config, name, value)
        x = make_tokens()
        tokens, _ = layer.token_dispatcher.dispatch_preprocess(x, *_routed(layer, x))
        expect_same([tokens], [x.reshape(tokens.shape)], "tokens")
        return tokens.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()

    graphs = {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": ["moe_router", "moe_preprocess"],
        "cuda_graph_scope": ["moe_router", "moe_preprocess"],
    }
    freed = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    assert shares_memory() and shares_memory(**graphs) and shares_memory(**freed)
    assert not shares_memory(**graphs, **freed)


def _routed(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The map of routes and the probabilities, as dispatchers take them."""
    probs, routing_map = layer.router(x)
    return routing_map, probs
