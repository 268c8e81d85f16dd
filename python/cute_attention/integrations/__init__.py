"""The names and conventions of other libraries, served by `attention` and `attention_varlen`.

`import cute_attention` imports nothing of this.
"""
