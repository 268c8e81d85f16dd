"""The torch ops: schemas, fakes, FLOP formulas."""
