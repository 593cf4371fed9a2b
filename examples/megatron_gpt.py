"""A small GPT of Megatron-Core on GPUs: its own MoE layers beside uniep's, step by step.

    pip install megatron-core
    python examples/megatron_gpt.py
    UNIEP_SPARE_SMS=16 NCCL_MAX_CTAS=16 torchrun --nproc_per_node=2 examples/megatron_gpt.py

With several GPUs experts are spread over them. Megatron's own data parallelism and distributed
optimizer do the rest; gradients are reduced under backward, which is what the two variables are for
(docs/python.md, "Beside other parallelism"). Prints the mean losses of each model, which agree to
roundings, and the time of a step.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
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
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from uniep.megatron import with_uniep

EXPERTS, VOCABULARY, LENGTH, BATCH, STEPS = 16, 1024, 512, 8, 12
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29534",
}


def join() -> None:
    """The ranks that torchrun started, or this process alone."""
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def make_model(spec: Any) -> DistributedDataParallel:
    """Two layers whose MLPs are `spec`'s, spread over the ranks."""
    config = TransformerConfig(
        num_layers=2,
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
        attention_dropout=0.0,
        hidden_dropout=0.0,
        expert_model_parallel_size=dist.get_world_size(),
        expert_tensor_parallel_size=1,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
    )
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        use_distributed_optimizer=True,
        bucket_size=1 << 20,
    )
    return DistributedDataParallel(config, options, Float16Module(config, model.cuda()))


def train(model: DistributedDataParallel) -> tuple[list[float], float]:
    """Losses of all steps on random tokens, and milliseconds of a step."""
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(options, [model], use_gloo_process_groups=False)
    generator = torch.Generator(device="cuda").manual_seed(1 + dist.get_rank())
    positions = torch.arange(LENGTH, device="cuda").expand(BATCH, LENGTH)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, device="cuda", dtype=torch.bool).triu(1)
    losses, seconds = [], []
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH), device="cuda", generator=generator)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(ids, positions, hidden, labels=ids).float().mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses, 1e3 * statistics.median(seconds)


def main() -> None:
    warnings.simplefilter("ignore")
    join()

    def spec() -> Any:
        return get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)

    own = make_model(spec())
    models = {"Megatron": own}
    for name, options in {"uniep": {}, "uniep, shared fused": {"shared_experts": "fused"}}.items():
        models[name] = make_model(with_uniep(spec(), **options))
        models[name].load_state_dict(own.state_dict())
    for name, model in models.items():
        losses, ms = train(model)
        if dist.get_rank() == 0:
            print(f"{name:20s} {ms:7.1f} ms a step, losses", " ".join(f"{x:.4f}" for x in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
