"""A small GPT of Megatron-Core on GPUs: its own MoE layers beside uniep's, step by step.

    pip install megatron-core
    python examples/megatron_gpt.py
    export UNIEP_SPARE_SMS=16 NCCL_MAX_CTAS=16 NCCL_CGA_CLUSTER_SIZE=0
    torchrun --nproc_per_node=2 examples/megatron_gpt.py
    torchrun --nproc_per_node=4 examples/megatron_gpt.py --pipeline 2 --microbatches 4

Experts are spread over the GPUs of a pipeline stage. All else is Megatron's: its schedules, data
parallelism and distributed optimizer. Gradients are reduced under backward, which is what the
variables are for (docs/parallelism.md). Prints the mean losses of each model, which agree to
roundings, and the time of a step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from uniep.megatron import with_uniep

EXPERTS, LAYERS, VOCABULARY, LENGTH, BATCH, STEPS = 16, 2, 1024, 512, 8, 12
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29534",
}


def join(pipeline: int) -> None:
    """The ranks that torchrun started, or this process alone, as so many pipeline stages."""
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=dist.get_world_size() // pipeline,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def make_model(spec: Any, pipeline: int) -> DistributedDataParallel:
    """The stage that this rank has of a model whose MLPs are `spec`'s."""
    config = TransformerConfig(
        num_layers=LAYERS * pipeline,
        hidden_size=1024,
        num_attention_heads=8,
        ffn_hidden_size=512,
        moe_ffn_hidden_size=512,
        num_moe_experts=EXPERTS,
        moe_router_topk=4,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=512,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=dist.get_world_size() // pipeline,
        expert_tensor_parallel_size=1,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        use_distributed_optimizer=True,
        bucket_size=1 << 20,
    )
    wrapped = DistributedDataParallel(config, options, Float16Module(config, model.cuda()))
    config.no_sync_func = wrapped.no_sync
    return wrapped


def forward_step(data: Iterator[Tensor], model: DistributedDataParallel) -> tuple[Tensor, Any]:
    """What Megatron's schedules call for each microbatch."""
    ids = next(data)
    positions = torch.arange(LENGTH, device="cuda").expand(BATCH, LENGTH)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, device="cuda", dtype=torch.bool).triu(1)

    def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return model(ids, positions, hidden, labels=ids), loss_of


def train(model: DistributedDataParallel, microbatches: int) -> tuple[list[float], float]:
    """Losses of all steps on random tokens, and milliseconds of a step; of the last stage."""
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(options, [model], use_gloo_process_groups=False)
    rank = parallel_state.get_data_parallel_rank()  # all stages of a pipeline see the same tokens
    generator = torch.Generator(device="cuda").manual_seed(1 + rank)
    shape = (microbatches, BATCH, LENGTH)
    losses, seconds = [], []
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, shape, device="cuda", generator=generator)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(ids),
            model=[model],
            num_microbatches=microbatches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
        )
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        if found:
            mean = torch.stack([entry["loss"] for entry in found]).mean()
            dist.all_reduce(mean, dist.ReduceOp.AVG, parallel_state.get_data_parallel_group())
            losses.append(mean.item())
    return losses, 1e3 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages (default 1)")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step (default 1)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    join(args.pipeline)

    def spec() -> Any:
        return get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)

    own = make_model(spec(), args.pipeline)
    models = {"Megatron": own}
    for name, options in {"uniep": {}, "uniep, shared fused": {"shared_experts": "fused"}}.items():
        models[name] = make_model(with_uniep(spec(), **options), args.pipeline)
        models[name].load_state_dict(own.state_dict())
    for name, model in models.items():
        losses, ms = train(model, args.microbatches)
        if dist.get_rank() == dist.get_world_size() - 1:  # of the last stage
            print(f"{name:20s} {ms:7.1f} ms a step, losses", " ".join(f"{x:.4f}" for x in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
