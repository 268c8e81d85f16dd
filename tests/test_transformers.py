"""Models of transformers with our attention, beside its own implementations: small ones with random
weights, in float32 on the CPU."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

from cute_attention import FallbackWarning
from cute_attention.integrations import transformers as integration
from small_transformers import (
    CAUSAL,
    MODELS,
    NEW_ENOUGH,
    PADDING,
    SEQLEN,
    VERSION,
    make,
    tokens,
    transformers,
)

pytestmark = NEW_ENOUGH
OURS = integration.NAME


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


def results(model, implementation: str, inputs: dict, keep: torch.Tensor | None = None):
    """Logits, of the tokens that `keep` says, and gradients of all parameters."""
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    model.zero_grad()
    logits = model(**inputs).logits
    assert logits.isfinite().all()
    if keep is not None:
        logits = logits[keep.bool()]
    (logits.double() ** 2).mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(grad.isfinite().all() for grad in grads.values())
    return {"logits": logits.detach(), **{n: grad.clone() for n, grad in grads.items()}}


def assert_same(have: dict, want: dict, tolerance: float = 2e-5) -> None:
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        scale = max(1.0, tensor.abs().max().item())
        error = (have[name] - tensor).abs().max().item()
        assert error <= tolerance * scale, (name, error)


def peers(name: str) -> tuple[str, ...]:
    """PyTorch's attention has neither softcap nor sinks."""
    return ("eager",) if name in ("gemma2", "gpt_oss") else ("eager", "sdpa")


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", MODELS)
def test_models(name, padding):
    model, mask = make(name), PADDING[padding]
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    if name != "modernbert":
        inputs["use_cache"] = False
    ours = results(model, OURS, inputs, mask)
    for peer in peers(name):
        assert_same(ours, results(model, peer, inputs, mask))


@pytest.mark.parametrize("name", MODELS)
def test_padding_between_tokens(name):
    """As of several turns of a conversation, each padded: a window counts what lies between."""
    mask = torch.tensor([[1] * 12, [1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1]])
    model, inputs = make(name), {"input_ids": tokens(), "attention_mask": mask}
    ours = results(model, OURS, inputs, mask)
    assert_same(ours, results(model, "eager", inputs, mask))
    if name == "modernbert":
        return
    generated = {}
    for implementation in ("eager", OURS):
        model.set_attn_implementation(implementation)
        generated[implementation] = model.generate(
            tokens(), attention_mask=mask, max_new_tokens=6, do_sample=False
        )
    assert torch.equal(generated["eager"], generated[OURS])


@pytest.mark.parametrize("padding", PADDING)
def test_t5(padding):
    """The bias of T5 is learnt; its decoder attends to what the encoder has made of padding."""
    if VERSION < (5, 15):
        pytest.skip("T5 asks the registry for its attention from transformers 5.15 on")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    mask = PADDING[padding]
    inputs = {
        "input_ids": tokens(),
        "attention_mask": mask,
        "decoder_input_ids": tokens(2, 9),
        "use_cache": False,
    }
    ours = results(model, OURS, inputs)
    assert any("relative_attention_bias" in key for key in ours)
    for peer in ("eager", "sdpa"):
        assert_same(ours, results(model, peer, inputs))
    generated = {}
    for implementation in ("eager", OURS):
        model.set_attn_implementation(implementation)
        generated[implementation] = model.generate(
            tokens(), attention_mask=mask, max_new_tokens=6, do_sample=False
        )
    assert torch.equal(generated["eager"], generated[OURS])


@pytest.mark.parametrize("name", CAUSAL)
def test_packed_sequences(name):
    """Several sequences in a row, told apart by their positions or by their lengths, give what they
    give alone."""
    model, ids = make(name), tokens(1, 21)
    lengths = (7, 1, 13)
    ends = torch.tensor((0, *lengths)).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    model.set_attn_implementation("eager")
    alone = torch.cat([model(input_ids=part).logits for part in ids.split(lengths, 1)], 1)
    model.set_attn_implementation(OURS)
    by_lengths = {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    for inputs in (
        {"position_ids": positions, "use_cache": False},
        {"position_ids": positions, "use_cache": True},  # where the masks of others do not ask
        {"position_ids": positions, "use_cache": False, **by_lengths},
    ):
        logits = model(input_ids=ids, **inputs).logits
        torch.testing.assert_close(logits, alone, atol=2e-5, rtol=2e-5)


def test_packed_sequences_in_several_rows():
    """A row ends its last sequence."""
    model, ids = make("mistral"), tokens(2, 12)
    rows = ((7, 5), (3, 9))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    model.set_attn_implementation("eager")
    alone = [
        torch.cat([model(input_ids=part).logits for part in ids[i : i + 1].split(row, 1)], 1)
        for i, row in enumerate(rows)
    ]
    model.set_attn_implementation(OURS)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits, torch.cat(alone), atol=2e-5, rtol=2e-5)


