# Forward FLOPs against dense_small, head not counted: 1.284 by the paper's formula, 1.182 executed.
base = "small.py"
variant = "grt"
n_prelude, n_core, recurrence, n_coda = 1, 1, 10, 1
