# As many parameters as dense_micro, less 7%.
base = "micro.py"
variant = "grt"
n_prelude, n_core, recurrence, n_coda = 1, 5, 4, 1