def test_positions_changed_in_place_are_read_again():
    model, ids = make("llama"), tokens(1, 10)
    model.set_attn_implementation(OURS)
    positions = torch.arange(10)[None]
    whole = model(input_ids=ids, position_ids=positions).logits
    positions[:, 4:] -= 4
    packed = model(input_ids=ids, position_ids=positions).logits
    alone = model(input_ids=ids[:, 4:]).logits
    torch.testing.assert_close(packed[:, 4:], alone, atol=2e-5, rtol=2e-5)
    assert not torch.allclose(whole[:, 4:], alone, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_inference_mode(name):
    """Whose tensors do not count their changes."""
    model, ids = make(name), tokens(2, 10)
    model.set_attn_implementation(OURS)
    want = model(input_ids=ids).logits
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=ids).logits, want, atol=2e-5, rtol=2e-5)


def test_positions_of_inference_mode_changed_in_place_are_read_again():
    model, ids = make("llama"), tokens(1, 10)
    model.set_attn_implementation(OURS)
    with torch.inference_mode():
        positions = torch.arange(10)[None]
        model(input_ids=ids, position_ids=positions)
        positions[:, 4:] -= 4
        packed = model(input_ids=ids, position_ids=positions).logits
        alone = model(input_ids=ids[:, 4:]).logits
    torch.testing.assert_close(packed[:, 4:], alone, atol=2e-5, rtol=2e-5)


CACHES = ["dynamic", "static", "offloaded", "offloaded_static"]


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", CAUSAL)
def test_generate(name, cache, padding):
    """Beyond the sliding window, so that caches of windowed layers roll over."""
    if "offloaded" in cache and name not in ("llama", "gemma3"):
        pytest.skip("these caches differ in where they lie alone")
    device = "cuda" if "offloaded" in cache else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("transformers offloads from a GPU alone")
    mask = PADDING[padding]
    generated = generate(name, ("eager", OURS), mask, device, cache_implementation=cache)
    assert torch.equal(generated["eager"], generated[OURS])


def generate(name: str, implementations, mask=None, device: str = "cpu", **options):
    model, ids = make(name).to(device), tokens().to(device)
    mask = None if mask is None else mask.to(device)
    found = {}
    for implementation in implementations:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found[implementation] = model.generate(
                ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **options
            )
    assert found[OURS].shape[1] > SEQLEN
    return found


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"use_cache": False}])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_generate_otherwise(options, padding):
    found = generate("mistral", ("eager", OURS), PADDING[padding], **options)
    assert torch.equal(found["eager"], found[OURS])


@pytest.mark.parametrize("package", ["optimum.quanto", "hqq"])
def test_generate_with_a_quantized_cache(package):
    pytest.importorskip(package)
    backend = "quanto" if "quanto" in package else "hqq"
    options = {"backend": backend, "nbits": 4, "residual_length": 4}
    if backend == "quanto":
        options |= {"q_group_size": 8, "axis_key": 0, "axis_value": 0}
    else:
        options |= {"q_group_size": 8, "axis_key": 1, "axis_value": 1}
    found = generate(
        "llama", ("eager", OURS), cache_implementation="quantized", cache_config=options
    )
    assert torch.equal(found["eager"], found[OURS])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_more_queries_after_a_cache_was_filled(name):
    """Several queries that see a cache, as when a prompt comes in chunks."""
    model, ids = make(name), tokens(2, 14)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[1, :3] = 0
    model.set_attn_implementation(OURS)
    whole = model(input_ids=ids, attention_mask=mask).logits
    for cache in (
        transformers.DynamicCache(config=model.config),
        transformers.StaticCache(config=model.config, max_cache_len=20),
    ):
        parts, done = [], 0
        for length in (6, 5, 1, 2):
            done += length
            out = model(
                input_ids=ids[:, done - length : done],
                attention_mask=mask[:, :done],
                past_key_values=cache,
                use_cache=True,
            )
            parts.append(out.logits)
        have = torch.cat(parts, 1)[mask.bool()]
        torch.testing.assert_close(have, whole[mask.bool()], atol=3e-5, rtol=3e-5)


