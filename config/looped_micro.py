# Forward FLOPs against dense_micro, head not counted: 1, the same blocks run.
base = "micro.py"
variant = "looped"
n_prelude, n_core, recurrence, n_coda = 1, 1, 6, 1
