# What the medium cells share.
dataset = "cccc"
reference = "dense_medium"
n_embd = 1024
n_head = 16
eval_tokens = 10_485_760
