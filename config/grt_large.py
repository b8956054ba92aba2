# Forward FLOPs against dense_large, head not counted: 1.061 by the paper's formula, 1.041 executed.
base = "large.py"
variant = "grt"
n_prelude, n_core, recurrence, n_coda = 1, 5, 6, 5
