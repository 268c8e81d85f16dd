"""Training a model of two layers: the losses are those with PyTorch's own attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from training_model import WAYS, Model, checkpointed, pytorchs, run, tokens, train

WORLD = 2
pytestmark = pytest.mark.xdist_group("training")  # so that the processes are started once


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def tolerance(device: str) -> float:
    return 2e-2 if device == "cuda" else 1e-5


@pytest.fixture(scope="module")
def expected() -> dict[str, list[float]]:
    """The losses with PyTorch's attention, by device."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {
        device: train(Model(pytorchs).to(device, dtype_of(device)), tokens(torch.device(device)))
        for device in devices
    }


def ours(device: str, prepare) -> list[float]:
    model = Model().to(device, dtype_of(device))
    prepare(model)
    return train(model, tokens(torch.device(device)))


@pytest.mark.parametrize("way", ["plain", "checkpoint", "selective"])
def test_losses(way, device, expected):
    def prepare(model: Model) -> None:
        if way != "plain":
            model.call = checkpointed(way == "selective")

    losses = ours(device, prepare)
    assert losses == pytest.approx(expected[device], abs=tolerance(device))
    assert losses[-1] < losses[0] - 0.1


def test_selective_checkpoint_saves_attention(device):
    """Attention runs once for each layer, and not again in the backward."""
    counts = {}
    for selective in (False, True):
        model = Model().to(device, dtype_of(device))
        model.call = checkpointed(selective)
        calls = _Calls()
        with calls:
            model(tokens(torch.device(device))[:, :-1]).float().sum().backward()
        counts[selective] = calls.forward
    assert counts == {False: 4, True: 2}


class _Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the forward ops of attention that run; those that a checkpoint has kept do not."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cute_attention" and "forward" in func._opname:
            self.forward += 1
        return func(*args, **(kwargs or {}))


def test_compiled_block(device, expected):
    """The whole block is one graph."""
    backend = "inductor" if device == "cuda" else "aot_eager"

    def prepare(model: Model) -> None:
        for block in model.blocks:
            block.compile(fullgraph=True, backend=backend)

    losses = ours(device, prepare)
    assert losses == pytest.approx(expected[device], abs=tolerance(device))


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> list[dict]:
    """What two processes have found, on two GPUs where there are two."""
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    folder = str(tmp_path_factory.mktemp("processes"))
    mp.spawn(run, (WORLD, folder), nprocs=WORLD)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("way", WAYS)
def test_losses_on_two_devices(way, processes):
    device = "cuda" if torch.cuda.device_count() >= WORLD else "cpu"
    for found in processes:
        assert found[way] == pytest.approx(found["pytorch"], abs=tolerance(device))


# Along which dimension the output is split, where each device has a part of it.
SPLIT = {
    "batch": 0,
    "heads": 2,
    "neither": None,
    "length": None,
    "heads that do not divide": None,
    "batch with a sink": 0,
    "heads with a sink": 2,
    "batch with a shared bias": 0,
    "heads with a bias": 2,
    "batch with its bias": 0,
    "heads with a bias for all": 2,
    "slopes": 2,
    "packed": 1,
    "dropout": None,
}


@pytest.mark.parametrize("case", SPLIT)
def test_dtensors(case, processes):
    """Results are those of whole tensors, and nothing is gathered that need not be."""
    limit = 1e-1 if torch.cuda.device_count() >= WORLD else 1e-6
    for found in processes:
        result = found["rules"][case]
        assert result["split"] == SPLIT[case]
        assert result["error"] < limit
        assert result["compared"] >= 4  # the output and the gradients of q, k and v
