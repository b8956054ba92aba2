# Rung 2: and noise on the state.
base = "ladder_3_anchor_tiny.py"
anchor = False
