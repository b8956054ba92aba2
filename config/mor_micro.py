# Forward FLOPs against dense_micro, head not counted: 0.962.
base = "micro.py"
variant = "mor"
n_prelude, n_core, recurrence, n_coda = 1, 4, 2, 1
