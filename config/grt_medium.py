# Forward FLOPs against dense_medium, head not counted: 1.060 by the paper's formula, 1.042 executed.
base = "medium.py"
variant = "grt"
n_prelude, n_core, recurrence, n_coda = 2, 5, 4, 2
