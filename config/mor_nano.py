# Forward FLOPs against dense_nano, head not counted: 1.033.
base = "nano.py"
variant = "mor"
n_prelude, n_core, recurrence, n_coda = 1, 3, 2, 1
