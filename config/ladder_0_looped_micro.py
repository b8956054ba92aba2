# Ablation ladder, rung 0 of 4: one block looped, nothing else. Each rung adds one thing. Depth is sampled as GRT
# samples it on every rung (ours: the paper does not say), so that the last rung is grt_micro.
base = "ladder_1_prelude_coda_micro.py"
n_prelude, n_core, recurrence, n_coda = 0, 1, 8, 0
