# The smallest of the three tiny scales. All share the recipe of tiny.py; a dense parameter sees 38, 14 and 8 training tokens
# (79, 28 and 13 in the paper).
base = "tiny.py"
reference = "dense_nano"
n_embd = 32
