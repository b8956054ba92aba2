# Forward FLOPs against dense_tiny, head not counted: 1, the same blocks run.
base = "tiny.py"
variant = "looped"
n_prelude, n_core, recurrence, n_coda = 1, 1, 6, 1
