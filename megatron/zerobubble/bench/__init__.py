"""`zerobubble bench`: the user's own training script under several schedules, side by side.

contenders  which schedules, and the zero-bubble flags of each
jobs        the script, and its flags under a contender
block       one block: run the script, warm up, time iterations, measure memory
workers     a process per block, so that nothing of one contender reaches the next, and a failure stays a row of the table
speed_ups   ratios with confidence intervals, predictions, the verdict
comparison_report the table and JSON
"""
