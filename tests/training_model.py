"""A model of two layers and the ways to train it on several devices.

`run(rank, world, folder)` is what each process runs; the processes are started by
test_training.py, with nccl on two GPUs where there are two, and else with gloo on the CPU.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cute_attention

HEADS, HEADS_KV, HEAD_DIM, WIDTH, VOCABULARY = 4, 2, 16, 48, 32
BATCH, SEQLEN, STEPS = 4, 24, 3


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cute_attention.attention(q, k, v, causal=True)


def pytorchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tensors = (t.transpose(1, 2) for t in (q, k, v))
    out = functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


class Block(nn.Module):
    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.k = nn.Linear(WIDTH, HEADS_KV * HEAD_DIM)
        self.v = nn.Linear(WIDTH, HEADS_KV * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, HEAD_DIM)) for layer in (self.q, self.k, self.v)
        )
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Model(nn.Module):
    def __init__(self, attention: Callable[..., Tensor] = ours) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.call: Callable[..., Tensor] = lambda block, x: block(x)  # how a block is called

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def tokens(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (BATCH, SEQLEN + 1), generator=generator).to(device)


def train(model: nn.Module, batch: Tensor) -> list[float]:
    """The losses of a few steps, and the one after them."""
    # One parameter at a time: with tensor parallelism some are DTensors and others are not.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    losses = []
    for _ in range(STEPS + 1):
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def saves_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Everything is computed again but attention."""
    is_ours = op.namespace == "cute_attention"
    return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(selective: bool) -> Callable[..., Tensor]:
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, saves_attention
        )
    return lambda block, x: checkpoint(block, x, **options)


def data_parallel(model: Model, device: torch.device) -> nn.Module:
    ids = [device] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)


def fully_sharded(model: Model, device: torch.device) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: Model, device: torch.device) -> nn.Module:
    """Heads on different devices: attention is called with DTensors."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    columns = functools.partial(ColwiseParallel, use_local_output=False)
    for block in model.blocks:
        plan = {name: columns() for name in ("q", "k", "v", "up")}
        plan |= {name: RowwiseParallel() for name in ("out", "down")}
        parallelize_module(block, mesh, plan)
    return model


WAYS = {
    "data_parallel": (data_parallel, True),
    "fully_sharded": (fully_sharded, True),
    "tensor_parallel": (tensor_parallel, False),
}


def run(rank: int, world: int, folder: str) -> None:
    """Trains in all ways; the losses of this process go to a file."""
    is_gpu = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("nccl" if is_gpu else "gloo", store=store, rank=rank, world_size=world)
    batch = tokens(device)
    own = batch.chunk(world)[rank]
    found = {"pytorch": train(Model(pytorchs).to(device, dtype), batch)}
    for name, (prepare, splits_batch) in WAYS.items():
        model = prepare(Model().to(device, dtype), device)
        losses = torch.tensor(train(model, own if splits_batch else batch), device=device)
        if splits_batch:
            dist.all_reduce(losses)
            losses /= world
        found[name] = losses.tolist()
    found["rules"] = placements_of_dtensors(device)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # the other process may still want answers of this one's threads
    dist.destroy_process_group()
    # Threads of PyTorch may still ask for Python, which would end meanwhile and abort the process.
    os._exit(0)


def placements_of_dtensors(device: torch.device) -> dict[str, Any]:
    """Of calls with DTensors in many placements: how the output lies, and the largest error of the
    output and the gradients beside the call with whole tensors."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    torch.manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float64).to(dtype)

    q, k, v = draw(4, 24, 4, 16), draw(4, 24, 2, 16), draw(4, 24, 2, 16)
    odd = draw(4, 24, 3, 16), draw(4, 24, 3, 16), draw(4, 24, 3, 16)
    sink = torch.randn(4, device=device, dtype=torch.float32)
    shared, per_entry = draw(1, 4, 24, 24), draw(4, 1, 1, 24)
    offsets = torch.tensor([0, 7, 24], dtype=torch.int32, device=device)
    packed = draw(24, 4, 16), draw(24, 2, 16), draw(24, 2, 16)
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    longest = {"max_seqlen_q": 17, "max_seqlen_k": 17}
    cases: dict[str, tuple[Any, ...]] = {
        "batch": ((q, k, v), Shard(0), {}, {"causal": True}),
        "heads": ((q, k, v), Shard(2), {}, {"causal": True}),
        "neither": ((q, k, v), Replicate(), {}, {}),
        "length": ((q, k, v), Shard(1), {}, {"causal": True}),
        "heads that do not divide": (odd, Shard(2), {}, {}),
        "batch with a sink": ((q, k, v), Shard(0), {"sink": (sink, Replicate())}, {}),
        "heads with a sink": ((q, k, v), Shard(2), {"sink": (sink, Shard(0))}, {}),
        "batch with a shared bias": ((q, k, v), Shard(0), {"bias": (shared, Replicate())}, {}),
        "heads with a bias": ((q, k, v), Shard(2), {"bias": (shared, Shard(1))}, {}),
        "batch with its bias": ((q, k, v), Shard(0), {"bias": (per_entry, Shard(0))}, {}),
        "heads with a bias for all": ((q, k, v), Shard(2), {"bias": (per_entry, Replicate())}, {}),
        "slopes": ((q, k, v), Shard(2), {"alibi_slopes": (sink, Shard(0))}, {}),
        "packed": (packed, Shard(1), {n: (t, Replicate()) for n, t in lengths.items()}, longest),
        "dropout": (
            (q, k, v),
            Shard(2),
            {"dropout_seed": (torch.tensor([5], device=device), Replicate())},
            {"dropout_p": 0.5},
        ),
    }
    found = {}
    for name, (tensors, placement, extras, options) in cases.items():
        function = cute_attention.attention_varlen if name == "packed" else cute_attention.attention
        whole = [t.clone().requires_grad_() for t in tensors]
        others = {n: t.clone().requires_grad_(_learns(n)) for n, (t, _) in extras.items()}
        parts = [distribute_tensor(t.detach(), mesh, [placement]).requires_grad_() for t in whole]
        other_parts = {
            n: distribute_tensor(t.detach(), mesh, [extras[n][1]]).requires_grad_(_learns(n))
            for n, t in others.items()
        }
        expected = function(*whole, **others, **options)
        out = function(*parts, **other_parts, **options)
        grad = draw(*expected.shape)
        expected.backward(grad)
        out.backward(distribute_tensor(grad, mesh, [Replicate()]))
        pairs = [(out, expected)]
        pairs += [(a.grad, b.grad) for a, b in zip(parts, whole, strict=True)]
        pairs += [(other_parts[n].grad, t.grad) for n, t in others.items() if _learns(n)]
        errors = [
            (a.full_tensor().double() - b.double()).abs().max().item()
            for a, b in pairs
            if isinstance(a, DTensor)
        ]
        found[name] = {
            "split": getattr(out.placements[0], "dim", None),
            "error": max(errors),
            "compared": len(errors),
        }
    return found


def _learns(name: str) -> bool:
    return name in ("sink", "bias")
