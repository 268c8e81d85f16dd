"""The parts of examples/train_gpt.py.

text       bytes to train on, and bytes held out
model      the GPT; it is told which attention to call
position   rotary embeddings, ALiBi, T5's relative position bias
training   the loop, the loss curve, and how two curves are compared
step_time  how long a step takes, beside PyTorch's attention
sampling   text from a trained model, with a KV cache
report     what a person reads: backends, curves as PNG and CSV, the verdict
"""
