# Forward FLOPs against dense_nano, head not counted: 1.167 by the paper's formula, 1.117 executed.
base = "nano.py"
variant = "grt"
n_prelude, n_core, recurrence, n_coda = 1, 1, 4, 1
