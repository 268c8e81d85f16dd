"""The kernels of an sm90 backward begin before the one before has ended (core/dependent_launch.h):
whatever that one writes is awaited. On a GPU a wait that is missing seldom shows; in the emulator,
in late and random timing, it does (docs/emulator.md)."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from cute_attention import attention
from cute_attention.native import rows
from cute_attention.native.core import core
from cute_attention.semantics.formula import attention_reference
from every_row import fixture_of, skip_unless_it_is_chosen
from kernel_calls import CAUSAL, Case, options_for, plain_pytorch
from test_backward_kernels import BACKWARD, NAMES, gradients, make
from test_key_parts import codes, params_of, workspace_of
from test_sizes import set_tensor
from tolerances import assert_as_accurate

pytestmark = pytest.mark.gpu

EARLY = [row for row in BACKWARD if row.arch == "sm90" and not row.has_two_kernels()]
row = fixture_of(EARLY, skip_unless_it_is_chosen)

# Workspaces hold what calls before have left there. This number looks as if two blocks had been
# taken, two turns had ended and all sums were there (sm90/backward_states.h). With 0 it looks as if
# the sums of all heads were complete (sm90/complete_heads.h).
LEFT_BEHIND = 2


def case_of(name: str, row: rows.TableRow) -> Case:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    stores = 1 + 2**15 * multiprocessors // (270 * row.head_dim)
    return {
        "one_round": Case(1, 300, 300, 2, 2, CAUSAL),
        "two_rounds": Case(1 + multiprocessors // 3, 300, 300, 1, 1, {}),
        "sums_that_begin_with_a_store": Case(stores, 270, 270, 1, 1, CAUSAL),
        "one_block_of_keys": Case(2, 300, 100, 2, 2, {}),
        "keys_that_no_query_sees": Case(1, 130, 600, 2, 2, {"window": (50, 0)}),
        "a_leftover_key": Case(1 + multiprocessors // 2, 200, 257, 2, 1, {}),
        "heads_that_are_counted": Case(1 + multiprocessors // 3, 200, 1100, 1, 1, {}),
        "heads_that_seem_complete": Case(1 + multiprocessors // 3, 200, 1100, 1, 1, {}),
    }[name]


@pytest.mark.parametrize("fixed_order", [False, True], ids=["any_order", "fixed_order"])
@pytest.mark.parametrize(
    "name",
    [
        "one_round",
        "two_rounds",
        "sums_that_begin_with_a_store",
        "one_block_of_keys",
        "keys_that_no_query_sees",
        "a_leftover_key",
        "heads_that_are_counted",
        "heads_that_seem_complete",
    ],
)
def test_what_workspaces_held_is_not_read(row: rows.TableRow, name: str, fixed_order: bool) -> None:
    case = case_of(name, row)
    options = options_for(row, case.options, case.heads)
    (q, k, v), grad_out = make(row, case)
    with torch.no_grad():
        out, lse = attention(q, k, v, backend=row.arch, return_lse=True, **options)
    found = [torch.full_like(t, math.nan) for t in (q, k, v)]
    params = params_of(row, case)
    tensors = {"q": q, "k": k, "v": v, "o": out, "grad_o": grad_out}
    tensors |= dict(zip(("grad_q", "grad_k", "grad_v"), found, strict=True))
    for field, tensor in tensors.items():
        set_tensor(params, field, tensor)
    params.lse = lse.data_ptr()
    sizes = workspace_of(row, params)
    left_behind = 0 if name == "heads_that_seem_complete" else LEFT_BEHIND
    spaces = {
        field: torch.full((getattr(sizes, field) + 4,), left_behind, device="cuda").int()
        for field in ("delta", "grad_q_sum", "grad_q_turn", "grad_kv_parts")
    }
    if not fixed_order:
        spaces["grad_q_turn"] = torch.empty(0)
    for field, space in spaces.items():
        setattr(params, field, space.data_ptr() if len(space) > 4 else None)
    spaces["grad_q_sum"].fill_(-1)  # NaN
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = core().cute_attention_backward(ctypes.byref(params), *codes(row), stream)
    assert error == 0, core().cute_attention_last_error().decode()
    torch.cuda.synchronize()

    def exact(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return attention_reference(*leaves, return_lse=True, **options)

    def plain(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return plain_pytorch(*leaves, options)

    expected = gradients(exact, tuple(t.double() for t in (q, k, v)), grad_out, None)
    ordinary = gradients(plain, (q, k, v), grad_out, None)
    for gradient, a, b, c in zip(NAMES, found, expected, ordinary, strict=True):
        assert_as_accurate(a, b, c.nan_to_num(), gradient)
