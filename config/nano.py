# The smallest of the three tiny scales. All share the recipe of tiny.py; a dense parameter sees 30, 11 and 6 training
# tokens (79, 28 and 13 in the paper).
base = "tiny.py"
reference = "dense_nano"
n_embd = 32
init_std = 0.098      # 0.02 at width 768, scaled by 1/√width
