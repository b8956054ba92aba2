# The smallest of the three tiny scales. All share tiny.py's recipe; a dense parameter sees 59, 21 and 12 training tokens, as
# the paper's three scales do (79, 28 and 13).
base = "tiny.py"
reference = "dense_nano"
n_embd = 32
