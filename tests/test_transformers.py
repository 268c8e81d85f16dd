"""Models of transformers with our attention, beside its own implementations: small ones with random
weights, in float32 on the CPU."""

from __future__ import annotations

import os
import sys
import warnings

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the models here come from nowhere
pytest.importorskip("transformers", reason="needs transformers, which [dev] installs")

import transformers

from cute_attention import FallbackWarning
from cute_attention.integrations import masks
from cute_attention.integrations import transformers as integration

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (4, 57), reason="needs transformers 4.57")
OURS = integration.NAME
SEQLEN = 12
COMMON = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 12}
# Configuration, model, options beside those of all, and the oldest transformers whose model asks
# the registry for its attention.
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}, (4, 57)),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 5}, (4, 57)),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GEMMA, (4, 57)),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
        (4, 57),
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}, (4, 57)),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        (4, 57),
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {"local_attention": 6, "global_attn_every_n_layers": 2, "reference_compile": False},
        (5, 0),
    ),
}
CAUSAL = [name for name in MODELS if name != "modernbert"]
PADDING = {
    "none": None,
    "left": torch.tensor([[1] * 12, [0] * 5 + [1] * 7]),
    "right": torch.tensor([[1] * 12, [1] * 7 + [0] * 5]),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


def make(name: str, **options):
    config_class, model_class, own, oldest = MODELS[name]
    if oldest > VERSION:
        pytest.skip(f"{name} asks the registry for its attention from transformers {oldest} on")
    config = getattr(transformers, config_class)(**COMMON | own | options)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():  # initialised or not, and large enough to matter
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                torch.nn.init.normal_(parameter)
    return model.eval()


def tokens(batch: int = 2, seqlen: int = SEQLEN) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, COMMON["vocab_size"], (batch, seqlen), generator=generator)


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


@pytest.mark.parametrize("padding", PADDING)
def test_t5(padding):
    """The bias of T5 is learnt; its decoder attends to what the encoder has made of padding."""
    if VERSION < (5, 0):
        pytest.skip("T5 asks the registry for its attention from transformers 5 on")
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


# ---- the masks alone


def mask_of(function, q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, **others):
    sizes = {"q_length": q_length, "q_offset": q_offset}
    if VERSION < (5, 0):
        sizes = {"cache_position": torch.arange(q_length) + q_offset}
    return masks.mask(
        batch_size=2,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
        **sizes,
        **others,
    )


def test_no_mask_where_none_is_needed():
    from transformers import masking_utils as theirs

    causal, window = theirs.causal_mask_function, theirs.sliding_window_causal_mask_function
    ones = torch.ones(2, 12, dtype=torch.bool)
    assert mask_of(causal, 12, 12) is None
    assert mask_of(causal, 12, 12, attention_mask=ones) is None
    assert mask_of(causal, 1, 12, q_offset=11, attention_mask=ones) is None
    assert mask_of(window(12), 12, 12) is None
    note = masks.note_of(mask_of(window(11), 12, 12))
    assert note == masks.Note(masks.Pattern(True, 10, None), whole=True)
    static = mask_of(causal, 4, 32, q_offset=2)
    assert static.shape == (2, 6)
    assert static.all()
    padded = mask_of(causal, 4, 32, q_offset=8, attention_mask=PADDING["left"].bool())
    assert torch.equal(padded, PADDING["left"].bool())


def test_a_mask_that_no_kernel_serves_is_named_once(monkeypatch):
    from transformers import masking_utils as theirs

    monkeypatch.setattr(masks, "_warned", set())
    function = theirs.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long))
    with pytest.warns(FallbackWarning, match="chunked_overlay.* of llama4"):
        mask = mask_of(
            function, 12, 12, config=transformers.Llama4TextConfig(), device=torch.device("cpu")
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = mask_of(function, 12, 12)
    i, j = torch.arange(12)[:, None], torch.arange(12)
    expected = (j <= i) & (i // 4 == j // 4)
    assert torch.equal(mask, expected.expand(2, 1, 12, 12))
    assert torch.equal(again, mask)
    q, k, v = torch.randn(3, 2, 4, 12, 8, dtype=torch.float64).unbind()
    out = integration.attention_forward(torch.nn.Module(), q, k, v, mask)[0]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
    torch.testing.assert_close(out, want)


def test_masks_of_anybodys_making():
    """Four dimensions, bool or added; keys beyond the mask are not seen."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 9, 8, dtype=torch.float64).unbind()
    seen = torch.rand(2, 1, 6, 7) > 0.3
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :, :7], v[:, :, :7], seen, enable_gqa=True
    )
    for mask in (seen, added):
        out = integration.attention_forward(torch.nn.Module(), q, k, v, mask)[0]
        torch.testing.assert_close(out, want.transpose(1, 2))


def test_what_is_not_served_is_refused_by_name():
    q = torch.randn(1, 2, 8, 8)
    module = torch.nn.Module()
    with pytest.raises(NotImplementedError, match=r"head_mask is a torch\.Tensor, expected None"):
        integration.attention_forward(module, q, q, q, None, head_mask=torch.ones(2))
    bias = torch.zeros(1, 2, 8, 8)
    ids = torch.zeros(1, 8, dtype=masks.IDS)
    with pytest.raises(NotImplementedError, match="position_bias is given for several sequences"):
        integration.attention_forward(module, q, q, q, ids, position_bias=bias)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[8\], expected \[batch"):
        integration.attention_forward(module, q, q, q, torch.ones(8))
    with pytest.warns(UserWarning, match="output_attentions has no effect"):
        integration.attention_forward(module, q, q, q, None, output_attentions=True)


def test_older_transformers_is_told(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.48.1")
    with pytest.raises(ImportError, match=r"needs transformers 4\.57 or newer, and this is 4\.48"):
        integration.register()
