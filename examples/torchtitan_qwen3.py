"""Some layers of Qwen3-30B-A3B in torchtitan's trainer: its own experts, then uniep's.

    pip install torchtitan==0.3.0
    torchrun --nproc_per_node=1 examples/torchtitan_qwen3.py
    export UNIEP_SPARE_SMS=16 NCCL_MAX_CTAS=16 NCCL_CGA_CLUSTER_SIZE=0
    torchrun --nproc_per_node=4 examples/torchtitan_qwen3.py

Experts are spread over all ranks, and FSDP shards the rest. What is trained on are random tokens,
so that nothing has to be downloaded, and attention is PyTorch's, which needs no compiler. Prints
the losses of each run, which agree to roundings, and the time of a step. torchtitan needs a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager
from torchtitan.models.common.attention import ScaledDotProductAttention

EXPERTS = "uniep.torchtitan.uniep_routed_experts"
SHARED_TOO = "uniep.torchtitan.uniep_moe"
KEEP = "uniep.torchtitan.uniep_selective_ac"


class RandomTokens(BaseDataLoader):
    """Batches that depend on the rank and the step alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """How many tokens there are."""

        vocabulary: int

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self._vocabulary = config.vocabulary
        self._shape = (local_batch_size, seq_len + 1)
        self._seed = 1 + dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            ids = torch.randint(self._vocabulary, self._shape, generator=generator)
            inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            positions = torch.arange(inputs.shape[1]).expand(inputs.shape).contiguous()
            yield {"input": inputs, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Recorder(MetricsProcessor):
    """Keeps the loss of every step, and when it was known."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """As torchtitan's."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self.losses: list[float] = []
        self.times: list[float] = []

    def log(self, step: int, global_avg_loss: float, *_: Any, **__: Any) -> None:
        self.losses.append(global_avg_loss)  # for which torchtitan has waited
        self.times.append(time.perf_counter())


def configuration(overrides: list[str], options: argparse.Namespace) -> Any:
    """torchtitan's, from its own command line, with fewer layers and on random tokens."""
    module, name = options.model.split(":")
    config = ConfigManager().parse_args(
        ["--module", module, "--config", name]
        + (["--override.imports", ",".join(overrides)] if overrides else [])
        + ["--training.seq_len", str(options.length), "--training.steps", str(options.steps)]
        + ["--training.local_batch_size", str(options.batch), "--training.disable_cuda_graphs"]
        + ["--parallelism.expert_parallel_degree", os.environ["WORLD_SIZE"]]
        + ["--debug.seed", "0", "--checkpoint.no-enable", "--metrics.log_freq", "1"]
        + (["--compile.enable"] if options.compile else [])
        + [f"activation_checkpoint:{options.checkpointing}"]
    )
    model = config.model_spec.model
    model.layers = model.layers[: options.layers]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dataloader = RandomTokens.Config(vocabulary=model.vocab_size)
    config.tokenizer = NoTokenizer.Config()
    config.metrics = Recorder.Config(log_freq=1)
    return config


def train(overrides: list[str], options: argparse.Namespace) -> tuple[list[float], float]:
    """Losses of all steps, and milliseconds of a step."""
    trainer = configuration(overrides, options).build()
    try:
        trainer.train()
        found = trainer.metrics_processor
    finally:
        trainer.close()
    steps = [end - begin for begin, end in zip(found.times, found.times[1:], strict=False)]
    return found.losses, 1e3 * statistics.median(steps)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3:qwen3_30b_a3b", help="module and configuration")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument(
        "--checkpointing", default="selective", choices=["selective", "full", "none"]
    )
    parser.add_argument("--compile", action="store_true", help="blocks one by one")
    parser.add_argument("--shared", action="store_true", help="shared experts in uniep's pass")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    own = [SHARED_TOO if options.shared else EXPERTS]
    own += [KEEP] if options.checkpointing == "selective" else []
    for name, overrides in (("torchtitan", []), ("uniep", own)):
        losses, ms = train(overrides, options)
        if dist.get_rank() == 0:
            print(f"{name:10s} {ms:7.1f} ms a step, losses", " ".join(f"{x:.4f}" for x in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
