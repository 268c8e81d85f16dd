"""What stands behind `cute_attention.flash_attn_interface`: the functions of FlashAttention-3.

    dense, varlen   the public functions, dense and packed
    kvcache         flash_attn_with_kvcache
    fp8             FP8 tensors as bfloat16 ones
    combine         flash_attn_combine and get_scheduler_metadata
    ops             torch.ops.flash_attn_3
    private         _flash_attn_forward and _flash_attn_backward, which other libraries call

What it shares with flash-attn 2 is in `integrations/flash_attn`.
"""
