# Forward FLOPs against dense_tiny, head not counted: 1.094 by the paper's formula, 1.055 executed.
base = "tiny.py"
variant = "poisson"
n_prelude, n_core, recurrence, n_coda = 1, 1, 6, 1
