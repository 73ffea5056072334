"""The first hour on GPUs in one command: what needs them, in the order of what it would tell.

`python -m tools.gpu hour`, or `make gpu-hour`. Each step is a command that a person can run alone; its output goes to the screen
and to a file, and its result is printed as soon as it ends. At the end there is one text report: the machine, what passed, what
was measured against what was predicted, and what to send back. `--rehearse` runs the same steps with tiny sizes on the CPU.
"""
