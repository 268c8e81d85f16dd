"""A random call with a cache, and its comparison with the formula in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cute_attention.bench.roundings import exact
from cute_attention.inference import explain_with_cache
from cute_attention.semantics.rotary import rotate
from every_row import DTYPES
from kernel_calls import offsets
from paged_calls import Call, Form
from random_calls import Drawn
from random_checks import Wrong, bits, judge, poison, rows_of
from random_tensors import laid_out, sink_of, spread
from random_ways import attend_cache, in_its_way


def form_of(call: Drawn) -> tuple[Form, list[int]]:
    """The form of a call, and how many of each sequence's tokens it appends."""
    rng, cache = random.Random(call.seed), call.cache
    options: dict[str, Any] = dict(call.options)
    torch.manual_seed(call.seed)
    if call.slopes:
        options["alibi_slopes"] = torch.randn(call.heads).bfloat16().float() / 8
    if call.sink:
        options["sink"] = sink_of(call, "cpu")
    if cache["chunk"]:
        options["attention_chunk"] = cache["chunk"]
    lengths = tuple(keys for _, keys in call.lengths)
    queries = tuple(q for q, _ in call.lengths)
    if cache["packed"]:
        queries = tuple(rng.choice((0, 1, 1, 3, q)) for q in queries)
    pads = tuple(rng.choice((0, 1, 17, n)) for n in lengths) if cache["pads"] else ()
    form = Form(
        page_size=cache["page_size"], lengths=lengths, queries=queries, packed=cache["packed"],
        heads=(call.heads, call.heads_kv), dims=(call.dim, call.dim_v),
        room=max(lengths) + cache["room"] if cache["room"] else 0, batch_idx=cache["batch_idx"],
        leftpad=pads, options=options, dtype=DTYPES[call.dtype],
    )  # fmt: skip
    many = queries if cache["packed"] else (cache["new"],) * len(lengths)
    new = [min(n, length) for n, length in zip(many, lengths, strict=True)]
    if not cache["new"] or (not cache["packed"] and min(new) < cache["new"]) or pads:
        new = []
    return replace(form, appended=tuple(new)), new


def check_cache(drawn: Drawn, device: str, backend: str) -> list[str]:
    """Like `random_checks.check`."""
    if not drawn.heads or not drawn.heads_kv:
        return ["not served"]
    form, new = form_of(drawn)
    call = Call(form, device)
    given = call.given
    given |= {name: drawn.cache[name] for name in ("batch_invariant",)}
    given["num_splits"] = drawn.cache["splits"]
    if drawn.cache["max_seqlen_k"]:
        given["max_seqlen_k"] = max(form.lengths)
    whole = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    if any(new):
        _take_new(call, new)
        if drawn.cache["rotary"]:
            _turn(call, drawn, new, whole["k_cache"])
    if drawn.cache["qv"]:
        shape = (*given["q"].shape[:-1], drawn.dim_v)
        given["qv"] = torch.randn(shape, device=device).to(given["q"].dtype)
    for name, value in given.items():
        if isinstance(value, Tensor) and value.dtype == torch.int32:
            given[name] = spread(value, drawn.strided_ends)
    rows = rows_of(explain_with_cache(**given, backend=backend))
    if backend == "auto" and "reference" in rows:
        return ["not served"]
    first, again = (_run(drawn, given, whole if any(new) else {}, backend) for _ in range(2))
    for name, one, other in zip(("out", "lse"), first, again, strict=True):
        if not torch.equal(bits(one), bits(other)):
            raise Wrong(name, "not repeated")
    _compare(call, *call.flat(*first))
    return rows


def _take_new(call: Call, new: list[int]) -> None:
    """Takes the last tokens of each sequence out of the cache: the call appends them."""
    given, form = call.given, call.form
    taken: dict[str, list[Tensor]] = {"k": [], "v": []}
    for b, (length, many) in enumerate(zip(form.lengths, new, strict=True)):
        for name, cache in (("k", "k_cache"), ("v", "v_cache")):
            slots = [_slot(call, b, t) for t in range(length - many, length)]
            tokens = [given[cache][slot].clone() for slot in slots]
            taken[name].append(
                torch.stack(tokens)
                if tokens
                else given[cache].new_empty(0, *given[cache].shape[2:])
            )
    for b, (length, many) in enumerate(zip(form.lengths, new, strict=True)):
        for t in range(length - many, length):
            for cache in ("k_cache", "v_cache"):
                given[cache][_slot(call, b, t)] = torch.nan
    for name, tokens in taken.items():
        given[name] = torch.cat(tokens) if form.packed else torch.stack(tokens)
    device = given["q"].device
    given["cache_seqlens"] = given["cache_seqlens"] - torch.tensor(new, device=device).int()
    if form.packed:
        given["cu_seqlens_k_new"] = offsets(new, str(device))


