"""What every argument means: the formula, and the same in linear memory."""
