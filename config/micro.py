# The middle one of the three tiny scales.
base = "tiny.py"
reference = "dense_micro"
n_embd = 48
init_std = 0.08      # 0.02 at width 768, scaled by 1/√width
