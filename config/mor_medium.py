# Forward FLOPs against dense_medium, head not counted: 0.999.
base = "medium.py"
variant = "mor"
n_prelude, n_core, recurrence, n_coda = 1, 15, 2, 1
