# Forward FLOPs against dense_micro, head not counted: 1.087 by the paper's formula, 1.050 executed.
base = "micro.py"
variant = "poisson"
n_prelude, n_core, recurrence, n_coda = 1, 1, 6, 1
