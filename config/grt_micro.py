# Forward FLOPs against dense_micro, head not counted: 1.216 by the paper's formula, 1.144 executed.
base = "micro.py"
variant = "grt"
n_prelude, n_core, recurrence, n_coda = 1, 1, 6, 1
