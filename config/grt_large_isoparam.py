base = "large.py"
variant = "grt"
n_prelude, n_core, recurrence, n_coda = 3, 30, 6, 3
batch_size = 4
