# What the small cells share: GPT-2 small's width on the paper's data; the recipe is train.py's defaults.
dataset = "cccc"
reference = "dense_small"
n_embd = 768
n_head = 12
eval_tokens = 10_485_760
