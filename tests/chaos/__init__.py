"""Chaos: checks that real processes keep the promises while others are killed, frozen or cut off.

    python -m tests.chaos --seconds 1200 --seed 7

Masters, block servers and clients are processes of their own on loopback. Proxies between them
delay, stall, chop and cut the traffic. The simulator (`tests.simulation`) reaches rarer states and
can repeat them exactly. Here nothing is simulated: the kernel, uvloop, shared memory and
kill -9 are real. A seed repeats the faults and their order, but not their consequences.
"""
