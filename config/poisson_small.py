# Forward FLOPs against dense_small, head not counted: 1.019 by the paper's formula, 0.973 executed (9 steps;
# 10 would be 1.114 and 1.062).
base = "small.py"
variant = "poisson"
n_prelude, n_core, recurrence, n_coda = 1, 1, 9, 1
