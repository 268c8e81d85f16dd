"""The parts of examples/pair_bias.py.

block      triangle attention over a pair representation; it is told which attention to call
measure    time and peak memory with each attention, and whether their results agree
report     the table and the picture
"""
