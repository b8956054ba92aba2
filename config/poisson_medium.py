# Forward FLOPs against dense_medium, head not counted: 1.024 by the paper's formula, 1.015 executed.
base = "medium.py"
variant = "poisson"
n_prelude, n_core, recurrence, n_coda = 2, 5, 4, 2
