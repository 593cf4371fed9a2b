#!/usr/bin/env python3
"""Train a small mixture-of-experts language model on the bytes of any text files.

    python examples/train_moe_lm.py --text docs/*.md
    torchrun --nproc_per_node=2 examples/train_moe_lm.py --text docs/*.md --ep 2

Losses are the same to the last bit for every --ep, --schedule, --save, with --recompute-h,
--exact-rows, --checkpointing and after --resume. uniep sees to that for the MoE layers; what this
program holds fixed for all else:

- The global batch is cut into --shards shards, whatever --ep; each rank has shards / ep of them.
- All but the experts runs shard by shard, so every product has the same shapes. Each shard has its
  own gradients; they are gathered and added in fp32 in the order of shards, and so are the losses.
- A MoE layer takes all shards of a rank at once, and ranks have them in order: the concatenation of
  all ranks' tokens is always the same, and so is each expert's sum over its rows.
- Weights of experts are drawn and updated one expert at a time; a batch depends on seed and step.
- The number of CPU threads of PyTorch, by --threads: its products may depend on it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

MoE = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # x, ids, probs, w1, w2


# What a shard has to itself.


class Attention(nn.Module):
    """x + causal attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        update: Tensor = self.out(y.transpose(1, 2).reshape(x.shape))
        return x + update


class Router(nn.Module):
    """Which experts a token goes to, and how much of each it takes."""

    def __init__(self, hidden: int, experts: int, topk: int) -> None:
        super().__init__()
        self.experts, self.topk = experts, topk
        self.norm = nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens = self.norm(x).flatten(0, 1)
        probs = torch.softmax(self.gate(tokens), -1)
        top, ids = torch.topk(probs, self.topk)
        share = F.one_hot(ids, self.experts).float().mean((0, 1))  # of the slots, by expert
        balance = self.experts * (share * probs.mean(0)).sum()  # 1 where all experts do the same
        return tokens.bfloat16(), ids, top / top.sum(-1, keepdim=True), balance


class Dense(nn.Module):
    """All of the model but its experts."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, args.hidden)
        self.positions = nn.Embedding(args.length, args.hidden)
        layers = range(args.layers)
        self.attention = nn.ModuleList(Attention(args.hidden, args.heads) for _ in layers)
        self.router = nn.ModuleList(Router(args.hidden, args.experts, args.topk) for _ in layers)
        self.norm = nn.RMSNorm(args.hidden)
        self.head = nn.Linear(args.hidden, 256, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                usual = name.startswith(("attention", "router"))
                nn.init.normal_(weight, std=args.hidden**-0.5 if usual else 0.02)

    def embed(self, text: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(text)
        return embedded + self.positions.weight

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def sharing_weights(dense: Dense, shards: int) -> list[Dense]:
    """Modules with the same weights in memory, and gradients of their own."""
    copies = [dense, *(copy.deepcopy(dense) for _ in range(shards - 1))]
    for other in copies[1:]:
        for mine, shared in zip(other.parameters(), dense.parameters(), strict=True):
            mine.data = shared.data
    return copies


def generator(seed: int, purpose: int, number: int) -> torch.Generator:
    """Random numbers that depend on these three alone."""
    # PyTorch's generator on the CPU takes the low 32 bits of a seed, so all three go into these.
    mixed = hashlib.blake2b(f"{seed} {purpose} {number}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed, "little"))


class Experts(nn.Module):
    """The experts of one layer that this rank holds, an fp32 parameter for each weight."""

    def __init__(self, args: argparse.Namespace, layer: int, mine: range) -> None:
        super().__init__()
        self.w1 = nn.ParameterDict()
        self.w2 = nn.ParameterDict()
        for expert in mine:
            source = generator(args.seed, 1 + layer, expert)
            hidden, inter = args.hidden, args.intermediate
            w1 = torch.randn(2 * inter, hidden, generator=source) * hidden**-0.5
            w2 = torch.randn(hidden, inter, generator=source) * inter**-0.5
            self.w1[str(expert)] = nn.Parameter(w1)
            self.w2[str(expert)] = nn.Parameter(w2)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return w1 [El, 2I, H] and w2 [El, H, I] in bf16."""
        w1, w2 = (torch.stack([w.bfloat16() for w in ws.values()]) for ws in (self.w1, self.w2))
        return w1, w2


def by_shard(step: Callable[..., Any], *inputs: Iterable[Any]) -> list[Any]:
    return [step(*of_shard) for of_shard in zip(*inputs, strict=True)]


