"""A small Qwen3-MoE of transformers, its experts spread over ranks: its own, then uniep's.

    pip install transformers accelerate
    export UNIEP_SPARE_SMS=16 NCCL_MAX_CTAS=16 NCCL_CGA_CLUSTER_SIZE=0
    torchrun --nproc_per_node=2 examples/transformers_qwen3.py

All but the experts is sharded by FSDP2, as transformers does it. Its collectives run beside
uniep's passes, which is what the variables are for (docs/parallelism.md). Without GPUs it
runs on CPUs. Prints the mean losses of each model, which agree to roundings, and the time of a
step. Weights are bf16, which is enough to compare these; train in fp32 under autocast
(docs/transformers.md).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

import uniep.transformers

ON_GPUS = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPUS else "cpu"
VOCABULARY, BATCH, LENGTH, STEPS = 4096, 4, 512 if ON_GPUS else 32, 12
CONFIG = Qwen3MoeConfig(
    vocab_size=VOCABULARY,
    hidden_size=1024 if ON_GPUS else 64,
    moe_intermediate_size=512 if ON_GPUS else 32,
    num_experts=32,
    num_experts_per_tok=4,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
)


def join() -> None:
    """The ranks that torchrun started."""
    if ON_GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPUS else "gloo")


def load(folder: str, ep_implementation: str) -> nn.Module:
    """The model in `folder`, spread over all ranks."""
    size = dist.get_world_size()
    config = DistributedConfig(ep_size=size, fsdp_size=size, ep_implementation=ep_implementation)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, distributed_config=config
    )
    return model.train()


def train(model: nn.Module) -> tuple[list[float], float]:
    """Losses of all steps on random tokens, and milliseconds of a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses, seconds = [], []
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator).to(DEVICE)
        if ON_GPUS:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())  # waits for the GPU
        seconds.append(time.perf_counter() - begin)
    return losses, 1e3 * statistics.median(seconds)


def main() -> None:
    join()
    uniep.transformers.register(max_tokens=BATCH * LENGTH)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(folder[0])
    dist.barrier()
    for name in ("all_to_all", "uniep"):
        losses, ms = train(load(folder[0], name))
        if dist.get_rank() == 0:
            print(f"{name:10s} {ms:7.1f} ms a step, losses", " ".join(f"{x:.4f}" for x in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
