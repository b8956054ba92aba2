# What the tiny cells share: bytes of the Python standard library, minutes on two CPU cores.
dataset = "stdlib"
reference = "dense_tiny"
n_embd = 64
init_std = 0.069      # 0.02 at width 768, scaled by 1/√width
n_head = 2
block_size = 128
vocab_size = 257
tokens_per_step = 2048
batch_size = 16
max_iters = 1250
learning_rate = 1.2e-2      # the best of 3e-3, 6e-3, 1.2e-2 and 2.4e-2 for all five systems, on micro
warmup_iters = 100
eval_interval = 625
eval_tokens = 262_144
log_interval = 100
