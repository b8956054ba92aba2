# Forward FLOPs against dense_tiny, head not counted: 1.234 by the paper's formula, 1.156 executed.
base = "tiny.py"
variant = "grt"
n_prelude, n_core, recurrence, n_coda = 1, 1, 6, 1