class Model:
    """The shards of this rank, and its experts."""

    def __init__(self, args: argparse.Namespace, moe: MoE, rank: int, device: torch.device) -> None:
        torch.manual_seed(args.seed)
        self.args, self.moe = args, moe
        self.shards = sharing_weights(Dense(args).to(device), args.shards // args.ep)
        local = args.experts // args.ep
        mine = range(rank * local, (rank + 1) * local)
        self.experts = [Experts(args, layer, mine).to(device) for layer in range(args.layers)]
        compiled = torch.compile if args.compile else lambda step: step
        self.attend = compiled(lambda attention, x: attention(x))
        self.route = compiled(lambda router, x: router(x))
        self.score = compiled(lambda dense, x, targets: dense.loss(x, targets))

    def block(self, layer: int, xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """One layer of all shards: the new x and the balance of experts, each by shard."""
        xs = by_shard(self.attend, [shard.attention[layer] for shard in self.shards], xs)
        routed = by_shard(self.route, [shard.router[layer] for shard in self.shards], xs)
        tokens, ids, probs, balances = zip(*routed, strict=True)
        w1, w2 = self.experts[layer]()
        y = self.moe(torch.cat(tokens), torch.cat(ids), torch.cat(probs), w1, w2)
        ys = torch.split(y.float(), len(tokens[0]))
        return by_shard(lambda x, y: x + y.view_as(x), xs, ys), list(balances)

    def losses(self, texts: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Cross entropy and what is minimised, by shard; texts: [shards, batch, length + 1]."""
        xs = by_shard(lambda shard, text: shard.embed(text[:, :-1]), self.shards, texts)
        balance = [torch.zeros((), device=texts.device) for _ in xs]
        for layer in range(self.args.layers):
            if self.args.checkpointing:
                xs, more = checkpoint(self.block, layer, xs, use_reentrant=False)
            else:
                xs, more = self.block(layer, xs)
            balance = by_shard(torch.add, balance, more)
        losses = by_shard(self.score, self.shards, xs, texts[:, :, 1:])
        return losses, by_shard(lambda loss, penalty: loss + 0.01 * penalty, losses, balance)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer updates; names are the same on every rank that has a parameter."""
        yield from self.shards[0].named_parameters(prefix="dense")
        for layer, experts in enumerate(self.experts):
            yield from experts.named_parameters(prefix=f"layer{layer}.experts")

    def zero_grad(self) -> None:
        for module in (*self.shards, *self.experts):
            module.zero_grad()


def gather_shards(mine: Tensor) -> Tensor:
    """[shards of this rank, ...] -> [all shards, ...], in order."""
    if not dist.is_initialized():
        return mine
    # gloo, which ranks that share a GPU have to use, gathers in the host's memory.
    own = mine.cpu() if dist.get_backend() == "gloo" else mine
    every = own.new_empty(dist.get_world_size() * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(every, own.contiguous())
    return every.to(mine.device)


def ascending_sum(parts: Tensor) -> Tensor:
    return functools.reduce(torch.add, parts.unbind())


def add_up_gradients(shards: list[Dense]) -> None:
    """Leave in the first shard the sum over all ranks' shards, added in their order."""
    flat = [
        torch.cat([w.grad.flatten() for w in s.parameters() if w.grad is not None]) for s in shards
    ]
    total = ascending_sum(gather_shards(torch.stack(flat)))
    weights = list(shards[0].parameters())
    sizes = [weight.numel() for weight in weights]
    for weight, gradient in zip(weights, torch.split(total, sizes), strict=True):
        weight.grad = gradient.view_as(weight)


# The run.


def batch_of(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """[shards, batch, length + 1] windows of the text; the same for every --ep."""
    source = generator(args.seed, 0, step)
    starts = torch.randint(len(text) - args.length, (args.shards, args.batch, 1), generator=source)
    return text[starts + torch.arange(args.length + 1)].long()


#: What a checkpoint's model is made of.
MODEL_FLAGS = ("layers", "hidden", "heads", "experts", "topk", "intermediate")


def save(folder: Path, losses: list[float], rank: int, model: Model, optimizer: AdamW) -> None:
    """Write what this rank updates; rank 0 then names the checkpoint in `latest`."""
    # A folder for each number of ranks: else files of ranks that are no more would lie beside.
    to = folder / f"step{len(losses)}_ranks{model.args.ep}"
    to.mkdir(parents=True, exist_ok=True)
    state = {name: {"weight": w.data, **optimizer.state[w]} for name, w in model.parameters()}
    flags = {name: getattr(model.args, name) for name in MODEL_FLAGS}
    torch.save({"losses": losses, "flags": flags, **state}, to / f"rank{rank}.pt")
    if dist.is_initialized():
        dist.barrier()
    if rank == 0:
        (folder / "latest.new").write_text(to.name)
        (folder / "latest.new").rename(folder / "latest")


def load(folder: Path, model: Model, optimizer: AdamW) -> list[float]:
    """Read the latest checkpoint, of any number of ranks; return the losses of its steps."""
    latest = folder / (folder / "latest").read_text()
    state: dict[str, Any] = {}
    for file in latest.glob("rank*.pt"):
        state.update(torch.load(file, weights_only=True))
    for flag, saved in state["flags"].items():
        if saved != getattr(model.args, flag):
            sys.exit(
                f"--{flag} is {getattr(model.args, flag)}, but the checkpoint {latest} is of a "
                f"model with --{flag} {saved}"
            )
    for name, weight in model.parameters():
        weight.data.copy_(state[name].pop("weight"))
        steps = state[name].pop("step")  # stays on the CPU
        moments = {key: value.to(weight.device) for key, value in state[name].items()}
        optimizer.state[weight] = {"step": steps, **moments}
    losses: list[float] = state["losses"]
    return losses


def plot(file: str, curves: dict[str, list[float]]) -> None:
    """Draw losses by step."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (name, losses) in enumerate(curves.items()):
        # Equal curves lie on each other: wide ones below, narrow ones above.
        axes.plot(losses, label=name, linewidth=1 + 2 * (len(curves) - 1 - number))
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(file)


def train(args: argparse.Namespace, moe: MoE, rank: int, device: torch.device) -> None:
    data = b"".join(Path(file).read_bytes() for file in args.text)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    model = Model(args, moe, rank, device)
    optimizer = AdamW([w for _, w in model.parameters()], betas=(0.9, 0.95))
    history = load(args.checkpoint, model, optimizer) if args.resume else []
    first = len(history)
    if rank == 0:
        millions = sum(w.numel() for _, w in model.parameters()) / 1e6
        print(f"{millions:.2f} M parameters on each of {args.ep} ranks, {len(text)} bytes of text")

    mine = slice(rank * len(model.shards), (rank + 1) * len(model.shards))
    begin = time.perf_counter()
    for step in range(first, args.steps):
        optimizer.param_groups[0]["lr"] = args.lr * min(1, (step + 1) / 20)
        model.zero_grad()
        losses, minimised = model.losses(batch_of(text, step, args)[mine].to(device))
        torch.autograd.backward([loss / args.shards for loss in minimised])
        add_up_gradients(model.shards)
        optimizer.step()
        loss = ascending_sum(gather_shards(torch.stack(losses).detach())).item() / args.shards
        history.append(loss)
        if rank == 0:
            rate = (step + 1 - first) * args.shards * args.batch * args.length
            report(step + 1, args.steps, loss, rate / (time.perf_counter() - begin))
        if args.checkpoint and ((step + 1) % args.every == 0 or step + 1 == args.steps):
            save(args.checkpoint, history, rank, model, optimizer)
    if rank == 0 and args.losses:
        args.losses.write_text("".join(f"{loss.hex()}\n" for loss in history))
    if rank == 0 and args.plot:
        files = {file.stem: file.read_text().split() for file in args.beside}
        others = {name: [float.fromhex(line) for line in lines] for name, lines in files.items()}
        plot(args.plot, {f"{args.layer}, ep {args.ep}": history, **others})


def report(step: int, steps: int, loss: float, rate: float) -> None:
    """Draw the progress bar; where nobody watches, print a line now and then."""
    done = math.floor(30 * step / steps)
    line = f"{step:5d}/{steps} |{'#' * done:30s}| loss {loss:.4f}  {rate:,.0f} tokens/s"
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if step == steps else "", flush=True)
    elif step % 20 == 0 or step == steps:
        print(line, flush=True)


def choose_moe(args: argparse.Namespace, device: torch.device, shares_gpu: bool) -> MoE:
    group = dist.group.WORLD if args.ep > 1 else None
    sums = {"combine_groups": args.hosts, "combine_partials": "bf16"} if args.hosts > 1 else {}
    if args.layer != "uniep":
        from uniep import plain

        ascending = args.layer == "ascending"
        return functools.partial(plain.moe, group=group, ascending=ascending, **sums)
    import uniep

    if args.hosts > 1 and args.ep > 1:
        shape = (args.hosts, args.ep // args.hosts)
        members = init_device_mesh(device.type, shape, mesh_dim_names=("hosts", "ranks"))
    else:
        members = uniep.Group(group, device=device, share_device=shares_gpu)
    schedule = None if args.schedule == "auto" else args.schedule
    return functools.partial(
        uniep.moe,
        group=members,
        schedule=schedule,
        save=args.save,
        recompute_h=args.recompute_h,
        exact_rows=args.exact_rows,
        **sums,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--text", nargs="+", required=True, metavar="FILE", help="what to learn")
    add("--ep", type=int, help="ranks that hold the experts together; None: all processes")
    add(
        "--hosts", type=int, default=1, help="each with as many ranks; tokens cross by NCCL or gloo"
    )
    add(
        "--layer",
        choices=["uniep", "plain", "ascending"],
        default="uniep",
        help="plain: uniep.plain; ascending: the same, with uniep's bits on a CPU too, slowly",
    )
    add("--schedule", default="auto", help="of uniep: auto, sequential, single, pipelined:4, ...")
    add("--save", choices=["rows", "tokens", "none"], default="rows", help="what uniep keeps of x")
    add("--recompute-h", action="store_true", help="uniep computes h again in backward")
    add("--exact-rows", action="store_true", help="uniep takes memory for the rows that come")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    add("--threads", type=int, default=1, help="of PyTorch on a CPU; may change bits")
    add("--compile", action="store_true", help="compile what runs shard by shard")
    add("--checkpointing", action="store_true", help="recompute layers in backward")
    add("--steps", type=int, default=200, help="of the optimizer, those before --resume included")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--lr", type=float, default=1e-3, help="learning rate, after 20 steps of warm-up")
    add("--shards", type=int, default=4, help="parts of the global batch; --ep must divide them")
    add("--batch", type=int, default=4, help="texts of a shard")
    add("--length", type=int, default=128, help="bytes of a text")
    add("--layers", type=int, default=2, help="each of attention and experts")
    add("--hidden", type=int, default=128, help="width of a token, a multiple of 8 and of --heads")
    add("--heads", type=int, default=4, help="of attention")
    add("--experts", type=int, default=16, help="of a layer, on all ranks together")
    add("--topk", type=int, default=2, help="experts of a token")
    add("--intermediate", type=int, default=128, help="width of an expert, a multiple of 8")
    add("--losses", type=Path, metavar="FILE", help="write a loss a line, as a hexadecimal float")
    add("--checkpoint", type=Path, metavar="DIR", help="where checkpoints go")
    add("--every", type=int, default=100, help="steps between checkpoints")
    add("--resume", action="store_true", help="from the latest checkpoint, whatever its --ep")
    add("--plot", metavar="FILE.svg", help="draw the losses (needs matplotlib)")
    add("--beside", type=Path, nargs="+", default=[], metavar="FILE", help="other --losses to draw")
    args = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    args.ep = processes if args.ep is None else args.ep
    check(args, processes)
    run(args, processes)


def check(args: argparse.Namespace, processes: int) -> None:
    """Ends the program with a sentence where the arguments do not fit."""
    for file in args.text:
        if not Path(file).is_file():
            sys.exit(f"--text {file} is no file; files are accepted, such as docs/*.md")
    for flag in (*MODEL_FLAGS, "ep", "hosts", "threads", "shards", "batch", "length", "every"):
        if getattr(args, flag) < 1:
            sys.exit(f"--{flag} is {getattr(args, flag)}; 1 or more is accepted")
    size = sum(Path(file).stat().st_size for file in args.text)
    if size <= args.length:
        sys.exit(f"--text has {size} bytes; more than --length, {args.length}, are needed")
    if args.topk > args.experts:
        sys.exit(f"--topk {args.topk} is more than --experts {args.experts}")
    if args.hidden % args.heads:
        sys.exit(f"--heads {args.heads} must divide --hidden {args.hidden}")
    if args.ep != processes:
        sys.exit(
            f"--ep {args.ep} takes as many processes, but there are {processes}: "
            f"torchrun --nproc_per_node={args.ep} {' '.join(sys.argv)}"
        )
    if args.shards % args.ep or args.experts % args.ep:
        sys.exit(f"--ep {args.ep} must divide --shards {args.shards} and --experts {args.experts}")
    if args.experts % args.hosts or (args.ep > 1 and args.ep % args.hosts):
        sys.exit(f"--hosts {args.hosts} must divide --ep {args.ep} and --experts {args.experts}")
    if args.resume and not args.checkpoint:
        sys.exit("--resume needs --checkpoint DIR, from which it takes the latest")
    if args.resume and not (args.checkpoint / "latest").is_file():
        sys.exit(f"--resume finds no checkpoint in {args.checkpoint}; leave it out to begin")


def run(args: argparse.Namespace, processes: int) -> None:
    torch.set_num_threads(args.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    rank = int(os.environ.get("RANK", "0"))
    device, shares_gpu = torch.device("cpu"), False
    if args.device == "cuda":
        on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        shares_gpu = on_this_host > torch.cuda.device_count()
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if processes > 1:
        dist.init_process_group("nccl" if args.device == "cuda" and not shares_gpu else "gloo")
    train(args, choose_moe(args, device, shares_gpu), rank, device)
    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