def test_rows_of_padding_are_zeros():
    q, k, v = torch.randn(3, 2, 4, 12, 8).unbind()
    module = torch.nn.Module()
    module.is_causal = True
    for given in (PADDING["left"], PADDING["right"], PADDING["left"].bool()):
        out, probabilities = integration.attention_forward(module, q, k, v, given)
        mask = given.bool()
        assert probabilities is None
        assert out.shape == (2, 12, 4, 8)
        assert (out[~mask] == 0).all()
        assert (out[mask] != 0).all()
    empty = torch.zeros(2, 12, dtype=torch.bool)
    assert (integration.attention_forward(module, q, k, v, empty)[0] == 0).all()


def test_dropout_in_training_alone():
    model = make("llama", attention_dropout=0.5)
    model.set_attn_implementation(OURS)
    ids = tokens()
    quiet = model(input_ids=ids).logits
    assert torch.equal(quiet, model(input_ids=ids).logits)
    model.train()
    torch.manual_seed(5)
    first = model(input_ids=ids, use_cache=False).logits
    torch.manual_seed(5)
    assert torch.equal(first, model(input_ids=ids, use_cache=False).logits)
    assert not torch.allclose(first, quiet, atol=1e-3)
    module = torch.nn.Module().eval()
    q = torch.randn(1, 2, 8, 8)
    loud = integration.attention_forward(module, q, q, q, None, dropout=0.9)[0]
    assert torch.equal(loud, integration.attention_forward(module, q, q, q, None)[0])


def test_sinks_have_gradients_in_the_dtype_of_the_model():
    model = make("gpt_oss").to(torch.bfloat16)
    inputs = {"input_ids": tokens(), "use_cache": False}
    ours = results(model, OURS, inputs)
    eager = results(model, "eager", inputs)
    names = [name for name in ours if name.endswith("sinks")]
    assert len(names) == 2
    for name in names:
        assert ours[name].dtype == torch.bfloat16
        assert ours[name].abs().max() > 0
        error = (ours[name] - eager[name]).float().abs().max()
        assert error < 0.1 * eager[name].float().abs().max(), (name, error)


def test_gradient_checkpointing():
    model = make("gemma3").train()
    inputs = {"input_ids": tokens(), "attention_mask": PADDING["left"], "use_cache": False}
    plain = results(model, OURS, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(results(model, OURS, inputs), plain, 1e-6)


@pytest.mark.parametrize(("name", "padding"), [("llama", "none"), ("mistral", "left")])
def test_compiled_model(name, padding):
    model = make(name, num_hidden_layers=1)
    inputs = {"input_ids": tokens(), "attention_mask": PADDING[padding], "use_cache": False}
    plain = results(model, OURS, inputs, PADDING[padding])
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert_same(results(model, OURS, inputs, PADDING[padding]), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", MODELS)
def test_kernels_on_a_gpu(name, padding):
    """In bfloat16, beside eager in float32: the error is at most twice that of eager in bfloat16.
    No call falls back to the reference backend."""
    mask = PADDING[padding]
    inputs = {"input_ids": tokens().cuda()}
    if name != "modernbert":
        inputs["use_cache"] = False
    if mask is not None:
        inputs["attention_mask"] = mask = mask.cuda()
    exact = results(make(name).cuda(), "eager", inputs, mask)
    errors = {}
    for implementation in ("eager", OURS):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            model = make(name).to("cuda", torch.bfloat16)
            found = results(model, implementation, inputs, mask)
        errors[implementation] = {
            key: ((found[key].float() - value).norm() / value.norm().clamp(min=1e-6)).item()
            for key, value in exact.items()
        }
    for key, error in errors[OURS].items():
        assert error <= 2 * errors["eager"][key] + 0.01, (key, error, errors["eager"][key])


def test_older_transformers_is_told(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.48.1")
    with pytest.raises(ImportError, match=r"needs transformers 4\.57 or newer, and this is 4\.48"):
        integration.register()