def _slot(call: Call, sequence: int, token: int) -> tuple[int, int]:
    row, size = call.rows[sequence], call.form.page_size
    if not size:
        return row, token
    return int(call.given["block_table"][row, token // size]), token % size


def _turn(call: Call, drawn: Drawn, new: list[int], cache: Tensor) -> None:
    """Has the call turn what it appends and its queries. `cache`, the queries and the keys that the
    formula gets become those that are turned; the cache holds what is written bit by bit."""
    given, rotary = call.given, drawn.cache["rotary"]
    device, size = given["q"].device, rotary["dim"] // 2
    lengths = given["cache_seqlens"].tolist()
    if rotary["seqlens"]:
        lengths = [(7 * index + drawn.seed) % 300 for index in range(len(new))]
        given["rotary_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    angles = torch.rand(max(lengths) + max(*call.many, *new) + 1, size, device=device) * 6.3
    dtype = torch.float32 if rotary["float"] else given["q"].dtype
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    given |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary["interleaved"]}
    options = call.form.options
    is_masked = any(options.get(name) for name in ("causal", "attention_chunk"))
    is_masked |= any(side is not None for side in options.get("window") or ())

    def turned(rows: Tensor, places: Tensor) -> Tensor:
        found = rotate("", rows, cos, sin, places, rotary["interleaved"])
        _check_turned(rows, cos[places], sin[places], found, rotary["interleaved"])
        return found

    for b, (many, first) in enumerate(zip(new, lengths, strict=True)):
        places = torch.arange(call.many[b], device=device) * int(is_masked) + first
        if call.many[b]:
            call.queries[b] = turned(call.queries[b][0], places)[None]
        if many:
            keys = call.keys[0][b][0]
            added = turned(keys[-many:], torch.arange(first, first + many, device=device))
            call.keys[0][b] = torch.cat((keys[:-many], added))[None]
            length = call.form.lengths[b]
            for t in range(length - many, length):
                cache[_slot(call, b, t)] = added[t - length + many]


def _check_turned(rows: Tensor, cos: Tensor, sin: Tensor, found: Tensor, interleaved: bool) -> None:
    """Rows turned in float32, and rounded once, are what they are in float64 but for half a unit of
    the dtype and some of float32."""
    half = cos.shape[-1]
    value, cos, sin = rows.double(), cos.double()[:, None], sin.double()[:, None]
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    if not interleaved:
        pairs = (slice(0, half), slice(half, 2 * half))
    a, b = (value[..., pair] for pair in pairs)
    expected, size = value.clone(), value.abs()
    for pair, (one, other) in zip(pairs, ((a * cos, -b * sin), (a * sin, b * cos)), strict=True):
        expected[..., pair], size[..., pair] = one + other, one.abs() + other.abs()
    kind = torch.finfo(found.dtype)
    allowed = kind.eps / 2 * expected.abs() + 4 * torch.finfo(torch.float32).eps * size
    allowed += kind.smallest_normal * kind.eps
    if ((found.double() - expected).abs() > allowed).any():
        raise Wrong("rotary", "not what it is in float64")


def _run(
    drawn: Drawn, given: dict[str, Any], whole: dict[str, Tensor], backend: str
) -> tuple[Tensor, Tensor]:
    """Output and LSE. What is appended must make the caches those of `whole`, and nothing else may
    change: bit by bit."""
    given = dict(given)
    for name in ("k_cache", "v_cache"):
        given[name] = laid_out(given[name].clone(), drawn.cache["layout"])
    expected = {name: whole.get(name, given[name].clone()) for name in ("k_cache", "v_cache")}
    others = {
        name: value.clone()
        for name, value in given.items()
        if isinstance(value, Tensor) and name not in expected
    }
    poison(given["q"].device)
    results = in_its_way(drawn.way, lambda: attend_cache(drawn.way, given, backend))
    for name, value in (expected | others).items():
        if not torch.equal(bits(given[name]), bits(value)):
            raise Wrong(name, "not the cache with the new tokens, or changed")
    return results


def _compare(call: Call, out: Tensor, lse: Tensor) -> None:
    """Flat results with the formula, sequence by sequence."""
    names = ("causal", "window", "softcap", "scale", "alibi_slopes", "sink")
    options = {name: call.given[name] for name in names if name in call.given}
    given, start = call.given, 0
    chunk = given.get("attention_chunk", 0)
    for q, k, v in zip(call.queries, *call.keys, strict=True):
        rows = slice(start, start + q.shape[1])
        start = rows.stop
        if not q.shape[1]:
            continue
        mine = out[rows][None], lse[:, rows][None]
        if not k.shape[1]:
            blind = torch.full_like(mine[1], -torch.inf)
            if "sink" in options:
                blind = options["sink"][:, None].expand_as(blind)
            if mine[0].any() or not torch.allclose(mine[1], blind, rtol=1e-6):
                raise Wrong("out", "a sequence without keys has an output, or another LSE")
            continue
        zero = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        if "qv" in given:
            qv = given["qv"] if call.form.packed else given["qv"].flatten(0, 1)
            q, k = torch.cat((q, qv[rows][None]), -1), torch.cat((k, v), -1)
        if chunk:
            options["bias"] = _beyond_chunks(q, k, chunk)
        right = exact(q, k, v, zero, **options)
        for name, found in zip(("out", "lse"), mine, strict=True):
            judge(name, found, right.values[name], right.sizes[name], right.eps[name])


def _beyond_chunks(q: Tensor, k: Tensor, chunk: int) -> Tensor:
    """A bias that hides the keys of other chunks than the query's own."""
    place = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1], device=q.device)
    same = place.div(chunk, rounding_mode="floor") == key.div(chunk, rounding_mode="floor")
    return torch.zeros(same.shape, device=q.device).masked_fill(~same, -torch.inf)
