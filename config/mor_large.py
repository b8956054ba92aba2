# Forward FLOPs against dense_large, head not counted: 0.995.
base = "large.py"
variant = "mor"
n_prelude, n_core, recurrence, n_coda = 1, 23, 2, 1
