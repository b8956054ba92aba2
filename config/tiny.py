# What the tiny cells share: bytes of the Python standard library, minutes on two CPU cores.
dataset = "stdlib"
reference = "dense_tiny"
n_embd = 64
n_head = 2
block_size = 128
vocab_size = 257
tokens_per_step = 2048
batch_size = 16
max_iters = 1600
learning_rate = 1.2e-2      # the best of 3e-3, 6e-3, 1.2e-2, 2.4e-2 and 4.8e-2 for dense, poisson and grt on micro
warmup_iters = 100
eval_interval = 800
eval_tokens = 262_144
log_interval = 100
