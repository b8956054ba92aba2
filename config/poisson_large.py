# Forward FLOPs against dense_large, head not counted: 1.025 by the paper's formula, 1.014 executed.
base = "large.py"
variant = "poisson"
n_prelude, n_core, recurrence, n_coda = 1, 5, 6, 5
