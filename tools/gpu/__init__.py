"""The first hour on GPUs in one command: every test and benchmark that needs them, in the order of what it would tell.

`python -m tools.gpu test` and `python -m tools.gpu bench`, or `make test-gpu` and `make bench-gpu`. Each step is a command that a
person can run alone; its output goes to the screen and to a file. At the end there is one text report: the machine, what passed,
what was measured against what was predicted, and what to send back.
"""
