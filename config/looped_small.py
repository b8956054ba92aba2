# Forward FLOPs against dense_small, head not counted: 1, the same blocks run.
base = "small.py"
variant = "looped"
n_prelude, n_core, recurrence, n_coda = 1, 1, 10, 1
