# What the tiny cells share: bytes of the Python standard library, minutes on two CPU cores.
dataset = "stdlib"
reference = "dense_tiny"
n_embd = 64
n_head = 2
block_size = 128
vocab_size = 257
tokens_per_step = 2048
batch_size = 16
max_iters = 2500
learning_rate = 3e-3
warmup_iters = 100
eval_interval = 1250
eval_tokens = 262_144
log_interval = 100
