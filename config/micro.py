# The middle one of the three tiny scales.
base = "tiny.py"
reference = "dense_micro"
n_embd = 48
