# Forward FLOPs against dense_nano, head not counted: 1.067 by the paper's formula, 1.042 executed.
base = "nano.py"
variant = "poisson"
n_prelude, n_core, recurrence, n_coda = 1, 1, 4, 1
