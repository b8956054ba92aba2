# Forward FLOPs against dense_large, head not counted: 1, the same blocks run.
base = "large.py"
variant = "looped"
n_prelude, n_core, recurrence, n_coda = 1, 5, 6, 5
