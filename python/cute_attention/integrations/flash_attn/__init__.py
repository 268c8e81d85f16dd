"""What stands behind `cute_attention.flash_attn`: the functions of flash-attn 2.

dense, varlen         the public functions, dense and packed
kvcache               flash_attn_with_kvcache
private               _flash_attn_forward and its relatives, which other libraries call
arguments             flash-attn's arguments as our options; our errors in flash-attn's words
dropout, softmax      kept values times 1 / (1 - p); the matrix S_dmask
spans, pages, cache   sequences with gaps between them; keys from pages; the steps of a cache call
rotary, bert_padding  rotary embeddings; padding removed and put back
"""
