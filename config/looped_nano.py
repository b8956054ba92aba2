# Forward FLOPs against dense_nano, head not counted: 1, the same blocks run.
base = "nano.py"
variant = "looped"
n_prelude, n_core, recurrence, n_coda = 1, 1, 4, 1
