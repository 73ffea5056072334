"""`zerobubble bench`: the user's own training job under several schedules, side by side.

contenders  which schedules, and the settings of the job under each
block       one block: build the job, warm up, time iterations, measure memory
workers     a process per block, so that nothing of one contender reaches the next, and a failure stays a row of the table
speed_ups   ratios with confidence intervals, predictions, the verdict
comparison_report the table and JSON
"""
