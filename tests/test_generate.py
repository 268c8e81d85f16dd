"""The example that samples with a paged cache, at a tiny size."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attention import attention
from cute_attention.inference import attention_with_cache

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TINY = ["--device", "cpu", "--layers", "2", "--heads", "2", "--heads-kv", "1", "--head-dim", "16"]
TINY += ["--context", "64", "--batch", "8", "--steps", "60", "--learning-rate", "0.01"]
STARTS = ["sat on", "s", "the dog lay by"]
TINY += ["--prefix", "the cat ", "--length", "30"]
TINY += [word for start in STARTS for word in ("--prompt", start)]


@pytest.fixture(scope="module", autouse=True)
def _examples_on_path() -> None:
    sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def example() -> Any:
    import generate

    return generate


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("the cat sat on the mat and the dog lay by the log. " * 200)
    return str(path)


def test_texts_are_those_without_a_cache(example, prose, capsys) -> None:
    assert example.main([*TINY, prose]) == 0
    printed = capsys.readouterr().out
    texts = printed.split("-" * 80)[1:-1]
    assert len(texts) == len(STARTS)
    for text, start in zip(texts, STARTS, strict=True):
        assert text.strip("\n").startswith(start)
        assert set(text.strip("\n")) <= set(Path(prose).read_text())  # learnt
    assert "same       3 of 3 texts" in printed
    assert "PASS: the texts are those without a cache" in printed
    assert printed.count("tokens per second") == 1


def model_of(seed: int) -> Any:
    from gpt.model import GPT, Shape

    torch.manual_seed(seed)
    model = GPT(Shape(2, 4, 2, 16, 96), functools.partial(attention, causal=True))
    for parameter in model.parameters():  # logits that differ from byte to byte
        parameter.data.mul_(1.5)
    return model


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("prefix", [b"", b"0123456789abcdef", b"0123456789abcdefg"])
def test_every_step_of_both_ways(page_size: int, prefix: bytes) -> None:
    """Byte by byte as a model without a cache writes, for prefixes that end at and in a page."""
    from gpt.serving import largest_gap, write_padded, write_paged

    model = model_of(0)
    prompts = [b"a", b"some words", b"x" * 17]
    wanted = []
    for prompt in prompts:
        text = list(prefix + prompt)
        for _ in range(12):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        wanted.append(bytes(text))
    assert write_paged(model, prefix, prompts, 12, page_size).texts == wanted
    assert write_padded(model, prefix, prompts, 12).texts == wanted
    assert largest_gap(model, wanted, 12) < 1e-4
    wrong = [text[:-1] + bytes([text[-1] ^ 1]) for text in wanted]
    assert largest_gap(model, wrong, 12) > 1e-2


def test_it_fails_where_the_cache_is_wrong(example, prose, capsys, monkeypatch) -> None:
    from gpt import serving

    def forgetful(*arguments: Any, **options: Any) -> Any:
        return attention_with_cache(*arguments, **{**options, "window": (3, 0)})

    monkeypatch.setattr(serving, "attention_with_cache", forgetful)
    assert example.main([*TINY, prose]) == 1
    assert "FAIL: a byte was chosen" in capsys.readouterr().out


WRONG = {
    "too long": (["--length", "60"], "make 82 bytes, more than the --context 64"),
    "empty prompt": (["--prompt", ""], "--prompt is empty"),
    "no length": (["--length", "0"], "--length, --steps and --page-size are positive"),
    "heads": (["--heads-kv", "3"], "--heads-kv 3 does not divide --heads 2"),
    "device": (["--device", "toaster"], "--device toaster: expected cpu, cuda or cuda:N"),
    "backend that cannot": (["--backend", "sm80", "--steps", "1"], "sm80"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments(example, prose, capsys, options, message) -> None:
    with pytest.raises(SystemExit) as caught:
        example.main([*TINY, *options, prose])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
