# Rung 2: and noise on the state.
base = "ladder_3_anchor_micro.py"
anchor = False
