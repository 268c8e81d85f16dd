"""The version of flash-attn whose names, arguments and results are served here.

Callers compare it to find out what flash-attn can do.
"""

VERSION = "2.8.3"
