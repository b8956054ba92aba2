# What the large cells share.
dataset = "cccc"
reference = "dense_large"
n_embd = 1280
n_head = 20
eval_tokens = 10_485_760
