# Forward FLOPs against dense_nano, head not counted: 1, the same blocks run.
base = "nano.py"
variant = "looped"
n_prelude, n_core, recurrence, n_coda = 1, 1, 4, 1
learning_rate = 2.4e-2      # the best of the same five, on micro
