# Forward FLOPs against dense_medium, head not counted: 1, the same blocks run.
base = "medium.py"
variant = "looped"
n_prelude, n_core, recurrence, n_coda = 2, 5, 4, 2
