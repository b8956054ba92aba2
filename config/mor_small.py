# Forward FLOPs against dense_small, head not counted: 1.015 (6 shared blocks would be 0.894).
base = "small.py"
variant = "mor"
n_prelude, n_core, recurrence, n_coda = 1, 7, 2, 1
