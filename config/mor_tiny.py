# Forward FLOPs against dense_tiny, head not counted: 0.969.
base = "tiny.py"
variant = "mor"
n_prelude, n_core, recurrence, n_coda = 1, 4, 2, 1
